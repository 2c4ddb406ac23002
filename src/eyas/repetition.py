"""Endless repetition: is the end of an answer one short cycle of tokens, over and over?

An answer that fell into a loop teaches a draft nothing but the loop, and its accept length there is infinite. A tail
*repeats with period p over s tokens* when its last s tokens satisfy x[i] == x[i-p] wherever both lie in the tail.
It is called endless when s is at least MIN_SPAN tokens and at least MIN_REPEATS cycles. Where an answer was cut off at
its length limit, a tail that repeats but for a counter (`7. The car is red` / `8. The car is red`) is a loop, too:
NEAR_MATCH of the tokens over NEAR_REPEATS cycles and NEAR_SPAN tokens. Rows of a table or items of a list do not
trigger either, since their contents differ.

    pytest tests/test_repetition.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_PERIOD = 64
MIN_SPAN = 32  # a ruled line of a table (`|---|---|`) is shorter than this
MIN_REPEATS = 4  # three equal verses of a song are an answer; nobody asks for four of 16 tokens
NEAR_SPAN, NEAR_REPEATS, NEAR_MATCH = 72, 3, 0.9


def threshold(max_period: int = MAX_PERIOD) -> np.ndarray:
    """Smallest number of consecutive matches that makes a loop of period p = 1, 2, ...: int64 [max_period].

    A span of s tokens holds s - p matches.
    """
    periods = np.arange(1, max_period + 1)
    return np.maximum(MIN_SPAN, MIN_REPEATS * periods) - periods


def trailing_period(ids: Sequence[int], max_period: int = MAX_PERIOD) -> tuple[int, int] | None:
    """(period, span in tokens) of the endless repetition at the end of `ids`, or None. The shortest period counts."""
    row = np.asarray(ids, dtype=np.int64)
    for period in range(1, min(max_period, len(row) - 1) + 1):
        differs = (row[period:] != row[:-period])[::-1]
        matches = int(differs.argmax()) if differs.any() else len(differs)
        if matches >= max(MIN_SPAN, MIN_REPEATS * period) - period:
            return period, matches + period
    return None


def nearly_periodic(ids: Sequence[int], max_period: int = MAX_PERIOD) -> int | None:
    """The period with which the end of `ids` repeats but for one token in ten, or None. See the rule above."""
    row = np.asarray(ids, dtype=np.int64)
    for period in range(1, max_period + 1):
        span = max(NEAR_SPAN, NEAR_REPEATS * period)
        if span > len(row):
            return None
        tail = row[-span:]
        if (tail[period:] == tail[:-period]).mean() >= NEAR_MATCH:
            return period
    return None


def is_endless(ids: Sequence[int], finish: str) -> bool:
    """Is an answer that ended by `finish` ("stop", "length" or "loop") endless repetition?

    A model that ends its turn by itself ("stop") was not caught in a loop, whatever its last lines look like.
    """
    if finish == "stop":
        return False
    return trailing_period(ids) is not None or nearly_periodic(ids) is not None


class RunningPeriods:
    """The same test while tokens arrive, for many rows at once: counts of matches in a row, for each period.

    `push` costs one vectorised comparison a token; it lets a generator stop a loop instead of finishing it.
    """

    def __init__(self, rows: int, max_period: int = MAX_PERIOD):
        self.recent = np.full((rows, max_period), -1, dtype=np.int64)  # [rows, p]: the token p+1 places back
        self.matches = np.zeros((rows, max_period), dtype=np.int64)  # [rows, p]
        self._threshold = threshold(max_period)

    def clear(self, row: int) -> None:
        """Forget a row: a new answer begins there."""
        self.recent[row] = -1
        self.matches[row] = 0

    def push(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Append one token to each of `rows` (int [n], distinct); returns bool [n]: is that row in a loop now?"""
        recent = self.recent[rows]  # [n, max_period]
        matches = np.where(recent == tokens[:, None], self.matches[rows] + 1, 0)
        self.matches[rows] = matches
        self.recent[rows] = np.concatenate([tokens[:, None], recent[:, :-1]], axis=1)
        return np.asarray((matches >= self._threshold).any(axis=1))
