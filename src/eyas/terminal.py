"""The one way to a terminal: text that others wrote (names, configs, prompts, servers' lines) arrives there harmless.

    echo(f"{name}: 3 tensors"); console().print(table)

Everything that a command prints goes through here, so that no verb can forget it: a control character, which could move
the cursor, set the window's title or hide a line, is written out (`\\x1b`), and so is what reorders or hides text
(Unicode TR 9 and TR 36). NO_COLOR and FORCE_COLOR as no-color.org and force-color.org describe them: any value that is
not empty counts, and NO_COLOR wins.   pytest tests/test_terminal.py tests/test_console.py
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

# C0 but newline and tab, DEL, C1; marks of direction; separators of lines; joiners and tags that nothing shows; halves
# of characters. Not the joiners of emoji and of Indic scripts (U+200C, U+200D).
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def harmless(text: str) -> str:
    """The text with every such character written out as Python would: `\\x1b`, `\\u202e`. Newlines and tabs stay."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape", "backslashreplace").decode(), text)


def echo(
    text: Any = "", *, err: bool = False, nl: bool = True, styled: bool = False, color: bool | None = None
) -> None:
    """Print a text. styled: it holds colours of ours, and what others wrote in it went through `harmless` before."""
    click.echo(text if styled else harmless(str(text)), err=err, nl=nl, color=color)


def wants_color(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Colour on a terminal that is not dumb; never with a non-empty NO_COLOR, always with a non-empty FORCE_COLOR."""
    if environment.get("NO_COLOR"):
        return False
    return bool(environment.get("FORCE_COLOR")) or is_terminal(stream, environment)


def is_terminal(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> bool:
    """One that can move its cursor. A stream that is closed, or that pythonw never opened, is none."""
    try:
        return stream is not None and stream.isatty() and environment.get("TERM") != "dumb"
    except ValueError:
        return False


def console(stream: TextIO | None = None, *, markup: bool = False) -> Console:
    """rich on stdout (or `stream`), whose texts are harmless, whoever they are from; no markup is read in them.

    Alone, rich would keep bold and dim letters under NO_COLOR.
    """
    from rich.console import Console

    color = wants_color(stream or sys.stdout)
    made = Console(
        file=stream, highlight=False, markup=markup, force_terminal=color, color_system="auto" if color else None
    )
    made.push_render_hook(_Hook())  # type: ignore[arg-type]  # a RenderHook by its one method; rich loads late
    return made


class _Hook:
    def process_renderables(self, renderables: Sequence[Any]) -> list[Any]:
        return [_Harmless(renderable) for renderable in renderables]


class _Harmless:
    """A renderable whose segments of text are harmless; rich adds its colours later."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for segment in console.render(self.inner, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)
