"""A small process between Eyas and a server that it started, so that no process of the server outlives Eyas.

    python -I guard.py PARENT_PID LOG GRACE_SECONDS COMMAND...

Eyas holds the other end of its standard input. When that closes, when the parent is gone (SIGKILL included) or on
SIGTERM, the server is asked to stop and then made to: SIGINT to itself, SIGTERM to its group, SIGKILL to everything
below. It is made the subreaper of all that it starts, so grandchildren that left the group or were orphaned are found.
What it says, a line each: `PID n` when the server was started, `EXIT code` when nothing of it is left, `FAILED why`.

Standard library only: it runs alone.          pytest tests/test_serve_process.py
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL = 0.2  # seconds between two looks
AFTER_TERM = 3.0  # seconds that are left after SIGTERM, at most


def _prctl(option: int, value: int) -> None:
    """Does nothing where there is no prctl: there the process group has to do."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _in_the_server() -> None:
    """Between fork and exec: signals as a terminal gives them (a shell's `&` ignores SIGINT); the guard's end is heard
    of, too."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def descendants(root: int) -> list[int]:
    """Living processes below `root`, by /proc; [] where there is none."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue  # it ended meanwhile
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found, open_ = [], [root]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


class Guard:
    """The server and what became of it."""

    def __init__(self, parent: int, log: str, grace: float, command: list[str]) -> None:
        self.parent, self.grace, self.told = parent, grace, False
        self.code: int | None = None
        signal.signal(signal.SIGTERM, self._tell)
        for name in (signal.SIGINT, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        with open(log, "ab") as file:
            self.server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=_in_the_server,
            )  # fmt: skip

    def _tell(self, *_: object) -> None:
        self.told = True

    def reap(self) -> None:
        """Collect whoever ended, orphans included, and keep the server's exit code."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.server.pid:
                    self.code = os.waitstatus_to_exitcode(status)

    def wanted(self) -> bool:
        """Is anybody still there who wants the server?"""
        if self.told or os.getppid() != self.parent:
            return False
        readable, _, _ = select.select([0], [], [], POLL)
        return not readable or bool(os.read(0, 64))

    def watch(self) -> int:
        """Until the server ends or nobody wants it any more; returns its exit code once nothing of it is left."""
        while self.code is None and self.wanted():
            self.reap()
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.server.pid, signal.SIGINT)
            self._wait(self.grace)
        if descendants(os.getpid()) or self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.server.pid, signal.SIGTERM)
            for pid in descendants(os.getpid()):
                self._kill(pid, signal.SIGTERM)
            self._wait(min(AFTER_TERM, self.grace), everybody=True)
        while True:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.server.pid, signal.SIGKILL)
            left = descendants(os.getpid())
            for pid in left:
                self._kill(pid, signal.SIGKILL)
            self.reap()
            if not left and self.code is not None:
                return self.code
            time.sleep(0.02)

    def _wait(self, seconds: float, everybody: bool = False) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.reap()
            if self.code is not None and not (everybody and descendants(os.getpid())):
                return
            time.sleep(0.05)

    def _kill(self, pid: int, how: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, how)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be left to hear it
        os.write(1, f"{line}\n".encode())


def main() -> int:
    parent, log, grace, *command = sys.argv[1:]
    try:
        guard = Guard(int(parent), log, float(grace), command)
    except OSError as error:
        _say(f"FAILED {command[0]}: {error.strerror}")
        return 127
    _say(f"PID {guard.server.pid}")
    _say(f"EXIT {guard.watch()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
