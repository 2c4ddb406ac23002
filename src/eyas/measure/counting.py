"""The rounds of one answer, from what the server counted for this very request.

vLLM and SGLang count every round whole, also what was accepted and then cut off by the last token; llama.cpp and
OpenVINO draft no more than still fits. Which it is stands beside every number (`rule`), and what is predicted for the
same prompts is counted alike (`fitting`).
    pytest tests/test_measure_counting.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..serve.client import Reply
from ..serve.dialects import DIALECTS

WHOLE, FITTING = "whole", "fitting"
RULES = {
    WHOLE: "every round in full: what the last one accepted beyond the end counts, too",
    FITTING: "of each answer's last rounds only what fits before the end",
}
OF = {"vllm": WHOLE, "sglang": WHOLE, "llamacpp": FITTING, "openvino": FITTING}
"""The rule by which each engine counts."""
SERVER, GROUPS = "the server, for this request", "the groups in which tokens came"


@dataclass(frozen=True)
class Rounds:
    """Rounds of one answer, prefill's token in none of them."""

    rounds: int
    accepted: int
    rule: str
    source: str
    """Whose count: the server's for this request, or the groups in which its tokens came."""
    each: tuple[int, ...] = ()
    """Accepted drafts of each round in their order; () where that is not said."""
    histogram: tuple[int, ...] = ()
    """Rounds that accepted 0, 1, ... drafts; () where that is not said."""
    steps: int | None = None
    """Tokens drafted a round, where it is said."""

    @property
    def guessed(self) -> bool:
        """Are there maybe more rounds? Several that came together look like one, and make tau too large."""
        return self.source == GROUPS


def rounds_of(engine: str, reply: Reply) -> Rounds | None:
    """None where nothing tells them, or what is told contradicts itself. Sources: docs/facts/serving.md.

    Where the server says nothing, groups of tokens are taken for rounds (`Rounds.guessed`).
    """
    if reply.count == 1:  # prefill's; of such an answer no engine says anything
        return Rounds(0, 0, OF[engine], SERVER)
    read = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _timings, "openvino": _timings}[engine]
    found = read(reply)
    if found is None and DIALECTS[engine].by_round and len(reply.chunks) > 1:
        each = _by_chunk(reply)
        found = Rounds(len(each), sum(each), FITTING, GROUPS, each)
    return found


def all_rounds(engine: str, replies: Sequence[Reply]) -> list[Rounds | None]:
    """`rounds_of` each. llama.cpp says nothing of an answer for which nothing was drafted; beside answers for which
    something was, that is an answer of rounds without drafts."""
    found = [rounds_of(engine, reply) for reply in replies]
    drafts = any(r is not None and r.rounds for r in found)
    if engine == "llamacpp" and drafts:
        for place, reply in enumerate(replies):
            tokens = _number(reply.counts, "predicted_n")
            if found[place] is None and tokens and "draft_n" not in reply.counts:
                found[place] = Rounds(tokens - 1, 0, FITTING, SERVER)
    return found


def _possible(found: Rounds) -> Rounds | None:
    """None for counts that cannot be; without the histogram where it does not fit them."""
    if found.steps and found.accepted > found.rounds * found.steps:
        return None
    h = found.histogram
    fits = sum(h) == found.rounds and sum(j * n for j, n in enumerate(h)) == found.accepted
    return found if not h or fits else dataclasses.replace(found, histogram=())


