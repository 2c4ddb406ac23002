"""The one way to a terminal: text that others wrote (names, configs, prompts, servers' lines) arrives there harmless.

    echo(f"{name}: 3 tensors"); console().print(table)

Everything that a command prints goes through here, so that no verb can forget it: a control character, which could move
the cursor, set the window's title or hide a line, is written out (`\\x1b`), and so is what reorders or hides text
(Unicode TR 9 and TR 36).   pytest tests/test_terminal.py
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

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


def console(**options: Any) -> Console:
    """A rich console whose texts are harmless, whoever they are from; no markup is read in them."""
    from rich.console import Console

    made = Console(**{"highlight": False, "markup": False, **options})
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
