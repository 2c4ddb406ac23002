"""A diagnosis as one HTML file that needs nothing else: no network, no script, light and dark, wide and narrow.

eyas doctor DRAFT --html report.html          pytest tests/test_report_diagnosis.py

Nothing is computed here. Every text is escaped, because names and values come out of files of strangers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.report import diagnosis_text as text
from eyas.report import plots
from eyas.report.diagnosis_text import (
    fixed,
    items,
    mapping,
    number,
    pair,
    percent,
    reading,
    rows,
    sentence,
    span,
    whole,
)
from eyas.report.page import Raw, e, page, section, source_link, table

UNCONDITIONAL = "≥ j: share of all rounds whose first j drafted tokens were accepted (unconditional rate)."
CONDITIONAL = "Conditional rate: the same, among the rounds whose first j − 1 drafted tokens were accepted."
CONTROLS = {
    "declared": "as declared",
    "best": "best reading",
    "shuffled_states": "shuffled states",
    "random_draft": "random draft",
    "word_frequencies": "token frequencies alone",
    "knows_nothing": "knows nothing",
}
NOT_MEASURED = "Not evaluated: this diagnosis holds no such measurement."


def render(diagnosis: Mapping[str, Any]) -> str:
    """The whole page. Any part of `diagnosis` may be missing or null: its section says that it was not evaluated."""
    verdict, where, summary = text.headline(diagnosis)
    command = sentence(diagnosis.get("next"))
    head = (
        f"<h1>eyas doctor · {e(diagnosis.get('draft'))}</h1>"
        f'<p class="verdict {verdict}">{verdict.capitalize()}{e(where and f" ({where})")}</p>'
        f'<p class="summary">{e(summary)}</p>'
        + (f"<p>Next:</p><pre><code>{e(command)}</code></pre>" if command else "")
    )
    parts = (
        ("tau", "Accept length τ", _tiles(diagnosis), ""),
        ("acceptance", "Acceptance by position", _acceptance(diagnosis), NOT_MEASURED),
        ("findings", "Findings", _findings(diagnosis), "No finding was recorded."),
        ("evidence", "Evidence", _evidence(diagnosis), "Not evaluated: no hypothesis was measured."),
        ("ruled-out", "Ruled out", _ruled_out(diagnosis), "Nothing was refuted by measurement."),
        ("map", "Vocabulary map", _map(diagnosis), "Not evaluated, or this draft has no map."),
        ("positions", "τ by position in the text", _positions(diagnosis), NOT_MEASURED),
        ("tensors", "Tensors", _tensors(diagnosis), "Not evaluated: no statistics of tensors."),
        ("controls", "Controls", _controls(diagnosis), NOT_MEASURED),
        ("not-evaluated", "Not evaluated", _not_evaluated(diagnosis), "Nothing is recorded as left out."),
        ("engines", "As each engine reads it", _engines(diagnosis), "Not evaluated: no engine's reading."),
        ("details", "Details", _details(diagnosis), ""),
    )
    made = {part[0]: section(*part) for part in parts}
    for left, right in (("map", "positions"), ("controls", "not-evaluated")):  # side by side where there is room
        made[left], made[right] = f'<div class="pair">{made[left]}', f"{made[right]}</div>"
    body = "".join(made.values())
    foot = f"Eyas {e(diagnosis.get('eyas'))}, read-only: nothing was changed."
    return page(f"{verdict}: {text.words(diagnosis.get('draft'))}", head, body, foot)


def _tiles(diagnosis: Mapping[str, Any]) -> str:
    tau, measured = mapping(diagnosis.get("tau")), mapping(diagnosis.get("acceptance"))
    readings = mapping(measured.get("as_read"))
    tiles = [("declared", "replayed as declared", tau.get("declared"), measured.get("declared"))]
    for key, value in mapping(tau.get("as_read")).items():
        tiles.append((f"as {reading(key)} reads it", "replayed under its rules", value, readings.get(key)))
    tiles.append(("best", "replayed under the best reading found", tau.get("best"), measured.get("best")))
    tiles.append(("served", "counted while serving", tau.get("served"), measured.get("served")))
    tiles.append(("training", "expected by training", tau.get("training"), None))
    cards = []
    for label, meaning, value, numbers in tiles:
        x, interval = number(value), span(mapping(numbers).get("interval"))
        shown = f'<data value="{x!r}">{fixed(x)}</data>' if x is not None else "<p>not evaluated</p>"
        meaning = f"{meaning}; interval {interval}" if interval and x is not None else meaning
        cards.append(f'<div class="card tile">{e(label)}{shown}<span class="quiet">{e(meaning)}</span></div>')
    return f'<p class="quiet">{e(text.TAU)}</p><div class="tiles">{"".join(cards)}</div>'


def _acceptance(diagnosis: Mapping[str, Any]) -> str:
    measured = mapping(diagnosis.get("acceptance"))
    named = [("declared", "declared", measured.get("declared"))]
    named += [(reading(k), f"engine{i % 3}", v) for i, (k, v) in enumerate(mapping(measured.get("as_read")).items())]
    named += [(key, key, measured.get(key)) for key in ("best", "served")]
    known = [(label, tone, mapping(counts)) for label, tone, counts in named if mapping(counts)]
    series = [(label, tone, [number(x) for x in items(c.get("unconditional"))]) for label, tone, c in known]
    if not any(x is not None for _, _, values in series for x in values):
        return ""
    wide = max(len(values) for _, _, values in series)
    desc = "; ".join(f"{label}: {', '.join(map(percent, values))}" for label, _, values in series)
    plot = plots.acceptance("plot-acceptance", "Acceptance by drafted position", desc, series)
    heads = ["reading", "τ", "interval", "rounds", "accepted", *(f"≥ {j}" for j in range(1, wide + 1))]
    body, conditional = [], []
    for (label, _, counts), (_, _, values) in zip(known, series, strict=True):
        rates = [percent(x) for x in values] + [text.MISSING] * (wide - len(values))
        body.append([label, fixed(counts.get("tau")), span(counts.get("interval")) or text.MISSING])
        body[-1] += [whole(counts.get("rounds")), whole(counts.get("accepted")), *rates]
        rates = [percent(x) for x in items(counts.get("conditional"))[:wide]]
        conditional.append([label, *rates, *([text.MISSING] * (wide - len(rates)))])
    further = table(["reading", *(str(j) for j in range(1, wide + 1))], conditional, CONDITIONAL, range(1, wide + 1))
    return (
        f'<p class="quiet">{UNCONDITIONAL} An engine\'s line is the draft replayed as that engine reads it. Interval: '
        f"bootstrap over sequences.</p>"
        f'<div class="pair plotted">{plot}<div>{table(heads, body, "By reading", range(1, 99))}'
        f"<details><summary>Conditional rates</summary>{further}</details></div></div>"
    )


def _findings(diagnosis: Mapping[str, Any]) -> str:
    shown: list[str] = []
    fine: list[str] = []
    for finding in text.by_severity(diagnosis):
        level = text.severity(finding)
        status = text.verdict_words(finding.get("status")) if finding.get("status") else ""
        convention = f" · {e(finding['convention'])}" if finding.get("convention") else ""
        said = "".join(f"<p>{e(line)}</p>" for line in text.definition(finding))
        for heading, key in (("", "evidence"), ("If served so: ", "consequence"), ("What to do: ", "remedy")):
            if line := sentence(finding.get(key)):
                said += f"<p>{heading and f'<b>{heading}</b>'}{e(line)}</p>"
        if sources := items(finding.get("sources")):
            said += f'<p class="quiet">Seen in: {", ".join(source_link(source) for source in sources)}</p>'
        card = (
            f'<article class="card finding s-{level}"><h3><span class="word">{level}</span> '
            f"<code>{e(finding.get('id'))}</code>{convention}{e(status and f' · {status}')}</h3>"
            f'<div class="body">{said}</div></article>'
        )
        (fine if level == "ok" else shown).append(card)
    if fine:
        shown.append(f"<details><summary>{len(fine)} in order, though odd</summary>{''.join(fine)}</details>")
    return "".join(shown)


def _evidence(diagnosis: Mapping[str, Any]) -> str:
    ledger = rows(diagnosis.get("ledger"))
    if not ledger:
        return ""
    first = text.notable(diagnosis)
    said = "" if first else f"<p>Of {len(ledger)} hypotheses none was confirmed and none is undecided.</p>"
    shown = _ledger(first, "Confirmed, undecided and reversed") if first else ""
    whole_ledger = _ledger(ledger, "In the order of the investigation")
    return (
        f'{said}<p class="quiet">{e(text.GAIN)} The bar is its interval: bootstrap over sequences. Δτ: what the '
        f"alternative changes in τ.</p>{shown}<details><summary>All {len(ledger)} hypotheses, in order</summary>"
        f"{whole_ledger}</details>"
    )


def _ledger(ledger: Sequence[Mapping[str, Any]], caption: str) -> str:
    known = [x for row in ledger if (x := number(row.get("gain"))) is not None]
    known += [end for row in ledger for end in pair(row.get("interval")) or ()]
    domain = (min(known, default=0.0), max(known, default=0.0))
    body = []
    for row in ledger:
        verdict = text.verdict_words(row.get("verdict"))
        said_as = "inconclusive" if row.get("verdict") == "helps" else row.get("verdict")
        tone = next((v for v in ("confirmed", "inconclusive", "refuted") if v == said_as), "not_evaluated")
        gain, reach = number(row.get("gain")), span(row.get("interval"), 3, True)
        said = f"{fixed(gain, 3, True)}{reach and f' ({reach})'}"
        ends = pair(row.get("interval"))
        bar = plots.interval_bar(gain, ends, domain, tone, f"{said} nats per token") if gain is not None else ""
        note = f'<br><span class="quiet">{e(sentence(row["note"]))}</span>' if row.get("note") else ""
        start = [f"from {reading(row['from'])}"] if row.get("from") is not None else []
        start += [f"round {whole(row['round'])}"] if row.get("round") is not None else []
        origin = " · ".join([text.words(row.get("convention")), *start])
        what = f'{e(row.get("hypothesis"))}<br><span class="quiet">{e(origin)}</span>{note}'
        word = Raw(f'<span class="word v-{tone}">{e(verdict)}</span>')
        delta = fixed(row.get("delta_tau"), 3, True)
        body.append([whole(row.get("order")), word, Raw(what), Raw(f"{e(said)}{bar}"), delta])
    return table(
        ["no.", "verdict", "hypothesis", "gain, nats per token", "Δτ"], body, caption, (0, 4), (2,), stack=True
    )


def _ruled_out(diagnosis: Mapping[str, Any]) -> str:
    lines = []
    for convention, count, reach, which in text.ruled_out(diagnosis):
        gains = f", gain {reach} nats per token" if reach else ""
        lines.append(f"<li><b>{e(convention)}</b> ({count}{e(gains)}): {e('; '.join(which))}</li>")
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _map(diagnosis: Mapping[str, Any]) -> str:
    found = mapping(diagnosis.get("map"))
    given, best = (_points(found.get(key)) for key in ("points", "best_points"))
    if not given:
        return ""
    size, target = number(found.get("size")) or 0.0, number(found.get("target_size")) or 0.0
    curves = [("declared", "declared", given), *([("best", "best", best)] if best and best != given else [])]
    desc = "; ".join(
        f"{label}: {len(points)} points, target ids {whole(min(b for _, b in points))} to "
        f"{whole(max(b for _, b in points))}"
        for label, _, points in curves
    )
    plot = plots.map_curve("plot-map", "Target id over draft id", desc, curves, size, target)
    return (
        f'<p class="quiet">Target id of draft id i: i + d2t[i]. {whole(size)} draft ids, {whole(target)} target ids. '
        f"Grey dashes: where both ids are the same (d2t = 0). Red dashes: the target's last id.</p>{plot}"
    )


def _points(value: Any) -> list[tuple[float, float]]:
    return [point for part in items(value) if (point := pair(part)) is not None]


def _positions(diagnosis: Mapping[str, Any]) -> str:
    bars = []
    for row in rows(diagnosis.get("positions")):
        if (tau := number(row.get("tau"))) is not None:
            end = f"–{whole(row['to'])}" if number(row.get("to")) is not None else " on"
            bars.append((f"{whole(row.get('from'))}{end}", tau, f"{fixed(tau, 2)} ({whole(row.get('rounds'))})"))
    if not bars:
        return ""
    desc = "; ".join(f"positions {label}: {said} rounds" for label, _, said in bars)
    plot = plots.bars("plot-positions", "Accept length by position", desc, bars, base=1.0)
    return f'<p class="quiet">{e(text.TAU)} Bars begin at 1; in brackets: rounds.</p>{plot}'


def _tensors(diagnosis: Mapping[str, Any]) -> str:
    tensors = rows(diagnosis.get("tensors"))
    most = max([number(row.get("std")) or 0.0 for row in tensors], default=0.0) or 1.0
    body = []
    for row in tensors:
        std = number(row.get("std"))
        bar = plots.small_bar(std / most) if std is not None else ""
        shape = " × ".join(whole(n) for n in items(row.get("shape"))) or text.words(row.get("shape"))
        spread, most_of_all = (
            text.words(row.get(key)) if (x := number(row.get(key))) is None else f"{x:.4g}" for key in ("std", "max")
        )
        named = [text.words(row.get("name")), text.words(row.get("dtype")), shape]
        body.append([*named, Raw(bar + e(spread)), most_of_all, sentence(row.get("note"))])
    heads = ["tensor", "dtype", "shape", "standard deviation", "largest size", "note"]
    return table(heads, body, "Of the stored values", (4,), (5,), stack=True) if body else ""


def _controls(diagnosis: Mapping[str, Any]) -> str:
    given = mapping(diagnosis.get("controls"))
    bars = [
        (CONTROLS.get(key, text.words(key)), x, fixed(x, 2)) for key, v in given.items() if (x := number(v)) is not None
    ]
    if not bars:
        return ""
    desc = "; ".join(f"{label}: {said} nats" for label, _, said in bars)
    plot = plots.bars("plot-controls", "Negative log-likelihood of the target's choice", desc, bars)
    return (
        '<p class="quiet">Negative log-likelihood of the target\'s choice under the draft, nats per token; lower is '
        f"better. The controls give the scale: what a broken draft would reach.</p>{plot}"
    )


def _not_evaluated(diagnosis: Mapping[str, Any]) -> str:
    missing = [[sentence(r.get("what")), sentence(r.get("supply"))] for r in rows(diagnosis.get("not_evaluated"))]
    return table(["what", "supply"], missing, "What was left out, and what it needs", (), (0, 1)) if missing else ""


def _engines(diagnosis: Mapping[str, Any]) -> str:
    cards = []
    for key, given in mapping(diagnosis.get("engines")).items():
        engine = mapping(given)
        said = f"<p>{text.starting(engine.get('starts')).capitalize()}.</p>"
        for heading, part in (("Reads otherwise than declared:", "differences"), ("Needs:", "needs")):
            if lines := items(engine.get(part)):
                said += f"<p>{heading}</p><ul>{''.join(f'<li>{e(sentence(line))}</li>' for line in lines)}</ul>"
        if not items(engine.get("differences")):
            said += "<p>No difference from the declared reading is recorded.</p>"
        cards.append(f'<div class="card"><h3>{e(text.named(key, engine.get("version")))}</h3>{said}</div>')
    return f'<div class="pair">{"".join(cards)}</div>' if cards else ""


def _details(diagnosis: Mapping[str, Any]) -> str:
    features, served = mapping(diagnosis.get("features")), mapping(diagnosis.get("served"))
    body: list[list[Any]] = [
        ["draft", diagnosis.get("draft")],
        ["features from", features.get("source")],
        ["positions, one a token of the target's text", whole(features.get("positions"))],
        ["documents", whole(features.get("documents"))],
        ["share of tokens that are the target's own first choice", percent(features.get("share_top1"))],
        *([f"served: {text.words(key)}", value] for key, value in served.items()),
        ["duration, s", fixed(diagnosis.get("seconds"), 1)],
        ["largest memory, MiB", fixed(diagnosis.get("peak_mib"), 0)],
        ["Eyas", diagnosis.get("eyas")],
    ]
    return table(["what", "value"], body, "Of this diagnosis", (), (1,))
