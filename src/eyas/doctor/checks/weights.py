"""The weights themselves, a few hundred rows of each: never trained, all the same, not a number.

Random initialisation draws every number alike, so the norms of rows (and of columns) differ by chance only: by
1/sqrt(2n) of themselves for n normal numbers each. Training moves rows and columns apart; one of
the two differs by at least 1.4 times that in every matrix of the healthy drafts at hand (docs/experiments.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...draft.dialects.keys import MAPS
from ...draft.files import TensorRef
from ..case import Case
from ..finding import Finding, Severity

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ROWS = 256
WHOLE = 32 << 20  # bytes up to which every number of a tensor is looked at
EXPONENT = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7}
"""Bits that are all set in NaN and infinity."""
EVEN = 1.15
"""Spread of row or column norms, in units of what chance gives, up to which a matrix looks random."""
LEAST = 96  # rows and columns below which chance says too little
FLOATS = ("F64", "F32", "F16", "BF16")


def check(case: Case) -> Iterator[Finding]:
    """Findings about single tensors, from samples."""

    fresh: list[str] = []
    for name, ref in case.tensors.items():
        if name in MAPS:
            continue
        if ref.dtype not in FLOATS:
            yield Finding(
                "EY-TENSOR-DTYPE",
                Severity.ERROR,
                f"{ref.name} is stored as {ref.dtype}, which is no floating point: quantised, or damaged",
                "Engines refuse it, or read its bits as other numbers",
                "Export the weights in bfloat16",
                convention=about(name),
            )
            continue
        kind, looked, bad = _looked_at(ref)
        if kind == "nan":
            yield Finding(
                "EY-TENSOR-NAN",
                Severity.ERROR,
                f"{ref.name} holds NaN or infinite values: {bad:,} in {looked:,} rows that were looked at",
                "One such number makes every logit NaN: nothing is accepted, or everything",
                "Take the weights of an earlier checkpoint",
                ("NVIDIA/TensorRT-LLM#5146", "SafeAILab/EAGLE#69"),
                about(name),
            )
        elif kind == "zero":
            yield Finding(
                "EY-TENSOR-ZERO",
                Severity.ERROR,
                f"{ref.name} {list(ref.shape)} is zero in all {looked:,} rows that were looked at",
                "Whatever it should add is lost",
                "Export the weights of the finished training run",
                convention=about(name),
            )
        elif kind == "fresh":
            fresh.append(name)
    for name in fresh:
        ref = case.tensors[name]
        embedding = name == "embed_tokens.weight"
        yield Finding(
            "EY-EMBED-FRESH" if embedding else "EY-TENSOR-FRESH",
            Severity.ERROR,
            f"{ref.name} {list(ref.shape)} looks freshly initialised: its rows, and its columns, are as even as random "
            f"numbers, which no trained matrix is",
            "vLLM reads the stored embedding and accepts next to nothing; SGLang replaces it with the target's"
            if embedding
            else "It was never trained, or made anew on the way: acceptance is near zero",
            "Leave the embedding out, or copy the target's" if embedding else "Export the weights of the finished run",
            ("lightseekorg/TorchSpec#38",),
            about(name),
        )


_KNOWN: WeakKeyDictionary[TensorRef, tuple[str, int, int]] = WeakKeyDictionary()
"""A repair examines a draft again after every step, of which most tensors know nothing."""


def _looked_at(ref: TensorRef) -> tuple[str, int, int]:
    """("nan", "zero", "fresh" or "" for nothing wrong, rows that were looked at, numbers that are not finite)."""
    if ref not in _KNOWN:
        _KNOWN[ref] = _look_at(ref)
    return _KNOWN[ref]


def _look_at(ref: TensorRef) -> tuple[str, int, int]:
    whole = ref.array()
    whole = whole.reshape(1) if whole.ndim == 0 else whole
    rows = _sample(whole, ref.dtype)
    if not rows.size:
        return "", 0, 0
    looked = whole if whole.nbytes <= WHOLE else rows
    if bad := _not_finite(looked, ref.dtype if looked is whole else "F32"):
        return "nan", len(looked), bad
    if len(ref.shape) == 2 and not rows.any():
        return "zero", len(rows), 0
    return "fresh" if len(ref.shape) == 2 and min(rows.shape) >= LEAST and _even(rows) else "", len(rows), 0


def about(name: str) -> str:
    """The convention that a tensor belongs to."""
    ends = {"lm_head.weight": "head", "embed_tokens.weight": "embedding"}
    short = name.removeprefix("midlayer.").removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight")
    return ends.get(name) or f"tensor {short}"


def _sample(values: Array, dtype: str) -> Array:
    """Up to ROWS rows, evenly spread, as float32."""
    import numpy as np

    step = max(1, len(values) // ROWS) if values.ndim > 1 else 1
    part = np.asarray(values[::step][:ROWS] if values.ndim > 1 else values)
    if dtype == "BF16":
        return (part.astype(np.uint32) << 16).view(np.float32)
    return part.astype(np.float32)


def _not_finite(values: Array, dtype: str) -> int:
    import numpy as np

    bits = np.asarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")
    mask = bits.dtype.type(EXPONENT[dtype])
    return int(((bits & mask) == mask).sum())


def _even(rows: Array) -> bool:
    import numpy as np

    with np.errstate(all="ignore"):
        squares = rows.astype(np.float64) ** 2
        across, down = np.sqrt(squares.sum(1)), np.sqrt(squares.sum(0))
        spread = max(
            across.std() / across.mean() * math.sqrt(2 * rows.shape[1]),
            down.std() / down.mean() * math.sqrt(2 * rows.shape[0]),
        )
    return bool(spread < EVEN)
