"""A server's counters before and after: how much of what it did was ours?   pytest tests/test_measure_traffic.py

Counters run since the process started and are everybody's. What was ours is counted request by request; the difference
is other people's traffic, which is told and never mixed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..engines.served.metrics import TIMEOUT, Counters, counters_between, fetch
from ..errors import BadInput
from .asking import Run
from .counting import Rounds

SLACK = 2
"""Tokens: an engine may count one that a stop takes back."""


@dataclass(frozen=True)
class Snapshot:
    """The text of /metrics, or why there is none."""

    text: str = ""
    missing: str = ""


def snapshot(url: str) -> Snapshot:
    """Now. Never raises: a server without metrics can still be measured."""
    try:
        return Snapshot(fetch(f"{url}/metrics", TIMEOUT))
    except BadInput as error:
        return Snapshot(missing=str(error))


def others(before: Snapshot, after: Snapshot, runs: list[Run], mine: list[Rounds]) -> dict[str, Any]:
    """{"seen": bool or None where it cannot be known, "tokens", "rounds": beyond ours, "why": what makes it unknown}.

    Raises nothing: counters that fell (the server was restarted) are told as unknown.
    """
    unknown = {"seen": None, "tokens": None, "rounds": None}
    if before.missing or after.missing:
        return unknown | {"why": f"no metrics: {before.missing or after.missing}"}
    model = next((run.model for run in runs if run.model), None)
    try:
        between: Counters = counters_between(before.text, after.text, model)
    except BadInput as error:
        return unknown | {"why": str(error)}
    tokens = sum(len(a.reply.tokens) for run in runs for a in run.answered if a.reply is not None)
    more = None if between.tokens is None else round(between.tokens - tokens)
    rounds = None if between.rounds is None or not mine else round(between.rounds - sum(r.rounds for r in mine))
    if more is None and rounds is None:
        return unknown | {"why": between.missing}
    if any(run.errors for run in runs):  # what a broken answer had cost is nobody's
        return unknown | {"tokens": more, "rounds": rounds, "why": "some answers broke off"}
    seen = (more or 0) > SLACK or (more is None and (rounds or 0) > 0)
    return {"seen": seen, "tokens": more, "rounds": rounds, "why": ""}
