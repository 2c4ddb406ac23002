"""From a `Change` of tensors to the files that change: their new bytes as parts that are kept and parts that are new.

    plan(open_folder("draft"), Change({"d2t": piece})).files       # nothing is read but headers, nothing written

The header keeps its length where it can, so that what is kept stays in its place and a rename or a new map costs a few
writes inside the file.   pytest tests/test_repair_in_place.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..draft.assemble import PAGE, Extent, Piece
from ..draft.files import CONFIG, EYAS_JSON, DraftFolder, read_json, weight_files
from ..errors import BadInput
from ..headers import Entry, Header, read_header
from .change import Change
from .recipe import Keep

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Fresh:
    """Bytes that the file did not have."""

    parts: tuple[Any, ...]
    """Of extents, arrays, bytes, or functions that return an array."""
    size: int
    what: str


@dataclass(frozen=True)
class FilePlan:
    """A file that changes."""

    name: str
    """Relative to the draft."""
    parts: tuple[Keep | Fresh, ...] | None
    """None: the file goes."""

    @property
    def size(self) -> int:
        """Bytes it will have."""
        return sum(p.size if isinstance(p, Fresh) else p.stop - p.start for p in self.parts or ())

    @property
    def fresh(self) -> int:
        """Bytes that are new."""
        return sum(p.size for p in self.parts or () if isinstance(p, Fresh))


@dataclass(frozen=True)
class PlannedFiles:
    """What a change does to the files. eyas.json is not among them: its digests follow from the new bytes."""

    files: list[FilePlan]
    tensors: dict[str, dict[str, Any]]
    """By stored name: {"file", "before": {"dtype", "shape"} or None, "after": the same}."""
    touched: set[str]
    """Stored names whose bytes are new, or that are new themselves."""


def plan(folder: DraftFolder, change: Change) -> PlannedFiles:
    """Decide which files change and how. Raises BadInput where the change does not fit the draft."""
    by_file: dict[Path, dict[str, Piece | None]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for name, piece in change.tensors.items():
        held = folder.tensors.get(name)
        if held is None and piece is None:
            raise BadInput(f"{folder.path} holds no {name} that could be left out; name a tensor that is there")
        if piece is not None and piece.name != name:
            raise BadInput(
                f"the piece for {name} is named {piece.name}; a change goes by the names in the file; name it so"
            )
        file = held.file if held is not None else _home(folder, piece)
        if file.suffix != ".safetensors":
            raise BadInput(
                f"{file} is a pickle, which Eyas does not write; convert the draft first (eyas export DRAFT OUT writes "
                f"safetensors) and repair that"
            )
        by_file.setdefault(file, {})[name] = piece
        before = {"dtype": held.dtype, "shape": list(held.shape)} if held else None
        after = {"dtype": piece.dtype, "shape": list(piece.shape)} if piece else None
        tensors[name] = {"file": str(file.relative_to(folder.path)), "before": before, "after": after}
    files = [_weights(folder, file, changes) for file, changes in by_file.items()]
    if by_file and all(f.parts is None for f in files) and set(folder.files) == set(by_file):
        raise BadInput(
            f"{folder.path}: the change leaves out every tensor; nothing would be left of the draft; keep those "
            "that it needs"
        )
    files += _index(folder, by_file, change.tensors)
    files += _config(folder, change.config)
    return PlannedFiles(files, tensors, {name for name, piece in change.tensors.items() if piece is not None})


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """As `writes.atomic_write_json` writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def json_plan(name: str, value: Mapping[str, Any]) -> FilePlan:
    """A JSON file that is replaced as a whole."""
    raw = json_bytes(value)
    return FilePlan(name, (Fresh((raw,), len(raw), name),))


def _home(folder: DraftFolder, piece: Piece | None) -> Path:
    """The file of a tensor that is new: where its bytes lie already, else the first."""
    parts = piece.parts if piece else ()
    lies = [p.file for p in parts if isinstance(p, Extent)]
    return next((file for file in lies if file in folder.files), folder.files[0])


