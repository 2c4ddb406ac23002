"""Writes that happen whole or not at all, and what a disk that refuses them says.

    with atomic_path("out/weights.bin") as temporary: ...          pytest tests/test_artifacts.py

Nothing is ever half-written under its final name: everything is written beside it under a temporary name, flushed to
the disk and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.digests import plain
from eyas.errors import EyasError

if TYPE_CHECKING:
    import torch

TEMP_MARK = ".eyas-tmp-"
"""In every temporary name, so that leftovers of a kill can be told from the user's files."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    **dict.fromkeys(FULL, "The disk is full{room}: free some space or choose another --out"),
    errno.EFBIG: "A file may not become so large there{room}: raise the limit (ulimit -f) or choose another --out",
    **dict.fromkeys((errno.EACCES, errno.EPERM),
                    "Writing there is not allowed: choose another --out or mend its permissions"),
    errno.EROFS: "The file system is read-only: choose another --out, or mount it for writing",
    errno.EIO: "The disk fails: look at the system's log and copy what is there elsewhere",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Too many files are open: raise the limit (ulimit -n)"),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
                    "A file is where a folder should be, or the other way round: choose another --out"),
}  # fmt: skip
# The system's words, as safetensors and torch put them into exceptions of their own.
_IN_WORDS = (
    (errno.ENOSPC, ("no space left", "os error 28", "disk quota")),
    (errno.EFBIG, ("file too large", "os error 27")),
    (errno.EROFS, ("read-only file system", "os error 30")),
    (errno.EIO, ("input/output error", "os error 5)")),
)


def _said(path: str | os.PathLike[str], number: int, words: str, needed: int | None) -> str | None:
    """The message for one of _REMEDIES, None for any other error."""
    if number not in _REMEDIES:
        return None
    room = ""
    if needed is not None:
        room = f" ({needed:,} bytes are needed"
        with contextlib.suppress(OSError):
            room += f", {shutil.disk_usage(_existing(Path(path))).free:,} are free"
        room += ")"
    remedy = _REMEDIES[number].format(room=room)
    again = ", and run the same command again; what is done is kept" if number in (*FULL, errno.EFBIG) else ""
    named = re.sub(re.escape(TEMP_MARK) + r"\d+-[0-9a-f]{8}-", "", str(path))  # by the name that it would have got
    return f"{named} cannot be written ({words}). {remedy}{again}."


def _existing(path: Path) -> Path:
    return next((p for p in (path, *path.parents) if p.exists()), Path("/"))


@contextlib.contextmanager
def disk_errors(path: str | os.PathLike[str], needed: int | None = None) -> Iterator[None]:
    """Turn the operating system's refusals to write `path` into an EyasError that names the file and the remedy.

    needed: bytes that it takes, for the message of a full disk.
    """
    try:
        yield
    except OSError as error:
        elsewhere = error.filename is not None and not str(error.filename).startswith(str(Path(path).parent))
        said = _said(path, error.errno or 0, error.strerror or str(error), needed)
        if said is None or (elsewhere and error.errno not in FULL):
            raise  # the body read something else and failed there
        raise EyasError(said) from error
    except Exception as error:
        # safetensors and torch report a full disk as their own exceptions, with the system's words inside.
        text = str(error).lower()
        number = next((number for number, words in _IN_WORDS if any(word in text for word in words)), None)
        if isinstance(error, EyasError) or number is None:
            raise
        raise EyasError(str(_said(path, number, str(error), needed))) from error


def fsync_path(path: str | os.PathLike[str]) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str], needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it and rename it to `path`, on any error remove it.

    The temporary name keeps the suffix of `path`, since some writers choose their format by it. Raises EyasError where
    the disk is full (`needed`: the bytes that are to be written) or the folder cannot be written.
    """
    final = Path(path)
    temporary = final.with_name(f"{TEMP_MARK}{os.getpid()}-{secrets.token_hex(4)}-{final.name}")
    with disk_errors(final, needed):
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            fsync_path(temporary)
            os.replace(temporary, final)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        fsync_path(final.parent)  # the rename itself


@contextlib.contextmanager
def atomic_dir(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Like `atomic_path` for a folder: yield an empty temporary folder and rename it, whole, to `path`.

    Where `path` exists it is replaced: moved aside first, removed once the new one is in place.
    """
    final = Path(path)
    temporary = final.with_name(f"{TEMP_MARK}{os.getpid()}-{secrets.token_hex(4)}-{final.name}")
    aside = temporary.with_name(temporary.name + "-old")
    with disk_errors(final):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for entry in sorted(temporary.rglob("*"), reverse=True):
                if not entry.is_symlink():
                    fsync_path(entry)
            fsync_path(temporary)
            if final.exists():
                os.rename(final, aside)
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            if aside.exists() and not final.exists():
                os.rename(aside, final)
            raise
        fsync_path(final.parent)
        shutil.rmtree(aside, ignore_errors=True)


def atomic_write(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write `data` (text as UTF-8) to `path`, whole or not at all."""
    raw = data.encode() if isinstance(data, str) else data
    with atomic_path(path, len(raw)) as temporary, open(temporary, "wb") as file:
        file.write(raw)


def atomic_write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, keys in their order, whole or not at all."""
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False, default=plain) + "\n")


def atomic_save_safetensors(
    tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as safetensors, whole or not at all. Equal tensors and metadata give equal bytes."""
    from safetensors.torch import save_file

    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with atomic_path(path, needed) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, dict(metadata or {}))
        _sort_metadata(temporary)


def _sort_metadata(path: Path) -> None:
    """Put the metadata of a safetensors file in order, in place.

    The library keeps it in a hash map whose order changes from process to process (safetensors/src/tensor.rs,
    `HashMap<String, String>`), so equal content would have many digests. The header keeps its length.
    """
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        if len(header.get("__metadata__", ())) < 2:
            return
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > size:  # escapes spelled otherwise than the library does: rather unsorted than damaged
            return
        file.seek(8)
        file.write(text.ljust(size))


@contextlib.contextmanager
def scratch_dir(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new folder in `directory` that is gone at the end; after a kill `remove_leftovers` removes it."""
    folder = Path(directory) / f"{TEMP_MARK}{os.getpid()}-{secrets.token_hex(4)}"
    with disk_errors(folder):
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(directory: str | os.PathLike[str]) -> list[str]:
    """Remove temporary files and folders that killed writers left in `directory`; return their names.

    Only those of processes that no longer live are touched, so several processes may share a folder.
    """
    removed = []
    for path in sorted(Path(directory).glob(f"{TEMP_MARK}*")):
        pid = path.name.removeprefix(TEMP_MARK).split("-", 1)[0]
        if pid.isdigit() and int(pid) != os.getpid() and Path(f"/proc/{pid}").exists():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        removed.append(path.name)
    return removed
