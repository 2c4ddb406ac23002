"""The summary of a run: made of the records of its stages, shown as a table and told as a short story.

eyas run demo      pytest tests/test_report.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eyas.terminal import console

if TYPE_CHECKING:
    from eyas.config import RunConfig
    from eyas.stages import StageRecord


def summarise(records: Mapping[str, StageRecord], proof: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """summary.json: the result of `prove`, and what it took to get there.

    records: of all stages. proof: what eyas.decode.prove returned. seconds: of all stages together, without what killed
    runs lost. peak_memory_gib: largest resident set of the process or a child, over all stages.
    """
    extracted = records["extract"].counts
    asked, answered = (records[name].counts if name in records else None for name in ("ask", "regenerate"))
    return {
        "tau_mean": proof["tau_mean"],
        "tau": {name: dict(numbers) for name, numbers in proof["tau"].items()},
        "per_position": proof["per_position"],
        "lossless": proof["lossless"],
        "supervised_tokens": extracted["supervised_tokens"],
        "seconds": round(sum(record.duration_s for record in records.values()), 1),
        "peak_memory_gib": max(record.peak_memory_gib for record in records.values()),
        "speedup": proof["speedup"],
        "draft_tokens": config.prove.draft_tokens,
        "tau_mean_low": proof["tau_mean_low"],
        "tau_mean_high": proof["tau_mean_high"],
        "compared": proof["compared"],
        "identical": proof["identical"],
        "near_ties": len(proof["near_ties"]),
        "speed": proof["speed"],
        "asked": asked,
        "answers": answered,
        "vocabulary": records["vocab"].counts,
        "training": records["train"].counts,
        "stages": {name: {"seconds": r.duration_s, "counts": r.counts} for name, r in records.items()},
        "name": config.name,
        "target": config.target.source,
        "definition": proof["definition"],
    }


def print_summary(summary: Mapping[str, Any]) -> None:
    """The table of accept lengths and the story, on stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    screen = console(markup=True)
    k = summary["draft_tokens"]
    title = f"accept length τ: tokens emitted per target forward, {k} drafted"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("prompts", no_wrap=True)
    for heading in ("τ", "95 %", "answers", "rounds", *(f"≥{j} %" for j in range(1, k + 1))):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in summary["tau"].items():
        rates = [_percent(rate) for rate in row["unconditional"]]
        table.add_row(name, _tau(row["tau"]), _range(row), str(row["prompts"]), f"{row['rounds']:,}", *rates)
    table.add_section()
    rates = [_percent(rate) for rate in summary["per_position"]["unconditional"]]
    mean = {"low": summary["tau_mean_low"], "high": summary["tau_mean_high"]}
    prompts = sum(row["prompts"] for row in summary["tau"].values())
    rounds = sum(row["rounds"] for row in summary["tau"].values())
    table.add_row("mean of sets", _tau(summary["tau_mean"]), _range(mean), str(prompts), f"{rounds:,}", *rates)
    screen.print(table)
    screen.print("≥j %: share of rounds whose first j drafted tokens were accepted.\n")
    screen.print(story(summary))


def story(summary: Mapping[str, Any]) -> str:
    """What happened, in a few sentences, with the numbers that this run measured."""
    lines = []
    asked, answers = summary.get("asked"), summary["answers"]
    if asked is not None:
        lines.append(f"The target wrote {asked['prompts']:,} requests itself, to learn from beside those given.")
    if answers is not None:
        lines.append(_answers(summary["target"], answers))
    vocabulary, training = summary["vocabulary"], summary["training"]
    lines.append(
        f"The target's states were recorded on {summary['supervised_tokens']:,} tokens of answers. The draft can "
        f"say {vocabulary['ids']:,} ids, which cover {vocabulary['held_out_coverage']:.1%} of answers that it was not "
        f"trained on."
    )
    trained = f"It was trained for {training['steps']:,} steps on {training['tokens_seen']:,} tokens"
    predicted = training.get("predicted")
    if predicted:
        trained += f"; the accept length that held-out answers predict is {predicted['accept_length']:.2f}"
    lines.append(trained + ".")
    lines.append(_lossless(summary))
    tau = summary["tau_mean"]
    speed = summary["speedup"]
    if tau is not None:
        sentence = f"A forward pass of the target now emits {tau:.2f} tokens on average instead of 1"
        if speed is not None:
            faster = "faster" if speed >= 1 else "slower"
            factor = speed if speed >= 1 else 1 / speed
            sentence += f"; measured one answer at a time on this machine, decoding is {factor:.2f} times {faster}"
        lines.append(sentence + ".")
    minutes = summary["seconds"] / 60
    lines.append(f"All of it took {minutes:.1f} minutes and at most {summary['peak_memory_gib']:.1f} GiB of memory.")
    return "\n".join(lines)


def _answers(target: str, counts: Mapping[str, Any]) -> str:
    said = f"The target, {target}, answered {counts['prompts']:,} prompts; {counts['kept']:,} answers were kept"
    aside = counts.get("set_aside") or {}
    if aside:
        said += ", " + " and ".join(f"{n:,} set aside ({reason})" for reason, n in aside.items())
    return said + "."


def _lossless(summary: Mapping[str, Any]) -> str:
    compared, identical, near = summary["compared"], summary["identical"], summary["near_ties"]
    if summary["lossless"] is None:
        return "Decoding was sampled, so answers cannot be compared token for token."
    if summary["lossless"]:
        rest = "" if identical == compared else f", and {near} first differ at a near-tie of two logits"
        return f"Of {compared} answers decoded with and without the draft, {identical} are token for token equal{rest}."
    return f"NOT lossless: {compared - identical - near} of {compared} answers differ by more than a near-tie."


def _tau(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _range(row: Mapping[str, Any]) -> str:
    return "-" if row["low"] is None else f"{row['low']:.2f}–{row['high']:.2f}"
