"""Recorded text as a folder of features, for faults that lie in the data."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.conventions import Conventions
from eyas.doctor.material import Material
from eyas.features.layout import FeatureMeta
from eyas.features.writer import ShardBuffer, ShardWriter, plan_digest


def write(material: Material, folder: Path, conventions: Conventions, vocab: int) -> Path:
    """The states at the taps of `conventions`, one shard."""
    width = next(iter(material.states.values())).shape[1]
    meta = FeatureMeta(width, vocab, conventions, "a" * 64, "b" * 64, "c" * 64)
    taps = torch.cat([material.states[t] for t in conventions.taps], -1).bfloat16()
    count = len(material.ids)
    rows = {"ids": material.ids.int(), "mask": material.mask.to(torch.uint8), "taps": taps,
            "top1": material.choice.int(), "final": torch.zeros(count, width).bfloat16(),
            "logsumexp": torch.zeros(count)}  # fmt: skip
    spans = list(zip(material.offsets.tolist(), material.offsets[1:].tolist(), strict=False))
    documents = [{name: x[a:b] for name, x in rows.items()} for a, b in spans]
    writer, buffer = ShardWriter(folder, meta), ShardBuffer(meta, [b - a for a, b in spans])
    for i, document in enumerate(documents):
        buffer.put(i, **document)
    names = [f"d{i}" for i in range(len(documents))]
    plan = plan_digest(meta, [(n, d["ids"], d["mask"]) for n, d in zip(names, documents, strict=True)])
    writer.write(0, names, buffer, plan)
    writer.finish(1, {"conversations": "recorded"}, {}, {"documents": len(documents)}, 0.0)
    return folder
