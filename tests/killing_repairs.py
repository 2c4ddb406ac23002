"""Repairs a draft in place again and again, killed by SIGKILL at one call of the system after the other.

    python tests/killing_repairs.py CASE EMPTY_DIR

A process of its own, since it forks: all modules are imported once, and each attempt is a child that inherits them.
Prints one JSON line: how many kills there were, and what was wrong after any. test_repair_crash.py reads it.

fsync is counted and not done: a SIGKILL loses nothing that was written. What a loss of power needs is the order of
writes and fsyncs, which test_repair_crash.py checks by itself.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from changing import CHANGES, leftovers, state, write_draft
from eyas.draft.files import PENDING, open_folder
from eyas.errors import BadInput
from eyas.repair import history as h
from eyas.repair import in_place

CALLS = (
    "write", "pwrite", "fsync", "fdatasync", "rename", "replace", "unlink", "rmdir", "mkdir", "utime", "chmod", "chown",
    "ftruncate", "copy_file_range",
)  # fmt: skip
REAL = {name: getattr(os, name) for name in CALLS}
UNSYNCED = ("fsync", "fdatasync")


def watch(reached: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call `reached(name, arguments)` before each call of the system that changes something."""

    def hooked(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            reached(name, args)
            return None if name in UNSYNCED else REAL[name](*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, hooked(name))


def unwatch() -> None:
    for name in CALLS:
        setattr(os, name, (lambda *_, **__: None) if name in UNSYNCED else REAL[name])


WRITES = ("write", "pwrite")


def die_at(nth: int, torn: bool, refuse: str | None, noted: list[str]) -> None:
    """Make this process kill itself at the n-th call (0: never); torn: halfway through it, where it writes.

    refuse: the second call of that name finds the disk full, so that what is done about it is interrupted, too.
    noted: takes the names of the calls.
    """
    seen: Counter[str] = Counter()

    def reached(name: str, args: tuple[Any, ...]) -> None:
        seen[name] += 1
        noted.append(name)
        if len(noted) == nth:
            if torn:
                data = memoryview(args[1]).cast("B")
                REAL[name](args[0], data[: len(data) // 2], *args[2:])
            os.kill(os.getpid(), signal.SIGKILL)
        if name == refuse and seen[name] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    watch(reached)


def child(work: Callable[[], Any], nth: int = 0, torn: bool = False, refuse: str | None = None) -> list[str] | None:
    """Do the work in a child that is killed at its n-th call. None if it was, else the names of its calls."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, noted = 1, []
        try:
            die_at(nth, torn, refuse, noted)
            try:
                work()
            except in_place.EyasError:
                if refuse is None:
                    raise
            REAL["write"](writer, json.dumps(noted).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        said = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    assert status == 0, "the child failed by itself"
    return list(json.loads(said))


class Case:
    """A draft, and what is done to it."""

    def __init__(self, name: str, root: Path):
        self.root, self.draft = root, root / "draft"
        self.sharded = name.startswith("sharded_")
        self.name = name.removeprefix("sharded_")
        self.refuse = "pwrite" if self.name == "full_disk" else None
        self.pristine = write_draft(root / "pristine", self.sharded)
        self.before = 0  # changes in the history before the one that is interrupted
        if self.name == "revert":
            for change in ("same_size", "renamed", "other_size", "of_everything"):
                in_place.repair_in_place(self.pristine, CHANGES[change](self.pristine), {"operation": change})
            self.before = 4
        self.reset()
        self.old = state(self.draft)
        self.work()
        self.new = state(self.draft)
        if self.name == "recovery":
            self._leave_half_done()

    def reset(self) -> None:
        shutil.rmtree(self.draft, ignore_errors=True)
        shutil.copytree(self.pristine, self.draft)

    def work(self) -> None:
        if self.name == "revert":
            h.revert(self.draft, 2)
        elif self.name == "recovery" and self.before is None:
            h.history(self.draft)
        else:
            name = {"recovery": "of_everything", "full_disk": "same_size"}.get(self.name, self.name)
            in_place.repair_in_place(self.draft, CHANGES[name](self.draft), {"operation": name})

    def _leave_half_done(self) -> None:
        """Make the pristine draft one whose repair was killed at its first rename into the draft."""
        nth = 1
        while True:
            self.reset()
            child(self.work, nth)
            if (self.draft / PENDING).exists() and state(self.draft) not in (self.old, self.new):
                break
            nth += 1
        shutil.rmtree(self.pristine)
        shutil.copytree(self.draft, self.pristine)
        self.before = None  # type: ignore[assignment]

    def check(self) -> list[str]:
        """What is wrong after a kill."""
        wrong = []
        pending, found = (self.draft / PENDING).exists(), state(self.draft)
        if not pending and found not in (self.old, self.new):
            wrong.append("neither old nor new, and nothing says so")
        try:
            open_folder(self.draft)
            if pending:
                wrong.append("a reader did not notice")
        except BadInput as error:
            if not pending or "eyas history" not in str(error):
                wrong.append(f"a reader was refused: {error}")
        base = self.before or 0
        count, found = len(h.history(self.draft)), state(self.draft)
        if found != (self.new if count > base else self.old):
            wrong.append("after recovery neither old nor new")
        if count == base:
            self.work()
        if state(self.draft) != self.new:
            wrong.append("the repair could not be done again")
        h.revert(self.draft)
        if state(self.draft) != self.old:
            wrong.append("the old state did not come back")
        h.revert(self.draft)
        if state(self.draft) != self.new:
            wrong.append("the new state did not come back")
        return wrong + [f"left over: {name}" for name in leftovers(self.draft)]


def main(name: str, root: Path) -> dict[str, Any]:
    unwatch()
    case = Case(name, root)
    kills, wrong = 0, []
    case.reset()
    calls = child(case.work, refuse=case.refuse)
    assert calls is not None
    if state(case.draft) != (case.old if case.refuse else case.new):
        wrong.append("what was not killed did not end as it should")
    for nth, name_of_call in enumerate(calls, 1):
        for torn in (False, True) if name_of_call in WRITES else (False,):
            case.reset()
            if child(case.work, nth, torn, case.refuse) is not None:
                wrong.append(f"call {nth} was not reached")
            kills += 1
            wrong += [f"call {nth} ({name_of_call}){' torn' if torn else ''}: {text}" for text in case.check()]
    return {"case": name, "kills": kills, "wrong": wrong[:10]}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))), flush=True)
