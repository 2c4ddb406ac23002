"""Further starts of the search: what the files show put right, and what each engine reads.

pytest tests/test_doctor_measure.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ..draft.expected import expected_tensors
from .departures import departures, same
from .readings import Readings
from .scale import BARELY, BLIND, controls, frequencies, mean
from .search import Entry, Found, Search
from .specimen import Specimen
from .trial import Bench


def with_suspected(search: Search, found: Found, tell: Callable[[str], None]) -> Found:
    """Where the search left alone what the files show to be wrong: once more, with that put right first.

    One fault may hide another so well that putting right the one gains nothing by itself.
    """
    groups = search.context.suspected - {h.group for h in found.taken}
    if not groups or time.monotonic() > search.deadline:
        return found
    start, first = found.base, []
    for name in sorted(groups):
        tried = search.singles("declared", start, tell, only=name)
        if tried:
            first.append(tried[0].hypothesis)
            start = tried[0].hypothesis.apply(start)
    if not first:
        return found
    other = search.run("with what the files show put right", start, tell)
    found.ledger += other.ledger
    before, after = search.bench.surprise([found.best, other.best])
    if not search.paired.gain(before, after, len(other.last) + 1).real:
        return found
    return search.reduced(replace(found, best=other.best, taken=[*first, *other.taken], last=other.last))


def lost(bench: Bench, best: Specimen) -> bool:
    """Does it know nothing, or not use the states? As `Measured.knows_nothing`, on the bench that is searched on."""
    if best.lacking or not bench.has_states(best):
        return True
    c, vocab = controls(bench, best), best.shape.vocab_size
    little = min(frequencies(bench.material, bench.rows, bench.document, vocab), BARELY * c["random_draft"])
    return c["states_are_worth"] < BLIND or mean(bench.surprise([best])[0]) > little


def mends(search: Search, found: Found, engine: str, read: Specimen, tell: Callable[[str], None]) -> Entry | None:
    """Single substitutions in what an engine reads: the one that helps most. All go into the ledger."""
    tried = search.singles(f"as {engine} reads it", read, tell)
    found.ledger += tried
    return next((e for e in tried if e.verdict == "better"), None)


def from_engines(search: Search, found: Found, readings: Readings, tell: Callable[[str], None]) -> Found:
    """Where the declared reading leads nowhere: the same search from each engine's reading.

    What is found there is told as substitutions in the declared reading: the engine's departures, then what was taken.
    """
    best, least = found, search.bench.surprise([found.best])[0]
    for name, read in readings.as_read.items():
        if time.monotonic() > search.deadline:
            break
        if read.lacking or same(read, found.base) or not search.bench.has_states(read):
            continue
        points = departures(found.base, read, found.base)
        if any(
            h.group in expected_tensors(read.shape, read.conventions) for h in points
        ):  # memory that nobody wrote stands for a tensor there
            continue
        other = search.run(f"as {name} reads it", read, tell)
        found.ledger += other.ledger
        if lost(search.bench, other.best):  # less wrong than nothing at all is no reading
            continue
        surprise = search.bench.surprise([other.best])[0]
        if not search.paired.gain(least, surprise, len(other.last)).real:
            continue
        candidate = search.reduced(replace(found, best=other.best, taken=[*points, *other.taken], last=other.last))
        if candidate.taken:
            best, least = candidate, search.bench.surprise([candidate.best])[0]
    return best