def _number(counts: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = counts.get(name)
        if type(value) is int and 0 <= value < 1 << 40:
            return value
    return None


def _list(counts: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    for name in names:
        value = counts.get(name)
        if isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in value):
            return tuple(value)
    return ()


def _by_chunk(reply: Reply) -> tuple[int, ...]:
    """Each group of tokens after the first is a round: its accepted drafts and one token of the target."""
    return tuple(n - 1 for _, n in reply.chunks[1:])


def _vllm(reply: Reply) -> Rounds | None:
    c = reply.counts
    rounds, accepted = _number(c, "num_spec_steps"), _number(c, "num_accepted_draft_tokens")
    if not rounds or accepted is None:
        return None
    each = _list(c, "per_step_accepted")
    each = each if len(each) == rounds and sum(each) == accepted else _completed(reply, rounds, accepted)
    histogram, steps = _list(c, "acceptance_histogram"), _number(c, "num_spec_tokens")
    return _possible(Rounds(rounds, accepted, WHOLE, SERVER, each, histogram, steps))


def _sglang(reply: Reply) -> Rounds | None:
    c = reply.counts
    rounds = _number(c, "spec_verify_ct")
    accepted = _number(c, "spec_num_correct_drafts", "spec_accept_token_num")
    if not rounds or accepted is None:
        return None
    drafted = _number(c, "spec_num_proposed_drafts", "spec_draft_token_num")
    histogram = _list(c, "spec_correct_drafts_histogram", "spec_accept_histogram")
    steps = drafted // rounds if drafted and drafted % rounds == 0 else None
    each = _completed(reply, rounds, accepted)
    return _possible(Rounds(rounds, accepted, WHOLE, SERVER, each, histogram, steps))


def _completed(reply: Reply, rounds: int, accepted: int) -> tuple[int, ...]:
    """Each round from the groups of tokens, the last one, which was cut, from the total; () where they do not fit."""
    each = _by_chunk(reply)
    if len(each) != rounds:
        return ()
    last = accepted - sum(each[:-1])
    return (*each[:-1], last) if last >= each[-1] else ()


def _timings(reply: Reply) -> Rounds | None:
    """Rounds = tokens - accepted, prefill's token apart: each emits its accepted drafts and one token of the target.

    OpenVINO's server says the rounds, and each comes as a group; what it calls accepted leaves out the last round of an
    answer. Where what is said contradicts itself, nothing is believed.
    """
    said, tokens = _number(reply.counts, "draft_n_accepted"), _number(reply.counts, "predicted_n")
    if said is None or tokens is None or tokens - 1 - said <= 0:
        return None
    rounds, drafted = _number(reply.counts, "rounds"), _number(reply.counts, "draft_n")
    accepted = said if rounds is None else tokens - 1 - rounds
    if rounds == 0 or accepted < said or (drafted is not None and drafted < said):  # drafted leaves it out, too
        return None
    each = _by_chunk(reply) if rounds is not None else ()  # () for one group, as sampled answers come
    if each and (len(each) != rounds or said not in (accepted, accepted - each[-1])):
        return None
    return Rounds(tokens - 1 - accepted, accepted, FITTING, SERVER, each)


def fitting(begun: Sequence[int], accepted: Sequence[int], limit: int) -> tuple[int, int]:
    """(rounds, accepted) of an engine that drafts no more than fits, from the rounds of one that always drafts k.

    begun: tokens of the answer before each round; limit: of an answer, whose last token is the target's own. Measured:
    llama.cpp b11434 and OpenVINO GenAI 2026.4.1 give the same rounds as the reference under this rule.
    """
    return len(begun), sum(min(a, limit - b - 1) for b, a in zip(begun, accepted, strict=True))


def in_all(parts: Sequence[Rounds], k: int) -> dict[str, Any]:
    """tau = 1 + accepted / rounds over all rounds of all answers, as plain JSON values.

    unconditional: share of all rounds whose first j drafts were accepted, j = 1 .. k; [] where an answer does not say.
    rule and source are those of the answers that have rounds. at_most: is tau no more than a bound?
    """
    rounds, accepted = sum(p.rounds for p in parts), sum(p.accepted for p in parts)
    histogram = [0] * (k + 1)
    said = True
    for p in parts:
        counts = p.histogram or _counted(p.each, k)
        said = said and sum(counts) == p.rounds and len(counts) <= k + 1
        for j, n in enumerate(counts[: k + 1]):
            histogram[j] += n
    told = [p for p in parts if p.rounds] or parts
    rules, sources = {p.rule for p in told}, {p.source for p in told}
    rule, source = (next(iter(said)) if len(said) == 1 else "mixed" if said else "" for said in (rules, sources))
    return {
        "tau": round(1 + accepted / rounds, 4) if rounds else None,
        "rounds": rounds,
        "accepted": accepted,
        "unconditional": [round(sum(histogram[j:]) / rounds, 4) for j in range(1, k + 1)] if said and rounds else [],
        "rule": rule,
        "source": source,
        "at_most": any(p.guessed for p in told),
    }


def _counted(each: Sequence[int], k: int) -> tuple[int, ...]:
    """Histogram of rounds, () of none; one that accepted more than k was several, and is in no place of it."""
    return tuple(each.count(a) for a in range(k + 1)) if each else ()
