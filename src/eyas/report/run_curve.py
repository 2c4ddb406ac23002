"""The curves of a training, from its metrics.jsonl: few enough points for a page, however long the run.

pytest tests/test_report_run.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

POINTS = 160
"""Points of a curve at most; each is the mean over as many steps as that takes."""


def read_training(path: Path) -> dict[str, Any] | None:
    """What the log of a training tells, also of one that goes on; None where it has no whole line.

    tokens [P] seen at the end of each point, loss [K][P] and chain_accuracy [K][P] by unrolled step (means over the
    point's steps, weighted by their supervised rows), steps_a_point; predicted: a record a measurement; tokens_per_s:
    over all steps.
    """
    records = list(_records(path))
    if not records:
        return None
    last = records[-1]
    rows = [record["rows"] for record in records]
    weights = [max(now - before, 0) for before, now in zip([0, *rows], rows, strict=False)]
    size = math.ceil(len(records) / POINTS)
    cuts = [slice(at, at + size) for at in range(0, len(records), size)]
    seconds = sum(_number(record.get("seconds")) for record in records)
    return {
        "steps": last["step"],
        "tokens_seen": last["tokens"],
        "supervised_rows_seen": last["rows"],
        "seconds": round(seconds, 1),
        "tokens_per_s": round(last["tokens"] / seconds, 1) if seconds > 0 else None,
        "steps_a_point": size,
        "tokens": [records[cut][-1]["tokens"] for cut in cuts],
        "loss": _curves(records, weights, cuts, "loss"),
        "chain_accuracy": _curves(records, weights, cuts, "chain_accuracy"),
        "predicted": [
            {"step": r["step"], "tokens": r["tokens"], **r["predicted"]}
            for r in records
            if isinstance(r.get("predicted"), Mapping) and "accept_length" in r["predicted"]
        ],
    }


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; the last may be half-written while training goes on."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
            if all(isinstance(record[name], int) for name in ("step", "tokens", "rows")) and record["loss"]:
                yield record
        except (ValueError, KeyError, TypeError):
            continue


def _curves(
    records: Sequence[Mapping[str, Any]], weights: Sequence[int], cuts: Sequence[slice], name: str
) -> list[list[float | None]]:
    """[K][P]; None where nothing was supervised in a point's steps."""
    steps = max(len(record.get(name) or ()) for record in records)
    curves: list[list[float | None]] = [[None] * len(cuts) for _ in range(steps)]
    for place, cut in enumerate(cuts):
        for k in range(steps):
            pairs = [(w, float(r[name][k])) for w, r in zip(weights[cut], records[cut], strict=True)
                     if w and k < len(r.get(name) or ())]  # fmt: skip
            if pairs:
                curves[k][place] = round(sum(w * x for w, x in pairs) / sum(w for w, _ in pairs), 4)
    return curves


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and -1e100 < value < 1e100 else 0.0
