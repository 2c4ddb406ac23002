"""What is said beside results: how much (quiet, normal, verbose), in colours or plain, and bars on stderr.

    with bar(total=10, desc="prove", unit="answer") as shown: shown.update()
    pytest tests/test_console.py

Results go to stdout; whatever is said meanwhile goes to stderr, and only where a terminal shows it. Colours, and the
way to a terminal itself: terminal.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

from eyas.terminal import echo, is_terminal

Level = Literal["quiet", "normal", "verbose"]
# What libraries read that draw bars or log by themselves, at a level other than normal.
_VARIABLES: dict[str, dict[str, str]] = {
    "quiet": {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"},
    "verbose": {"TRANSFORMERS_VERBOSITY": "info", "HF_HUB_VERBOSITY": "info"},
}
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
    try:
        yield
    finally:
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
    """A tqdm bar on stderr; silent where nobody watches it, where it was not to be shown, and with --quiet."""
    from tqdm import tqdm

    return tqdm(**{**how, "disable": not (show and watched())})


def teller() -> Callable[[str], None]:
    """Says on stderr what is being done, where a terminal shows it or logs were asked for."""
    if quiet() or not (verbose() or is_terminal(sys.stderr)):
        return lambda text: None
    return lambda text: say(f"  {text} ...")


def say(text: str) -> None:
    """One line on stderr, unless --quiet: what is worth knowing beside the result."""
    if not quiet():
        echo(text, err=True)
