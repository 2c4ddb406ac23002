"""Every message that a user can be told, read off the source: the raise sites of errors.py's family and click's.

from raised import messages
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import eyas

SOURCE = Path(eyas.__file__).parent
TOLD = {"EyasError", "BadInput", "Mismatch", "OutOfMemory", "NotExpressible", "Unusable", "CommandFailed", "Failed"}
OF_CLICK = {"UsageError", "BadParameter", "ClickException"}


@dataclass(frozen=True)
class Message:
    """One raise of an error that is told to users."""

    place: str
    """module:line"""
    kind: str
    text: str
    """The literal parts, with `{}` for each value put in."""
    values: tuple[str, ...]
    """The expressions put in."""


@functools.cache
def messages() -> tuple[Message, ...]:
    """All of them, in the order of the files."""
    return tuple(m for path in sorted(SOURCE.rglob("*.py")) for m in _of(path))


def _of(path: Path) -> Iterator[Message]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = ast.unparse(node.exc.func).rsplit(".", 1)[-1]
            if kind in TOLD | OF_CLICK:
                said = node.exc.args[1 if kind == "Unusable" and len(node.exc.args) > 1 else 0]
                text, values = literal(said)
                yield Message(f"{path.relative_to(SOURCE)}:{node.lineno}", kind, text, values)


def literal(node: ast.expr) -> tuple[str, tuple[str, ...]]:
    """(text with `{}` for values, the values) of a string, an f-string or a sum of such."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, ()
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        (left, some), (right, more) = literal(node.left), literal(node.right)
        return left + right, some + more
    if isinstance(node, ast.JoinedStr):
        parts = [literal(part) for part in node.values]
        return "".join(text for text, _ in parts), tuple(v for _, values in parts for v in values)
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    return "{}", (ast.unparse(inner),)
