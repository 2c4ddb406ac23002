"""Is a difference real? Paired over positions, bootstrapped over sequences, corrected for the number of tests.

    Paired(bench.document).gain(surprise_a, surprise_b, tests=50)     -> Gain(mean, low, high)

Positions of one sequence are not independent, sequences are; so whole sequences are drawn with replacement. The
interval is mean +- z * standard error of the bootstrap means, z for a two-sided level of 5 % divided by the number of
tests (Bonferroni).   pytest tests/test_doctor_evidence.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

LEVEL = 0.05
RESAMPLES = 2000
LEAST_GAIN = 0.02
"""Nats per token below which no reading is called better. On three healthy drafts of few tokens alternatives that are
wrong win by up to 0.012 because nothing is trained to its optimum; one layer off costs 0.03 (docs/experiments.md)."""


@dataclass(frozen=True)
class Gain:
    """How much less surprised the second reading is than the first: nats per token, with its interval."""

    mean: float
    low: float
    high: float

    @property
    def real(self) -> bool:
        """Better for certain, and by enough to matter."""
        return self.low > 0 and self.mean >= LEAST_GAIN

    @property
    def worse(self) -> bool:
        """Worse for certain."""
        return self.high < 0

    def to_list(self) -> list[float]:
        """The interval, rounded for a report."""
        return [round(self.low, 4), round(self.high, 4)]


class Paired:
    """Bootstrap over the documents of one bench; `document` int64 [R] as in `Bench`. The same draws for every pair."""

    def __init__(self, document: torch.Tensor, seed: int = 0) -> None:
        used, self.place = document.unique(return_inverse=True)
        self.count = torch.bincount(self.place, minlength=len(used)).double()  # rows of each document
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randint(len(used), (RESAMPLES, len(used)), generator=generator)
        self.weights = torch.zeros(RESAMPLES, len(used), dtype=torch.float64)
        self.weights.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))

    def gain(self, before: torch.Tensor, after: torch.Tensor, tests: int = 1) -> Gain:
        """before, after: surprise [R, K] of two readings of the same rows."""
        each = (before - after).double().mean(1)
        sums = torch.zeros(len(self.count), dtype=torch.float64).index_add_(0, self.place, each)
        mean = float(sums.sum() / self.count.sum())
        if len(self.count) < 2:
            return Gain(mean, -math.inf, math.inf)
        means = (self.weights @ sums) / (self.weights @ self.count)
        z = NormalDist().inv_cdf(1 - LEVEL / (2 * max(1, tests)))
        spread = z * float(means.std())
        return Gain(mean, mean - spread, mean + spread)
