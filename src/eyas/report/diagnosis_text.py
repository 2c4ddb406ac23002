"""A diagnosis in words: how its numbers and names are written, and the report in the terminal.

eyas doctor DRAFT          pytest tests/test_report_diagnosis.py

What is written here came out of files of strangers, so nothing is taken for markup, and a character that does not print
(an escape sequence, one that turns the direction of writing) is shown as its code.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MISSING = "–"
ENGINES = {"sglang": "SGLang", "vllm": "vLLM", "llamacpp": "llama.cpp", "openvino": "OpenVINO"}
SEVERITIES = ("error", "warning", "info", "ok")  # worst first
STYLES = {
    "error": "bold red", "warning": "yellow", "ok": "green", "info": "dim",
    "faulty": "bold red", "undecided": "bold yellow", "healthy": "bold green",
    "confirmed": "bold red", "helps": "yellow", "inconclusive": "yellow", "refuted": "green", "not_evaluated": "dim",
}  # fmt: skip
COUNTED = ("confirmed", "helps", "inconclusive", "refuted")
FALLBACK = {
    "healthy": "No fault was found in this draft.",
    "faulty": "This draft, or the way it is read, has a fault.",
    "undecided": "What was measured does not decide whether this draft has a fault.",
}
TAU = "τ: tokens emitted per target forward, 1 + accepted / rounds, bonus included; 1 means that nothing is accepted."
GAIN = (
    "Gain: nats per token by which the alternative lowers the draft's negative log-likelihood of the target's choice,"
    " against the reading that it starts from; above 0 it fits better."
)


# ---- values: any part of a diagnosis may be missing, null or no finite number --------------------------------------


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Any]:
    """`value` as a list; empty where it is none."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []


