"""The header of a GGUF file, walked once before anything else reads it: every count and length must fit into the file.

    check_header(Path("model.Q4_1.gguf"))

The reader of the `gguf` package trusts the counts: an array said to be 2**60 long fills the memory. Layout: ggml's
docs/gguf.md, versions 2 and 3, little-endian.   pytest tests/test_target_gguf.py
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import IO, Any, NoReturn

from eyas.errors import BadInput
from eyas.untrusted import regular

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
DEEPEST = 2  # arrays in arrays
MOST_AXES = 4
# Sizes that a model is made of before any tensor is read, and that its tensors must bear out.
_WIDTHS = ("embedding_length", "feed_forward_length")


def check_header(path: Path) -> None:
    """Raises BadInput naming what in the header cannot be."""
    size = regular(path).stat().st_size
    with open(path, "rb") as file:
        _Walk(path, file, size).all()


class _Walk:
    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.place = 0

    def all(self) -> None:
        magic, version = self.bytes(4, "its first bytes"), self.number("<I", "its version")
        if magic != b"GGUF":
            self.refuse("it does not start with the letters GGUF; is the download complete?")
        if version not in (2, 3):
            self.refuse(f"version {version & 0xFFFF}, or another byte order; versions 2 and 3 are read")
        tensors = self.count("tensors", 24)
        sizes: dict[str, int] = {}
        for _ in range(self.count("metadata", 13)):
            key = self.text("a key").decode("utf-8", "replace")
            value = self.value(self.number("<I", key), key, 0)
            name = key.rpartition(".")[2]
            if name in ("block_count", *_WIDTHS) and type(value) is int:
                sizes[name] = max(value, sizes.get(name, 0))
        widest = max((self.tensor() for _ in range(tensors)), default=0)
        if sizes.get("block_count", 0) > tensors:
            self.refuse(f"block_count = {sizes['block_count']:,}, with {tensors:,} tensors")
        for name in _WIDTHS:
            if sizes.get(name, 0) > widest:
                self.refuse(f"{name} = {sizes[name]:,}, its widest tensor has {widest:,}")

    def tensor(self) -> int:
        """Its widest axis."""
        name = self.text("a tensor's name").decode("utf-8", "replace")[:80]
        axes = self.number("<I", name)
        if axes > MOST_AXES:
            self.refuse(f"the tensor {name!r} has {axes:,} axes")
        dims = [self.number("<Q", name) for _ in range(axes)]
        self.number("<I", name)  # its type
        offset = self.number("<Q", name)
        # The densest type takes more than one bit a number.
        if offset > self.size or math.prod(dims) > 8 * self.size:
            self.refuse(f"the tensor {name!r} of {dims} at byte {offset:,} is larger than the file")
        return max(dims, default=0)

    def value(self, kind: int, what: str, depth: int) -> Any:
        """A scalar's value; None for what is only walked over."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            self.skip(self.number("<Q", what), what)
            return None
        if kind != _ARRAY or depth == DEEPEST:
            self.refuse(f"{what[:80]!r} has a value of type {kind:,}, which GGUF does not have there")
        inner, width = self.number("<I", what), 1
        if inner in _SCALARS:
            width = struct.calcsize(_SCALARS[inner])
        elif inner == _STRING:
            width = 8
        elif inner == _ARRAY:
            width = 12
        many = self.count(what, width)
        if inner in _SCALARS:
            self.skip(many * width, what)
        else:
            for _ in range(many):
                self.value(inner, what, depth + 1)
        return None

    def count(self, what: str, least: int) -> int:
        """A number of things that take at least `least` bytes each."""
        many = int(self.number("<Q", what))
        if many > (self.size - self.place) // least:
            self.refuse(f"{what[:80]!r} is said to be {many:,} long, the file has {self.size:,} bytes")
        return many

    def text(self, what: str) -> bytes:
        length = self.number("<Q", what)
        if length > 1 << 16:
            self.refuse(f"{what} of {length:,} bytes")
        return self.bytes(length, what)

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.bytes(struct.calcsize(form), what))[0]

    def skip(self, length: int, what: str) -> None:
        if length > self.size - self.place:
            self.refuse(f"{what[:80]!r} is said to take {length:,} bytes, the file has {self.size:,}")
        self.place += length
        self.file.seek(self.place)

    def bytes(self, length: int, what: str) -> bytes:
        found = self.file.read(length)
        self.place += length
        if len(found) != length:
            self.refuse(f"it ends within {what[:80]!r}")
        return found

    def refuse(self, why: str) -> NoReturn:
        raise BadInput(f"{self.path} is not a readable GGUF file: {why}. Download or convert it again")
