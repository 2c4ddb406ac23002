"""A line of a plan: a name, a formula, the values put in, and the result. What is printed is what was computed.

    line("taps", "B", "2*T*H", T=3, H=7168).result        # 43008

A formula is text of arithmetic over named values, and the result is that text evaluated: the two cannot differ.
    Exercise it:  pytest tests/test_plan.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FUNCTIONS = {"ceil": math.ceil, "min": min, "max": max}
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Line:
    """One number of a plan. unit: "" (a count), "B", "FLOP", "s", "$", or what follows the number."""

    name: str
    unit: str
    formula: str
    values: Mapping[str, float]
    result: float

    @property
    def filled(self) -> str:
        """The formula with its values: `2*3*7,168`."""
        return _NAME.sub(lambda m: number(self.values[m[0]]) if m[0] in self.values else m[0], self.formula)

    @property
    def shown(self) -> str:
        """The result for people: `43.0 kB`, `1,193,000,000`, `2.1 h`."""
        return amount(self.result, self.unit)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "values": dict(self.values)}


@dataclass(frozen=True)
class Section:
    """Lines that belong together; the last is what they come to."""

    title: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"title": self.title, "lines": [line.to_dict() for line in self.lines], "notes": list(self.notes)}


def line(name: str, unit: str, formula: str, **values: float) -> Line:
    """Evaluate `formula` over `values`. The formulas are this package's own; nothing of a user's is evaluated."""
    result = eval(formula, {"__builtins__": {}, **FUNCTIONS}, dict(values))
    return Line(name, unit, formula, values, result)


def total(name: str, unit: str, lines: list[Line]) -> Line:
    """The sum of lines, as a line whose formula names them by their order: `a + b + c`."""
    letters = [chr(ord("a") + i) for i in range(len(lines))]
    return line(name, unit, " + ".join(letters), **{x: y.result for x, y in zip(letters, lines, strict=True)})


def number(value: float) -> str:
    """1234567.0 -> 1,234,567; 0.25 -> 0.25; 9.89e14 -> 9.89e+14."""
    if float(value).is_integer() and abs(value) < 1e13:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e4 or abs(value) >= 1e13 else f"{value:,.0f}"


def amount(value: float, unit: str) -> str:
    """A number with its unit, in the size that people read."""
    if unit == "s":
        long = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))
        span, name = next(((s, n) for s, n in long if value >= 2 * s), (1.0, "s"))
        return f"{value / span:,.1f} {name}"
    if unit == "$":
        return f"${value:,.2f}" if value < 100 else f"${value:,.0f}"
    if unit in ("B", "FLOP"):
        size, prefix = next(((s, p) for s, p in _UNITS if abs(value) >= s), (1.0, ""))
        return f"{value / size:,.{0 if size == 1 else 2}f} {prefix}{unit}"
    return f"{number(value)}{' ' + unit if unit else ''}"
