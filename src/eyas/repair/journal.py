"""The journal of a draft's changes: one record each, and the one that is under way.

A change exists from the moment that pending.json has its name: from then on it will be finished, by whoever comes next.
It is finished when pending.json has become its record, in one rename.   pytest tests/test_repair_history.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .._version import __version__
from ..draft.files import PENDING, read_json
from ..errors import BadInput
from ..writes import fsync_path
from .copying import write_all
from .recipe import Blob, from_json
from .store import Store

SCHEMA = "eyas-change/1"


def record(
    number: int, kind: str, entry: Mapping[str, Any], files: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """kind: repair, revert, or new (a directory that a repair wrote). files: as `file_step.prepare` returns them."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "schema": SCHEMA, "number": number, "kind": kind, "when": when, "eyas_version": __version__,
        "entry": dict(entry), **more, "files": files,
    }  # fmt: skip


def records(store: Store) -> list[dict[str, Any]]:
    """All finished changes, oldest first. Raises BadInput where the journal is damaged."""
    folder = store.root / "journal"
    found = [_checked(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    for place, value in enumerate(found, 1):
        if value["number"] != place:
            raise BadInput(f"{folder}: change {place} is missing from the journal; put it back from a backup")
    return found


def pending(store: Store) -> dict[str, Any] | None:
    """The change that is under way, None where there is none."""
    path = store.draft / PENDING
    return _checked(path) if path.exists() else None


def begin(store: Store, value: Mapping[str, Any]) -> None:
    """Make the change exist. All that it is made of must be on the disk already."""
    write_record(store.draft / PENDING, value)


def finished(store: Store, value: Mapping[str, Any]) -> None:
    """The files are changed, and on the disk."""
    os.rename(store.draft / PENDING, store.root / "journal" / file_name(value["number"]))
    fsync_path(store.root / "journal")
    fsync_path(store.root)


def dropped(store: Store) -> None:
    """The files are as they were."""
    os.unlink(store.draft / PENDING)
    fsync_path(store.root)


def write_record(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    new = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(new, (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode())
        os.fsync(new)
    finally:
        os.close(new)
    os.rename(temporary, path)
    fsync_path(path.parent)


def file_name(number: int) -> str:
    return f"{number:06}.json"


def named(values: list[dict[str, Any]]) -> set[str]:
    """The undo blobs that records name."""
    return {
        part.sha256
        for value in values
        for file in value["files"]
        for part in from_json(file["undo"]) or ()
        if isinstance(part, Blob)
    }


def _checked(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if value.get("schema") != SCHEMA or not isinstance(value.get("files"), list) or not isinstance(
        value.get("number"), int
    ):  # fmt: skip
        raise BadInput(f"{path}: expected schema {SCHEMA!r}, found {value.get('schema')!r}; update Eyas")
    return value
