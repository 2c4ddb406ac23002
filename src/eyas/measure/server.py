"""One server measured: acceptance by its own words and by ours, other traffic, speed, and the same text or not.

    passes = run("http://127.0.0.1:8000", questions, How(), levels=(1, 8))
    result = numbers(passes, plain, k=4)

What came is kept in `Passes`, so that an interrupt or a server that dies loses nothing.
    pytest tests/test_measure_server.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engines.served.metrics import counters_between
from ..errors import BadInput
from .asking import INTERRUPTED, Answered, How, Question, Run, ask_all
from .counting import FITTING, OF, RULES, WHOLE, Rounds, all_rounds, in_all
from .speed import speed, speed_of_set, speedup
from .traffic import Snapshot, others, settled, snapshot


@dataclass
class Passes:
    """What one server answered, a pass for every level of concurrency."""

    url: str
    runs: list[Run] = field(default_factory=list)
    before: Snapshot = field(default_factory=Snapshot)
    after: Snapshot = field(default_factory=Snapshot)
    interrupted: bool = False
    """Did the user end it?"""

    @property
    def engine(self) -> str:
        """Its dialect; "" before it was asked."""
        return next((run.engine for run in self.runs if run.engine), "")

    @property
    def first(self) -> list[Answered]:
        """The pass whose answers count: the first one."""
        return self.runs[0].answered if self.runs else []

    @property
    def errors(self) -> list[str]:
        """Each reason once."""
        return list(dict.fromkeys(error for run in self.runs for error in run.errors))


def run(
    url: str, questions: Sequence[Question], how: How, *, levels: Sequence[int] = (1,), engine: str | None = None,
    model: str | None = None, passes: Passes | None = None, on_answer: Callable[[], None] = lambda: None,
) -> Passes:  # fmt: skip
    """Ask all questions once at every level of concurrency; stops where the server does, and on Ctrl-C
    (`passes.interrupted`). `passes` is filled on the way.

    Raises BadInput, and Failed where nobody answers at all.
    """
    passes = Passes(url) if passes is None else passes
    passes.url, passes.before = url, snapshot(url)
    try:
        for level in levels:
            passes.runs.append(Run(level))
            ask_all(url, questions, how, concurrency=level, engine=engine, model=model, run=passes.runs[-1],
                    on_answer=on_answer)  # fmt: skip
            if passes.runs[-1].stopped:
                break
    except KeyboardInterrupt:
        passes.interrupted = True
        passes.runs[-1].stopped = passes.runs[-1].stopped or INTERRUPTED
    finally:
        passes.after = settled(url, passes.before, passes.runs)
    return passes


def counted(passes: Passes, one: Run | None = None) -> list[tuple[Answered, Rounds]]:
    """The answers of a pass (the first one) whose rounds are known."""
    answers = [a for a in (passes.first if one is None else one.answered) if a.reply is not None]
    found = all_rounds(passes.engine, [a.reply for a in answers if a.reply is not None]) if answers else []
    return [(a, r) for a, r in zip(answers, found, strict=True) if r is not None]


def numbers(passes: Passes, plain: Passes | None, k: int) -> dict[str, Any]:
    """Plain JSON values of one server; `plain`: the same prompts without the draft. See docs/engines.md."""
    found = counted(passes)
    k = next((r.steps for _, r in found if r.steps), k)
    mine = [r for one in passes.runs for _, r in counted(passes, one)]
    traffic = others(passes.before, passes.after, passes.runs, [] if any(r.guessed for r in mine) else mine)
    rounds = {id(a): r for a, r in found}
    return {
        "engine": passes.engine,
        "url": passes.url,
        "k": k,
        "acceptance": _acceptance(passes, found, k, traffic),
        "sets": _by_set(passes, found, k),
        "other_traffic": traffic,
        "speed": _speed(passes, plain),
        "answers": [_answer(a, rounds.get(id(a))) for a in passes.first],
        "errors": [*passes.errors, *([] if plain is None else plain.errors)],
        "interrupted": passes.interrupted or (plain is not None and plain.interrupted),
    }


def _acceptance(
    passes: Passes, found: Sequence[tuple[Answered, Rounds]], k: int, traffic: dict[str, Any]
) -> dict[str, Any] | None:
    """By the server's counts for each request; else by its counters, where all traffic was ours; else by groups of
    tokens, which give a bound. None where nothing of it is to be had."""
    whole = bool(found) and len(found) == sum(a.reply is not None for a in passes.first)
    if not whole or any(r.guessed for _, r in found):
        counters = _from_counters(passes, k) if traffic["seen"] is False else None
        if counters is not None or not whole:
            return counters
    out = in_all([r for _, r in found], k) | {"own": _own(passes)}
    counting = RULES.get(out["rule"], "")
    if out["at_most"]:
        counting = "groups of tokens are taken for rounds, of which several may come together, so τ may be less"
    return out | {"counting": counting, "strict": _strict(found, k)}


def _own(passes: Passes) -> dict[str, Any]:
    """The engine's own words, over all answers."""
    from ..engines.served import from_metadata

    try:
        served = from_metadata([a.reply.counts for a in passes.first if a.reply is not None])
    except BadInput:
        return {}
    return {name: round(value, 4) for name, value in served.said.items() if isinstance(value, int | float)}


