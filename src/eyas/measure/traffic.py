"""A server's counters before and after: how much of what it did was ours?   pytest tests/test_measure_traffic.py

Counters run since the process started and are everybody's. What was ours is counted request by request; the difference
is other people's traffic, which is told and never mixed in.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from ..engines.served.metrics import TIMEOUT, Counters, counters_between, fetch
from ..errors import BadInput
from ..serve.client import address
from .asking import Run
from .counting import Rounds

SLACK = 2
"""Tokens: an engine may count one that a stop takes back."""
LATE = 2.0
"""Seconds for which counters may lag behind the answers."""


@dataclass(frozen=True)
class Snapshot:
    """The text of /metrics, or why there is none."""

    text: str = ""
    missing: str = ""


def snapshot(url: str, timeout: float = TIMEOUT) -> Snapshot:
    """Now. Never raises: a server without metrics can still be measured. url: as users write it."""
    try:
        return Snapshot(fetch(f"{address(url)}/metrics", timeout))
    except BadInput as error:
        return Snapshot(missing=str(error))


def settled(url: str, before: Snapshot, runs: list[Run], timeout: float = TIMEOUT) -> Snapshot:
    """A snapshot that holds our own answers: engines add to their counters a moment after an answer's end."""
    end = time.monotonic() + LATE
    while True:
        now = snapshot(url, timeout)
        if now.missing or before.missing or any(run.errors for run in runs) or time.monotonic() > end:
            return now
        with contextlib.suppress(BadInput):
            between = counters_between(before.text, now.text, _model(runs))
            if between.tokens is None or between.tokens >= _tokens(runs):
                return now
        time.sleep(0.1)


def _model(runs: list[Run]) -> str | None:
    return next((run.model for run in runs if run.model), None)


def _tokens(runs: list[Run]) -> int:
    return sum(a.reply.count for run in runs for a in run.answered if a.reply is not None)


def others(before: Snapshot, after: Snapshot, runs: list[Run], mine: list[Rounds]) -> dict[str, Any]:
    """{"seen": bool or None where it cannot be known, "tokens", "rounds": beyond ours, "why": what makes it unknown}.

    Raises nothing: counters that fell (the server was restarted) are told as unknown.
    """
    unknown = {"seen": None, "tokens": None, "rounds": None}
    if before.missing or after.missing:
        return unknown | {"why": f"no metrics: {before.missing or after.missing}"}
    try:
        between: Counters = counters_between(before.text, after.text, _model(runs))
    except BadInput as error:
        return unknown | {"why": str(error)}
    more = None if between.tokens is None else round(between.tokens - _tokens(runs))
    rounds = None if between.rounds is None or not mine else round(between.rounds - sum(r.rounds for r in mine))
    if more is None and rounds is None:
        return unknown | {"why": between.missing}
    if any(run.errors for run in runs):  # what a broken answer had cost is nobody's
        return unknown | {"tokens": more, "rounds": rounds, "why": "some answers broke off"}
    seen = (more or 0) > SLACK or (more is None and (rounds or 0) > 0)
    return {"seen": seen, "tokens": more, "rounds": rounds, "why": ""}
