"""What lies below DRAFT/.eyas: the bytes that changes replaced, and those that a change under way is made of.

    lock              held while the draft is changed
    journal/000001.json   one record a change, see journal.py
    undo/<sha256>     bytes that a change replaced, a tensor each; kept as long as a record names them
    redo/<sha256>, staged/<n>, pending.json   only while a change is under way

Blobs go by their digest, so that what is equal is stored once.   pytest tests/test_repair_history.py
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..draft.assemble import Extent
from ..draft.files import HISTORY, PENDING
from ..errors import BadInput, EyasError
from ..writes import fsync_path
from .copying import blocks, write_all
from .recipe import Blob

FOLDERS = ("journal", "undo", "redo", "staged")


@dataclass(frozen=True)
class Store:
    """The store of one draft. Whoever writes to it holds its lock."""

    draft: Path

    @property
    def root(self) -> Path:
        return self.draft / HISTORY

    @property
    def undo(self) -> Path:
        return self.root / "undo"

    @property
    def redo(self) -> Path:
        return self.root / "redo"

    @property
    def staged(self) -> Path:
        return self.root / "staged"

    def prepare(self) -> None:
        """Make the folders."""
        for name in FOLDERS:
            os.makedirs(self.root / name, exist_ok=True)

    def put(self, folder: Path, parts: Sequence[Any], size: int, what: str) -> Blob:
        """Store the bytes of `parts` in `folder`, synced; returns the whole blob.

        Raises BadInput where they are not `size` bytes.
        """
        if all(isinstance(part, Extent | bytes) for part in parts):  # cheap to read twice, dear to write
            digest, length = _digest(parts)
            if length == size and self._holds(folder / digest, size):
                return Blob(digest, 0, size, what)
        temporary = folder / f"new-{secrets.token_hex(8)}"
        running, written = hashlib.sha256(), 0
        new = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for block in blocks(parts):
                running.update(block)
                write_all(new, block)
                written += len(block)
            os.fsync(new)
        finally:
            os.close(new)
        if written != size:
            raise BadInput(
                f"{what}: its parts are {written:,} bytes, not {size:,}; something else wrote to it: run the same "
                "command again"
            )
        os.rename(temporary, folder / running.hexdigest())
        return Blob(running.hexdigest(), 0, size, what)

    def find(self, blob: Blob) -> Path:
        """The file of a blob. Raises EyasError where it is gone or cut short."""
        for folder in (self.redo, self.undo):
            if (path := folder / blob.sha256).is_file() and path.stat().st_size >= blob.stop:
                return path
        raise EyasError(
            f"{self.undo / blob.sha256} is missing or cut short: it holds {blob.what or 'bytes'} of an earlier state. "
            f"Put it back from a backup; without it that state cannot be brought back"
        )

    def read(self, blob: Blob) -> Iterable[memoryview]:
        """Its bytes, some at a time."""
        return blocks((Extent(self.find(blob), blob.start, blob.stop),))

    def digest(self, blob: Blob) -> str:
        """SHA-256 of its bytes, which are read. Raises EyasError where a whole blob is not what its name says."""
        path = self.find(blob)
        found = digest_of(path, blob.start, blob.stop)
        if blob.start == 0 and path.stat().st_size == blob.stop and found != blob.sha256:
            raise EyasError(
                f"{path} is damaged: its SHA-256 is {found[:16]}; it holds {blob.what or 'bytes'} of an earlier state. "
                f"Put it back from a backup; without it that state cannot be brought back"
            )
        return found

    def settle(self) -> None:
        """Flush the names of everything to the disk."""
        for name in FOLDERS:
            fsync_path(self.root / name)
        fsync_path(self.root)
        fsync_path(self.draft)  # for the name of the store itself

    def sweep(self, named: set[str]) -> None:
        """Remove what no change is made of any more: all but the undo blobs in `named`."""
        for folder, kept in ((self.redo, set()), (self.staged, set()), (self.undo, named)):
            with contextlib.suppress(OSError):  # the draft is right either way; the next change tries again
                for name in sorted(set(os.listdir(folder)) - kept):
                    os.unlink(folder / name)

    def remove_if_empty(self) -> None:
        """Leave nothing of the store where no change was ever made."""
        with contextlib.suppress(OSError):
            if not (self.draft / PENDING).exists() and not os.listdir(self.root / "journal"):
                for name in FOLDERS:
                    os.rmdir(self.root / name)

    @staticmethod
    def _holds(path: Path, size: int) -> bool:
        return path.is_file() and path.stat().st_size == size


def _digest(parts: Sequence[Any]) -> tuple[str, int]:
    running, length = hashlib.sha256(), 0
    for block in blocks(parts):
        running.update(block)
        length += len(block)
    return running.hexdigest(), length


def digest_of(path: Path, start: int, stop: int) -> str:
    """SHA-256 of bytes `start` to `stop` of a file."""
    return _digest((Extent(path, start, stop),))[0]
