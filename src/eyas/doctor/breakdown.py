"""The accept length by where in the text a round begins, and by the kind of text.

pytest tests/test_doctor_measure.py
"""

from __future__ import annotations

from typing import Any

import torch

from ..decode.acceptance import Acceptance, interval
from ..decode.replay import rounds
from .material import Material

BUCKETS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def by_position(material: Material, accepted: torch.Tensor, k: int) -> list[dict[str, Any]]:
    """tau by where in its document a round begins. accepted: int64 [N] as of `Bench.accepted`."""
    at, n = rounds(accepted, material.run, k)
    place = torch.bucketize(material.packing.position[at], torch.tensor(BUCKETS), right=True) - 1
    out = []
    for bucket in place.unique().tolist():
        here = n[place == bucket]
        upper = BUCKETS[bucket + 1] if bucket + 1 < len(BUCKETS) else None
        tau = round(1 + float(here.float().mean()), 4)
        out.append({"from": BUCKETS[bucket], "to": upper, "tau": tau, "rounds": len(here)})
    return out


def by_kind(kinds: tuple[str, ...], parts: list[Acceptance], k: int) -> list[dict[str, Any]]:
    """tau of each kind of text and of all the rest, with their intervals; the worst kind first. [] for one kind alone.

    kinds, parts: one entry per document.
    """
    out = []
    for kind in sorted(set(kinds)):
        mine = [p for p, other in zip(parts, kinds, strict=True) if other == kind and p.rounds]
        rest = [p for p, other in zip(parts, kinds, strict=True) if other != kind and p.rounds]
        if len(mine) < 2 or len(rest) < 2:
            continue
        whole, others = Acceptance.merged(mine, k), Acceptance.merged(rest, k)
        out.append({
            "kind": kind, "tau": round(whole.tau, 4), "interval": [round(x, 4) for x in interval([mine])],
            "rounds": whole.rounds, "rest": round(others.tau, 4),
            "rest_interval": [round(x, 4) for x in interval([rest])],
        })  # fmt: skip
    return sorted(out, key=lambda row: row["tau"])
