"""Throughput and latency of one pass.   pytest tests/test_measure_speed.py

Time to first token: from sending a request to its first token. Time per token: (last - first) / (tokens - 1) of one
answer. Gap: between two groups of tokens that came together; with a draft a group holds several tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..serve.client import Reply
from .asking import Run

PERCENTILES = (50, 95, 99)


def speed(run: Run) -> dict[str, Any] | None:
    """Plain JSON values: tokens_per_s over the whole pass; p50, p95, p99 in milliseconds.

    None without an answer, and of a pass that did not end: waiting for a server that hangs is no speed of it.
    """
    replies = _whole(run)
    if not replies or not run.seconds or run.stopped:
        return None
    tokens = sum(r.count for r in replies)
    return {
        "requests": len(replies),
        "tokens": tokens,
        "seconds": round(run.seconds, 3),
        "tokens_per_s": round(tokens / run.seconds, 2),
        **latency(replies),
    }


def speed_of_set(run: Run, name: str) -> dict[str, Any] | None:
    """The same of the prompts of one set, among the others: `tokens_per_s` is what one request sees of it."""
    replies = _whole(run, name)
    seconds = sum(r.seconds for r in replies)
    if not seconds or run.stopped:
        return None
    tokens = sum(r.count for r in replies)
    return {"requests": len(replies), "tokens": tokens, "tokens_per_s": round(tokens / seconds, 2), **latency(replies)}


def speedup(with_: Mapping[str, Any] | None, without: Mapping[str, Any] | None) -> float | None:
    """Tokens per second with the draft over those without."""
    return round(with_["tokens_per_s"] / without["tokens_per_s"], 3) if with_ and without else None


def latency(replies: Sequence[Reply]) -> dict[str, Any]:
    """first_token_ms, per_token_ms, gap_ms: p50, p95, p99 over the answers."""
    longer = [r for r in replies if len(r.chunks) > 1]
    return {
        "first_token_ms": percentiles([r.chunks[0][0] for r in replies]),
        "per_token_ms": percentiles([(r.chunks[-1][0] - r.chunks[0][0]) / (r.count - r.chunks[0][1]) for r in longer]),
        "gap_ms": percentiles([b[0] - a[0] for r in replies for a, b in itertools.pairwise(r.chunks)]),
    }


def _whole(run: Run, name: str | None = None) -> list[Reply]:
    return [a.reply for a in run.answered
            if a.reply is not None and a.reply.chunks and name in (None, a.question.set)]  # fmt: skip


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """{"p50", "p95", "p99"} in milliseconds; None of nothing."""
    import numpy as np

    if not seconds:
        return None
    found = np.percentile(seconds, PERCENTILES)
    return {f"p{p}": round(1000 * float(x), 2) for p, x in zip(PERCENTILES, found, strict=True)}
