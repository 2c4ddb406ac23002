"""Find the reading under which the weights make most sense: substitutions one by one, kept while they help, dropped
when they no longer do.   pytest tests/test_doctor_search.py

From a start (the draft as declared, or as an engine reads it) every hypothesis is tried; the best real gain is taken;
then again from there. After each step what was taken before must still be needed, else it is reversed: with two faults
at once the first step may have been a compensation. Where nothing helps by itself and the draft knows nothing, pairs
are tried. Each trial is an entry of the ledger.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .evidence import LEAST_GAIN, Gain, Paired
from .hypotheses import hypotheses
from .hypothesis import Context, Hypothesis
from .specimen import Specimen
from .trial import Bench

DEPTH = 4
UNSURE = 4
LEAK = 1.0
"""Nats that states of the next token must win: they hold the answer, so a healthy draft may win by them, most of all
one that is little more than a linear guess (0.33 measured; docs/experiments.md)."""
TRAINED_SO = 0.5
"""Nats that another reading must win over what training wrote down of these very weights: a draft that was trained for
minutes fits some other reading better by 0.1, and was trained under its own all the same."""
PAIRED = ("layer_input", "qkv", "gate_up", "rope_layout", "transposed", "norm_before_residual", "norm_output", "d2t",
          "taps", "slice_order", "norm_before_fc", "fc_norm", "embedding", "head", "norm_before_head")  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One line of the ledger."""

    round: int
    start: str
    hypothesis: Hypothesis
    gain: Gain
    verdict: str
    """taken | better | refuted | inconclusive | reversed"""
    note: str = ""


@dataclass
class Found:
    """The best reading, what was substituted for it in this order, and everything that was tried."""

    start: str
    base: Specimen
    best: Specimen
    taken: list[Hypothesis] = field(default_factory=list)
    ledger: list[Entry] = field(default_factory=list)
    last: list[Entry] = field(default_factory=list)
    """What was tried at the best reading: why it is the best."""
    complete: bool = True
    """False where the time was over before."""


