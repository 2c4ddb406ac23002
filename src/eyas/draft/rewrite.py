"""A safetensors file with some tensors replaced, added or left out; all other bytes are copied as they are.

    rewrite(Path("model.safetensors"), Path("new.safetensors"), {"d2t": offsets, "lm_head.weight": None})

pytest tests/test_rewrite.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..headers import NUMPY, read_header
from .assemble import Extent, Piece, assemble

if TYPE_CHECKING:
    import numpy as np

CODES = {("?" if kind == "?" else kind.lstrip("<")): code for code, kind in NUMPY.items()}


def rewrite(source: Path, out: Path, changes: Mapping[str, np.ndarray[Any, Any] | None]) -> None:
    """Write `out`: the tensors of `source` with `changes`, None leaving one out. Tensors keep their order.

    Raises BadInput for a source that is no safetensors file, for a dtype that the format lacks and for a tensor left
    out that is not there; EyasError where the disk is full. `out` must not exist.
    """
    header = read_header(source)
    for name, value in changes.items():
        if value is None and name not in header.entries:
            raise BadInput(f"{source} holds no {name} that could be left out; name a tensor that is there")
    pieces = []
    for name in sorted(header.entries, key=lambda n: header.entries[n].start):
        entry, value = header.entries[name], changes.get(name)
        if value is not None:
            pieces.append(_given(name, value))
        elif name not in changes:
            pieces.append(Piece(name, entry.dtype, entry.shape, (Extent(source, entry.start, entry.stop),)))
    pieces += [_given(n, value) for n, value in changes.items() if value is not None and n not in header.entries]
    assemble(out, pieces, header.metadata)


def _given(name: str, value: np.ndarray[Any, Any]) -> Piece:
    code = CODES.get(value.dtype.str.lstrip("<|=")) or CODES.get(value.dtype.char)
    if code is None:
        raise BadInput(f"{name}: safetensors has no dtype for {value.dtype}; convert it first")
    return Piece(name, code, value.shape, (value,))
