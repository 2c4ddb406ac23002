"""The plots of a run's page, of one run or of two on the same axes, each with its note, its sentence and its table.

pytest tests/test_report_run.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eyas.report.diagnosis_text import fixed, number, percent, whole
from eyas.report.interactive import Curve, Plot, figure, joined
from eyas.report.page import table

Run = Mapping[str, Any]
TONES = ("c0", "c1", "c2", "c3", "c4", "c5")
ROWS = 24
"""Rows of a plot's table at most; all points are in the page's data."""


def letter(runs: Sequence[Run], place: int) -> str:
    """`A: `, where there are two."""
    return f"{'AB'[place]}: " if len(runs) > 1 else ""


def loss(runs: Sequence[Run]) -> tuple[Plot, str] | None:
    """Loss over tokens seen: every unrolled step of one run, the first and the last of two."""
    known = [(place, run["training"]) for place, run in enumerate(runs) if run["training"]]
    if not known:
        return None
    x, spread = joined([(training["tokens"], training["loss"]) for _, training in known])
    curves = []
    for (place, _), lines in zip(known, spread, strict=True):
        for k, values in enumerate(lines):
            both = len(runs) > 1
            curves.append(Curve(
                f"{letter(runs, place)}step {k + 1}", values, TONES[place if both else k % len(TONES)],
                dash=(5, 4) if both and k else (), show=not both or k in (0, len(lines) - 1),
            ))  # fmt: skip
    plot = Plot("loss", "Loss by unrolled step", "tokens seen", x, curves)
    grouped = {training["steps_a_point"] for _, training in known}
    note = (
        "Cross-entropy against the target's distribution, nats; step k drafts the k-th token, from the draft's states."
    )
    note += f" A point is the mean over {' or '.join(map(str, sorted(grouped)))} steps." if grouped != {1} else ""
    sizes = {run["settings"].get("vocab.size") for run in runs}
    if len(sizes) > 1:
        note += " The two draft vocabularies differ in size, so the two losses cannot be compared."
    said = "; ".join(
        f"{letter(runs, place)}step 1 goes from {fixed(_first(t['loss'][0]))} to {fixed(_last(t['loss'][0]))}, "
        f"step {len(t['loss'])} from {fixed(_first(t['loss'][-1]))} to {fixed(_last(t['loss'][-1]))} "
        f"over {whole(t['tokens_seen'])} tokens"
        for place, t in known
    )
    return plot, figure(plot, note, said, _table(plot, whole, "Loss, nats"))


def predicted(runs: Sequence[Run]) -> tuple[Plot, str] | None:
    """The accept length that training predicts on held-out answers, over tokens seen."""
    known = [
        (place, run["training"]["predicted"])
        for place, run in enumerate(runs)
        if run["training"] and run["training"]["predicted"]
    ]
    if not known:
        return None
    x, spread = joined([([p["tokens"] for p in points], [[p["accept_length"] for p in points]]) for _, points in known])
    curves = [
        Curve(f"{letter(runs, place)}predicted τ", lines[0], TONES[place], dash=(5, 4) if place else (), points=True)
        for (place, _), lines in zip(known, spread, strict=True)
    ]
    plot = Plot("predicted", "Predicted accept length", "tokens seen", x, curves)
    drafted = " or ".join(str(n) for n in sorted({p["draft_tokens"] for _, points in known for p in points}))
    note = (
        f"τ on held-out answers that the draft is replayed over, {drafted} drafted a round; 1 means nothing accepted."
    )
    said = "; ".join(
        f"{letter(runs, place)}from {fixed(points[0]['accept_length'])} to {fixed(points[-1]['accept_length'])} "
        f"at {whole(points[-1]['tokens'])} tokens"
        for place, points in known
    )
    return plot, figure(plot, note, said, _table(plot, whole, "Predicted accept length"))


def acceptance(runs: Sequence[Run]) -> tuple[Plot, str] | None:
    """Share of rounds by drafted position: what the proof counted, a curve a prompt set, and what training predicts."""
    lines: list[tuple[int, str, str, Sequence[Any], dict[str, Any]]] = []
    two = len(runs) > 1
    for place, run in enumerate(runs):
        before, proof = letter(runs, place), run["proof"] or {}
        rates = (proof.get("per_position") or {}).get("unconditional")
        tone = TONES[place]
        if rates:
            lines.append((place, f"{before}all sets", tone, rates, {"width": 3.0}))
            sets = proof.get("tau") or {}
            for i, (name, row) in enumerate(sets.items()):
                if len(sets) > 1:
                    shade = tone if two else TONES[1 + i % 4]
                    lines.append((place, f"{before}{name}", shade, row["unconditional"], {"show": not two}))
        measured = (run["training"] or {}).get("predicted")
        if measured:
            tone = tone if two else TONES[5]
            lines.append((place, f"{before}predicted", tone, measured[-1]["per_position"], {"dash": (2, 3)}))
    if not lines:
        return None
    k = max(len(values) for *_, values, _ in lines)
    curves = [
        Curve(label, [_share(values[j]) if j < len(values) else None for j in range(k)], tone, points=True, **how)
        for _, label, tone, values, how in lines
    ]
    plot = Plot(
        "acceptance", "Acceptance by drafted position", "drafted position", list(range(1, k + 1)), curves,
        digits=1, unit=" %", whole=True, from_=0.0, to=100.0,
    )  # fmt: skip
    note = (
        "Share of all rounds whose first j drafted tokens were accepted. Predicted: by training, on held-out answers."
    )
    said = "; ".join(
        f"{curve.label}: {', '.join(fixed(v, 1) + ' %' for v in curve.values if v is not None)}" for curve in curves
    )
    return plot, figure(plot, note, said, _table(plot, whole, "Per cent of rounds, by position"))


def coverage(runs: Sequence[Run]) -> tuple[Plot, str] | None:
    """Share of the text that the most frequent ids cover, over how many they are."""
    known = [
        (place, run["vocabulary"]) for place, run in enumerate(runs) if run["vocabulary"] and run["vocabulary"]["curve"]
    ]
    if not known:
        return None
    parts: list[tuple[Any, Any]] = []
    named: list[tuple[str, str, tuple[int, ...]]] = []
    for place, vocabulary in known:
        curve, lines = vocabulary["curve"], []
        tone = TONES[place]
        if curve["held_out"]:
            lines.append([_share(v) for v in curve["held_out"]])
            named.append((f"{letter(runs, place)}held-out answers", tone, ()))
        lines.append([_share(v) for v in curve["counted"]])
        named.append((f"{letter(runs, place)}training answers", tone if len(runs) > 1 else TONES[1], (5, 4)))
        parts.append((curve["ids"], lines))
    x, spread = joined(parts)
    values = [line for lines in spread for line in lines]
    curves = [Curve(label, v, tone, dash=dash) for (label, tone, dash), v in zip(named, values, strict=True)]
    plot = Plot(
        "coverage", "Coverage by size of the draft vocabulary", "ids", x, curves,
        digits=2, unit=" %", log=True, to=100.0, marks=[(v["ids"], TONES[place]) for place, v in known],
    )  # fmt: skip
    note = "Share of answer tokens among the most frequent ids. The upright line is the size that was chosen."
    said = "; ".join(
        f"{letter(runs, place)}{whole(v['ids'])} of {whole(v['target_ids'])} ids cover "
        f"{percent(v['held_out_coverage'], 2)} of held-out answers, {percent(v['coverage'], 2)} of those counted"
        for place, v in known
    )
    return plot, figure(plot, note, said, _table(plot, whole, "Per cent of answer tokens covered, by ids"))


def _table(plot: Plot, form: Callable[[Any], str], caption: str) -> str:
    """The plot's numbers, thinned out where they are many: first, last, and evenly spaced between."""
    count = len(plot.x)
    places = range(count) if count <= ROWS else sorted({round(i * (count - 1) / (ROWS - 1)) for i in range(ROWS)})
    rows = [
        [form(plot.x[i]), *(fixed(curve.values[i], plot.digits) + ("" if number(curve.values[i]) is None else plot.unit)
                            for curve in plot.curves)]
        for i in places
    ]  # fmt: skip
    if count > ROWS:
        caption += f": {len(rows)} of {count} points"
    heads = [plot.x_label, *(curve.label for curve in plot.curves)]
    return table(heads, rows, caption, range(len(heads)))


def _share(value: Any) -> float | None:
    x = number(value)
    return None if x is None else round(100 * x, 3)


def _first(values: Sequence[float | None]) -> float | None:
    return next((v for v in values if v is not None), None)


def _last(values: Sequence[float | None]) -> float | None:
    return _first(list(reversed(values)))
