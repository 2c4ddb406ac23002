"""Plots that answer: the figure around one, its data for plots.js, and the library that draws it, in the page itself.

pytest tests/test_report_run.py          make test-browser

The library is uPlot (MIT, 51 kB; vendor/README.md): a page must open from a disk without a network, so the whole of it
is in every page, and plotly's 4 MB or Chart.js's 200 kB would be most of the file. A canvas says nothing to a screen
reader, so each plot has a sentence, a slider that reads values, and a table with the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from eyas.report.page import e

UPLOT = ("vendor", "uplot")
CSS = """
:root{--c0:#0067a8;--c1:#bf4a00;--c2:#00785a;--c3:#9c3d82;--c4:#7a5c00;--c5:#5c6670}
@media (prefers-color-scheme:dark){:root{--c0:#6cbcf0;--c1:#ff9a5c;--c2:#4fd1ad;--c3:#e69ad0;--c4:#e3cb62;--c5:#b4bec8}}
figure{margin:0}figure h3{margin-top:.25rem}figcaption p{font-size:.875rem;color:var(--quiet);margin:.1rem 0 .4rem}
.unscripted{display:none}@media (scripting:none){.unscripted{display:block}.canvas{display:none}}
.canvas{width:100%;min-height:220px;overflow:hidden}.canvas .u-over{cursor:crosshair}
.u-select{background:color-mix(in srgb,var(--blue) 18%,transparent)}
.u-hz .u-cursor-x,.u-hz .u-cursor-y,.u-vt .u-cursor-x,.u-vt .u-cursor-y{border-color:var(--quiet)}
.curves{border:0;margin:.25rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:.1rem 1rem;font-size:.875rem}
.curves label{display:inline-flex;align-items:center;gap:.4rem;min-height:1.75rem;cursor:pointer}
.curves input{accent-color:var(--blue);margin:0}
.swatch{display:inline-block;width:1.1rem;border-top:3px solid currentColor}.swatch.dashed{border-top-style:dashed}
.value{font-variant-numeric:tabular-nums;color:var(--quiet)}
.reader{display:flex;align-items:center;flex-wrap:wrap;gap:.25rem .75rem;font-size:.875rem;margin:.25rem 0}
.reader .value{min-width:10rem}.reader input{appearance:none;background:none;flex:1 1 10rem;min-width:0;height:1.5rem;
cursor:ew-resize}.reader input::-webkit-slider-runnable-track{height:2px;background:var(--quiet)}
.reader input::-moz-range-track{height:2px;background:var(--quiet)}
.reader input::-webkit-slider-thumb{appearance:none;width:1rem;height:1rem;margin-top:-7px;border-radius:50%;
background:var(--blue)}.reader input::-moz-range-thumb{width:1rem;height:1rem;border:0;border-radius:50%;
background:var(--blue)}
button{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--quiet);border-radius:.3rem;
padding:.15rem .6rem;cursor:pointer}button[hidden]{display:none}
:is(a,summary,button,input,.box):focus-visible{outline:2px solid var(--blue);outline-offset:2px;border-radius:2px}
.hidden{position:absolute;width:1px;height:1px;margin:-1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
"""


@dataclass(frozen=True)
class Curve:
    """One line. values: a number or None for each x of its plot. tone: a colour variable, c0 to c5."""

    label: str
    values: Sequence[float | None]
    tone: str
    dash: tuple[int, ...] = ()
    show: bool = True
    points: bool = False
    width: float = 1.75


@dataclass(frozen=True)
class Plot:
    """What plots.js draws. `whole`: x are the whole numbers of a few positions; `log`: x is logarithmic; `from_`, `to`:
    where the y axis begins and ends at most; marks: (x, tone) of vertical lines."""

    name: str
    title: str
    x_label: str
    x: Sequence[float]
    curves: Sequence[Curve]
    digits: int = 3
    unit: str = ""
    whole: bool = False
    log: bool = False
    from_: float | None = None
    to: float | None = None
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for curve in self.curves:
            if len(curve.values) != len(self.x):
                raise ValueError(f"{self.name}, {curve.label}: {len(curve.values)} values for {len(self.x)} points")

    def to_dict(self) -> dict[str, Any]:
        """As plots.js reads it."""
        series = [
            {"label": c.label, "values": list(c.values), "tone": c.tone, "dash": list(c.dash) or None, "show": c.show,
             "points": c.points, "width": c.width}
            for c in self.curves
        ]  # fmt: skip
        return {
            "title": self.title, "xLabel": self.x_label, "x": list(self.x), "series": series, "digits": self.digits,
            "unit": self.unit, "whole": self.whole, "log": self.log, "from": self.from_, "to": self.to,
            "marks": [{"x": x, "tone": tone} for x, tone in self.marks],
        }  # fmt: skip


def figure(plot: Plot, note: str, said: str, table: str) -> str:
    """The plot's place in the page. note: a line under its title; said: what it shows, in a sentence, for those who do
    not see it; table: markup with the numbers."""
    name = e(plot.name)
    return (
        f'<figure data-plot="{name}" aria-labelledby="{name}-title"><figcaption>'
        f'<h3 id="{name}-title">{e(plot.title)}</h3><p>{e(note)}</p></figcaption>'
        f'<div class="canvas" role="img" aria-label="{e(f"{plot.title}. {said}")}"></div>'
        '<div class="controls"></div><details><summary>Numbers'
        f'<span class="hidden"> of the plot: {e(plot.title)}</span></summary>{table}</details></figure>'
    )


def data(plots: Sequence[Plot]) -> str:
    """The data of all plots, as a block that a browser does not run; no text in it can end the block."""
    text = json.dumps({plot.name: plot.to_dict() for plot in plots}, ensure_ascii=False, allow_nan=False)
    return f'<script type="application/json" id="plots">{_inert(text)}</script>'


def _inert(text: str) -> str:
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def scripts() -> tuple[str, str]:
    """The library, and what draws the plots with it."""
    return _read(*UPLOT, "uPlot.iife.min.js"), _read("plots.js")


@cache
def css() -> str:
    """The library's style and the plots' own."""
    return _read(*UPLOT, "uPlot.min.css") + CSS


def _read(*names: str) -> str:
    return resources.files("eyas.report").joinpath(*names).read_text(encoding="utf-8")


def joined(
    parts: Sequence[tuple[Sequence[float], Sequence[Sequence[float | None]]]],
) -> tuple[list[float], list[list[list[float | None]]]]:
    """Curves over different points on one axis: all points in order, and each part's curves with None between its own.

    parts: (x ascending, curves over it).
    """
    axis = sorted({x for points, _ in parts for x in points})
    place = {x: i for i, x in enumerate(axis)}
    out = []
    for points, curves in parts:
        spread = []
        for curve in curves:
            values: list[float | None] = [None] * len(axis)
            for x, y in zip(points, curve, strict=True):
                values[place[x]] = y
            spread.append(values)
        out.append(spread)
    return axis, out
