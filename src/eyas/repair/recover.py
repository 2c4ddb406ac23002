"""Carry out a prepared change; finish one that a crash interrupted.

From the moment that .eyas/pending.json has its name, a change is rolled FORWARD: all that it is made of is on the disk
by then, so finishing it needs neither space nor memory. Before that moment nothing of the draft was touched, and what
was prepared is thrown away.   pytest tests/test_repair_crash.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..draft.files import PENDING
from ..errors import EyasError
from . import file_step, journal
from .lock import locked
from .store import Store


def carry_out(store: Store, record: Mapping[str, Any]) -> None:
    """Do the steps of the pending record and file it. Patches first: only they can run out of space.

    Where the disk refuses one, what was patched is put back and the change dropped; where even that fails, it stays
    pending. Raises EyasError either way.
    """
    numbered = list(enumerate(record["files"]))
    patches = [(place, file) for place, file in numbered if file["how"] == "patch"]
    try:
        for place, file in patches:
            file_step.do(store, place, file)
    except OSError as error:
        with _stays_pending(store):
            for _, file in patches:
                file_step.put_back(store, file)
            journal.dropped(store)
            store.sweep(journal.named(journal.records(store)))
        raise EyasError(
            f"{store.draft} could not be changed ({error.strerror or error}); all of it is as it was. Mend that and "
            f"run the same command again"
        ) from error
    with _stays_pending(store):
        for place, file in numbered:
            if file["how"] != "patch":
                file_step.do(store, place, file)
        journal.finished(store, record)


def finish(store: Store) -> int | None:
    """Finish an interrupted change, throw away one that was only prepared; returns the number of what was finished."""
    record = journal.pending(store)
    if record is not None:
        store.prepare()
        carry_out(store, record)
    if store.undo.is_dir():
        store.sweep(journal.named(journal.records(store)))
    return record["number"] if record is not None else None


def recover(draft: Path) -> int | None:
    """`finish` for whoever only wants to read: takes the lock only where there is something to do."""
    if not (draft / PENDING).exists():
        return None
    with locked(draft) as store:
        return finish(store)


@contextlib.contextmanager
def _stays_pending(store: Store) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EyasError(
            f"{store.draft}: a change could not be finished ({error.strerror or error}); nothing is lost. Mend that "
            f"and run `eyas history {store.draft}`, which finishes it"
        ) from error
