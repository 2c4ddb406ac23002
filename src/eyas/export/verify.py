"""What was written against what it was made of, byte by byte; and a digest of each tensor for eyas.json.

pytest tests/test_export_spellings.py
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from ..draft.assemble import Extent
from ..draft.directory import WEIGHTS
from ..errors import BadInput, EyasError
from ..headers import read_header
from .plan import NAMES, Plan

BLOCK = 1 << 26  # bytes compared at a time
EXPONENT: dict[str, tuple[str, int]] = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
}


def compare_written(plan: Plan, out: Path) -> dict[str, Any]:
    """Compare every written tensor with its source, byte by byte; returns what eyas.json records of each."""
    header, recorded = read_header(out / WEIGHTS), {}
    for item, piece in zip(plan.items, plan.pieces(), strict=True):
        entry = header.entries[item.name]
        digest = hashlib.sha256()
        written = _mapped(Extent(out / WEIGHTS, entry.start, entry.stop))
        place = 0
        for part in piece.parts:
            wanted = _mapped(part) if isinstance(part, Extent) else _bytes(part() if callable(part) else part)
            for start in range(0, len(wanted), BLOCK):
                block = wanted[start : start + BLOCK]
                held = written[place : place + len(block)]
                if not np.array_equal(block, held):
                    raise EyasError(f"{out / WEIGHTS}: {item.name} is not what was written; check the disk")
                if item.dtype in EXPONENT and not _finite(held, item.dtype):
                    raise BadInput(
                        f"{plan.reading.folder.path}: NaN or infinite values in {item.canonical}, which make every "
                        f"answer of a draft NaN; take the weights of an earlier checkpoint"
                    )
                digest.update(held.data)
                place += len(block)
        if item.canonical not in recorded:
            recorded[item.canonical] = {
                "sha256": digest.hexdigest(), "dtype": NAMES.get(item.dtype, {"I64": "int64"}.get(item.dtype, "bool")),
                "shape": list(item.shape),
            }  # fmt: skip
    return recorded


def _finite(raw: np.ndarray[Any, Any], code: str) -> bool:
    """Is no number of these bytes NaN or infinite? An exponent of ones alone says so."""
    kind, ones = EXPONENT[code]
    bits = raw.view(kind)
    return not bool(((bits & ones) == ones).any())


def _mapped(extent: Extent) -> np.ndarray[Any, Any]:
    size = extent.stop - extent.start
    if not size:
        return np.zeros(0, np.uint8)
    return np.memmap(extent.file, np.uint8, "r", extent.start, (size,))


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
