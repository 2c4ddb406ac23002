"""One writer of a folder at a time: a lock that the kernel lets go of when its process ends, however it ends.

    with inside(out): ...          # a folder that grows in its place: out/.lock
    with beside(out): ...          # one that appears whole: .out.lock beside it

A second run on the same folder is refused at once, by the process that holds it; after a SIGKILL there is nothing to
clean up. Where several processes do one run (torchrun, Ray) the first alone takes the lock.

    pytest tests/test_locks.py
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from eyas.errors import EyasError
from eyas.terminal import echo
from eyas.writes import disk_errors

LOCK = ".lock"
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
# What file systems answer that keep no locks: NFS without its lock daemon, Lustre mounted without -o flock.
_NONE_KEPT = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made where it is not there. Raises EyasError naming the process that holds it."""
    made = not folder.exists()
    try:
        with _held(folder / LOCK, folder):
            yield
    finally:
        if made:  # a refusal leaves nothing behind
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Hold the name of a folder that is replaced as a whole."""
    folder = folder.absolute()
    path = folder.with_name(f".{folder.name}{LOCK}")
    with _held(path, folder):
        yield


@contextlib.contextmanager
def _held(path: Path, folder: Path) -> Iterator[None]:
    with disk_errors(path):
        descriptor = take(path, f"{folder} is being written")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a folder that was moved, or became read-only: nobody holds it all the same
            if _same(descriptor, path):
                path.unlink()
        os.close(descriptor)


def take(path: Path, busy: str) -> int:
    """Lock the file `path`, made with its folder where it is not there; note who holds it; a descriptor to close.

    busy: how the refusal begins. Raises EyasError where another process holds it, OSError where it cannot be made.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # whoever had made the folder, and leaves it empty, took it away in between
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            if error.errno in _NONE_KEPT:
                echo(f"note: {path.parent} lies on a file system that keeps no locks ({error.strerror}): run one "
                     f"command at a time there", err=True)  # fmt: skip
                return descriptor
            os.close(descriptor)
            if error.errno not in _BUSY:
                raise
            raise EyasError(
                f"{busy} by {holder}; wait until it has ended and run the same command again, or choose another folder"
            ) from None
        if _same(descriptor, path):
            with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only its owner goes unnamed
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)  # somebody removed the file between our opening and our locking it


def _holder(descriptor: int) -> str:
    pid, _, host = os.pread(descriptor, 200, 0).decode(errors="replace").strip().partition(" ")
    if not pid.isdigit():
        return "another process"
    return f"process {pid}" + (f" on {host}" if host and host != socket.gethostname() else "")


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