def _from_counters(passes: Passes, k: int) -> dict[str, Any] | None:
    """From the server's counters, where all traffic was ours: vLLM's rounds and accepted drafts; of the other engines
    what follows from all tokens, since llama.cpp counts only rounds that drafted, and SGLang no drafts."""
    from ..engines.served import from_prometheus

    model = next((run.model for run in passes.runs if run.model), None)
    try:
        between = counters_between(passes.before.text, passes.after.text, model)
        served = from_prometheus(passes.after.text + "\n", passes.before.text + "\n", model)
    except BadInput:
        return None
    rounds, accepted, tokens = between.rounds, between.accepted, between.tokens
    answers = sum(a.reply is not None for run in passes.runs for a in run.answered)
    if passes.engine != "vllm" and tokens is not None:
        if passes.engine == "sglang" and rounds is not None:
            accepted = tokens - answers - rounds
        elif accepted is not None:
            rounds = tokens - answers - accepted
    if not rounds or accepted is None or not 0 <= accepted <= rounds * k:
        return None
    rates = served.unconditional if served.rounds == round(rounds) else ()
    rule = OF.get(passes.engine, WHOLE) if passes.engine != "sglang" else FITTING
    return {
        "tau": round(1 + accepted / rounds, 4), "rounds": round(rounds), "accepted": round(accepted),
        "unconditional": [round(x, 4) for x in rates], "rule": rule, "source": "the server's counters",
        "at_most": False, "own": dict(served.said), "counting": RULES[rule], "strict": None,
    }  # fmt: skip


def _strict(found: Sequence[tuple[Answered, Rounds]], k: int) -> dict[str, Any] | None:
    """Rounds whose k drafts all fall within the answer (design.md, section 3); None where rounds are not told apart."""
    from ..decode.acceptance import Acceptance
    from ..decode.answers import Answer

    parts = []
    for a, rounds in found:
        if rounds.guessed or len(rounds.each) != rounds.rounds or max(rounds.each, default=0) > k:
            return None
        assert a.reply is not None
        ends, length = [], 1
        for accepted in rounds.each:
            length += accepted + 1
            ends.append(length)
        parts.append(Answer(a.reply.tokens, list(rounds.each), ends).acceptance(k))
    return Acceptance.merged(parts, k).to_dict()


def _by_set(passes: Passes, found: Sequence[tuple[Answered, Rounds]], k: int) -> dict[str, Any]:
    names = dict.fromkeys(a.question.set for a in passes.first)
    return {name: in_all([r for a, r in found if a.question.set == name], k)
            | {"answers": sum(a.reply is not None and a.question.set == name for a in passes.first)}
            for name in names}  # fmt: skip


def _speed(passes: Passes, plain: Passes | None) -> list[dict[str, Any]]:
    out = []
    for one in passes.runs:
        same = next((r for r in (plain.runs if plain else []) if r.concurrency == one.concurrency), None)
        both = speed(one), speed(same) if same is not None else None
        sets = {}
        for name in dict.fromkeys(a.question.set for a in one.answered):
            sides = speed_of_set(one, name), speed_of_set(same, name) if same is not None else None
            sets[name] = _sides(*sides)
        out.append({"concurrency": one.concurrency, **_sides(*both), "sets": sets})
    return out


def _sides(with_: dict[str, Any] | None, without: dict[str, Any] | None) -> dict[str, Any]:
    return {"with_draft": with_, "without_draft": without, "speedup": speedup(with_, without)}


def _answer(a: Answered, rounds: Rounds | None) -> dict[str, Any]:
    q, r = a.question, a.reply
    return {
        "set": q.set, "prompt": q.index, "tokens": r.tokens if r else [], "lost": r.lost if r else 0,
        "finish": r.finish if r else "", "seconds": round(r.seconds, 4) if r else None,
        "rounds": rounds.rounds if rounds else None, "accepted": rounds.accepted if rounds else None,
        "each": list(rounds.each) if rounds else [], "error": a.error,
    }  # fmt: skip
