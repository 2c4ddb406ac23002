"""Findings about the text: a draft that is good in short texts alone, or on some kinds of text alone.

pytest tests/test_doctor_verdict.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .finding import Severity
from .verdict import Told

if TYPE_CHECKING:  # static checks need no torch
    from .measure import Measured

LONG, ENOUGH_ROUNDS = 512, 150
POOR = 0.6
"""Accepted drafts a round of one kind of text over those of the rest, from which on it is told."""
FEW_ROUNDS = 40


def by_length(measured: Measured | None) -> list[Told]:
    """Good in short texts and bad in long ones."""
    buckets = [b for b in (measured.positions if measured else []) if b["rounds"] >= ENOUGH_ROUNDS]
    if len(buckets) < 2:
        return []
    first, last = buckets[0], buckets[-1]
    if last["from"] < LONG or last["tau"] - 1 > 0.6 * (first["tau"] - 1):
        return []
    return [
        Told(
            "EY-MEASURED-LONG", "confirmed", Severity.WARNING, "max_position",
            f"the accept length falls from {first['tau']:.2f} at the beginning of the text to {last['tau']:.2f} from "
            f"position {last['from']:,} on",
            "Long conversations gain little",
            "Compare RoPE scaling and max_position_embeddings with training; train on longer text",
            sources=("vllm-project/vllm#48894", "sgl-project/sglang#6783"),
        )
    ]  # fmt: skip


def by_kind(measured: Measured | None) -> list[Told]:
    """Kinds of text on which a draft is poor for certain while it is sound on the rest: its training, not a fault."""
    out = []
    for row in measured.kinds if measured else []:
        apart = row["interval"][1] < row["rest_interval"][0]
        if row["rounds"] < FEW_ROUNDS or not apart or row["tau"] - 1 > POOR * (row["rest"] - 1):
            continue
        out.append(
            Told(
                "EY-MEASURED-KIND", "static", Severity.INFO, None,
                f"the accept length is {row['tau']:.2f} on {row['kind']} and {row['rest']:.2f} on everything else",
                "Served such requests it looks poor; it is sound, and has seen little text of this kind",
                "Train on more answers of this kind, or measure with the requests that are served: --prompts FILE",
            )
        )  # fmt: skip
    return out
