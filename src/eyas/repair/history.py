"""What was done to a draft, and the way back to any earlier state.

    history("draft")                                 eyas history draft
    revert("draft", 2)                               eyas revert draft 2         # as it was before change 2

The states in between need not be visited: the recipes of all changes since are chained into one, so a revert costs what
it has to write. It is a change itself, with a record and a way back.   pytest tests/test_repair_history.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BadInput
from . import journal
from .copying import check_space
from .file_step import Step
from .in_place import begun, check_files, check_folder, complete, thrown_away
from .lock import locked
from .recipe import Blob, Keep, Recipe, chained, from_json, joined, length, moved
from .recover import finish, recover
from .store import Store, digest_of


def history(folder: str | Path) -> list[dict[str, Any]]:
    """All changes, oldest first: {"number", "kind", "when", "eyas_version", "entry", "tensors", "files"}.

    kind: repair, revert (then with "to", "reverts", "forced"), or new. An interrupted change is finished first. Raises
    BadInput where `folder` is no directory or its journal is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"there is no directory {folder}; name that of a draft: repairs keep their journal in it")
    recover(folder)
    told = []
    for record in journal.records(Store(folder)):
        value = {k: v for k, v in record.items() if k not in ("schema", "files")}
        value["files"] = [_told(file) for file in record["files"]]
        told.append(value)
    return told


def revert(folder: str | Path, to: int | None = None, *, force: bool = False) -> dict[str, Any]:
    """Bring back the state before change `to`, bit for bit; None: before the last one (which may be a revert itself).

    Returns the new record as `history` tells it. Raises BadInput, with nothing changed, where there is no such change,
    where it cannot be undone, or where bytes that a change wrote were changed by something else since. force: go back
    all the same; the record says which bytes those were, and keeps them.
    """
    folder = Path(folder)
    check_folder(folder)
    if not Store(folder).root.is_dir():
        raise BadInput(
            f"{folder} has no history: nothing was changed in place there; name the directory that was repaired"
        )
    with locked(folder) as store:
        finish(store)
        records = journal.records(store)
        if not records:
            raise BadInput(
                f"{folder} has no history: nothing was changed in place there; name the directory that was repaired"
            )
        number = len(records) if to is None else to
        if not 1 <= number <= len(records):
            raise BadInput(
                f"{folder}: there is no change {number}; its history has 1 to {len(records)}; name one of these"
            )
        undone = records[number - 1 :]
        new = next((r for r in undone if r["kind"] == "new"), None)
        if new is not None:
            raise BadInput(
                f"{folder}: change {new['number']} made this directory from another one, which was not touched; "
                "what was before lies there; use that one"
            )
        files = _files(undone)
        check_files(folder, list(files))
        odd = [text for name, file in files.items() for text in file.differences(store, name)]
        if odd and not force:
            raise BadInput(
                f"{folder}: {'; '.join(odd)}. Something else wrote there since, and a revert would lose that; --force "
                f"reverts all the same, and keeps those bytes in the journal"
            )
        if stuck := [name for name, file in files.items() if not file.possible(store, name)]:
            raise BadInput(
                f"{folder}: {', '.join(stuck)} has another size than the journal knows, so what was not changed cannot "
                f"be found in it; put the file back as change {records[-1]['number']} left it"
            )
        steps = [step for name, file in files.items() if (step := file.step(store, name)) is not None]
        if not steps:
            raise BadInput(f"{folder}: all is as it was before change {number} already; nothing was done")
        check_space(folder, sum(step.needs(folder) for step in steps))
        numbers = [r["number"] for r in undone]
        with thrown_away(store):
            store.prepare()
            record = begun(store, "revert", {}, steps, tensors=_tensors(undone), to=number, reverts=numbers, forced=odd)
        complete(store, record)
    return history(folder)[-1]


@dataclass
class _File:
    """A file over several changes: the way back, and what is known of its bytes now."""

    recipe: Recipe | None
    """Of the earliest state, told by the present one."""
    size: int | None
    """Now, as the journal has it; None: no such file."""
    known: list[dict[str, Any]] = field(default_factory=list)
    """Ranges that changes wrote and later ones kept: {"start", "stop", "sha256", "what", "number"}."""

    def differences(self, store: Store, name: str) -> list[str]:
        """Where the file is not what the journal says, in words."""
        path = store.draft / name
        if not path.is_file():
            return [f"{name} is gone"] if self.size is not None else []
        size = path.stat().st_size
        if self.size is None:
            return [f"{name} is there again"]
        if size != self.size:
            return [f"{name} has {size:,} bytes, the journal says {self.size:,}"]
        return [
            f"{known['what'] if known['what'] == name else known['what'] + ' in ' + name} is not what change "
            f"{known['number']} wrote"
            for known in self.known
            if digest_of(path, known["start"], known["stop"]) != known["sha256"]
        ]

    def possible(self, store: Store, name: str) -> bool:
        """Is what the recipe keeps there?"""
        if not any(isinstance(part, Keep) for part in self.recipe or ()):
            return True
        path = store.draft / name
        return path.is_file() and path.stat().st_size == self.size

    def step(self, store: Store, name: str) -> Step | None:
        """The step back, which leaves alone what is right already; None where that is all of the file."""
        path = store.draft / name
        if self.recipe is None or not path.exists():
            return Step(name, self.recipe) if self.recipe is not None or path.exists() else None
        out: list[Keep | Blob] = []
        size = path.stat().st_size
        for part in self.recipe:
            place = length(tuple(out))
            stop = place + part.stop - part.start
            same = isinstance(part, Blob) and stop <= size and digest_of(path, place, stop) == store.digest(part)
            out.append(Keep(place, stop) if same else part)
        recipe = joined(out)
        return None if recipe == (Keep(0, size),) else Step(name, recipe)


def _files(undone: Sequence[Mapping[str, Any]]) -> dict[str, _File]:
    """By name: the recipes back, chained from the last change to the first of `undone`."""
    files: dict[str, _File] = {}
    for record in reversed(undone):
        for told in record["files"]:
            back = from_json(told["undo"])
            file = files.get(told["file"])
            if file is None:
                size = told["after"]["size"] if told["after"] else None
                files[told["file"]] = _File(back, size)
            else:
                file.recipe = chained(back, file.recipe or ()) if back is not None else None
    for name, file in files.items():
        for record in undone:
            for told in (t for t in record["files"] if t["file"] == name):
                file.known = [k for old in file.known if (k := _carried(old, from_json(told["redo"])))]
                file.known += [{**r, "number": record["number"]} for r in told["result"]]
    return files


def _carried(known: dict[str, Any], redo: Recipe | None) -> dict[str, Any] | None:
    """A known range after a further change, None where that did not keep it."""
    place = moved(redo or (), known["start"], known["stop"])
    return None if place is None else {**known, "start": place[0], "stop": place[1]}


def _tensors(undone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tensors that change on the way back."""
    out: dict[str, Any] = {}
    for record in undone:
        for name, value in record.get("tensors", {}).items():
            earliest = out[name]["after"] if name in out else value["before"]
            out[name] = {"file": value["file"], "before": value["after"], "after": earliest}
    return {name: value for name, value in out.items() if value["before"] != value["after"]}


def _told(file: Mapping[str, Any]) -> dict[str, Any]:
    """For people: which file, how, its sizes, and how many bytes it takes to undo."""
    kept = sum(p.stop - p.start for p in from_json(file["undo"]) or () if isinstance(p, Blob))
    sizes = {side: file[side]["size"] if file[side] else None for side in ("before", "after")}
    return {"file": file["file"], "how": file["how"], **sizes, "undo_bytes": kept}
