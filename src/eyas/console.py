"""What is said beside results: how much (quiet, normal, verbose), in colours or plain, and bars on stderr.

    with bar(total=10, desc="prove", unit="answer") as shown: shown.update()
    console().print("no escape sequence unless a terminal shows it")            pytest tests/test_console.py

Results go to stdout; whatever is said meanwhile goes to stderr, and only where a terminal shows it. NO_COLOR and
FORCE_COLOR as no-color.org and force-color.org describe them: any value that is not empty counts, and NO_COLOR wins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import Console

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


def wants_color(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Colour on a terminal that is not dumb; never with a non-empty NO_COLOR, always with a non-empty FORCE_COLOR."""
    if environment.get("NO_COLOR"):
        return False
    return bool(environment.get("FORCE_COLOR")) or _terminal(stream, environment)


def _terminal(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> bool:
    """One that can move its cursor. A stream that is closed, or that pythonw never opened, is none."""
    try:
        return stream is not None and stream.isatty() and environment.get("TERM") != "dumb"
    except ValueError:
        return False


def console(stream: TextIO | None = None, *, markup: bool = False) -> Console:
    """rich on stdout (or `stream`), which alone would keep bold and dim letters under NO_COLOR."""
    from rich.console import Console

    color = wants_color(stream or sys.stdout)
    return Console(
        file=stream, highlight=False, markup=markup, force_terminal=color, color_system="auto" if color else None
    )


def watched() -> bool:
    """Does somebody look at stderr while we work, and want to?"""
    return not quiet() and _terminal(sys.stderr)


def bar(*, show: bool = True, **how: Any) -> Any:
    """A tqdm bar on stderr; silent where nobody watches it, where it was not to be shown, and with --quiet."""
    from tqdm import tqdm

    return tqdm(**{**how, "disable": not (show and watched())})


def teller() -> Callable[[str], None]:
    """Says on stderr what is being done, where a terminal shows it or logs were asked for."""
    if quiet() or not (verbose() or _terminal(sys.stderr)):
        return lambda text: None
    return lambda text: say(f"  {text} ...")


def say(text: str) -> None:
    """One line on stderr, unless --quiet: what is worth knowing beside the result."""
    if not quiet():
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # the one place that may
