"""One file of a change: prepared beside the draft, done to it, and put back.

A file whose kept bytes stay in their place is patched: only what is new is written, inside it. Any other is built in
.eyas/staged and renamed. Preparing changes nothing; doing may be repeated after a crash, at any point.

pytest tests/test_repair_crash.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..draft.assemble import Extent
from ..errors import BadInput, EyasError
from ..headers import read_header
from ..writes import fsync_path
from .copying import as_before, copy_range, write_all
from .recipe import Blob, Keep, Recipe, from_json, inverse, joined, length, stays, to_json
from .store import Store


@dataclass(frozen=True)
class Step:
    """A file, and what it becomes: of its own bytes and of stored blobs. None: it goes."""

    name: str
    recipe: Recipe | None

    def needs(self, draft: Path) -> int:
        """Bytes of disk that it takes besides blobs that are stored already: for undoing, and for building."""
        path = draft / self.name
        size = path.stat().st_size if path.exists() else 0
        replaced = sum(stop - start for start, stop, place, _ in inverse(self.recipe or (), size, ()) if place is None)
        built = 0 if self.recipe is None or stays(self.recipe, size) else length(self.recipe)
        return replaced + built


def prepare(store: Store, place: int, step: Step) -> dict[str, Any]:
    """Store what undoes the step, build the file where it is not patched; returns the step's part of the record.

    place: of the step among those of its change.
    """
    path = store.draft / step.name
    before = _facts(path)
    undo: Recipe | None = None
    if before is not None:
        parts: list[Keep | Blob] = []
        for start, stop, where, what in inverse(step.recipe or (), before["size"], _cuts(path, step.name)):
            if where is not None:
                parts.append(Keep(where, where + stop - start))
            elif stop > start:
                parts.append(store.put(store.undo, (Extent(path, start, stop),), stop - start, what))
        undo = joined(parts)
    how, after = "remove", None
    if step.recipe is not None:
        patch = before is not None and stays(step.recipe, before["size"])
        how = "patch" if patch else "replace" if before is not None else "create"
        after = {
            "size": length(step.recipe),
            "mtime_ns": max(time.time_ns(), before["mtime_ns"] + 1 if before else 0),
        }
        if not patch:
            _build(store, path, store.staged / str(place), step.recipe, after["mtime_ns"])
    return {
        "file": step.name, "how": how, "before": before, "after": after, "undo": to_json(undo),
        "redo": to_json(step.recipe), "result": _result(store, step.recipe),
    }  # fmt: skip


def do(store: Store, place: int, file: Mapping[str, Any]) -> None:
    """Carry out a prepared step. Doing it again, after whatever part of it, comes to the same."""
    path = store.draft / file["file"]
    if file["how"] == "patch":
        size = path.stat().st_size if path.is_file() else None
        if size != file["before"]["size"]:
            raise EyasError(
                f"{path} has {'gone' if size is None else f'{size:,} bytes'}, though a change of it is under way that "
                f"found {file['before']['size']:,}: something else wrote to it. Put it back, or remove "
                f"{store.root / 'pending.json'} to leave all as it is now"
            )
        _patch(store, path, from_json(file["redo"]) or (), file["after"]["mtime_ns"])
    elif file["how"] == "remove":
        path.unlink(missing_ok=True)
        fsync_path(path.parent)
    elif (staged := store.staged / str(place)).exists():  # else it was renamed before a crash
        os.rename(staged, path)
        fsync_path(path.parent)


def put_back(store: Store, file: Mapping[str, Any]) -> None:
    """Undo a patch that may have been done in part."""
    _patch(store, store.draft / file["file"], from_json(file["undo"]) or (), file["before"]["mtime_ns"])


def _patch(store: Store, path: Path, recipe: Recipe, mtime_ns: int) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        place = 0
        for part in recipe:
            at = place
            if isinstance(part, Blob):
                for block in store.read(part):
                    write_all(descriptor, block, at)
                    at += len(block)
            place += part.stop - part.start
        os.fdatasync(descriptor)
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(descriptor)


def _build(store: Store, path: Path, target: Path, recipe: Recipe, mtime_ns: int) -> None:
    new = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    old = os.open(path, os.O_RDONLY) if path.exists() else None
    try:
        for part in recipe:
            if isinstance(part, Blob):
                for block in store.read(part):
                    write_all(new, block)
            elif old is not None:
                copy_range(old, new, part.start, part.stop)
        if os.fstat(new).st_size != length(recipe):
            raise BadInput(f"{path}: something else wrote to it while it was copied; run the same command again")
        if old is not None:
            as_before(path, target)
        os.utime(new, ns=(mtime_ns, mtime_ns))
        os.fsync(new)
    finally:
        os.close(new)
        if old is not None:
            os.close(old)


def _facts(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    held = path.stat()
    return {"size": held.st_size, "mtime_ns": held.st_mtime_ns}


def _cuts(path: Path, name: str) -> list[tuple[int, str]]:
    """What begins where in a file: header and tensors, or the file itself."""
    if path.suffix == ".safetensors":
        try:
            entries = read_header(path).entries
        except BadInput:  # damaged since, and put back by force
            return [(0, name)]
        return [(0, "header"), *((entry.start, tensor) for tensor, entry in entries.items() if entry.bytes)]
    return [(0, name)]


def _result(store: Store, recipe: Recipe | None) -> list[dict[str, Any]]:
    """Digest of each range that the step writes: by these a later revert knows the file again."""
    out, place = [], 0
    for part in recipe or ():
        size = part.stop - part.start
        if isinstance(part, Blob):
            out.append({"start": place, "stop": place + size, "sha256": store.digest(part), "what": part.what})
        place += size
    return out
