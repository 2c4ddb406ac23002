"""Throughput and latency of one pass.   pytest tests/test_measure_speed.py

Time to first token: from sending a request to its first token. Time per token: (last - first) / (tokens - 1) of one
answer. Gap: between two groups of tokens that came together; with a draft a group holds several tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from .asking import Run

PERCENTILES = (50, 95, 99)


def speed(run: Run) -> dict[str, Any] | None:
    """Plain JSON values: tokens_per_s over the whole pass; p50, p95, p99 in milliseconds.

    None without an answer, and of a pass that did not end: waiting for a server that hangs is no speed of it.
    """
    replies = [a.reply for a in run.answered if a.reply is not None and a.reply.chunks]
    if not replies or not run.seconds or run.stopped:
        return None
    tokens = sum(r.count for r in replies)
    first = [r.chunks[0][0] for r in replies]
    longer = [r for r in replies if len(r.chunks) > 1]
    each = [(r.chunks[-1][0] - r.chunks[0][0]) / (r.count - r.chunks[0][1]) for r in longer]
    gaps = [b[0] - a[0] for r in replies for a, b in itertools.pairwise(r.chunks)]
    return {
        "requests": len(replies),
        "tokens": tokens,
        "seconds": round(run.seconds, 3),
        "tokens_per_s": round(tokens / run.seconds, 2),
        "first_token_ms": percentiles(first),
        "per_token_ms": percentiles(each),
        "gap_ms": percentiles(gaps),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """{"p50", "p95", "p99"} in milliseconds; None of nothing."""
    import numpy as np

    if not seconds:
        return None
    found = np.percentile(seconds, PERCENTILES)
    return {f"p{p}": round(1000 * float(x), 2) for p, x in zip(PERCENTILES, found, strict=True)}
