"""Change a draft in place, journaled: the old state or the new one, whatever happens, and always a way back.

    number = repair_in_place(Path("draft"), Change({"d2t": piece}), {"operation": "add-arange"})

All that undoes the change and all that it is made of lies below draft/.eyas, on the disk, before anything of the draft
is touched; recover.py says what happens after a crash. The file of a running engine is mapped: what is written here is
seen there, so stop it first.   pytest tests/test_repair_in_place.py tests/test_repair_crash.py
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..draft.assemble import Extent
from ..draft.digests import in_step
from ..draft.files import EYAS_JSON, PENDING, DraftFolder, TensorRef, open_folder
from ..errors import BadInput, EyasError
from ..headers import BYTES, NUMPY
from . import journal
from .change import Change
from .copying import check_space
from .file_step import Step, prepare
from .lock import locked
from .plan_files import FilePlan, Fresh, PlannedFiles, eyas_plan, plan
from .recipe import Blob, Keep, joined
from .recover import carry_out, finish
from .store import Store

if TYPE_CHECKING:
    import numpy as np
    import torch


def repair_in_place(folder: Path, change: Change | Callable[[DraftFolder], Change], entry: Mapping[str, Any]) -> int:
    """Make `change` of the draft in `folder`; returns the number of its record, which `revert` takes.

    change: or what makes it of the files as they are once nobody else changes them. entry: what the journal shall say
    of it. An interrupted change is finished first; digests in eyas.json follow.

    Raises BadInput, with nothing changed, for links, files that are read-only, hard-linked or pickles, and for a change
    that does not fit; EyasError where space is short or another process is at it.
    """
    folder = Path(folder)
    check_folder(folder)
    with locked(folder) as store:
        finish(store)
        draft = open_folder(folder)
        change = change if isinstance(change, Change) else change(draft)
        planned = plan(draft, change)
        names = [f.name for f in planned.files]
        check_files(folder, [*names, EYAS_JSON] if draft.eyas is not None or change.eyas is not None else names)
        check_space(folder, _space(folder, planned))
        with thrown_away(store):
            store.prepare()
            steps = [_step(store, file) for file in planned.files]
            eyas = change.eyas if change.eyas is not None else draft.eyas
            if eyas is not None:
                eyas = in_step(eyas, draft.tensors, _tensors_after(draft, planned, change, steps), planned.touched)
            steps += [_step(store, file) for file in eyas_plan(draft, eyas)]
            if not steps:
                raise BadInput(f"{folder}: the change would leave every file as it is; nothing was done")
            record = begun(store, "repair", entry, steps, tensors=planned.tensors)
        return complete(store, record)


def begun(
    store: Store, kind: str, entry: Mapping[str, Any], steps: Sequence[Step], tensors: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Prepare the steps and make the change pending: returns its record. The lock is held, nothing was pending.

    tensors: {stored name: {"file", "before", "after"}}; digests are added to those that have none.
    """
    finished = journal.records(store)
    files = [prepare(store, place, step) for place, step in enumerate(steps)]
    store.settle()
    record = journal.record(len(finished) + 1, kind, entry, files, tensors=_with_digests(tensors, files), **more)
    journal.begin(store, record)
    return record


def complete(store: Store, record: Mapping[str, Any]) -> int:
    """Carry out what is pending, and remove what it was made of; returns its number."""
    carry_out(store, record)
    store.sweep(journal.named(journal.records(store)))
    return int(record["number"])


@contextlib.contextmanager
def thrown_away(store: Store) -> Iterator[None]:
    """Where preparing fails, leave nothing of it."""
    try:
        yield
    except BaseException as error:
        begun = (store.draft / PENDING).exists()
        with contextlib.suppress(OSError, EyasError):
            if not begun:
                store.sweep(journal.named(journal.records(store)))
        if isinstance(error, OSError) and not begun:
            raise EyasError(
                f"{store.draft}: the change could not be prepared ({error.strerror or error}"
                f"{f': {error.filename}' if error.filename else ''}); nothing was changed. Mend that, or free some "
                f"space, and run the same command again"
            ) from error
        if isinstance(error, OSError):
            raise EyasError(
                f"{store.draft}: the change was interrupted ({error.strerror or error}); nothing is lost. Mend that "
                f"and run `eyas history {store.draft}`, which finishes it"
            ) from error
        raise


def check_folder(folder: Path) -> None:
    """Raise BadInput where this is no directory of its own that may be written to."""
    if folder.is_symlink():
        raise BadInput(f"{folder} is a symlink to {os.readlink(folder)}; name the directory itself to change it")
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a directory; changes in place work on draft directories; name one")
    _writable(folder)


