"""Plots as inline SVG, drawn from plain numbers: no script, no font, no picture from elsewhere.

pytest tests/test_report_diagnosis.py

Each is 360 units wide, so that its letters can be read on a telephone, and scales with the page. Colours are classes
`t-…` (tones) of the page's stylesheet, which knows light and dark; lines differ in dash and mark as well.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

WIDTH = 360
Point = tuple[float, float]
MARKS = {  # drawn around the point; one shape a tone
    "declared": "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",  # disc
    "best": "m0-4.5l4 7.5h-8z",  # triangle
    "served": "m-4-4l8 8m0-8l-8 8",  # cross
    "engine0": "m-3.5-3.5h7v7h-7z",  # square
    "engine1": "m0-5l4 5l-4 5l-4-5z",  # diamond
    "engine2": "m0 4.5l4-7.5h-8z",  # triangle on its head
}


def acceptance(name: str, title: str, desc: str, series: Sequence[tuple[str, str, Sequence[float | None]]]) -> str:
    """Lines over the drafted position, shares of 0 to 1 as per cent. series: (label, tone, value per position or None).

    Lines that coincide stay visible: each later one is thinner.
    """
    left, right, top, bottom = 34, 94, 16, 32
    height = 250
    positions = max((len(values) for _, _, values in series), default=1)
    ticks = _ticks(0, 100 * max([x for _, _, values in series for x in values if x is not None], default=1.0))
    across = (WIDTH - left - right) / max(positions - 1, 1)
    x = [left + across * j if positions > 1 else left + (WIDTH - left - right) / 2 for j in range(positions)]

    def y(share: float) -> float:
        return height - bottom - (height - top - bottom) * 100 * share / ticks[-1]

    parts = [_rule(left, WIDTH - right, y(tick / 100), f"{tick:g}") for tick in ticks]
    parts += [_label(x[j], height - bottom + 15, str(j + 1), "middle") for j in range(positions)]
    parts.append(_label((left + WIDTH - right) / 2, height - 3, "drafted position", "middle", "quiet"))
    parts.append(_label(left, 10, "% of rounds", "start", "quiet"))
    ends: list[tuple[float, float, str, str]] = []
    for place, (label, tone, values) in enumerate(series):
        points = [(x[j], y(value)) for j, value in enumerate(values) if value is not None]
        if not points:
            continue
        wide = max(4.5 - 0.9 * place, 1.4)
        marks = "".join(f"M{a:.1f} {b:.1f}{MARKS[tone]}" for a, b in points)
        parts.append(f'<g class="t-{tone}"><path class="line" stroke-width="{wide:.1f}" d="{_path(points)}"/>')
        parts.append(f'<path class="mark" d="{marks}"/></g>')
        ends.append((*points[-1], tone, label))
    ends.sort(key=lambda end: end[1])
    for (a, b, tone, label), at in zip(ends, _spread([end[1] for end in ends], 14, top, height - bottom), strict=True):
        near = WIDTH - right + 8
        parts.append(f'<g class="t-{tone}"><path class="leader" d="M{a + 5:.1f} {b:.1f}L{near} {at:.1f}"/>')
        parts.append(f'<path class="mark" d="M{near + 5} {at:.1f}{MARKS[tone]}"/></g>')
        parts.append(_label(near + 13, at + 4, label if len(label) <= 12 else label[:11] + "…"))
    return _svg(name, title, desc, height, parts)


def map_curve(
    name: str, title: str, desc: str, curves: Sequence[tuple[str, str, Sequence[Point]]], size: float, target: float
) -> str:
    """Target id over draft id. curves: (label, tone, points). The dashed line is `target id = draft id`; the upper rule
    is the target's vocabulary, `target` ids, which nothing may reach."""
    left, right, top, bottom, height = 52, 14, 34, 32, 290
    everything = [b for _, _, points in curves for _, b in points]
    low, high = min([0.0, *everything]), max([target, size, 1.0, *everything])
    wide = max([size, 1.0, *(a for _, _, points in curves for a, _ in points)])
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def at(point: Point) -> Point:
        share = (point[1] - low) / (high - low)
        return left + (WIDTH - left - right) * point[0] / wide, height - bottom - (height - top - bottom) * share

    parts = [_rule(left, WIDTH - right, at((0, tick))[1], _short(tick)) for tick in ticks]
    for tick in _ticks(0, wide):
        if tick <= wide:
            parts.append(_label(at((tick, 0))[0], height - bottom + 15, _short(tick), "middle"))
    parts.append(_label((left + WIDTH - right) / 2, height - 3, "draft id", "middle", "quiet"))
    parts.append(_label(2, 12, "target id", "start", "quiet"))
    if target > 0:
        (a, b), (c, _) = at((0, target)), at((wide, target))
        parts.append(f'<path class="limit" d="M{a:.1f} {b:.1f}H{c:.1f}"/>')
    end = min(wide, high)
    parts.append(f'<path class="diagonal" d="{_path([at((0, 0)), at((end, end))])}"/>')
    for place, (label, tone, points) in enumerate(curves):
        dots = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in map(at, points))
        parts.append(f'<g class="t-{tone}"><path class="dots" stroke-width="{4 - 1.5 * place}" d="{dots}"/>')
        parts.append(f'<path class="mark" d="M{86 + 100 * place} 8{MARKS[tone]}"/></g>')
        parts.append(_label(94 + 100 * place, 12, label))
    return _svg(name, title, desc, height, parts)


