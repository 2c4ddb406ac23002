"""What is said beside results: how much (quiet, normal, verbose), in colours or plain, and bars on stderr.

    with bar(total=10, desc="prove", unit="answer") as shown: shown.update()
    pytest tests/test_console.py

Results go to stdout; whatever is said meanwhile goes to stderr: bars where a terminal shows them, a line every
quarter of a minute elsewhere. Colours, and the way to a terminal itself: terminal.py.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from eyas.terminal import echo, is_terminal

Level = Literal["quiet", "normal", "verbose"]
# What libraries read that draw bars or log by themselves, at a level other than normal.
_VARIABLES: dict[str, dict[str, str]] = {
    "quiet": {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"},
    "verbose": {"TRANSFORMERS_VERBOSITY": "info", "HF_HUB_VERBOSITY": "info"},
}
PAUSE_S = 15.0
"""Seconds between two lines of progress where no terminal shows a bar: enough to see in a log that work goes on."""
_LIBRARIES = ("transformers", "huggingface_hub")
_level: Level = "normal"
_bounded = False


def quiet() -> bool:
    """Were only results and errors asked for (--quiet)?"""
    return _level == "quiet"


def verbose() -> bool:
    """Were logs, times and tracebacks asked for (--verbose)?"""
    return _level == "verbose"


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """Whatever `speak` chooses inside ends here: level, variables and log handlers are as before afterwards."""
    global _level, _bounded
    outer, _bounded = _bounded, True
    before, variables = _level, {name: os.environ.get(name) for names in _VARIABLES.values() for name in names}
    handlers, severity = list(logging.root.handlers), logging.root.level
    libraries = {name: logging.getLogger(name).level for name in _LIBRARIES}
    try:
        yield
    finally:
        for name, level in libraries.items():  # they set their own when imported, by the variables above
            logging.getLogger(name).setLevel(level)
        _level, _bounded = before, outer
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        logging.root.handlers[:] = handlers
        logging.root.setLevel(severity)


def bounded() -> bool:
    """Is somebody `speaking`, so that what is chosen now ends?"""
    return _bounded


def speak(level: Level) -> None:
    """How much is said from now on, by Eyas and by the libraries that it calls (which read this when imported)."""
    global _level
    _level = level
    for name, value in _VARIABLES.get(level, {}).items():
        os.environ.setdefault(name, value)
    if level == "verbose":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        logging.root.addHandler(handler)
        logging.root.setLevel(logging.INFO)


def watched() -> bool:
    """Does somebody look at stderr while we work, and want to?"""
    return not quiet() and is_terminal(sys.stderr)


def bar(*, show: bool = True, **how: Any) -> Any:
    """A tqdm bar on stderr; where that is no terminal a line now and then; silent where not to be shown, or --quiet."""
    from tqdm import tqdm

    if not show or quiet():
        return tqdm(**{**how, "disable": True})
    return (tqdm if is_terminal(sys.stderr) else _lines())(**how)


def teller() -> Callable[[str], None]:
    """Says on stderr what is being done; where no terminal shows it and no logs were asked for, only now and then."""
    if quiet():
        return lambda text: None
    if verbose() or is_terminal(sys.stderr):
        return lambda text: say(f"  {text} ...")
    pause = _Pause(PAUSE_S / 3)  # it has few things to say
    return lambda text: say(f"  {text} ...") if pause.over() else None


class _Pause:
    """Is it time for the next line into a log? What takes less than so many seconds needs none."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.spoke = seconds, time.monotonic()

    def over(self) -> bool:
        """At most once in so many seconds."""
        now = time.monotonic()
        if now - self.spoke < self.seconds:
            return False
        self.spoke = now
        return True


@functools.cache
def _lines() -> Any:
    """tqdm, imported when a bar is wanted, as lines of text for a log."""
    from tqdm import tqdm

    class Lines(tqdm):
        def __init__(self, **how: Any) -> None:
            self.pause = _Pause(PAUSE_S)
            # tqdm's own control characters go nowhere; it need not look at the clock more often than we speak.
            super().__init__(**{**how, "file": io.StringIO(), "mininterval": min(1.0, PAUSE_S), "miniters": 0,
                                "leave": False})  # fmt: skip

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if msg is None and self.pause.over():
                of = "" if self.total is None else f" of {self.total:,}"
                postfix = f", {self.postfix}" if self.postfix else ""
                took = self.format_interval(self.format_dict["elapsed"])
                say(f"  {self.desc.removesuffix(': ')}: {self.n:,}{of} {self.unit}s, {took} elapsed{postfix}")
            return True

    return Lines


def say(text: str) -> None:
    """One line on stderr, unless --quiet: what is worth knowing beside the result."""
    if not quiet():
        echo(text, err=True)