def check_files(folder: Path, names: Sequence[str]) -> None:
    """Raise BadInput for the first of these files that must not be changed in place."""
    for name in names:
        path = folder / name
        links = [p for p in (path, *path.parents) if folder in p.parents and p.is_symlink()]
        if links:
            raise BadInput(
                f"{links[0]} is a symlink to {os.readlink(links[0])}, so a change would reach files elsewhere (a hub "
                f"cache shares them); repair into a new directory (--out)"
            )
        if not path.exists():
            continue
        if not path.is_file():
            raise BadInput(f"{path} is not a file; put the draft's own file there")
        if (count := path.stat().st_nlink) > 1:
            raise BadInput(
                f"{path} has {count} hard links, so a change would reach other directories; repair into a new one "
                f"(--out)"
            )
        _writable(path)
        _writable(path.parent)


def _writable(path: Path) -> None:
    mode = path.stat().st_mode & 0o7777
    if not mode & 0o222 or not os.access(path, os.W_OK):  # root may always; a file that is marked is meant to stay
        raise BadInput(
            f"{path} is read-only (mode {mode:04o}); repair into a new directory (--out), or make it writable "
            f"(chmod u+w)"
        )


def _space(folder: Path, planned: PlannedFiles) -> int:
    """Bytes of disk: what is new, stored once more to be finished after a crash; what is replaced; what is built."""
    assumed = [Step(file.name, _recipe(file, [Blob("", 0, p.size) for p in _fresh(file)])) for file in planned.files]
    return sum(file.fresh for file in planned.files) + sum(step.needs(folder) for step in assumed)


def _fresh(file: FilePlan) -> list[Fresh]:
    return [part for part in file.parts or () if isinstance(part, Fresh)]


def _recipe(file: FilePlan, blobs: Sequence[Blob]) -> tuple[Keep | Blob, ...] | None:
    """The plan with its fresh parts stored."""
    if file.parts is None:
        return None
    left = iter(blobs)
    return joined(next(left) if isinstance(part, Fresh) else part for part in file.parts)


def _step(store: Store, file: FilePlan) -> Step:
    return Step(file.name, _recipe(file, [store.put(store.redo, p.parts, p.size, p.what) for p in _fresh(file)]))


def _tensors_after(
    draft: DraftFolder, planned: PlannedFiles, change: Change, steps: Sequence[Step]
) -> dict[str, TensorRef]:
    """The draft's tensors as they will be; those that are new read the stored blob."""
    store = Store(draft.path)
    blobs = {(step.name, p.what): p for step in steps for p in step.recipe or () if isinstance(p, Blob)}
    out = dict(draft.tensors)
    for name, piece in change.tensors.items():
        if piece is None:
            del out[name]
            continue
        file = planned.tensors[name]["file"]
        blob = blobs.get((file, name))
        # What is not new consists of extents of the draft's own files.
        extents = [Extent(store.find(blob), blob.start, blob.stop)] if blob is not None else list(piece.parts)
        array = partial(_array, piece.dtype, piece.shape, extents if piece.bytes else [])
        out[name] = TensorRef(name, piece.shape, piece.dtype, draft.path / file, partial(_tensor, array), array)
    return out


def _array(dtype: str, shape: tuple[int, ...], extents: Sequence[Extent]) -> np.ndarray[Any, Any]:
    import numpy as np

    maps = [np.memmap(e.file, np.uint8, "r", e.start, (e.stop - e.start,)) for e in extents if e.stop > e.start]
    raw = maps[0] if len(maps) == 1 else np.concatenate([np.zeros(0, np.uint8), *maps])
    return raw.view(NUMPY.get(dtype) or f"<u{BYTES[dtype]}").reshape(shape)


def _tensor(array: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(array())


def _with_digests(tensors: Mapping[str, Any], files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Digests of tensors whose bytes are new or replaced; a renamed one is the same under another name."""
    old = {(f["file"], part[4]): part[3] for f in files for part in f["undo"] or () if part[0] == "blob"}
    new = {(f["file"], part["what"]): part["sha256"] for f in files for part in f["result"]}
    out = {}
    for name, value in tensors.items():
        out[name] = dict(value)
        for side, digests in (("before", old), ("after", new)):
            digest = digests.get((value["file"], name))
            if value[side] is not None and digest is not None:
                out[name][side] = {"sha256": digest, **value[side]}
    return out
