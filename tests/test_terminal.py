"""Nothing that others wrote steers the terminal, by whichever way it gets there.   pytest -q tests/test_terminal.py"""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.table import Table

import eyas
from eyas.terminal import console, echo, harmless

STEERING = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\u202eabc",
    "\x9b31m",
    "a\rb",
    "\x08",
    "\u2066",
    "\ufeff",
    "\udc80",
    "\U000e0041",
]


@pytest.mark.parametrize("text", STEERING, ids=ascii)
def test_what_steers_is_written_out(text: str, capsys: pytest.CaptureFixture[str]):
    shown = harmless(text)
    assert all(c.isprintable() for c in shown) and "\\" in shown
    echo(text)
    assert capsys.readouterr().out == shown + "\n"
    out = io.StringIO()
    table = Table("name")
    table.add_row(text)
    console(out).print(table)
    console(out).print(text)
    assert not {c for c in out.getvalue() if not c.isprintable()} - {"\n"}


def test_words_of_all_languages_stay():
    for text in ("τ 1.66 → größer", "日本語", "नमस्ते", "👩‍👩‍👧", "a\tb\nc", "‌می‌خواهم"):
        assert harmless(text) == text


def test_there_is_no_other_way_to_the_terminal():
    """Nobody prints, and nobody makes a console of rich, but the gate (and the programs that engines' Pythons run)."""
    source = Path(eyas.__file__).parent
    for path in source.rglob("*.py"):
        if path.name == "terminal.py" or {"loaders", "servers", "stand_in"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            allowed = called == "click.echo" and path.name == "completion.py"
            assert allowed or called not in ("print", "click.echo", "click.secho", "Console"), f"{path}:{node.lineno}"
