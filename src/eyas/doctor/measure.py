"""The measured half of a diagnosis: search quickly on part of the text, confirm in float32 on all of it.

Measured.of(readings, material, ...)      pytest tests/test_doctor_diagnosis.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..decode.acceptance import Acceptance, interval
from ..machine import choose_precision
from .breakdown import by_kind, by_position
from .departures import costs, same
from .evidence import LEAST_GAIN, Gain, Paired
from .hypothesis import Context, Hypothesis
from .maps import Aligned, align, align_freely, usable
from .material import Material
from .readings import Readings
from .scale import BARELY, BLIND, controls, frequencies, mean
from .search import Entry, Found, Search, applied
from .specimen import HEAD, Specimen
from .starts import from_engines, lost, mends, with_suspected
from .trial import STEPS, Bench

SCREEN_ROWS, SCREEN_STEPS, SCREEN_DOCUMENTS = 384, 2, 16
CONFIRM_ROWS = 2048


@dataclass
class Taken:
    """One substitution of the best reading, and what it is worth."""

    hypothesis: Hypothesis
    gain: Gain
    delta_tau: float
    interval: tuple[float, float]
    """Of delta_tau: 95 %, bootstrap over sequences."""
    equivalents: list[Hypothesis]
    """Others that fit as well, in its place."""


@dataclass
class Measured:
    """Everything that was run."""

    found: Found
    taken: list[Taken]
    taus: dict[str, list[Acceptance]] = field(default_factory=dict)
    """declared, best, and each engine -> one Acceptance per document."""
    controls: dict[str, float] = field(default_factory=dict)
    """Mean surprise in nats per token."""
    engine_costs: dict[str, list[tuple[str, Gain]]] = field(default_factory=dict)
    """Engine -> what each point costs (negative gain) in which it departs from the best reading, the dearest first."""
    engine_mends: dict[str, Entry | None] = field(default_factory=dict)
    """Engine -> the single substitution in its reading that helps it most; None where none does."""
    positions: list[dict[str, Any]] = field(default_factory=list)
    kinds: list[dict[str, Any]] = field(default_factory=list)
    """tau of each kind of text, the worst first."""
    aligned: Aligned | None = None
    """Where no form of the stored map fits: the one that the text suggests."""

    @property
    def knows_nothing(self) -> bool:
        """Under no reading that was found do the weights know the text: nothing can be confirmed then."""
        return self.worthless or self.blind

    @property
    def worthless(self) -> bool:
        """Do they know no more than how often each token comes, or than random ones, which know which ids there are?"""
        c = self.controls
        return c["best"] > min(c["word_frequencies"], BARELY * c["random_draft"])

    @property
    def blind(self) -> bool:
        """Does it make next to no difference which states it is fed? Then it only counts what follows which token."""
        return self.controls["states_are_worth"] < BLIND

    @property
    def ledger(self) -> list[Entry]:
        return self.found.ledger


def measure(
    readings: Readings,
    material: Material,
    context: Context,
    *,
    k: int = 4,
    device: str = "cpu",
    deadline: float = float("inf"),
    tell: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Trials of the draft as declared, as engines read it, and under every hypothesis."""
    assert readings.declared is not None
    base = readings.declared
    judged = material.packing.document[material.judged(STEPS)].unique().tolist()
    few = material.first([judged[i] for i in _spread(len(judged), SCREEN_DOCUMENTS)])
    quick = getattr(torch, choose_precision("auto", device))
    bench = Bench(few, quick, device, SCREEN_STEPS, SCREEN_ROWS)
    search = Search(bench, context, deadline, Bench(material, quick, device, SCREEN_STEPS, CONFIRM_ROWS))
    found = with_suspected(search, search.run("declared", base, tell=tell), tell)
    tell("confirming in float32")
    sure = Bench(material, torch.float32, device, most_rows=CONFIRM_ROWS)
    # The target's own rows at the wrong ids are a head that works, too; a head that is there is rather right.
    others = [h for h in found.taken if h.group != "head" or HEAD not in base.tensors]
    nothing = lost(bench, found.best)
    if nothing:  # what is less wrong under a map that is another's tells nothing
        others = []
    fits, aligned = applied(base, others), None
    if not fits.lacking and all(h.group != "d2t" for h in others) and sure.has_states(fits):
        aligned = _aligned(Bench(material, quick, device, 1, CONFIRM_ROWS), fits)
    if aligned is not None:
        found = replace(found, taken=others, best=fits)
        search.context = replace(context, head=None)  # at the places of an estimate no head can be judged
        found = _further(found, search.run("the map that fits", found.best.with_(ids=aligned.ids), tell), aligned)
    elif not found.taken:
        found = search.pairs(found, tell)
        if nothing and not found.taken:
            found = from_engines(search, found, readings, tell)
    out = Measured(found, [], aligned=aligned)
    paired = Paired(sure.document)
    surprise = dict(zip(("declared", "best"), sure.surprise([base, found.best]), strict=True))
    accepted = {"declared": sure.accepted(base, k)}
    while True:
        accepted["best"] = accepted["declared"] if found.best is base else sure.accepted(found.best, k)
        both = {name: (surprise[name], sure.counted(accepted[name], k)) for name in ("declared", "best")}
        out.taken = [_worth(h, found, base, sure, paired, both, k) for h in found.taken]
        unreal = min((t for t in out.taken if not t.gain.real), key=lambda t: t.gain.mean, default=None)
        if unreal is None:
            break
        # A step that does not hold on all of the text is none.
        found.taken = [h for h in found.taken if h is not unreal.hypothesis]
        found.best = applied(found.base, found.taken)
        surprise["best"] = sure.surprise([found.best])[0]
        note = "it does not hold in float32 on all positions"
        found.ledger.append(Entry(len(out.taken), found.start, unreal.hypothesis, unreal.gain, "reversed", note))
    for name, specimen in readings.as_read.items():
        # What an engine reads is equal to what was declared more often than not: then it is not run again.
        known = {"declared": base, "best": found.best} | {
            n: readings.as_read[n] for n in accepted if n in readings.as_read
        }
        twin = next((n for n, other in known.items() if same(specimen, other)), None)
        accepted[name] = accepted[twin] if twin else sure.accepted(specimen, k)
        if twin not in ("declared", "best"):  # what is wrong as declared is told as such
            out.engine_costs[name] = costs(bench, search.paired, found.best, specimen, base)
            if any(gain.worse and gain.mean < -LEAST_GAIN for _, gain in out.engine_costs[name]):
                out.engine_mends[name] = mends(search, found, name, specimen, tell)
    out.taus = {name: sure.counted(a, k) for name, a in accepted.items()}
    out.controls = {
        "declared": mean(surprise["declared"]),
        "best": mean(surprise["best"]),
        **controls(bench, found.best),
        "word_frequencies": frequencies(material, sure.rows, sure.document, base.shape.vocab_size),
        "knows_nothing": round(sure.nothing(base), 3),
    }
    if out.knows_nothing and out.taken:
        note = "the draft knows nothing under it either: better by chance is no diagnosis"
        found.ledger += [Entry(0, found.start, t.hypothesis, t.gain, "reversed", note) for t in out.taken]
        out.taken, out.taus["best"] = [], out.taus["declared"]
    out.positions = by_position(material, accepted["best"], k)
    if material.kinds:
        out.kinds = by_kind(material.kinds, out.taus["best"], k)
    return out


