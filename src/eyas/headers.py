"""Safetensors files by their headers: names, dtypes, shapes and places, without torch and without touching the data.

    header = read_header(path); ids = read_array(path, header.entries["d2t"])

Everything that a reader would later trust is checked here, on a few kilobytes: a forged length allocates nothing, and
tensors lie one behind the other, from the header to the file's end, as the format says
(https://github.com/huggingface/safetensors, "Format").   pytest tests/test_headers.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import BadInput
from .untrusted import LONGEST_HEADER, regular

if TYPE_CHECKING:
    import numpy as np

MOST_AXES = 16
POINTER = b"version "  # of Git LFS: a few lines of text in the place of a file that was not fetched
BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "?", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor in a file."""

    dtype: str
    """The format's code: F32, BF16, I64, ..."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of one file. Raises BadInput naming the file, the tensor and what is wrong."""
    try:
        size = regular(path).stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == POINTER:
                raise BadInput(f"{path} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
            if size < 8 or length > min(LONGEST_HEADER, size - 8):
                _refuse(path, f"its header is said to be {length:,} bytes long, the whole file has {size:,}")
            raw = file.read(length)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror or error}); check the path and its permissions"
        ) from error
    try:
        table = json.loads(raw.decode(), object_pairs_hook=_once)  # UTF-8, where json alone would take others, too
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its header is not JSON ({_short(error)})")
    if not isinstance(table, dict):
        _refuse(path, f"its header is a {type(table).__name__}, not an object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse(path, "its __metadata__ is not an object of strings")
    begin = 8 + length
    entries = {name: _entry(path, name, value, begin, size) for name, value in table.items()}
    place = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != place:
            kind = "overlaps the tensor before it" if entry.start < place else "leaves a hole before it"
            _refuse(path, f"{name} {kind} (it begins at byte {entry.start:,}, expected {place:,})")
        place = entry.stop
    if place != size:
        _refuse(path, f"its tensors end at byte {place:,}, the file at {size:,}")
    return Header(entries, metadata)


def read_array(path: Path, entry: Entry) -> np.ndarray[Any, Any]:
    """The values of a tensor, mapped from the file; bfloat16 and 8-bit floats come as their bits (uint16, uint8)."""
    import numpy as np

    kind = NUMPY.get(entry.dtype) or f"<u{BYTES[entry.dtype]}"
    if not entry.bytes:
        return np.zeros(entry.shape, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r", offset=entry.start, shape=entry.shape)


def _entry(path: Path, name: str, value: Any, begin: int, size: int) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"{name!r} must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BYTES:
        _refuse(path, f"{name} has the dtype {dtype!r}; Eyas reads {', '.join(BYTES)}")
    if not _whole(shape) or len(shape) > MOST_AXES:
        _refuse(path, f"{name} has the shape {_short(shape)}, expected a list of sizes")
    if not _whole(offsets) or len(offsets) != 2:
        _refuse(path, f"{name} has the data_offsets {_short(offsets)}, expected two places")
    start, stop = (begin + place for place in offsets)
    wanted = math.prod(shape) * BYTES[dtype]
    if not start <= stop <= size:
        _refuse(path, f"{name} lies at bytes {start:,} to {stop:,}, the file ends at {size:,}")
    if stop - start != wanted:
        _refuse(path, f"{name} takes {stop - start:,} bytes; {dtype} {shape} needs {wanted:,}")
    return Entry(dtype, tuple(shape), start, stop)


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 48 for v in values)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a key given twice is an error, since readers would differ on which one holds."""
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the name {_short(key)!r} is given twice")
        out[key] = value
    return out


def _short(value: object) -> str:
    text = str(value).strip().splitlines() or [type(value).__name__]
    return text[0][:120]


def _refuse(path: Path, why: str) -> NoReturn:
    raise BadInput(
        f"{path} is not a readable safetensors file: {why}. It is truncated, forged or something else: copy or "
        f"convert it again"
    )
