"""One change of a draft at a time.

    with locked(Path("draft")) as store: ...

pytest tests/test_repair_in_place.py
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import BadInput, EyasError
from .store import Store

LOCK = "lock"


@contextlib.contextmanager
def locked(draft: Path) -> Iterator[Store]:
    """Hold the draft's lock, and yield its store. The kernel lets go of it when the process ends, however it ends.

    Raises EyasError naming the process that holds it, or where the folder cannot be written to.
    """
    store = Store(draft)
    if store.root.is_symlink():
        raise BadInput(f"{store.root} is a symlink; an undo store must lie in the draft itself. Remove the link")
    try:
        store.root.mkdir(exist_ok=True)
        descriptor = _take(store.root / LOCK, draft)
    except OSError as error:
        raise EyasError(
            f"{store.root} cannot be written to ({error.strerror}), so nothing was changed; mend that, or free space"
        ) from error
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only its owner goes unnamed
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield store
    finally:
        store.remove_if_empty()
        if not (store.root / "journal").exists():  # nothing was ever changed here
            with contextlib.suppress(OSError):
                (store.root / LOCK).unlink()
                store.root.rmdir()
        os.close(descriptor)


def _take(path: Path, draft: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(descriptor, path):
                return descriptor
        except OSError as error:
            held = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise EyasError(
                    f"{draft} is being changed by process {held or 'unknown'}; wait until it has ended and run the "
                    f"same command again"
                ) from None
            raise
        os.close(descriptor)  # somebody removed the file between our opening and our locking it


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
