"""The results of a run as tiles, of two runs as a table, with a word on whether their proofs can be compared.

pytest tests/test_report_run.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.report.diagnosis_text import TAU, fixed, mapping, number, span, whole
from eyas.report.page import e, table

Run = Mapping[str, Any]


def numbers(run: Run) -> list[tuple[str, str, Any, str, int]]:
    """(label, meaning, value, form, digits) of all results, a value None where it is not known."""
    proof, training, vocabulary = (mapping(run[name]) for name in ("proof", "training", "vocabulary"))
    expected = mapping((training.get("predicted") or [{}])[-1])
    counts = {row["name"]: row["counts"] for row in run["stages"]}
    reach, text = (
        span([proof.get("tau_mean_low"), proof.get("tau_mean_high")], 2),
        "of held-out answers by the draft vocabulary",
    )
    compared = proof.get("compared")
    minutes = run["seconds"] / 60 if number(run["seconds"]) is not None else None
    return [
        ("accept length τ", f"mean of prompt sets, 95 %: {reach}" if reach else "measured",
         proof.get("tau_mean"), "fixed", 3),
        ("predicted τ", "by training, on held-out answers", expected.get("accept_length"), "fixed", 3),
        ("speed-up", "decoding, one answer at a time", proof.get("speedup"), "fixed", 3),
        ("equal answers", f"of {whole(compared)}, token for token" if compared else "token for token",
         proof.get("identical"), "whole", 0),
        ("coverage", text, vocabulary.get("held_out_coverage"), "percent", 1),
        ("supervised tokens", "that features were made for",
         mapping(counts.get("extract")).get("supervised_tokens"), "whole", 0),
        ("tokens seen", "in training, prompts included", training.get("tokens_seen"), "whole", 0),
        ("tokens a second", "in training", training.get("tokens_per_s"), "whole", 0),
        ("minutes", "of all stages", minutes, "fixed", 1),
        ("memory, GiB", "at most, of all stages", run["peak_memory_gib"], "fixed", 1),
    ]  # fmt: skip


def _form(value: Any, form: str, digits: int, sign: bool = False) -> str:
    x = number(value)
    if x is None:
        return "not known"
    if form == "percent":
        return fixed(100 * x, digits, sign) + (" %" if not sign else " points")
    if form == "whole":
        return ("+" if sign and x > 0 else "") + whole(x)
    return fixed(x, digits, sign)


def results(runs: Sequence[Run], differences: Mapping[str, Any] | None) -> str:
    if differences is None:
        cards = "".join(
            f'<div class="card tile">{e(label)}<data value="{number(value)!r}">{e(_form(value, form, digits))}</data>'
            f'<span class="quiet">{e(meaning)}</span></div>'
            for label, meaning, value, form, digits in numbers(runs[0])
            if number(value) is not None
        )
        return f'<p class="quiet">{e(TAU)}</p><div class="tiles">{cards}</div>'
    body = []
    for (label, meaning, a, form, digits), (_, other, b, *_) in zip(*map(numbers, runs), strict=True):
        x, y = number(a), number(b)
        delta = "–" if x is None or y is None else _form(y - x, form, digits, sign=True)
        said = meaning if meaning == other else f"A {meaning}; B {other}"
        body.append([label, _form(a, form, digits), _form(b, form, digits), delta, said])
    made = table(["result", "A", "B", "B − A", "what"], body, "Results of both runs", (1, 2, 3), (4,), stack=True)
    return f"{_comparable(differences)}{made}"


def _comparable(differences: Mapping[str, Any]) -> str:
    proofs = differences["proofs"]
    if proofs["comparable"]:
        return (
            "<p>Both were proved with the same target on the same prompts in the same way: their τ can be compared.</p>"
        )
    if proofs["comparable"] is None:
        return '<p class="word undecided">One of them has no proof, so there are no two accept lengths to compare.</p>'
    because = "".join(f"<li>{e(text)}</li>" for text in proofs["because"])
    said = "Their τ cannot be compared: they were proved differently."
    return f'<p class="undecided"><strong>{said}</strong></p><ul>{because}</ul>'