def _further(found: Found, further: Found, aligned: Aligned) -> Found:
    """Both searches as one from the draft as declared, but for its map."""
    return Found(
        found.start,
        found.base.with_(ids=aligned.ids),
        further.best,
        [*found.taken, *further.taken],
        found.ledger + further.ledger,
        further.last,
        found.complete and further.complete,
    )


def _aligned(bench: Bench, best: Specimen) -> Aligned | None:
    """Another map, made on every other document, where it fits the rest far better than the stored one."""
    shape = best.shape
    if shape.draft_vocab_size == shape.vocab_size:
        return None
    made = bench.document % 2 == 0
    if not bool(made.any()) or bool(made.all()):
        return None
    lit = bench.lit(best, made)
    found: Aligned | None = None
    for aligned in (align(*lit, best), align_freely(*lit, best)):
        if not aligned.moved or (aligned.whole and not usable(aligned.ids)):
            continue
        before, after = (s[~made] for s in bench.surprise([best, best.with_(ids=aligned.ids)]))
        gain = Paired(bench.document[~made]).gain(before, after)
        if gain.low > 0 and gain.mean > (LEAST_ALIGNED if found is None else found.gain.mean + LEAST_ALIGNED):
            found = replace(aligned, gain=gain)
    return found


LEAST_ALIGNED = 0.3
"""Nats per token that another map must win on held-out text. A right map loses by it, untrained heads win 0.07."""


def _worth(
    h: Hypothesis, found: Found, declared: Specimen, bench: Bench, paired: Paired,
    known: Mapping[str, tuple[torch.Tensor, Sequence[Acceptance]]], k: int,
) -> Taken:  # fmt: skip
    """The best reading against the same without `h`."""
    without = found.base
    for other in found.taken:
        if other is not h:
            without = other.apply(without)
    best, accepted = known["best"]
    alone = without is declared  # one fault is the usual case, and costs nothing further
    before, rounds_before = known["declared"] if alone else (bench.surprise([without])[0], bench.acceptance(without, k))
    gain = paired.gain(before, best, len(found.taken))
    delta, low, high = delta_tau(rounds_before, accepted)
    entry = next(e for e in found.ledger if e.hypothesis is h and e.verdict == "taken")
    rivals = [
        e.hypothesis
        for e in found.ledger
        if (e.start, e.round) == (entry.start, entry.round)
        and e.hypothesis is not h
        and e.gain.real
        and e.gain.mean > entry.gain.mean - LEAST_GAIN
    ]
    return Taken(h, gain, delta, (low, high), rivals)


def delta_tau(before: Sequence[Acceptance], after: Sequence[Acceptance]) -> tuple[float, float, float]:
    """tau(after) - tau(before) and its 95 % interval, bootstrapped over documents; nan where there are no rounds."""
    import numpy as np

    pairs = [
        (a.accepted, a.rounds, b.accepted, b.rounds)
        for a, b in zip(before, after, strict=True)
        if a.rounds and b.rounds
    ]
    counts = np.array(pairs, dtype=np.float64).reshape(-1, 4)
    if not len(counts):
        return float("nan"), float("nan"), float("nan")
    rng = np.random.default_rng(0)
    drawn = counts[rng.integers(len(counts), size=(2000, len(counts)))].sum(1)
    each = drawn[:, 2] / drawn[:, 3] - drawn[:, 0] / drawn[:, 1]
    total = counts.sum(0)
    low, high = np.quantile(each, [0.025, 0.975])
    return float(total[2] / total[3] - total[0] / total[1]), float(low), float(high)


def _spread(count: int, most: int) -> list[int]:
    return torch.linspace(0, count - 1, min(count, most)).round().long().unique().tolist()


def summary(parts: Sequence[Acceptance], k: int) -> dict[str, Any]:
    """One reading's acceptance as plain JSON values."""
    low, high = interval([parts])
    return {**Acceptance.merged(parts, k).to_dict(), "interval": [round(low, 4), round(high, 4)]}
