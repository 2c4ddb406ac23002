"""A changed draft in a new directory; the draft itself is only read.

    write_new(Path("draft"), Path("mended"), Change({"d2t": piece}), {"operation": "add-arange"})

Files share their blocks with the draft's where the file system can (Btrfs, XFS), else they are copied; never hard
links, which would share later changes, too.   pytest tests/test_repair_in_place.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..draft.digests import in_step
from ..draft.files import HISTORY, DraftFolder, open_folder
from ..errors import BadInput
from ..writes import atomic_dir, disk_errors
from . import journal
from .change import Change
from .copying import as_before, blocks, check_space, clone, copy_range, write_all
from .plan_files import FilePlan, Fresh, eyas_plan, plan
from .recipe import Blob, joined, stays
from .store import Store


def check_out(source: Path, out: Path) -> None:
    """Raise BadInput where no copy of `source` can be made there."""
    if not source.is_dir():
        raise BadInput(f"{source} is not a directory; repair works on draft directories; name one")
    if out.exists() or out.is_symlink():
        raise BadInput(f"{out} exists; name a new directory, since a repair replaces nothing")
    if out.resolve().is_relative_to(source.resolve()):
        raise BadInput(f"{out} lies in {source} itself; name a directory outside of it")
    above = next(p for p in out.absolute().parents if p.exists())
    if not above.is_dir():
        raise BadInput(f"{out} cannot be made, since {above} is a file; name another directory")


def write_new(
    source: Path, out: Path, change: Change | Callable[[DraftFolder], Change], entry: Mapping[str, Any]
) -> None:
    """Write the draft of `source` with `change` to `out`, whole or not at all. Symlinks are followed.

    change: or what makes it of the files as they are now. entry: what the journal of `out` shall say of it, as its
    change 1; the journal of `source` stays there. Digests in eyas.json follow. Raises BadInput for a change that does
    not fit, for pickles and where `out` exists; EyasError where space is short.
    """
    source, out = Path(source), Path(out)
    check_out(source, out)
    draft = open_folder(source)
    change = change if isinstance(change, Change) else change(draft)
    planned = plan(draft, change)
    changed = {file.name: file for file in planned.files}
    held = dict(_files(source))
    sizes = {name: path.stat().st_size for name, path in held.items() if name not in changed}
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    check_space(out.parent, sum(sizes.values()) + sum(file.size for file in planned.files))
    with atomic_dir(out) as folder:
        for name in sorted({*held, *changed}):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name not in changed:
                clone(held[name], target)
            elif changed[name].parts is not None:
                _write(held.get(name), target, changed[name])
        eyas = change.eyas if change.eyas is not None else draft.eyas
        if eyas is not None:
            eyas = in_step(eyas, draft.tensors, open_folder(folder).tensors, planned.touched)
            for file in eyas_plan(draft, eyas):
                (folder / file.name).unlink(missing_ok=True)
                _write(held.get(file.name), folder / file.name, file)
        store = Store(folder)
        (store.root / "journal").mkdir(parents=True)
        first = journal.record(1, "new", entry, [], tensors=planned.tensors, source=source.name)
        journal.write_record(store.root / "journal" / journal.file_name(1), first)


def _files(source: Path) -> Iterator[tuple[str, Path]]:
    """(name, file) of all files but those of the journal; folders that are links are followed, once."""
    seen = set()
    for at, folders, files in os.walk(source, followlinks=True):
        here = Path(at)
        if here == source and HISTORY in folders:
            folders.remove(HISTORY)
        if (real := here.resolve()) in seen:  # a loop of links
            folders.clear()
            continue
        seen.add(real)
        for name in files:
            if (path := here / name).is_file():
                yield str(path.relative_to(source)), path


def _write(old: Path | None, target: Path, file: FilePlan) -> None:
    """One changed file: a clone into which the new bytes are written where what is kept stays, else part by part."""
    parts = file.parts or ()
    shape = joined(Blob(str(i), 0, p.size) if isinstance(p, Fresh) else p for i, p in enumerate(parts))
    if old is not None and stays(shape, old.stat().st_size):
        clone(old, target)
        descriptor = os.open(target, os.O_WRONLY)
    else:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    source = os.open(old, os.O_RDONLY) if old is not None else None
    patch, place = old is not None and stays(shape, old.stat().st_size), 0
    try:
        for part in parts:
            end = place + (part.size if isinstance(part, Fresh) else part.stop - part.start)
            if isinstance(part, Fresh):
                os.lseek(descriptor, place, os.SEEK_SET)
                for block in blocks(part.parts):
                    write_all(descriptor, block)
                if (at := os.lseek(descriptor, 0, os.SEEK_CUR)) != end:
                    raise BadInput(
                        f"{part.what}: its parts are {at - place:,} bytes, not {part.size:,}; something else wrote "
                        "to it: run the same command again"
                    )
            elif not patch and source is not None:
                os.lseek(descriptor, place, os.SEEK_SET)
                copy_range(source, descriptor, part.start, part.stop)
            place = end
        if old is not None:
            mtime = os.fstat(descriptor).st_mtime_ns
            as_before(old, target)
            os.utime(descriptor, ns=(mtime, mtime))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        if source is not None:
            os.close(source)