def bars(name: str, title: str, desc: str, rows: Sequence[tuple[str, float, str]], base: float = 0.0) -> str:
    """Horizontal bars from `base`. rows: (label, value, what stands behind the bar)."""
    left, right, step = 96, 92, 22
    reach = max([value - base for _, value, _ in rows] + [1e-9])
    parts = []
    for place, (label, value, said) in enumerate(rows):
        y = 4 + step * place
        long = max((WIDTH - left - right) * (value - base) / reach, 0.0)
        parts.append(_label(left - 6, y + 13, label, "end"))
        parts.append(f'<rect class="bar" x="{left}" y="{y + 2}" width="{long:.1f}" height="{step - 8}" rx="2"/>')
        parts.append(_label(left + long + 6, y + 13, said))
    height = 8 + step * len(rows)
    parts.append(f'<path class="axis" d="M{left} 2V{height - 4}"/>')
    return _svg(name, title, desc, height, parts)


def interval_bar(
    gain: float, ends: tuple[float, float] | None, domain: tuple[float, float], tone: str, said: str
) -> str:
    """A gain as a dot on its interval, with zero marked; `domain` is the same for all bars of a table."""
    width, height, edge = 150, 18, 6
    low, high = min(domain[0], 0.0), max(domain[1], 0.0)
    scale = (width - 2 * edge) / max(high - low, 1e-9)

    def x(value: float) -> float:
        return edge + (min(max(value, low), high) - low) * scale

    parts = [f'<path class="axis" d="M{x(0):.1f} 1V{height - 1}"/>']
    if ends is not None:
        a, b = x(min(ends)), x(max(ends))
        parts.append(f'<path class="whisker" d="M{a:.1f} 5v8m0-4H{b:.1f}m0-4v8"/>')
    parts.append(f'<circle class="mark" cx="{x(gain):.1f}" cy="9" r="3.5"/>')
    text = html.escape(said)
    return (
        f'<svg class="interval v-{tone}" viewBox="0 0 {width} {height}" role="img" aria-label="{text}">'
        f"<title>{text}</title>{''.join(parts)}</svg>"
    )


def small_bar(share: float) -> str:
    """A bar in a table's cell, next to the number that it shows; hidden from screen readers for that reason."""
    long = 60 * min(max(share, 0.0), 1.0)
    return (
        '<svg class="small" viewBox="0 0 60 8" aria-hidden="true">'
        f'<rect class="bar" x="0" y="1" width="{long:.1f}" height="6" rx="1"/></svg>'
    )


def _svg(name: str, title: str, desc: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{html.escape(title)}</title><desc id="{name}-desc">{html.escape(desc)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _label(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text{css} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _rule(left: float, right: float, y: float, text: str) -> str:
    line = f'<path class="grid" d="M{left} {y:.1f}H{right}"/>'
    return line + _label(left - 5, y + 4, text.replace("-", "−"), "end")


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def _short(value: float) -> str:
    """163840 → 164k, 20000 → 20k: ids on an axis."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:g}"


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers; the first is not above `low`, the last not below `high`."""
    reach = max(high - low, 1e-9)
    raw = reach / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) + 0.0 for k in range(first, max(last, first + 1) + 1)]


def _spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights near the `wanted` ones (ascending) that are `gap` apart and within low .. high."""
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    placed: list[float] = []
    for y in wanted:
        placed.append(max(y, low, placed[-1] + gap if placed else low))
    ceiling = high
    for k in reversed(range(len(placed))):
        placed[k] = min(placed[k], ceiling)
        ceiling = placed[k] - gap
    return placed
