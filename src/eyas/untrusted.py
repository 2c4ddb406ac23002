"""Files that others wrote, read within bounds: regular files only, so long and no longer, JSON and YAML of any depth.

    values = parse_json(content(path))

Whatever is wrong with a file comes out as OSError or ValueError, which readers turn into an error with its remedy; no
RecursionError, no wait for a pipe's other end, no gigabytes from a kilobyte.   pytest tests/test_untrusted.py
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import stat
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from eyas.errors import BadInput

if TYPE_CHECKING:
    import yaml

LONGEST_TEXT = 1 << 28
"""Bytes of a JSON file or of one line; tokenizers of real models reach 35 MB."""
LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header; the library's own bound."""
LONGEST_RECIPE = 1 << 20
LONGEST_NAME = 255
"""Of a file, as most file systems have it."""
DEEPEST = 100
"""Objects and lists in one another in a JSON text."""
MOST_NODES = 100_000
"""Values of a YAML file, each counted as often as its aliases repeat it."""
GROWTH = 256
"""How many times its size a gzip file may grow: states of real documents grow twice, text twenty times."""


def regular(path: str | os.PathLike[str]) -> Path:
    """`path`, if it is a file. Raises OSError for a folder, a pipe, a device or a socket, which would be waited for."""
    path = Path(path)
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a folder, expected a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "no regular file (a pipe, a device or a socket); write it to a file", str(path))
    return path


def inside(folder: Path, name: str, listing: Path) -> Path:
    """The file of `folder` that a listing names. The entry itself may be a symlink (hub caches); no name leads out.

    Raises BadInput naming the listing.
    """
    pure = PurePosixPath(name)
    odd = not name.isprintable() or "\\" in name or ":" in name or len(name) > LONGEST_NAME
    outside = not name or odd or pure.is_absolute() or ".." in pure.parts
    try:
        outside = outside or not (folder / pure).parent.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, no name at all
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise BadInput(
            f"{listing} names the file {name[:80]!r}, which cannot be ({why}); copy or download it again"
        ) from error
    if outside:
        raise BadInput(
            f"{listing} names the file {name[:80]!r}, which leads out of the folder; refusing to follow it: correct "
            "it, or copy the file into the folder"
        )
    return folder / pure


def content(path: str | os.PathLike[str], longest: int = LONGEST_TEXT) -> bytes:
    """The bytes of a file. Raises OSError where there is none, ValueError where it is longer than `longest`."""
    with open(regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > longest:
            raise ValueError(f"it is longer than {longest:,} bytes")
        return file.read()


def text(path: str | os.PathLike[str], longest: int = LONGEST_TEXT) -> str:
    """The same as text in UTF-8; ValueError for another encoding, too."""
    return content(path, longest).decode("utf-8")


def parse_json(source: str | bytes) -> Any:
    """What a JSON text says.

    Raises ValueError for one that is none, that is nested too deep to be read, or that holds half a character (a lone
    surrogate), which nothing could write down again.
    """
    try:
        value = json.loads(source)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if (b"\\ud" in source.lower()) if isinstance(source, bytes) else ("\\ud" in source.lower()):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError, which is a ValueError
    level, depth = [value], 0
    while level:  # so that whoever walks through it needs no bound of their own
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        level = [
            part
            for outer in level
            if isinstance(outer, dict | list)
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, dict | list)
        ]
    return value


def parse_yaml(source: str, loader: type[yaml.SafeLoader] | None = None) -> Any:
    """What a YAML text says: plain values only, no tags. Raises yaml.YAMLError and nothing else.

    An alias stands for all that it names: where few lines would become more than MOST_NODES values, or a value would
    hold itself, the text is refused.
    """
    import yaml

    class Bounded(loader or yaml.SafeLoader):  # type: ignore[misc]
        def fetch_more_tokens(self) -> Any:
            if self.flow_level + len(self.indents) > DEEPEST:  # each level costs a look at all before it
                raise yaml.YAMLError(f"it is nested more than {DEEPEST} deep")
            return super().fetch_more_tokens()

        def get_single_node(self) -> Any:
            node = super().get_single_node()
            _count_nodes(node, {})
            return node

    try:
        return yaml.load(source, Loader=Bounded)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deep") from None
    except (ValueError, OverflowError, TypeError, AttributeError, KeyError, IndexError) as error:
        # Scalars that look like dates or numbers and are none (2001-99-99, 1e, 0x), keys that cannot be keys.
        raise yaml.YAMLError(str(error) or type(error).__name__) from error


def _count_nodes(node: Any, known: dict[int, int | None]) -> int:
    import yaml

    if node is None:
        return 0
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise yaml.YAMLError("a value holds itself")
        return size
    known[id(node)] = None
    size = 1
    for inner in node.value if not isinstance(node.value, str) else ():
        size += sum(_count_nodes(part, known) for part in (inner if isinstance(inner, tuple) else (inner,)))
    if size > MOST_NODES:
        raise yaml.YAMLError(f"its aliases make more than {MOST_NODES:,} values of it")
    known[id(node)] = size
    return size


def lines(path: str | os.PathLike[str], longest: int = LONGEST_TEXT) -> Iterator[bytes]:
    """The lines of a file, plain or gzip by its name. Raises OSError, EOFError, ValueError or zlib.error."""
    with opened(path) as file:
        while line := file.readline(longest + 1):
            if len(line) > longest:
                raise ValueError(f"a line is longer than {longest:,} bytes")
            yield line


def opened(path: str | os.PathLike[str]) -> IO[bytes]:
    """A file for reading, plain or gzip by its name."""
    path = regular(path)
    return gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def load_tensors(path: str | os.PathLike[str]) -> Any:
    """What torch.load makes of a `.bin`, `.pt` or `.ckpt` (or `.gz` of one): plain data, never code.

    Files of today's format are mapped, so that sizes which a forged file claims are bounded by the file itself. Raises
    whatever torch raises; all is about the file.
    """
    import torch

    path = regular(path)
    source: Any = _unpacked(path) if path.suffix == ".gz" else path
    mapped = zipfile.is_zipfile(source)
    if mapped:
        with zipfile.ZipFile(source) as parts:
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts.infolist()):
                raise ValueError("its parts are compressed, which torch.save never does")
    if isinstance(source, io.BytesIO):
        source.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on odd pickles; what matters is raised
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped and source is path)


def _unpacked(path: Path) -> io.BytesIO:
    longest = GROWTH * path.stat().st_size + (1 << 20)
    out = io.BytesIO()
    with gzip.open(path, "rb") as file:
        while part := file.read(1 << 20):  # a read takes as much memory as it asks for
            if out.write(part) and out.tell() > longest:
                raise ValueError(f"it unpacks to more than {GROWTH} times its size")
    out.seek(0)
    return out
