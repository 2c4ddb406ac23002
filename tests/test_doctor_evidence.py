"""Paired evidence: nothing is made of chance, a real difference is seen, and many tests cost certainty.

pytest -q tests/test_doctor_evidence.py
"""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch

from eyas.doctor.evidence import LEAST_GAIN, LEVEL, Gain, Paired

DOCUMENTS, ROWS, STEPS = 40, 30, 2
DOCUMENT = torch.arange(DOCUMENTS).repeat_interleave(ROWS)


def pair(seed: int, shift: float = 0.0, common: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """Surprise of two readings: `common` is what rows of one document share of their difference."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.rand(len(DOCUMENT), STEPS, generator=generator) * 5
    own = torch.randn(len(DOCUMENT), STEPS, generator=generator)
    shared = torch.randn(DOCUMENTS, generator=generator)[DOCUMENT, None]
    return before, before - shift + 0.5 * own + common * shared


def test_no_difference_is_not_real():
    before, _ = pair(0)
    gain = Paired(DOCUMENT).gain(before, before.clone())
    assert (gain.mean, gain.low, gain.high) == (0.0, 0.0, 0.0)
    assert not gain.real and not gain.worse


def test_a_difference_is_the_mean_over_all_rows_and_steps():
    before, after = pair(1, shift=0.5)
    gain = Paired(DOCUMENT).gain(before, after)
    assert gain.mean == pytest.approx(float((before - after).mean()), abs=1e-6)
    assert gain.low < gain.mean < gain.high and gain.real and not gain.worse
    other_way = Paired(DOCUMENT).gain(after, before)
    assert (other_way.mean, other_way.low) == (pytest.approx(-gain.mean), pytest.approx(-gain.high))
    assert other_way.worse and not other_way.real
    assert gain.to_list() == [round(gain.low, 4), round(gain.high, 4)]


def test_documents_of_other_lengths_weigh_by_their_rows():
    document = torch.tensor([0] * 30 + [3] * 10)  # numbers need not follow each other
    before, after = torch.ones(40, 1), torch.ones(40, 1)
    after[:30] -= 0.2
    gain = Paired(document).gain(before, after)
    assert gain.mean == pytest.approx(0.15)
    assert gain.low < 0.15 < gain.high


def test_the_same_draws_for_every_pair():
    """So that two gains of one bench can be compared, and a second look says the same."""
    before, after = pair(2, shift=0.1)
    paired = Paired(DOCUMENT)
    first = paired.gain(before, after)
    assert paired.gain(before, after) == first == Paired(DOCUMENT).gain(before, after)
    assert paired.gain(before - 1, after - 1).low == pytest.approx(first.low, abs=1e-6)
    assert Paired(DOCUMENT, seed=1).gain(before, after) != first
    doubled = paired.gain(before, before - 2 * (before - after))
    assert doubled.high - doubled.low == pytest.approx(2 * (first.high - first.low), rel=1e-5)


def test_more_tests_more_doubt():
    before, after = pair(3, shift=0.1)
    paired = Paired(DOCUMENT)
    widths = [(g.high - g.low, g.mean) for g in (paired.gain(before, after, tests=n) for n in (1, 10, 100))]
    assert widths[0][0] < widths[1][0] < widths[2][0]
    assert len({mean for _, mean in widths}) == 1
    z = [NormalDist().inv_cdf(1 - LEVEL / (2 * n)) for n in (1, 100)]
    assert widths[2][0] / widths[0][0] == pytest.approx(z[1] / z[0])


def test_the_interval_is_that_of_whole_documents():
    """Rows of one document count once: of forty documents the mean is no better known than to their spread."""
    before, after = pair(4, common=2.0)
    gain = Paired(DOCUMENT).gain(before, after)
    means = (before - after).mean(1).view(DOCUMENTS, ROWS).mean(1)
    expected = 1.96 * float(means.std(correction=0)) / math.sqrt(DOCUMENTS)
    assert (gain.high - gain.low) / 2 == pytest.approx(expected, rel=0.1)
    as_rows = Paired(torch.arange(len(DOCUMENT))).gain(before, after)
    assert as_rows.high - as_rows.low < 0.5 * (gain.high - gain.low)


def test_one_document_decides_nothing():
    gain = Paired(torch.zeros(50, dtype=torch.int64)).gain(torch.ones(50, 1), torch.zeros(50, 1))
    assert gain.mean == 1.0 and (gain.low, gain.high) == (-math.inf, math.inf)
    assert not gain.real and not gain.worse


def test_chance_is_rarely_taken_for_a_difference():
    """Of 200 pairs that differ by chance alone about 5 % leave an uncorrected interval; corrected, hardly one."""
    paired = Paired(DOCUMENT)
    gains = [(paired.gain(*pair(seed)), paired.gain(*pair(seed), tests=60)) for seed in range(200)]
    left = sum(g.low > 0 or g.worse for g, _ in gains)
    assert 2 <= left <= 22  # 5 % of 200 and what the normal interval of 40 documents adds to it
    assert sum(g.real for g, _ in gains) <= 10
    assert sum(g.low > 0 or g.worse for _, g in gains) <= 1


def test_a_small_effect_is_found_where_the_text_suffices():
    paired = Paired(DOCUMENT)
    found = [paired.gain(*pair(seed, shift=0.15, common=0.05), tests=60) for seed in range(50)]
    assert sum(g.real for g in found) >= 48


def test_better_means_certain_and_enough():
    assert Gain(0.5, 0.1, 0.9).real
    assert not Gain(LEAST_GAIN / 2, LEAST_GAIN / 4, LEAST_GAIN).real  # certain and too little
    assert not Gain(0.5, -0.1, 1.1).real and not Gain(0.5, -0.1, 1.1).worse
    assert Gain(-0.5, -0.9, -0.1).worse
