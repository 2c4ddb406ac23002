"""Tensors that lie in no file yet: renamed, cut, joined, or computed when they are asked for.

    swapped = renamed(folder.tensors["gate"], "up"); parts_of(swapped)   # an extent of the old file: no bytes in memory

They are `TensorRef`s like those of a folder, so that whatever reads a draft reads them, too. Valid as long as the files
they are made of stay where they are.   pytest tests/test_repair_operations.py
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..draft.assemble import Extent, Piece
from ..draft.files import TensorRef
from ..headers import BYTES, read_header

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
CODES = {
    "bool": "BOOL", "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
    "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip
"""torch's (and numpy's) name of a dtype -> the code of safetensors."""
CHUNK = 64 << 20  # bytes of an extent that are hashed at a time


@dataclass(frozen=True)
class Laid(TensorRef):
    """A tensor laid over a folder."""

    parts: tuple[Any, ...] = ()
    """As `assemble.Piece` wants them: extents of files, arrays, functions that return one."""


def of_array(name: str, array: Array, file: Path) -> Laid:
    """Numbers at hand. `file`: what messages about it should name."""
    array = np.ascontiguousarray(array)
    code = CODES[array.dtype.name]
    return Laid(name, array.shape, code, file, partial(_tensor, array, code), lambda: array, (array,))


def computed(name: str, shape: Sequence[int], dtype: str, file: Path, array: Callable[[], Array]) -> Laid:
    """Numbers that `array` makes when they are asked for (bfloat16 as bits), each time anew."""
    return Laid(name, tuple(shape), dtype, file, lambda: _tensor(array(), dtype), array, (array,))


def changed(ref: TensorRef, change: Callable[[torch.Tensor], torch.Tensor], dtype: str | None = None) -> Laid:
    """`change` of a tensor, of the same shape, stored in `dtype` (its own where None)."""
    code = dtype or ref.dtype
    return computed(ref.name, ref.shape, code, ref.file, lambda: bits(_as(change(ref.load()), code)))


def renamed(ref: TensorRef, name: str) -> TensorRef:
    """The same bytes under another name."""
    return Laid(name, ref.shape, ref.dtype, ref.file, ref.load, ref.array, parts_of(ref))


def transposed(ref: TensorRef) -> Laid:
    """[a, b] -> [b, a]"""
    return computed(ref.name, ref.shape[::-1], ref.dtype, ref.file, lambda: np.ascontiguousarray(ref.array().T))


def rows(ref: TensorRef, name: str, start: int, stop: int) -> TensorRef:
    """Rows `start` to `stop`; an extent where the tensor is one."""
    shape = (stop - start, *ref.shape[1:])
    parts = parts_of(ref)
    row = math.prod(ref.shape[1:]) * BYTES[ref.dtype]
    if len(parts) == 1 and isinstance(parts[0], Extent):
        at = parts[0].start
        cut: tuple[Any, ...] = (Extent(parts[0].file, at + start * row, at + stop * row),)
    else:
        cut = (lambda: ref.array()[start:stop],)
    return Laid(name, shape, ref.dtype, ref.file, lambda: ref.load()[start:stop], lambda: ref.array()[start:stop], cut)


def joined(name: str, refs: Sequence[TensorRef]) -> TensorRef:
    """Tensors of one dtype and width, one behind the other along the first axis."""
    first = refs[0]
    shape = (sum(ref.shape[0] for ref in refs), *first.shape[1:])

    def load() -> torch.Tensor:
        import torch

        return torch.cat([ref.load() for ref in refs])

    parts = tuple(part for ref in refs for part in parts_of(ref))
    return Laid(name, shape, first.dtype, first.file, load, lambda: np.concatenate([r.array() for r in refs]), parts)


def parts_of(ref: TensorRef) -> tuple[Any, ...]:
    """What its bytes are made of, for `assemble.Piece`."""
    if isinstance(ref, Laid):
        return ref.parts
    if ref.file.suffix != ".safetensors":  # a pickle: there are no extents, its numbers are mapped by torch
        return (ref.array,)
    entry = read_header(ref.file).entries[ref.name]
    return (Extent(ref.file, entry.start, entry.stop),)


def piece(ref: TensorRef) -> Piece:
    """The tensor as a piece of the file to be."""
    return Piece(ref.name, ref.dtype, ref.shape, parts_of(ref))


def digest(ref: TensorRef) -> str:
    """SHA-256 (hex) of its bytes as safetensors stores them: row-major, little-endian."""
    found = hashlib.sha256()
    flat = np.ascontiguousarray(ref.array()).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), CHUNK):
        found.update(flat[start : start + CHUNK].data)
    return found.hexdigest()


def named(ref: TensorRef, name: str) -> TensorRef:
    """`ref` if it has this name already, else the same bytes under it."""
    return ref if ref.name == name else renamed(ref, name)


def bits(tensor: torch.Tensor) -> Array:
    """Its numbers, contiguous; bfloat16 as uint16."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    out: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return out


def code(tensor: torch.Tensor) -> str:
    """The dtype as safetensors spells it."""
    return CODES[str(tensor.dtype).removeprefix("torch.")]


def _tensor(array: Array, kind: str) -> torch.Tensor:
    import torch

    held = torch.from_numpy(np.array(array, order="C"))  # a copy: mapped files are read-only
    return held.view(torch.bfloat16) if kind == "BF16" else held


def _as(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    import torch

    names = {value: key for key, value in CODES.items()}
    wanted = getattr(torch, names[kind])
    return tensor if tensor.dtype == wanted else tensor.to(wanted)
