"""A safetensors file with some tensors replaced, added or left out; all other bytes are copied as they are.

    rewrite(Path("model.safetensors"), Path("new.safetensors"), {"d2t": offsets, "lm_head.weight": None})

Nothing is decoded: a draft of gigabytes is copied by the kernel, tensor by tensor.   pytest tests/test_rewrite.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifacts import disk_errors
from ..errors import BadInput
from .headers import NUMPY, Entry, read_header

if TYPE_CHECKING:
    import numpy as np

PIECE = 1 << 26  # bytes copied at a time
CODES = {("?" if kind == "?" else kind.lstrip("<")): code for code, kind in NUMPY.items()}


def rewrite(source: Path, out: Path, changes: Mapping[str, np.ndarray[Any, Any] | None]) -> None:
    """Write `out`: the tensors of `source` with `changes`, None leaving one out. Tensors keep their order.

    Raises BadInput for a source that is no safetensors file, for a dtype that the format lacks and for a tensor left
    out that is not there; EyasError where the disk is full. `out` must not be `source`.
    """
    header = read_header(source)
    for name, value in changes.items():
        if value is None and name not in header.entries:
            raise BadInput(f"{source} holds no {name} that could be left out")
    data: dict[str, np.ndarray[Any, Any]] = {name: value for name, value in changes.items() if value is not None}
    order = [
        name
        for name in sorted(header.entries, key=lambda n: header.entries[n].start)
        if changes.get(name, 1) is not None
    ]
    order += [name for name in data if name not in header.entries]
    table: dict[str, Any] = {"__metadata__": dict(header.metadata)} if header.metadata else {}
    place = 0
    for name in order:
        dtype, shape, size = _kind(name, data[name]) if name in data else _kept(header.entries[name])
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    with disk_errors(out), open(source, "rb") as old, open(out, "xb") as new:
        new.write(len(raw).to_bytes(8, "little") + raw)
        for name in order:
            if name in data:
                new.write(data[name].tobytes())
            else:
                new.flush()
                _copy(old.fileno(), new.fileno(), header.entries[name])
                new.seek(0, os.SEEK_END)
        new.flush()
        os.fsync(new.fileno())


def _kept(entry: Entry) -> tuple[str, list[int], int]:
    return entry.dtype, list(entry.shape), entry.bytes


def _kind(name: str, value: np.ndarray[Any, Any]) -> tuple[str, list[int], int]:
    code = CODES.get(value.dtype.str.lstrip("<|=")) or CODES.get(value.dtype.char)
    if code is None:
        raise BadInput(f"{name}: safetensors has no dtype for {value.dtype}")
    return code, list(value.shape), value.nbytes


def _copy(old: int, new: int, entry: Entry) -> None:
    """Bytes of one tensor to the end of `new`."""
    start, left = entry.start, entry.bytes
    os.lseek(new, 0, os.SEEK_END)
    while left:
        try:
            done = os.copy_file_range(old, new, min(left, PIECE), offset_src=start)
        except OSError:  # another file system, or one that cannot: through memory
            done = os.write(new, os.pread(old, min(left, PIECE), start))
        if not done:
            raise BadInput("the file ended while it was copied; copy it again")
        start, left = start + done, left - done
