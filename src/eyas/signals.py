"""SIGTERM and SIGHUP end a command as Ctrl-C does: work that is done is kept, children are stopped, one line is said.

    with_signals()          # once, by the command line

pytest tests/test_signals.py
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any


class Terminated(KeyboardInterrupt):
    """A signal that asks to end. What cleans up after Ctrl-C does so after this, too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """As a shell tells it: 143 for SIGTERM."""
        return 128 + self.number

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


def with_signals() -> None:
    """Raise Terminated in the main thread on the first SIGTERM or SIGHUP; a second one ends the process at once.

    Signals that somebody else handles, or that are ignored (nohup), stay as they are. Under torchrun too: a process
    that waits in a collective operation runs no Python, and torchrun would wait half a minute for it.
    """
    if threading.current_thread() is not threading.main_thread() or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # of an interpreter that is not the main one
                signal.signal(number, _end)


def _end(number: int, _frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Terminated(number)
