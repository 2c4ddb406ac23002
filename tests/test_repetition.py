"""What is endless repetition, and what only looks like it.   pytest -q tests/test_repetition.py"""

from __future__ import annotations

import numpy as np
import pytest

from eyas.repetition import MAX_PERIOD, RunningPeriods, is_endless, nearly_periodic, trailing_period

STORY = list(range(100, 190))


@pytest.mark.parametrize(
    ("cycle", "times", "rest"),
    [([7], 32, 0), ([7, 8], 20, 1), (list(range(10)), 5, 3), (list(range(25)), 4, 0), (list(range(64)), 4, 10)],
)
def test_a_cycle_until_the_end_is_found_with_its_period_and_span(cycle, times, rest):
    ids = STORY + cycle * times + cycle[:rest]
    assert trailing_period(ids) == (len(cycle), len(cycle) * times + rest)
    assert is_endless(ids, "length")
    assert not is_endless(ids, "stop"), "the model ended its turn by itself"


def test_a_cycle_that_ended_is_no_loop():
    assert trailing_period(STORY + [7] * 60 + [1, 2, 3]) is None


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [5],
        [7] * 31,
        STORY,
        STORY + list(range(20)) * 3,  # a refrain, three times
        [x for row in range(12) for x in (9, 200 + row, 9, 300 + row, 9, 400 + row, 10)],  # rows of a table
        [x for item in range(15) for x in (50 + item, 11, 300 + 3 * item, 301 + 3 * item, 10)],  # a list
        [9, 8, 9, 8, 9, 8, 9, 8, 9, 10],  # the ruled line of a table, `|---|---|---|---|`
        [x for item in range(20) for x in (7, 42, 50 + item, 61, 7 * item % 97 + 100, 10)],  # a multiplication table
    ],
)
def test_what_only_looks_like_it(ids):
    assert trailing_period(ids) is None
    assert not is_endless(ids, "length")


def test_a_loop_with_a_counter_is_a_loop():
    """`7. The car is red and fast and new\\n`, on and on: all but the number is the same."""
    sentence = list(range(500, 511))
    ids = STORY + [x for n in range(12) for x in (30 + n, *sentence)]
    assert trailing_period(ids) is None
    assert nearly_periodic(ids) == 12
    assert is_endless(ids, "length")
    assert not is_endless(ids, "stop")


def test_token_by_token_says_the_same():
    """RunningPeriods after each push against trailing_period of all pushed so far, on random rows full of cycles."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(24):
        parts = [rng.integers(0, 4, size=rng.integers(1, 40)) for _ in range(4)]
        rows.append(np.concatenate([np.tile(p, rng.integers(1, 8)) for p in parts])[:160])
    length = min(map(len, rows))
    running = RunningPeriods(len(rows))
    everyone = np.arange(len(rows))
    seen = 0
    for t in range(length):
        looping = running.push(everyone, np.array([r[t] for r in rows]))
        wanted = [trailing_period(r[: t + 1]) is not None for r in rows]
        assert looping.tolist() == wanted, t
        seen += sum(wanted)
    assert seen > 20


def test_a_cleared_row_has_no_past():
    running = RunningPeriods(2)
    both = np.arange(2)
    for _ in range(31):
        assert not running.push(both, np.array([7, 7])).any()
    running.clear(1)
    assert running.push(both, np.array([7, 7])).tolist() == [True, False]
    assert running.recent.shape[1] == MAX_PERIOD
