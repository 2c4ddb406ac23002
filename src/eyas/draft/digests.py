"""The digests that eyas.json keeps of a draft's tensors: compare them with files, and keep them in step with a change.

    compare(open_folder("draft")).changed          # without torch, as long as nothing was converted

Under canonical names, so that a copy whose tensors were renamed, fused or cast is compared as well.
pytest tests/test_verify.py
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .dialects.keys import FUSED, IGNORED, MAPS, Source, canonical_name, fused_rows
from .files import DraftFolder, TensorRef
from .shape import DraftShape

NAMES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
}  # fmt: skip
BLOCK = 1 << 26  # bytes hashed at a time


@dataclass(frozen=True)
class Compared:
    """What the files hold, beside what eyas.json says: canonical names."""

    tensors: int
    """Held by the files."""
    missing: list[str] = field(default_factory=list)
    additional: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Other bytes, or another shape."""
    converted: list[str] = field(default_factory=list)
    """Stored in another dtype, the recorded numbers all the same."""

    @property
    def same(self) -> bool:
        """Every recorded tensor is there, as it was, and no other one."""
        return not (self.missing or self.additional or self.changed)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def sources(tensors: Mapping[str, TensorRef], shape: DraftShape | None) -> dict[str, Source]:
    """Canonical name -> where it lies; fused tensors by rows where `shape` is known.

    Unlike `dialects.interpret` it takes whatever is there: what is wrong with a draft is to be named, not refused.
    """
    q, kv = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim) if shape else (0, 0)
    rows_of = fused_rows(q, kv, shape.mla if shape else None)
    out: dict[str, Source] = {}
    for foreign, ref in tensors.items():
        name = canonical_name(foreign)
        if any(re.search(pattern, name) for pattern in IGNORED):
            continue
        kind = next((k for k in FUSED if f".{k}." in name), None)
        rows = rows_of(kind, ref.shape[0]) if kind and ref.shape else []
        if kind is None or sum(rows) != (ref.shape or (0,))[0]:
            out[name] = Source(ref)
            continue
        start = 0
        for part, count in zip(FUSED[kind], rows, strict=True):
            out[name.replace(kind, part)] = Source(ref, start, start + count)
            start += count
    return out


def describe(source: Source) -> dict[str, Any]:
    """{"sha256": of the raw bytes, row-major and little-endian, "dtype", "shape"}, as `checkpoint.describe_tensor`."""
    import numpy as np

    array = source.ref.array()
    if array.ndim and (source.start, source.stop) != (0, None):
        array = array[source.start : source.stop]
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    digest = hashlib.sha256()
    for start in range(0, len(raw), BLOCK):
        digest.update(raw[start : start + BLOCK].data)
    return {"sha256": digest.hexdigest(), "dtype": NAMES.get(source.dtype, source.dtype), "shape": list(source.shape)}


def declared(eyas: Mapping[str, Any] | None) -> dict[str, Any]:
    """The digests of eyas.json by canonical name, {} where it has none."""
    table = (eyas or {}).get("tensors")
    return dict(table) if isinstance(table, Mapping) else {}


def compare(folder: DraftFolder) -> Compared:
    """Compare every tensor with the digests of eyas.json. Reads all bytes; {} declared compares nothing."""
    table, held = declared(folder.eyas), sources(folder.tensors, _shape(folder.eyas))
    # Layers >= 1 have one norm on the stream under two names, of which a copy may keep one.
    twins = {n.replace("input_layernorm", "hidden_norm"): n for n in held if re.match(r"layers\.\d+\.input_lay", n)}
    twins |= {twin: name for name, twin in twins.items()}
    missing = [n for n in table if n not in held and twins.get(n) not in held]
    additional = [n for n in held if n not in table and twins.get(n) not in table]
    changed: list[str] = []
    converted: list[str] = []
    for name in (n for n in table if n in held):
        wanted = table[name] if isinstance(table[name], Mapping) else {}
        if held[name].shape != tuple(wanted.get("shape") or ()):
            changed.append(name)
        elif NAMES.get(held[name].dtype) == wanted.get("dtype"):
            if describe(held[name])["sha256"] != wanted.get("sha256"):
                changed.append(name)
        else:
            (converted if _cast(held[name], wanted) else changed).append(name)
    return Compared(len(held), sorted(missing), sorted(additional), sorted(changed), sorted(converted))


def in_step(
    eyas: Mapping[str, Any], before: Mapping[str, TensorRef], after: Mapping[str, TensorRef], touched: set[str]
) -> dict[str, Any]:
    """eyas.json with the digests of the tensors that changed, and of the map where it did.

    before, after: the draft's tensors by stored name. touched: stored names whose bytes are other ones. Nothing is
    added to an eyas.json that keeps no digests.
    """
    out, table, shape = dict(eyas), declared(eyas), _shape(eyas)
    old, new = sources(before, shape), sources(after, shape)
    if table:
        kept = {name: value for name, value in table.items() if name in new or name not in old}
        out["tensors"] = kept | {n: describe(source) for n, source in new.items() if source.ref.name in touched}
    if shape is not None and "vocab_map" in eyas and any(n in new and new[n].ref.name in touched for n in MAPS):
        offsets = new["d2t"].ref.array() if "d2t" in new else None
        if offsets is not None and offsets.shape == (shape.draft_vocab_size,) and offsets.dtype.kind in "iu":
            content = offsets.astype("<i8").tobytes()  # as VocabMap.digest
            out["vocab_map"] = hashlib.sha256(f"{shape.vocab_size}:".encode() + content).hexdigest()
    return out


def _shape(eyas: Mapping[str, Any] | None) -> DraftShape | None:
    try:
        return DraftShape.from_dict((eyas or {})["shape"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _cast(source: Source, wanted: Mapping[str, Any]) -> bool:
    """Are these, in the recorded dtype, the recorded bytes?"""
    import torch

    from .checkpoint import describe_tensor

    dtype = getattr(torch, str(wanted.get("dtype")), None)
    if not isinstance(dtype, torch.dtype):
        return False
    return describe_tensor(source.load().to(dtype))["sha256"] == wanted.get("sha256")
