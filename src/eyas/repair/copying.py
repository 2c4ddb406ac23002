"""Bytes from one file to another: shared where the file system can, else copied by the kernel, else through memory.

pytest tests/test_repair_in_place.py
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..draft.assemble import Extent
from ..errors import BadInput, EyasError

FICLONE = 0x40049409  # linux/fs.h: share all blocks of a file, as Btrfs, XFS and bcachefs can
BLOCK = 1 << 24  # bytes in memory, or asked of the kernel, at a time
SLACK = 1 << 18  # bytes of folders, journal and rounding to blocks


def check_space(folder: Path, needed: int) -> None:
    """Raise EyasError where the file system of `folder` has not `needed` bytes left."""
    at = os.statvfs(folder)
    free = at.f_bavail * at.f_frsize
    if free < needed + SLACK:
        raise EyasError(
            f"{folder}: this needs {needed + SLACK:,} bytes of free space, {free:,} are there; free some and run the "
            f"same command again. Nothing was changed"
        )


def write_all(descriptor: int, data: Any, at: int | None = None) -> None:
    """All of `data`, at the file's position or at byte `at`."""
    left = memoryview(data).cast("B")
    while left:
        done = os.write(descriptor, left[:BLOCK]) if at is None else os.pwrite(descriptor, left[:BLOCK], at)
        left = left[done:]
        at = None if at is None else at + done


def blocks(parts: Iterable[Any]) -> Iterator[memoryview]:
    """The bytes of extents, arrays, bytes, and functions that make an array, some at a time."""
    for part in parts:
        if isinstance(part, Extent):
            with open(part.file, "rb", buffering=0) as file:
                at = part.start
                while at < part.stop:
                    data = os.pread(file.fileno(), min(BLOCK, part.stop - at), at)
                    if not data:
                        raise BadInput(f"{part.file} ends at byte {at:,}, expected {part.stop:,}; copy it again")
                    at += len(data)
                    yield memoryview(data)
        elif isinstance(part, bytes):
            yield memoryview(part)
        else:
            import numpy as np

            value = part() if callable(part) else part
            # A scalar or an empty array has no buffer of bytes by itself.
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data.cast("B")


def copy_range(source: int, target: int, start: int, stop: int) -> None:
    """Bytes `start` to `stop` of `source` to the position of `target` (descriptors)."""
    while start < stop:
        try:
            done = os.copy_file_range(source, target, min(stop - start, BLOCK), offset_src=start)
        except OSError:  # another file system, or one that cannot: through memory, which reports what is wrong
            data = os.pread(source, min(stop - start, BLOCK), start)
            write_all(target, data)
            done = len(data)
        if not done:
            raise BadInput("the file ended while it was copied; copy it again")
        start += done


def clone(source: Path, target: Path) -> None:
    """A new file `target` with the bytes, mode and times of `source`, owner-writable, synced; never a hard link."""
    old = os.open(source, os.O_RDONLY)
    try:
        new = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                fcntl.ioctl(new, FICLONE, old)
            except OSError:
                copy_range(old, new, 0, os.fstat(old).st_size)
            as_before(source, target)
            os.fsync(new)
        finally:
            os.close(new)
    finally:
        os.close(old)


def as_before(source: Path, target: Path) -> None:
    """Give `target` the mode, times, extended attributes and, where allowed, the owner of `source`."""
    shutil.copystat(source, target)
    held = os.stat(source)
    with contextlib.suppress(PermissionError):  # the new file is ours then
        os.chown(target, held.st_uid, held.st_gid)
    os.chmod(target, (held.st_mode & 0o7777) | 0o200)
