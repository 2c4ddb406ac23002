"""Runs the command line on what an attacker may have written, in a child that is bounded in memory and time.

said = eyas("inspect", str(draft)); said.harmless(); said.refused("config.json")
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

ROOM = 3 << 29  # bytes above what the test process has: a bomb that goes off needs more
PATIENCE = 60  # seconds
# What no output may hold but newlines and tabs: C0, DEL, C1, and what reorders or hides text.
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


@dataclass(frozen=True)
class Said:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    def harmless(self) -> Said:
        """No traceback, no hang, nothing raw on the terminal, nothing of a file elsewhere."""
        assert self.code in (0, 1, 2, 3), f"exit code {self.code}\n{self.err[-3000:]}"
        assert "Traceback" not in self.err, self.err[-3000:]
        for text in (self.out, self.err):
            assert not (found := RAW.search(text)), f"{found[0]!r} in {text[max(0, found.start() - 200) :][:400]!r}"
            assert "root:" not in text
        return self

    def refused(self, *words: str) -> Said:
        """One line on stderr that begins with the program's name and holds these words; an exit code to match."""
        self.harmless()
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert self.code != 0 and len(lines) == 1 and lines[0].startswith("eyas: "), (self.code, self.err)
        assert len(lines[0]) < 2000
        for word in words:
            assert word in lines[0], (word, lines[0])
        return self


def eyas(*arguments: str, before: Callable[[], None] | None = None) -> Said:
    """`eyas ARGUMENTS` in a child of this process, which has imported most already. before: called in the child."""
    pipes = [os.pipe() for _ in range(2)]
    child = os.fork()
    if child == 0:
        _run([writer for _, writer in pipes], arguments, before)
    texts = ["", ""]

    def read(place: int) -> None:
        with open(pipes[place][0], encoding="utf-8", errors="backslashreplace") as file:
            texts[place] = file.read()

    for _, writer in pipes:
        os.close(writer)
    readers = [threading.Thread(target=read, args=(place,)) for place in range(2)]
    for reader in readers:
        reader.start()
    status = os.waitpid(child, 0)[1]
    for reader in readers:
        reader.join()
    return Said(os.waitstatus_to_exitcode(status), *texts)


def _run(writers: list[int], arguments: tuple[str, ...], before: Callable[[], None] | None) -> None:
    status = 99
    try:
        for number, writer in zip((1, 2), writers, strict=True):
            os.dup2(writer, number)
        sys.stdin = open(os.devnull)  # noqa: SIM115  (closed with the process)
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        from eyas.cli import main

        if before is not None:
            before()
        main(list(arguments))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)  # whatever happens: a child that goes on would run the tests a second time
