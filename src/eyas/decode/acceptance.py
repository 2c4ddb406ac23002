"""Counts of accepted drafts, and the numbers made of them.   pytest tests/test_decode_acceptance.py

A *round* is one forward of the target that verifies `k` drafted tokens in a chain and emits those it accepts plus one
token of its own. So the accept length is `tau = 1 + accepted / rounds`, bonus token included; the token that prefill
emits belongs to no round. Two rates per position are in use, and every number printed must say which it is:

- unconditional: share of all rounds in which the first j drafts were all accepted (vLLM's per-position rate);
- conditional: the same, among the rounds in which the first j - 1 were (the EAGLE papers' n-alpha).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Acceptance:
    """`histogram[a]` rounds accepted exactly `a` drafts, for a = 0 .. k. Raises ValueError for impossible counts."""

    histogram: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "histogram", tuple(int(n) for n in self.histogram))
        if not self.histogram or min(self.histogram) < 0:
            raise ValueError(f"acceptance histogram {self.histogram}: must be k + 1 counts, none of them negative")

    @classmethod
    def of(cls, accepted: Iterable[int], k: int) -> Acceptance:
        """From the number of accepted drafts of each round. Raises ValueError where one is not in 0 .. k."""
        counts = np.fromiter(accepted, dtype=np.int64)
        if counts.size and (counts.min() < 0 or counts.max() > k):
            raise ValueError(f"rounds accepted {counts.min()} to {counts.max()} drafts, but only {k} were drafted")
        return cls(tuple(np.bincount(counts, minlength=k + 1).tolist()))

    @classmethod
    def merged(cls, parts: Sequence[Acceptance], k: int) -> Acceptance:
        """All rounds of all parts; an empty sequence gives no rounds."""
        return sum(parts, cls((0,) * (k + 1)))

    def __add__(self, other: Acceptance) -> Acceptance:
        if self.k != other.k:
            raise ValueError(f"rounds of {self.k} and of {other.k} drafts have no common accept length")
        return Acceptance(tuple(a + b for a, b in zip(self.histogram, other.histogram, strict=True)))

    @property
    def k(self) -> int:
        """Drafts in a round."""
        return len(self.histogram) - 1

    @property
    def rounds(self) -> int:
        """Forwards of the target after prefill."""
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        """Accepted drafts in all rounds together."""
        return sum(a * n for a, n in enumerate(self.histogram))

    @property
    def tau(self) -> float:
        """Accept length: 1 + accepted / rounds; nan without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else math.nan

    @property
    def at_least(self) -> tuple[int, ...]:
        """`at_least[j]`: rounds in which the first j drafts were all accepted, j = 0 .. k."""
        return tuple(np.cumsum(self.histogram[::-1])[::-1].tolist())

    @property
    def unconditional(self) -> tuple[float, ...]:
        """Per position j = 1 .. k: share of all rounds whose first j drafts were accepted; nan without a round."""
        reached = self.at_least
        return tuple(n / reached[0] if reached[0] else math.nan for n in reached[1:])

    @property
    def conditional(self) -> tuple[float, ...]:
        """Per position j = 1 .. k: the same among rounds whose first j - 1 were; nan where there is none."""
        reached = self.at_least
        return tuple(n / before if before else math.nan for before, n in itertools.pairwise(reached))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what has no rounds is None."""
        plain = [[None if math.isnan(x) else round(x, 4) for x in xs] for xs in (self.unconditional, self.conditional)]
        return {
            "tau": None if math.isnan(self.tau) else round(self.tau, 4),
            "rounds": self.rounds,
            "accepted": self.accepted,
            "histogram": list(self.histogram),
            "unconditional": plain[0],
            "conditional": plain[1],
        }


def interval(
    sets: Sequence[Sequence[Acceptance]], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of the mean over prompt sets of tau; give one set for the interval of that set.

    `sets[s]` holds one Acceptance per prompt. Percentile method: prompts, not rounds (those of one answer are not
    independent), are drawn with replacement within each set, `resamples` times. Deterministic for a seed. (nan, nan)
    where a set has no rounds. A prompt without a round of its own counts for nothing.
    """
    rng = np.random.default_rng(seed)
    taus = []
    for parts in sets:
        counts = np.array([(p.accepted, p.rounds) for p in parts if p.rounds], dtype=np.float64).reshape(-1, 2)
        if not len(counts):
            return math.nan, math.nan
        drawn = counts[rng.integers(len(counts), size=(resamples, len(counts)))].sum(1)  # [resamples, 2]
        taus.append(1 + drawn[:, 0] / drawn[:, 1])
    low, high = np.quantile(np.mean(taus, axis=0), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def rounded(value: float | None, digits: int = 4) -> float | None:
    """For JSON, which knows no NaN."""
    return None if value is None or math.isnan(value) else round(value, digits)
