"""The page of a run, or of two side by side: one HTML file that needs nothing else and says what is not there yet.

eyas report runs/demo          pytest tests/test_report_run.py

Nothing is computed here (run_read.py reads, run_compare.py compares). Every name, prompt and token is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from eyas._version import __version__
from eyas.report import run_plots
from eyas.report.diagnosis_text import fixed, mapping, number, percent, whole, words
from eyas.report.interactive import css, data, scripts
from eyas.report.page import Raw, e, page, section, table
from eyas.report.plots import small_bar
from eyas.report.run_marks import CSS, conversations, samples, visible
from eyas.report.run_results import results
from eyas.stages import describe

Run = Mapping[str, Any]
CODE = re.compile("`([^`]+)`")
STATES = {"finished": "finished", "working": "at work", "stopped": "stopped"}
SAID = {"done": "done", "working": "at work", "stopped": "stopped", "not yet": "not yet", "left out": "not asked for"}


def render(report: Mapping[str, Any]) -> str:
    """The whole page. report: {runs: one or two of `read_run`, differences: of `compare` or None}."""
    runs, differences = report["runs"], report["differences"]
    plots = {name: getattr(run_plots, name)(runs) for name in ("acceptance", "loss", "predicted", "coverage")}
    shown = {name: made[1] for name, made in plots.items() if made}
    parts = (
        ("results", "Results", results(runs, differences), ""),
        ("accept-length", "Accept length τ", _accept_length(runs, shown.get("acceptance")), _missing(runs, "proof")),
        ("training", "Training", _training(runs, shown), _missing(runs, "training")),
        ("vocabulary", "Draft vocabulary", _vocabulary(runs, shown.get("coverage")), _missing(runs, "vocabulary")),
        ("masks", "What is learnt from", _each(runs, "conversations", conversations), _missing(runs, "conversations")),
        ("rounds", "Rounds of a few answers", _each(runs, "samples", samples), _missing(runs, "samples")),
        ("stages", "Stages and their cost", _stages(runs), ""),
        ("differences", "Differences", _differences(runs, differences), ""),
        ("provenance", "Where it comes from", _provenance(runs), ""),
    )
    alone = all(run["kind"] == "train" for run in runs)  # then parts that a training never has would be noise
    chosen = [part for part in parts if part[2] or not (alone or part[0] == "differences")]
    links = "".join(f'<li><a href="#{name}">{e(title)}</a></li>' for name, title, *_ in chosen)
    body = f'<nav aria-label="Parts of this page"><ul>{links}</ul></nav>' + "".join(section(*part) for part in chosen)
    named = " and ".join(words(run["name"]) for run in runs)
    unscripted = "The plots need JavaScript; their numbers are in the tables below each."
    unscripted = f'<p class="unscripted">{unscripted}</p>' if shown else ""
    return page(
        f"Eyas: {named}", _head(runs), unscripted + body + data([made[0] for made in plots.values() if made]),
        f"Made by Eyas {e(__version__)} from what the run wrote. Nothing in this file asks a network.",
        css() + CSS, scripts() if shown else (),
    )  # fmt: skip


# ---------------------------------------------------------------- head and accept length


def _head(runs: Sequence[Run]) -> str:
    names = " · ".join(f"{run_plots.letter(runs, i)}{words(run['name'])}" for i, run in enumerate(runs))
    cards = []
    for i, run in enumerate(runs):
        tone, said = _verdict(run)
        story = f"<p>{e(' '.join(run['story']))}</p>" if run["story"] else ""
        gaps = "".join(f"<li>{_said(text)}</li>" for text in dict.fromkeys(run["missing"].values()))
        cards.append(
            f'<div><p class="verdict {tone}">{e(run_plots.letter(runs, i) + said)}</p>{story}'
            + (f'<p>Not there yet, or not known:</p><ul class="gaps">{gaps}</ul>' if gaps else "")
            + "</div>"
        )
    return f"<h1>eyas report · {e(names)}</h1>" + (
        f'<div class="pair">{"".join(cards)}</div>' if len(runs) > 1 else cards[0]
    )


def _verdict(run: Run) -> tuple[str, str]:
    """A tone and the first thing to know."""
    proof = run["proof"] or {}
    if proof.get("lossless") is False:
        return "faulty", "Not lossless: decoding with this draft changes the text"
    if number(proof.get("tau_mean")) is not None and run["state"] == "finished":
        return "", f"Accept length {fixed(proof['tau_mean'])}"
    where = next((row["name"] for row in run["stages"] if row["state"] in ("working", "stopped")), None)
    if run["state"] == "finished":
        return "", "Trained"
    if where is None:
        where = next((row["name"] for row in run["stages"] if row["state"] == "not yet"), "")
        return "undecided", f"{STATES[run['state']].capitalize()} before {where}"
    return "undecided", f"{STATES[run['state']].capitalize()} in {where}{_progress(run, where)}"


def _progress(run: Run, where: str) -> str:
    training = run["training"]
    if where != "train" or not training:
        return ""
    if number(training["planned_steps"]):
        return f", step {whole(training['steps'])} of {whole(training['planned_steps'])}"
    if number(training["planned_tokens"]):
        return f", {percent(training['tokens_seen'] / max(training['planned_tokens'], 1), 0)} of its tokens seen"
    return f", step {whole(training['steps'])}"


def _accept_length(runs: Sequence[Run], plot: str | None) -> str:
    made = _sets(runs)  # of two runs it has the whole width
    parts = made + _pair(plot) if len(runs) > 1 else _pair(made, plot, uneven=True)
    return _notes(runs, "proof") + parts if parts else ""


def _sets(runs: Sequence[Run]) -> str:
    rows, k = [], 0
    for i, run in enumerate(runs):
        proof = run["proof"]
        if not proof:
            continue
        for name, row in proof["tau"].items():
            rates = row["unconditional"]
            k = max(k, len(rates))
            rows.append([run_plots.letter(runs, i) + words(name), fixed(row["tau"]), _reach(row["low"], row["high"]),
                         whole(row["prompts"]), whole(row["rounds"]), *(fixed(_per(x), 1) for x in rates)])  # fmt: skip
        mean = _reach(proof["tau_mean_low"], proof["tau_mean_high"])
        rates = proof["per_position"]["unconditional"]
        total = whole(sum(row["prompts"] for row in proof["tau"].values()))
        rows.append([f"{run_plots.letter(runs, i)}mean of sets", fixed(proof["tau_mean"]), mean, total,
                     whole(proof["rounds"]), *(fixed(_per(x), 1) for x in rates)])  # fmt: skip
        k = max(k, len(rates))
    if not rows:
        return ""
    rows = [[*row, *["–"] * (5 + k - len(row))] for row in rows]
    heads = ["prompts", "τ", "95 %", "answers", "rounds", *(f"≥{j} %" for j in range(1, k + 1))]
    caption = "Accept length by prompt set; ≥j: share of rounds whose first j drafted tokens were accepted"
    text = "".join(
        f"<p>{e(run_plots.letter(runs, i) + _lossless(run['proof']))}</p>" for i, run in enumerate(runs) if run["proof"]
    )
    return f'<div class="tight">{table(heads, rows, caption, range(1, 5 + k))}{text}</div>'


def _reach(low: Any, high: Any) -> str:
    return "–" if number(low) is None or number(high) is None else f"{fixed(low, 2)}–{fixed(high, 2)}"


def _per(value: Any) -> float | None:
    x = number(value)
    return None if x is None else 100 * x


def _lossless(proof: Mapping[str, Any]) -> str:
    if proof.get("lossless") is None:
        return "Decoding was sampled, so answers cannot be compared token for token."
    near, wrong = len(proof.get("near_ties") or ()), len(proof.get("differences") or ())
    said = f"{proof['identical']} of {proof['compared']} answers are token for token those of plain decoding"
    said += f"; {near} first differ at a near-tie of two logits" if near else ""
    return said + (f"; {wrong} DIFFER." if wrong else ".")


# ---------------------------------------------------------------- parts


def _pair(*parts: str | None, uneven: bool = False) -> str:
    """Side by side where there is room; uneven: the first of two, a wide table, gets the larger share."""
    filled = [part for part in parts if part]
    kind = "pair uneven" if uneven and len(filled) == 2 else "pair"
    return f'<div class="{kind}">{"".join(filled)}</div>' if filled else ""


def _training(runs: Sequence[Run], shown: Mapping[str, str]) -> str:
    plots = _pair(shown.get("loss"), shown.get("predicted"))
    return _notes(runs, "training") + plots if plots else ""


def _vocabulary(runs: Sequence[Run], plot: str | None) -> str:
    tables = []
    for i, run in enumerate(runs):
        vocabulary = run["vocabulary"]
        if not vocabulary:
            continue
        before = run_plots.letter(runs, i)
        said = (
            f"<p>{e(before)}{whole(vocabulary['ids'])} of the target's {whole(vocabulary['target_ids'])} ids; "
            f"they cover {percent(vocabulary['coverage'], 2)} of the answers that they were counted in and "
            f"{percent(vocabulary['held_out_coverage'], 2)} of held-out ones.</p>"
        )
        rows = [[whole(m["id"]), Raw(f"<code>{visible(m['text'])}</code>") if m["text"] else "–", whole(m["count"])]
                for m in vocabulary["missed"]]  # fmt: skip
        caption = f"{before}Most frequent held-out tokens that the draft cannot say"
        tables.append(said + (table(["id", "text", "times"], rows, caption, (0, 2)) if rows else ""))
    return _notes(runs, "vocabulary") + _pair(plot, f"<div>{''.join(tables)}</div>") if tables else ""


def _each(runs: Sequence[Run], part: str, show: Any) -> str:
    """A column a run; a run that lacks the part says so."""
    if not any(run[part] for run in runs):
        return ""
    columns = []
    for i, run in enumerate(runs):
        heading = f"<h3>{e(run_plots.letter(runs, i) + words(run['name']))}</h3>" if len(runs) > 1 else ""
        content = (
            show(run[part], run_plots.letter(runs, i))
            if run[part]
            else f'<p class="quiet">{_said(run["missing"].get(part, ""))}</p>'
        )
        columns.append(f"<div>{heading}{content}</div>")
    return _pair(*columns) if len(runs) > 1 else columns[0]


def _missing(runs: Sequence[Run], part: str) -> str:
    """What there is to say where no run has the part."""
    return " ".join(dict.fromkeys(_said(run["missing"].get(part, "")) for run in runs))


def _notes(runs: Sequence[Run], part: str) -> str:
    """A line for each run that lacks the part, or has it in part, beside what the others have of it."""
    return "".join(
        f'<p class="undecided">{_said(run_plots.letter(runs, i) + run["missing"][part])}</p>'
        for i, run in enumerate(runs)
        if part in run["missing"]
    )


def _said(text: str) -> str:
    """A sentence as markup, its `commands` set as such."""
    return CODE.sub(r"<code>\1</code>", e(text))


def _stages(runs: Sequence[Run]) -> str:
    tables = []
    for i, run in enumerate(runs):
        total = sum(row["seconds"] or 0 for row in run["stages"]) or 1
        rows = []
        for row in run["stages"]:
            share = (row["seconds"] or 0) / total
            took = Raw(f"{small_bar(share)}{e(fixed(row['seconds'], 1))}") if row["seconds"] is not None else "–"
            rows.append([row["name"], SAID.get(row["state"], row["state"]), took, fixed(row["peak_memory_gib"], 2),
                         visible_counts(row["counts"])])  # fmt: skip
        caption = f"{run_plots.letter(runs, i)}Seconds of the calls that finished, memory up to the stage's end, counts"
        tables.append(table(["stage", "state", "seconds", "GiB", "counts"], rows, caption, (2, 3), (4,), stack=True))
    return _pair(*tables) if len(runs) > 1 else tables[0]


def visible_counts(counts: Mapping[str, Any]) -> str:
    """Counts as one line, also those that a training nests."""
    predicted = mapping(counts.get("predicted"))
    extra = f", predicted τ {fixed(predicted['accept_length'])}" if "accept_length" in predicted else ""
    return (describe(counts) + extra) or "–"


def _differences(runs: Sequence[Run], differences: Mapping[str, Any] | None) -> str:
    if differences is None:
        return ""
    settings = [[row["name"], words(row["a"]), words(row["b"])] for row in differences["settings"]]
    inputs = [[row["stage"], row["name"], _digest(row["a"]), _digest(row["b"])] for row in differences["inputs"]]
    heads, caption = ["stage", "input", "A", "B"], "Inputs whose content differs (SHA-256, first 16 digits)"
    first = table(["setting", "A", "B"], settings, "Settings that differ", (), (0, 1, 2), stack=True)
    second = table(heads, inputs, caption, (), (1, 2, 3), stack=True)
    return (first if settings else "<p>No setting differs.</p>") + (
        second if inputs else "<p>All inputs have the same content.</p>"
    )


def _provenance(runs: Sequence[Run]) -> str:
    columns = []
    for i, run in enumerate(runs):
        before = run_plots.letter(runs, i)
        facts = [
            ["folder", run["folder"]],
            ["state", STATES[run["state"]]],
            ["target", run["target"] or "not recorded"],
            ["Eyas", ", ".join(run["versions"]) or "not recorded"],
            ["last stage ended", max((row["ended"] for row in run["stages"] if row["ended"]), default="not yet")],
        ]
        inputs = [
            [stage, name, _digest(value)] for stage, named in run["inputs"].items() for name, value in named.items()
        ]
        settings = [[name, words(value)] for name, value in run["settings"].items()]
        heads, caption = ["stage", "input", "SHA-256"], f"{before}Content of the inputs, first 16 digits of SHA-256"
        columns.append(
            f"<div>{table(['what', 'value'], facts, f'{before}This run', (), (1,))}"
            + _folded(f"{before}Inputs of every stage", table(heads, inputs, caption, (), (1,), stack=True))
            + _folded(f"{before}All settings", table(["setting", "value"], settings, f"{before}Settings", (), (1,)))
            + "</div>"
        )
    return _pair(*columns) if len(runs) > 1 else columns[0]


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{e(summary)}</summary>{content}</details>"


def _digest(value: Any) -> Any:
    return Raw(f"<code>{e(value[:16])}</code>") if isinstance(value, str) and value else "–"