def rows(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list of mappings."""
    return [row for row in items(value) if isinstance(row, Mapping)]


def number(value: Any) -> float | None:
    """A number, or None: neither nan nor what no scale could hold."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if real and -1e100 < value < 1e100 else None


def pair(value: Any) -> tuple[float, float] | None:
    """The two ends of an interval, or None."""
    ends = [number(end) for end in items(value)]
    return (ends[0], ends[1]) if len(ends) == 2 and ends[0] is not None and ends[1] is not None else None


def fixed(value: Any, digits: int = 3, sign: bool = False) -> str:
    """A number with `digits` decimals and a true minus sign."""
    x = number(value)
    if x is None:
        return MISSING
    form = ("+" if sign else "") + (f".{digits}f" if abs(x) < 1e6 else ".4g")
    return format(x, form).replace("-", "−")


def whole(value: Any) -> str:
    """A count, with separators."""
    x = number(value)
    return MISSING if x is None else f"{round(x):,}".replace("-", "−")


def percent(value: Any, digits: int = 1) -> str:
    """A share as per cent."""
    x = number(value)
    return MISSING if x is None else f"{fixed(100 * x, digits)} %"


def span(value: Any, digits: int = 3, sign: bool = False) -> str:
    """An interval, `low to high`."""
    ends = pair(value)
    return "" if ends is None else f"{fixed(ends[0], digits, sign)} to {fixed(ends[1], digits, sign)}"


def words(value: Any, limit: int = 400) -> str:
    """Any JSON value as one line of printable text, cut at `limit` characters."""
    if value is None:
        said = MISSING
    elif isinstance(value, str):
        said = value
    elif isinstance(value, float):
        said = f"{value:g}"
    elif items(value) and not any(isinstance(part, Mapping | list | tuple) for part in value):
        said = ", ".join(words(part, limit) for part in value)
    else:
        said = json.dumps(value, ensure_ascii=False, default=str)
    said = " ".join(said.splitlines())
    said = said if len(said) <= limit else said[: limit - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in said)


def sentence(value: Any) -> str:
    """A text of the diagnosis, empty where it is missing."""
    return "" if value is None or value == "" else words(value, 4000)


def reading(key: Any) -> str:
    """Whose reading: `declared`, `best`, `served`, or an engine by its own name (and version: sglang@0.5.23)."""
    name, _, version = words(key).partition("@")
    return f"{ENGINES.get(name, name)} {version}".strip()


def named(key: Any, version: Any) -> str:
    """An engine with its version, which its key may hold already."""
    name, release = reading(key), "" if version is None else words(version)
    return name if name.endswith(release) else f"{name} {release}"


def headline(diagnosis: Mapping[str, Any]) -> tuple[str, str, str]:
    """The verdict, where it went wrong (empty if nowhere), and the two sentences."""
    given = diagnosis.get("verdict")
    verdict = given if isinstance(given, str) and given in FALLBACK else "undecided"
    where = sentence(diagnosis.get("where"))
    where = "" if where == "none" else "the cause is unknown" if where == "unknown" else where and f"in: {where}"
    return verdict, where, sentence(diagnosis.get("summary")) or FALLBACK[verdict]


def by_severity(diagnosis: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Findings, errors first and what is in order last, otherwise as given; a severity nobody knows counts as info."""
    return sorted(rows(diagnosis.get("findings")), key=lambda row: SEVERITIES.index(severity(row)))


def severity(finding: Mapping[str, Any]) -> str:
    """The severity of a finding, `info` where it has none that is known."""
    said = finding.get("severity")
    return said if isinstance(said, str) and said in SEVERITIES else "info"


def verdict_words(value: Any) -> str:
    """`not_evaluated` as people write it."""
    return words(value).replace("_", " ")


def starting(value: Any) -> str:
    """Whether an engine starts with this draft."""
    if value is True:
        return "loads it and starts"
    return "does not start" if value is False else "not evaluated whether it starts"


def notable(diagnosis: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Hypotheses that are confirmed, undecided, or have a note; of those on an engine's reading, what helps it."""
    return [
        row
        for row in rows(diagnosis.get("ledger"))
        if row.get("verdict") in ("confirmed", "helps")
        or (not _on_an_engine(row) and (row.get("verdict") == "inconclusive" or row.get("note")))
    ]


def _on_an_engine(row: Mapping[str, Any]) -> bool:
    return str(row.get("from", "")).startswith("as ")


def ruled_out(diagnosis: Mapping[str, Any]) -> list[tuple[str, int, str, list[str]]]:
    """Per convention: its name, how many alternatives were refuted, the range of their gains, and which they were."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows(diagnosis.get("ledger")):
        if row.get("verdict") == "refuted" and not _on_an_engine(row):
            grouped.setdefault(words(row.get("convention")), []).append(row)
    found = []
    for convention, refuted in grouped.items():
        gains = [gain for row in refuted if (gain := number(row.get("gain"))) is not None]
        reach = f"{fixed(min(gains), 2, True)} to {fixed(max(gains), 2, True)}" if len(gains) > 1 else ""
        reach = reach or (fixed(gains[0], 2, True) if gains else "")
        found.append((convention, len(refuted), reach, [words(row.get("hypothesis")) for row in refuted]))
    return found


def definition(finding: Mapping[str, Any]) -> list[str]:
    """What a finding says of its convention: the values, and what they change."""
    values = [(finding.get(key), how) for key, how in (("declared", "declared"), ("best", "fits best"))]
    said = ["; ".join(f"{how} {words(value)}" for value, how in values if value is not None)]
    if equal := items(finding.get("equivalents")):
        said.append("fits equally well: " + "; ".join(words(value) for value in equal))
    if number(finding.get("delta_tau")) is not None:
        reach = span(finding.get("interval"), 3, True)
        said.append(f"Δτ {fixed(finding['delta_tau'], 3, True)}" + (f" ({reach})" if reach else ""))
    return [line for line in said if line]


# ---- the terminal ---------------------------------------------------------------------------------------------------


def show(console: Console, diagnosis: Mapping[str, Any], verbose: bool = False) -> None:
    """The report in the terminal: verdict, findings, evidence, engines, what is missing, the next command.

    verbose: findings of severity `info`, and every hypothesis that was tried, too.
    """
    verdict, where, summary = headline(diagnosis)
    _say(console, f"{verdict}{where and f' ({where})'}: {words(diagnosis.get('draft'))}", STYLES[verdict])
    _say(console, summary)
    tau = mapping(diagnosis.get("tau"))
    taus = [(key, tau.get(key)) for key in ("declared", "best", "served")]
    taus += [(f"as {reading(key)} reads it", value) for key, value in mapping(tau.get("as_read")).items()]
    taus.append(("expected by training", tau.get("training")))
    if known := [f"{key} {fixed(value)}" for key, value in taus if number(value) is not None]:
        _say(console, f"\nτ: {', '.join(known)}")
        _say(console, TAU, "dim")
    _findings(console, diagnosis, verbose)
    _evidence(console, diagnosis, verbose)
    _rest(console, diagnosis)


def _say(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    from rich.padding import Padding

    if text.startswith("\n"):
        console.print()
    console.print(Padding(_text(text.removeprefix("\n"), style), (0, 0, 0, indent), expand=False), highlight=False)


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style)


def _evidence(console: Console, diagnosis: Mapping[str, Any], verbose: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    ledger = rows(diagnosis.get("ledger"))
    if not ledger:
        _say(console, "\nNo hypothesis was measured: this diagnosis is of the files alone.")
        return
    shown = [row for row in notable(diagnosis) if verbose or row.get("verdict") in ("confirmed", "helps")]
    if shown:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for heading, right in (("verdict", False), ("hypothesis", False), ("gain", True), ("Δτ", True)):
            table.add_column(heading, justify="right" if right else "left", no_wrap=right)
        for row in shown:
            start = "" if row.get("from") in (None, "declared") else f" (from {reading(row['from'])})"
            cell = _text(f"{words(row.get('convention'))}: {words(row.get('hypothesis'))}{start}")
            if row.get("note"):
                cell.append(f"\n{sentence(row['note'])}", style="dim")
            reach = span(row.get("interval"), 2, True)
            gain = fixed(row.get("gain"), 2, True) + (f"\n{reach}" if reach else "")
            style = STYLES.get(str(row.get("verdict")), "")
            verdict = verdict_words(row.get("verdict"))
            table.add_row(_text(verdict, style), cell, _text(gain), _text(fixed(row.get("delta_tau"), 2, True)))
        console.print()
        console.print(table, highlight=False)
    counts = Counter(str(row.get("verdict")) for row in ledger)
    told = [f"{counts[name]} {verdict_words(name)}" for name in dict.fromkeys([*COUNTED, *counts]) if counts[name]]
    more = "" if verbose else " (--verbose lists them)"
    _say(console, f"{'' if shown else chr(10)}{len(ledger)} hypotheses were tried: {', '.join(told)}{more}.")
    for convention, count, reach, _ in ruled_out(diagnosis) if verbose else ():
        alternatives = "1 alternative" if count == 1 else f"{count} alternatives"
        _say(console, f"ruled out  {convention}: {alternatives}{reach and f', gain {reach}'}")
    if shown or verbose:
        _say(console, GAIN, "dim")


def _findings(console: Console, diagnosis: Mapping[str, Any], verbose: bool) -> None:
    found = by_severity(diagnosis)
    for place, finding in enumerate(found):
        level = severity(finding)
        if level == "info" and not verbose:
            continue
        status = finding.get("status")
        tested = "" if status in (None, "static") else f"  {verdict_words(status)}"
        if not place or not _alike(found[place - 1], finding):
            _say(console, f"\n{level:8}{words(finding.get('id'))}{tested}", STYLES[level])
        for text in (finding.get("evidence"), *definition(finding)):
            if text:
                _say(console, sentence(text), indent=8)
        if place + 1 < len(found) and _alike(finding, found[place + 1]):
            continue  # what it does and what helps is said once, after the last of its kind
        for label in ("consequence", "remedy"):
            if finding.get(label):
                said = sentence(finding[label])
                _say(console, said if level == "ok" else f"{label.capitalize()}: {said}", indent=8)
        if sources := items(finding.get("sources")):
            _say(console, f"Seen in: {words(sources, 2000)}", "dim", indent=8)
    if not verbose and (hidden := sum(severity(finding) == "info" for finding in found)):
        _say(console, f"\nNot shown: {hidden} of severity info (--verbose shows them).", "dim")


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    same = ("id", "severity", "status", "consequence", "remedy", "sources")
    return all(one.get(name) == other.get(name) for name in same)


def _rest(console: Console, diagnosis: Mapping[str, Any]) -> None:
    for key, engine in mapping(diagnosis.get("engines")).items():
        facts = mapping(engine)
        said = starting(facts.get("starts"))
        accepted = number(mapping(mapping(diagnosis.get("tau")).get("as_read")).get(str(key).partition("@")[0]))
        if accepted is not None and facts.get("starts") is True:
            said += f"; as it reads these files, the accept length is {fixed(accepted, 2)}"
        _say(console, f"\n{named(key, facts.get('version'))}: {said}")
        _list(console, "reads otherwise", items(facts.get("differences")))
        _list(console, "needs", items(facts.get("needs")))
    if missing := rows(diagnosis.get("not_evaluated")):
        _say(console, "\nNot evaluated:")
        for row in missing:
            supply = f"; supply {sentence(row['supply'])}" if row.get("supply") else ""
            _say(console, f"{sentence(row.get('what')) or MISSING}{supply}", indent=2)
    if command := sentence(diagnosis.get("next")):
        _say(console, "\nNext:")
        console.print(_text(f"  {command}", "bold"), highlight=False, soft_wrap=True)


def _list(console: Console, heading: str, values: Iterable[Any]) -> None:
    for value in values:
        _say(console, f"{heading}: {sentence(value)}", indent=2)
