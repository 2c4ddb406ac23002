"""A safetensors file out of pieces of other files, copied by the kernel and decoded by nobody.

    assemble(Path("new.safetensors"), [Piece("fc.weight", "BF16", (576, 1728), (Extent(path, 8, 1990664),))])

A piece is made of extents of files, of arrays, or of functions that make an array when its turn comes, so that a draft
of gigabytes is written in the memory of one tensor.   pytest tests/test_rewrite.py
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..headers import BYTES
from ..writes import disk_errors

if TYPE_CHECKING:
    import numpy as np

PAGE = 4096
BLOCK = 1 << 30  # bytes asked of the kernel at a time


@dataclass(frozen=True)
class Extent:
    """Bytes `start` to `stop` of a file."""

    file: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """One tensor of the file to be; its parts are stored one behind the other."""

    name: str
    dtype: str
    """The format's code: F32, BF16, I64, ..."""
    shape: tuple[int, ...]
    parts: tuple[Any, ...]
    """Of `Extent`, array (bfloat16 as bits), or function that returns one."""

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * BYTES[self.dtype]


def assemble(out: Path, pieces: Sequence[Piece], metadata: Mapping[str, str] | None = None) -> None:
    """Write `out`, which must not exist, synced.

    Raises BadInput where a source ends early or a part has another size, EyasError on a full disk.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for piece in pieces:
        table[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape),
                             "data_offsets": [place, place + piece.bytes]}  # fmt: skip
        place += piece.bytes
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    raw += b" " * _shift(8 + len(raw), pieces)
    opened: dict[Path, int] = {}
    try:
        with disk_errors(out), open(out, "xb", buffering=0) as new:
            new.write(len(raw).to_bytes(8, "little") + raw)
            for piece in pieces:
                before = new.tell()
                for part in piece.parts:
                    if isinstance(part, Extent):
                        if part.file not in opened:
                            opened[part.file] = os.open(part.file, os.O_RDONLY)
                        _copy(opened[part.file], new.fileno(), part)
                    else:
                        _write(new.fileno(), part() if callable(part) else part)
                if new.tell() - before != piece.bytes:
                    raise BadInput(
                        f"{piece.name}: its parts are {new.tell() - before:,} bytes, not {piece.bytes:,}; something "
                        "else wrote to it: run the same command again"
                    )
            os.fsync(new.fileno())
    finally:
        for handle in opened.values():
            os.close(handle)


def _shift(begin: int, pieces: Sequence[Piece]) -> int:
    """Bytes by which to lengthen the header so that the largest extent keeps its place within a page of memory.

    The kernel then copies whole pages, in half the time; the format allows spaces after the header's JSON.
    """
    place, best, shift = begin, 0, 0
    for piece in pieces:
        first = piece.parts[0] if piece.parts else None
        if isinstance(first, Extent) and first.stop - first.start > best:
            best, shift = first.stop - first.start, (first.start - place) % PAGE
        place += piece.bytes
    return shift if best >= PAGE and shift % 8 == 0 else 0


def _write(new: int, value: np.ndarray[Any, Any]) -> None:
    import numpy as np

    left = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    while left:
        left = left[os.write(new, left[:BLOCK]) :]


def _copy(old: int, new: int, extent: Extent) -> None:
    """Bytes of one extent to the place of `new`."""
    start, left = extent.start, extent.stop - extent.start
    while left:
        try:
            done = os.copy_file_range(old, new, min(left, BLOCK), offset_src=start)
        except OSError:  # another file system, or one that cannot: through memory
            done = os.write(new, os.pread(old, min(left, BLOCK), start))
        if not done:
            raise BadInput("the file ended while it was copied; copy it again")
        start, left = start + done, left - done
