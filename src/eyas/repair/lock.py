"""One change of a draft at a time.

    with locked(Path("draft")) as store: ...

pytest tests/test_repair_in_place.py
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import BadInput, EyasError
from ..locks import take
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
        descriptor = take(store.root / LOCK, f"{draft} is being changed")
    except OSError as error:
        raise EyasError(
            f"{store.root} cannot be written to ({error.strerror}), so nothing was changed; mend that, or free space"
        ) from error
    try:
        yield store
    finally:
        store.remove_if_empty()
        if not (store.root / "journal").exists():  # nothing was ever changed here
            with contextlib.suppress(OSError):
                (store.root / LOCK).unlink()
                store.root.rmdir()
        os.close(descriptor)
