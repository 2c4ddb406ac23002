"""Features with something wrong in them, for the tests of audits.

changed(features, out, lambda rows: rows[0]["final"].zero_())
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from eyas.artifacts import read_manifest
from eyas.features.reader import FeatureSet
from eyas.features.writer import ShardBuffer, ShardWriter

Rows = list[dict[str, torch.Tensor]]


def changed(features: Path, out: Path, change: Callable[[Rows], object]) -> Path:
    """The same features after `change` of their documents, written as if nothing had happened."""
    there = FeatureSet.open(features)
    rows = [{name: x.clone() for name, x in there.document(i).items()} for i in range(there.num_docs)]
    change(rows)
    writer, buffer = ShardWriter(out, there.meta), ShardBuffer(there.meta, [len(r["ids"]) for r in rows])
    for i, row in enumerate(rows):
        buffer.put(i, **row)
    writer.write(0, there.doc_ids, buffer, "changed")
    manifest = read_manifest(features)
    writer.finish(1, manifest["inputs"], manifest["config"], manifest["counts"], 0.0)
    return out