def _weights(folder: DraftFolder, file: Path, changes: Mapping[str, Piece | None]) -> FilePlan:
    header = read_header(file)
    order = sorted(header.entries, key=lambda n: (header.entries[n].start, header.entries[n].stop))
    by_place = {(header.entries[n].start, header.entries[n].stop): n for n in order if n in changes}
    pieces: dict[str, list[Piece]] = {}  # by the name whose place they take
    behind: list[Piece] = []
    for name, piece in changes.items():
        if piece is None:
            continue
        only = piece.parts[0] if len(piece.parts) == 1 else None
        place = by_place.get((only.start, only.stop)) if isinstance(only, Extent) and only.file == file else None
        # A renamed tensor stays where it is, if nothing else is to lie there.
        if name in header.entries:
            pieces[name] = [piece, *pieces.get(name, [])]
        elif place is not None and changes[place] is None and piece.bytes:
            pieces.setdefault(place, []).append(piece)
        else:
            behind.append(piece)
    new: list[Piece] = []
    for name in order:
        entry = header.entries[name]
        if name in changes:
            new += pieces.get(name, [])
        else:
            new.append(Piece(name, entry.dtype, entry.shape, (Extent(file, entry.start, entry.stop),)))
    new += behind
    name = str(file.relative_to(folder.path))
    if not new:
        return FilePlan(name, None)
    begin = min((e.start for e in header.entries.values()), default=8)
    old = [(n, header.entries[n].dtype, header.entries[n].shape) for n in order]
    first: tuple[Keep | Fresh, ...] = (Keep(0, begin),)
    if old != [(p.name, p.dtype, p.shape) for p in new]:
        raw = header_bytes(new, header, begin, file)
        first = (Fresh((raw,), len(raw), "header"),)
    return FilePlan(name, (*first, *(part for piece in new for part in _parts(file, piece, header))))


def _parts(file: Path, piece: Piece, header: Header) -> list[Keep | Fresh]:
    """What of a piece lies in the file already, and what does not."""
    whole = piece.parts and all(isinstance(p, Extent) and p.file == file for p in piece.parts)
    if whole and sum(p.stop - p.start for p in piece.parts) == piece.bytes:
        return [Keep(p.start, p.stop) for p in piece.parts]
    return [Fresh(piece.parts, piece.bytes, piece.name)]


def header_bytes(pieces: Sequence[Piece], old: Header, begin: int, file: Path) -> bytes:
    """The first bytes of a file of these pieces, metadata as in `old`, whose tensors began at byte `begin`.

    As long as the old one where it fits, else so long that the largest extent keeps its place within a page of memory,
    which the kernel copies in half the time. The format allows spaces behind the JSON.
    """
    table: dict[str, Any] = {"__metadata__": dict(old.metadata)} if old.metadata else {}
    place, largest, phase = 0, 0, 0
    for piece in pieces:
        stop = place + piece.bytes
        if piece.name in table:
            raise BadInput(f"{file}: {piece.name} would be there twice; drop one of them first")
        table[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [place, stop]}
        part = piece.parts[0] if piece.parts else None
        if isinstance(part, Extent) and part.stop - part.start > largest:
            largest, phase = part.stop - part.start, part.start - place
        place = stop
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if 8 + len(raw) <= begin:
        raw = raw.ljust(begin - 8)
    elif largest >= PAGE and (shift := (phase - 8 - len(raw)) % PAGE) % 8 == 0:
        raw += b" " * shift
    return len(raw).to_bytes(8, "little") + raw


def _index(
    folder: DraftFolder, by_file: Mapping[Path, Mapping[str, Piece | None]], changes: Mapping[str, Piece | None]
) -> list[FilePlan]:
    """The index of a sharded draft, where tensors come, go or change their size."""
    if not by_file or weight_files(folder.path)[1] is None:
        return []
    index = read_json(folder.path / INDEX)
    now, placed = dict(index), dict(index["weight_map"])
    for file, held in by_file.items():
        for name, piece in held.items():
            if piece is None:
                placed.pop(name, None)
            else:
                placed[name] = str(file.relative_to(folder.path))
    now["weight_map"] = placed
    total = (index.get("metadata") or {}).get("total_size")
    if isinstance(total, int):
        sizes: dict[Path, Mapping[str, Entry]] = {file: read_header(file).entries for file in by_file}
        before = sum(sizes[f][n].bytes for f, held in by_file.items() for n in held if n in sizes[f])
        total += sum(piece.bytes for piece in changes.values() if piece is not None) - before
        now["metadata"] = {**index["metadata"], "total_size": total}
    return [json_plan(INDEX, now)] if now != index else []


def _config(folder: DraftFolder, config: Mapping[str, Any] | None) -> list[FilePlan]:
    if config is None or json_bytes(config) == json_bytes(folder.config):
        return []
    return [json_plan(CONFIG, config)]


def eyas_plan(folder: DraftFolder, value: Mapping[str, Any] | None) -> list[FilePlan]:
    """eyas.json, where `value` is another one than the draft's."""
    if value is None or (folder.eyas is not None and json_bytes(value) == json_bytes(folder.eyas)):
        return []
    return [json_plan(EYAS_JSON, value)]
