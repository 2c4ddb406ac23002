"""Acceptance arithmetic, checked by hand.   pytest -q tests/test_decode_acceptance.py"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.decode.acceptance import Acceptance, interval


def test_six_rounds_by_hand():
    a = Acceptance.of([0, 0, 1, 2, 2, 4], k=4)
    assert a.histogram == (2, 1, 2, 0, 1)
    assert (a.k, a.rounds, a.accepted) == (4, 6, 9)
    assert a.tau == 1 + 9 / 6
    assert a.at_least == (6, 4, 3, 1, 1)
    assert a.unconditional == pytest.approx((4 / 6, 3 / 6, 1 / 6, 1 / 6))
    assert a.conditional == pytest.approx((4 / 6, 3 / 4, 1 / 3, 1.0))


def test_bounds():
    assert Acceptance.of([0, 0, 0], k=4).tau == 1.0
    assert Acceptance.of([4, 4], k=4).tau == 5.0
    assert math.isnan(Acceptance.of([], k=4).tau)
    nothing = Acceptance.of([0], k=2)
    assert nothing.conditional[0] == 0
    assert math.isnan(nothing.conditional[1]), "nobody got as far as the second position"
    assert nothing.to_dict()["conditional"] == [0.0, None]


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="only 2 were drafted"):
        Acceptance.of([0, 3], k=2)
    with pytest.raises(ValueError, match="negative"):
        Acceptance((1, -1))
    with pytest.raises(ValueError, match="no common accept length"):
        Acceptance.of([1], k=2) + Acceptance.of([1], k=3)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 40))
def test_definitions_agree_with_each_other(accepted: list[int], cut: int):
    whole = Acceptance.of(accepted, k=3)
    assert Acceptance.merged([Acceptance.of(accepted[:cut], 3), Acceptance.of(accepted[cut:], 3)], 3) == whole
    # tau is one plus the sum of the unconditional rates, and those are running products of the conditional ones.
    assert whole.tau == pytest.approx(1 + sum(whole.unconditional))
    product = 1.0
    for unconditional, conditional in zip(whole.unconditional, whole.conditional, strict=True):
        product *= 0.0 if math.isnan(conditional) else conditional
        assert unconditional == pytest.approx(product)


def test_interval_is_seeded_and_covers():
    parts = [Acceptance.of([a % 3, (a * 7) % 4, 1], k=4) for a in range(30)]
    low, high = interval([parts])
    assert interval([parts]) == (low, high)
    assert low < Acceptance.merged(parts, 4).tau < high
    assert interval([parts], seed=1, resamples=101) != interval([parts], resamples=101)
    narrow = interval([parts], level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_interval_without_spread_is_a_point():
    same = [Acceptance.of([2, 2], k=4)] * 5
    assert interval([same]) == (3.0, 3.0)
    assert interval([same, [Acceptance.of([0], k=4)] * 2]) == (2.0, 2.0), "each set weighs the same"
    assert math.isnan(interval([same, []])[0])


def test_interval_resamples_prompts_not_rounds():
    # Two prompts that disagree wholly: 200 rounds would give a narrow interval, two prompts cannot.
    parts = [Acceptance.of([0] * 100, k=4), Acceptance.of([4] * 100, k=4)]
    assert interval([parts]) == (1.0, 5.0)