class Search:
    """One bench and what alternatives are made of."""

    def __init__(
        self, bench: Bench, context: Context, deadline: float = float("inf"), wide: Bench | None = None
    ) -> None:
        """wide: more text, on which what looks better and is not certain on `bench` gets a second look."""
        self.bench, self.context, self.deadline, self.wide = bench, context, deadline, wide
        self.paired = Paired(bench.document)

    def run(self, start: str, base: Specimen, tell: Callable[[str], None] = lambda text: None) -> Found:
        """Search from `base`."""
        found = Found(start, base, base)
        surprise = self.bench.surprise([base])[0]
        for round_ in range(1, DEPTH + 1):
            tried = self._round(round_, start, found.best, surprise, tell)
            found.last = [entry for entry, _ in tried]
            found.ledger += found.last
            found.complete = time.monotonic() <= self.deadline
            chosen = next(((e, after) for e, after in tried if e.verdict == "better"), None)
            if chosen is None:
                chosen = self._second_look(found.best, tried)
            if chosen is None:
                break
            self._take(found, [chosen[0].hypothesis], chosen[0].gain, round_)
            surprise = self._drop_needless(round_, found, chosen[1])
            if not found.complete:
                break
        return found

    def singles(
        self, start: str, base: Specimen, tell: Callable[[str], None] = lambda text: None, only: str | None = None
    ) -> list[Entry]:
        """Every hypothesis, or those of one group only, alone on `base`, the best first."""
        if time.monotonic() > self.deadline:
            return []
        return [entry for entry, _ in self._round(1, start, base, self.bench.surprise([base])[0], tell, only)]

    def reduced(self, found: Found) -> Found:
        """What `found` took, without what is not needed; every step is noted as taken."""
        best = applied(found.base, found.taken)
        surprise = self.bench.surprise([best])[0]
        before = self.bench.surprise([found.base])[0]
        whole = self.paired.gain(before, surprise, len(found.taken))
        note = f"found from the reading {found.start}"
        entries = [Entry(0, found.start, h, whole, "taken", note) for h in found.taken]
        out = replace(found, best=best, taken=list(found.taken), ledger=[*found.ledger, *entries])
        self._drop_needless(0, out, surprise)
        return out

    def _take(self, found: Found, hypotheses: list[Hypothesis], gain: Gain, round_: int, note: str = "") -> None:
        for h in hypotheses:
            found.taken.append(h)
            found.best = h.apply(found.best)
            found.ledger.append(Entry(round_, found.start, h, gain, "taken", note))

    def _round(
        self, round_: int, start: str, base: Specimen, before: torch.Tensor, tell: Callable[[str], None],
        only: str | None = None,
    ) -> list[tuple[Entry, torch.Tensor]]:  # fmt: skip
        """Every hypothesis (of the group `only`) on `base`, the best first."""
        all_ = [h for h in hypotheses(base, self.context) if only in (None, h.group)]
        if all_:
            tell(f"trying {len(all_)} hypotheses on the draft {start}")
        specimens = [h.apply(base) for h in all_]
        results = self._measure(specimens)
        out = []
        for h, after in zip(all_, results, strict=True):
            if after is None:
                continue
            gain = self.paired.gain(before, after, tests=len(all_))
            out.append((Entry(round_, start, h, gain, _verdict(h, gain, self.context.trained)), after))
        return sorted(out, key=lambda pair: -pair[0].gain.mean)

    def _second_look(
        self, base: Specimen, tried: list[tuple[Entry, torch.Tensor]]
    ) -> tuple[Entry, torch.Tensor] | None:
        """The best of what would be worth taking and is not certain yet, where more text makes it certain."""
        unsure = [(e, after) for e, after in tried if e.verdict == "inconclusive" and e.gain.mean >= LEAST_GAIN][
            :UNSURE
        ]
        if self.wide is None or not unsure or time.monotonic() > self.deadline:
            return None
        before, *others = self.wide.surprise([base, *(e.hypothesis.apply(base) for e, _ in unsure)])
        paired = Paired(self.wide.document)
        best: tuple[Entry, torch.Tensor] | None = None
        for (e, after), surprise in zip(unsure, others, strict=True):
            gain = paired.gain(before, surprise, len(tried))
            verdict = _verdict(e.hypothesis, gain, self.context.trained)
            if verdict == "better" and (best is None or gain.mean > best[0].gain.mean):
                best = replace(e, gain=gain), after
        return best

    def _measure(self, specimens: list[Specimen]) -> list[torch.Tensor | None]:
        """Surprise of each, None for those whose states were not recorded or for which there was no time."""
        out: list[torch.Tensor | None] = [None] * len(specimens)
        groups: dict[Any, list[int]] = {}
        for place, s in enumerate(specimens):
            if self.bench.has_states(s):
                groups.setdefault(s.body, []).append(place)
        for places in groups.values():
            if time.monotonic() > self.deadline:
                break
            for place, surprise in zip(places, self.bench.surprise([specimens[p] for p in places]), strict=True):
                out[place] = surprise
        return out

    def _drop_needless(self, round_: int, found: Found, surprise: torch.Tensor) -> torch.Tensor:
        """Reverse whatever the present reading does as well without; its surprise then."""
        candidates = found.taken[:-1]  # the last one was just seen to help
        while candidates:
            h = candidates.pop(0)
            rest = [other for other in found.taken if other is not h]
            without = applied(found.base, rest)
            simpler = self.bench.surprise([without])[0]
            gain = self.paired.gain(simpler, surprise, tests=len(found.taken))
            if not gain.real:
                found.taken, found.best, surprise = rest, without, simpler
                note = "it was a compensation: with the others in place it is not needed"
                found.ledger.append(Entry(round_, found.start, h, gain, "reversed", note))
                candidates = list(rest)
        return surprise

    def pairs(self, found: Found, tell: Callable[[str], None] = lambda text: None) -> Found:
        """Two structural substitutions at once, where no single one helped and the draft knows next to nothing."""
        base = found.best
        before = self.bench.surprise([base])[0]
        pair = self._pair(base, before, found.last, tell)
        if pair is None:
            found.complete = time.monotonic() <= self.deadline
            return found
        (first, second), gain, _ = pair
        self._take(found, [first, second], gain, 1, "two at once: neither helps without the other")
        further = self.run(found.start, found.best, tell)
        found.ledger += further.ledger
        found.taken, found.best, found.last = [*found.taken, *further.taken], further.best, further.last
        found.complete = further.complete
        if further.taken:
            self._drop_needless(DEPTH, found, self.bench.surprise([found.best])[0])
        return found

    def _pair(
        self, base: Specimen, before: torch.Tensor, tried: Iterable[Entry], tell: Callable[[str], None]
    ) -> tuple[tuple[Hypothesis, Hypothesis], Gain, torch.Tensor] | None:
        singles = [e.hypothesis for e in tried if _paired(e.hypothesis.group)]
        if float(before.mean()) < 0.6 * self.bench.nothing(base) or not singles:
            return None
        pairs = [(a, b) for a, b in itertools.combinations(singles, 2) if a.group != b.group]
        tell(f"trying {len(pairs)} pairs of hypotheses")
        specimens = [b.apply(a.apply(base)) for a, b in pairs]
        best: tuple[tuple[Hypothesis, Hypothesis], Gain, torch.Tensor] | None = None
        for (a, b), after in zip(pairs, self._measure(specimens), strict=True):
            if after is None:
                continue
            gain = self.paired.gain(before, after, tests=len(pairs))
            if gain.real and (best is None or gain.mean > best[1].mean):
                best = (a, b), gain, after
        return best


def _paired(name: str) -> bool:
    return name in PAIRED or name.startswith("name of ")


def _verdict(h: Hypothesis, gain: Gain, trained: frozenset[str] = frozenset()) -> str:
    least = LEAK if h.group == "state_shift" else TRAINED_SO if h.group in trained else 0.0
    if gain.real and gain.mean > least:
        return "better"
    return "refuted" if gain.worse else "inconclusive"


def applied(base: Specimen, taken: Iterable[Hypothesis]) -> Specimen:
    """`base` with these substitutions, in their order."""
    for h in taken:
        base = h.apply(base)
    return base
