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

from ..errors import BadInput
from .asking import Answered, How, Question, Run, ask_all
from .counting import RULES, WHOLE, Rounds, in_all, rounds_of
from .speed import speed
from .traffic import Snapshot, others, snapshot


@dataclass
class Passes:
    """What one server answered, a pass for every level of concurrency."""

    url: str
    runs: list[Run] = field(default_factory=list)
    before: Snapshot = field(default_factory=Snapshot)
    after: Snapshot = field(default_factory=Snapshot)

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
    """Ask all questions once at every level of concurrency; stops where the server does. `passes` is filled on the way.

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
    finally:
        passes.after = snapshot(url)
    return passes


def counted(passes: Passes) -> list[tuple[Answered, Rounds]]:
    """The answers of the first pass whose rounds are known."""
    return [(a, r) for a in passes.first if a.reply is not None
            and (r := rounds_of(passes.engine, a.reply)) is not None]  # fmt: skip


def numbers(passes: Passes, plain: Passes | None, k: int) -> dict[str, Any]:
    """Plain JSON values of one server; `plain`: the same prompts without the draft. See docs/engines.md."""
    found = counted(passes)
    k = next((r.steps for _, r in found if r.steps), k)
    mine = [r for one in passes.runs for a in one.answered if a.reply is not None
            and (r := rounds_of(passes.engine, a.reply)) is not None]  # fmt: skip
    traffic = others(passes.before, passes.after, passes.runs, mine)
    return {
        "engine": passes.engine,
        "url": passes.url,
        "k": k,
        "acceptance": _acceptance(passes, found, k, traffic),
        "sets": _by_set(passes, found, k),
        "other_traffic": traffic,
        "speed": _speed(passes, plain),
        "answers": [_answer(passes.engine, a) for a in passes.first],
        "errors": [*passes.errors, *([] if plain is None else plain.errors)],
    }


def _acceptance(
    passes: Passes, found: Sequence[tuple[Answered, Rounds]], k: int, traffic: dict[str, Any]
) -> dict[str, Any] | None:
    """None, and an `errors` entry elsewhere, where no answer says anything."""
    replies = [a for a in passes.first if a.reply is not None]
    if found and len(found) == len(replies):
        parts = [r for _, r in found]
        out = in_all(parts, k) | {"own": _own(passes)}
        return out | {"counting": RULES.get(out["rule"], ""), "strict": _strict(found, k)}
    if traffic["seen"] is False:
        from_counters = _from_counters(passes)
        if from_counters is not None:
            return from_counters
    return None


def _own(passes: Passes) -> dict[str, Any]:
    """The engine's own words, over all answers."""
    from ..engines.served import from_metadata

    try:
        served = from_metadata([a.reply.counts for a in passes.first if a.reply is not None])
    except BadInput:
        return {}
    return {name: round(value, 4) for name, value in served.said.items() if isinstance(value, int | float)}


def _from_counters(passes: Passes) -> dict[str, Any] | None:
    """From the server's counters, where all traffic was ours."""
    from ..engines.served import from_prometheus

    try:
        served = from_prometheus(passes.after.text + "\n", passes.before.text + "\n")
    except BadInput:
        return None
    if served.rounds is None or served.accepted is None:
        return None
    return {
        "tau": round(served.tau or 1.0, 4), "rounds": served.rounds, "accepted": served.accepted,
        "unconditional": [round(x, 4) for x in served.unconditional], "rule": WHOLE, "source": "the server's counters",
        "own": dict(served.said), "counting": RULES[WHOLE], "strict": None,
    }  # fmt: skip


def _strict(found: Sequence[tuple[Answered, Rounds]], k: int) -> dict[str, Any] | None:
    """Rounds whose k drafts all fall within the answer (design.md, section 3); None where rounds are not told apart."""
    from ..decode.acceptance import Acceptance
    from ..decode.answers import Answer

    parts = []
    for a, rounds in found:
        if len(rounds.each) != rounds.rounds or max(rounds.each, default=0) > k:
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
        with_, without = speed(one), speed(same) if same is not None else None
        up = round(with_["tokens_per_s"] / without["tokens_per_s"], 3) if with_ and without else None
        out.append({"concurrency": one.concurrency, "with_draft": with_, "without_draft": without, "speedup": up})
    return out


def _answer(engine: str, a: Answered) -> dict[str, Any]:
    q, r = a.question, a.reply
    rounds = rounds_of(engine, r) if r is not None else None
    return {
        "set": q.set, "prompt": q.index, "tokens": r.tokens if r else [], "finish": r.finish if r else "",
        "seconds": round(r.seconds, 4) if r else None, "rounds": rounds.rounds if rounds else None,
        "accepted": rounds.accepted if rounds else None, "each": list(rounds.each) if rounds else [],
        "error": a.error,
    }  # fmt: skip
