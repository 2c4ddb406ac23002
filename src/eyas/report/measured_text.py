"""A measurement in the terminal: one table of engines, where each falls, and what must be known to read it.

eyas measure DRAFT --target T --engine vllm          pytest tests/test_report_measured.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .diagnosis_text import ENGINES, MISSING, fixed, items, mapping, number, percent, rows, sentence, whole, words

if TYPE_CHECKING:
    from rich.console import Console

    from ..engines.served import Served

TAU = (
    "predicted (the replay as the engine reads the draft), reference (decoder) and served: accept length τ = 1 + "
    "accepted / rounds, prefill's token in no round; ≥j: share of all rounds that accepted at least j drafts; tok/s "
    "with the draft, plain without"
)


def show(console: Console, result: Mapping[str, Any], out: Path | None = None) -> None:
    """The whole measurement, as `eyas measure` prints it."""
    settings, parts = mapping(result.get("settings")), rows(result.get("engines"))
    prompts = mapping(settings.get("prompts"))
    console.print(_table(parts, settings, int(sum(number(n) or 0 for n in prompts.values()))))
    console.print(TAU, style="dim")
    for part in parts:
        _engine(console, part)
    for name, why in mapping(result.get("failed")).items():
        console.print(f"{_name(name)}: not measured: {sentence(why)}", style="bold red")
    if out is not None:
        console.print(f"Written to {out}.")
        if result.get("draft"):
            target = words(result.get("target_as_given") or result.get("target"))
            next_ = f"eyas doctor {words(result['draft'])} --target {target} --measured {out}"
            console.print(f"Next: {next_}", soft_wrap=True)


def _name(engine: Any) -> str:
    return ENGINES.get(str(engine), words(engine))


def _table(parts: list[Mapping[str, Any]], settings: Mapping[str, Any], prompts: int) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    k = max((int(number(part.get("k")) or 0) for part in parts), default=int(number(settings.get("k")) or 0))
    how = f"temperature {settings.get('temperature'):g}" if settings.get("temperature") else "greedy"
    table = Table(
        title=f"{prompts} prompts × {whole(settings.get('max_new_tokens'))} tokens, {k} drafted a round, {how}, "
        f"{words(settings.get('dtype'))}",
        title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=0,  # four drafts a round in 80 columns
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    for heading in (
        "predicted",
        "reference",
        "served",
        *(f"≥{j}" for j in range(1, k + 1)),
        "lossless",
        "tok/s",
        "plain",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for part in parts:
        said, taus = mapping(part.get("acceptance")), _taus(part)
        rates = [percent(x, 0).replace(" ", "") for x in items(said.get("unconditional"))[:k]]
        speeds = rows(part.get("speed"))
        with_, without = (mapping((speeds or [{}])[0].get(side)) for side in ("with_draft", "without_draft"))
        served = ("≤ " if said.get("at_most") and number(said.get("tau")) is not None else "") + fixed(said.get("tau"))
        table.add_row(
            _name(part.get("engine")), fixed(taus.get("as_read")), fixed(taus.get("reference")), served,
            *rates, *[MISSING] * (k - len(rates)), _lossless(mapping(part.get("lossless"))),
            fixed(with_.get("tokens_per_s"), 1), fixed(without.get("tokens_per_s"), 1),
        )  # fmt: skip
    return table


def _taus(part: Mapping[str, Any]) -> dict[str, Any]:
    return {str(r.get("row")): r.get("tau") for r in rows(mapping(part.get("locate")).get("rows"))}


def _lossless(said: Mapping[str, Any]) -> str:
    if said.get("lossless") is None:
        return MISSING
    text = f"{whole(said.get('identical'))}/{whole(said.get('compared'))}"
    return text if said["lossless"] else f"NO {text}"


def _engine(console: Console, part: Mapping[str, Any]) -> None:
    name, said = _name(part.get("engine")), mapping(part.get("acceptance"))
    console.print()
    console.print(f"{name} {words(part.get('version') or '')}".rstrip(), style="bold")
    if not said:
        console.print("  It did not say what it accepted.", style="yellow")
    own = ", ".join(f"{words(key)} {value:g}" for key, value in mapping(said.get("own")).items()
                    if number(value) is not None)  # fmt: skip
    if said:
        console.print(f"  Counted by {words(said.get('source'))}: {words(said.get('counting'))}.")
    if own:
        console.print(f"  In its own words: {own}.")
    strict = mapping(said.get("strict"))
    if strict:
        rounds = whole(strict.get("rounds"))
        console.print(
            f"  τ {fixed(strict.get('tau'))} over the {rounds} rounds whose drafts all fall within the answer."
        )
    _traffic(console, mapping(part.get("other_traffic")))
    _differences(console, mapping(part.get("lossless")))
    for row in rows(part.get("speed")):
        _speed(console, row)
    _sets(console, mapping(part.get("sets")), rows(part.get("speed")))
    _located(console, mapping(part.get("locate")))
    _captured(console, mapping(part.get("capture")))
    for text in items(part.get("notes")):
        console.print(f"  {sentence(text)}.")
    for text in items(part.get("warnings")):
        console.print(f"  {sentence(text)}", style="yellow")
    for error in items(part.get("errors")):
        console.print(f"  {sentence(error)}", style="bold red")


def _traffic(console: Console, said: Mapping[str, Any]) -> None:
    if said.get("seen"):
        console.print(f"  Somebody else was served meanwhile ({whole(said.get('tokens'))} tokens more than ours): not "
                      "mixed into the counts, but into the speed.", style="yellow")  # fmt: skip
    elif said.get("seen") is None and said.get("why"):
        console.print(
            f"  Whether somebody else was served meanwhile is not known: {sentence(said['why'])}.", style="dim"
        )


def _differences(console: Console, said: Mapping[str, Any]) -> None:
    for kind, told in (("near-tie", said.get("near_ties")), ("DIFFERS", said.get("differences"))):
        for row in rows(told):
            both = [(side, mapping(row.get(side))) for side in ("plain", "speculative")]
            sides = " | ".join(f"{side} {words(said.get('token'))} {words(said.get('text'))}" for side, said in both)
            where = f"{words(row.get('set'))} prompt {words(row.get('prompt'))}, token {words(row.get('position'))}"
            console.print(f"  {kind}: {where}: {sides}; gap {fixed(row.get('gap'), 6)}")


def _speed(console: Console, row: Mapping[str, Any]) -> None:
    for side, label in (("with_draft", "with the draft"), ("without_draft", "without")):
        said = mapping(row.get(side))
        if said:
            first, each, gap = (mapping(said.get(key)) for key in ("first_token_ms", "per_token_ms", "gap_ms"))
            shown = "; ".join(f"{what} {'/'.join(fixed(d.get(p), 0) for p in ('p50', 'p95', 'p99'))}"
                              for what, d in (("first token", first), ("per token", each), ("gap", gap)))  # fmt: skip
            rate = f"{whole(row.get('concurrency'))} at once, {label}: {fixed(said.get('tokens_per_s'), 1)} tokens/s"
            console.print(f"  {rate}; ms p50/p95/p99: {shown}", style="dim")


def _sets(console: Console, sets: Mapping[str, Any], speeds: list[Mapping[str, Any]]) -> None:
    if len(sets) < 2:
        return
    shown = []
    for name, said in sets.items():
        rates = [f"{fixed(mapping(mapping(row.get('sets')).get(name)).get('speedup'), 2)} times as fast"
                 + (f" with {whole(row.get('concurrency'))} at once" if len(speeds) > 1 else "")
                 for row in speeds if mapping(mapping(row.get("sets")).get(name)).get("speedup")]  # fmt: skip
        shown.append(", ".join([f"{words(name)} τ {fixed(mapping(said).get('tau'))}", *rates]))
    console.print(f"  By set: {'; '.join(shown)}.")


def _located(console: Console, said: Mapping[str, Any]) -> None:
    for row in rows(said.get("rows")):
        mark = "→" if said.get("falls") and row.get("row") == said.get("falls") else " "
        counts = f"{whole(row.get('accepted'))} of {whole(row.get('rounds'))} rounds" if row.get("rounds") else ""
        why = f"({sentence(row.get('why'))})" if row.get("tau") is None and row.get("why") else counts
        style = "bold red" if mark == "→" else None
        console.print(f"  {mark} {words(row.get('what')):44} {fixed(row.get('tau')):>7}  {why}".rstrip(), style=style)
    if said.get("says"):
        console.print(f"  {sentence(said['says'])}.", style="bold red" if said.get("falls") else "green")


def _captured(console: Console, said: Mapping[str, Any]) -> None:
    for s in rows(said.get("slices")):
        shift = f", {s['shift']:+} token" if number(s.get("shift")) else ""
        which = f"states fed as tap {words(s.get('declared'))}: nearest is tap {words(s.get('nearest'))}{shift}"
        how = f"norm {fixed(s.get('norm_ratio'))} times, cosine {fixed(s.get('cosine'), 4)}"
        console.print(f"    {which}; {how}", style=None if s.get("right") else "bold red")
    if said.get("says"):
        console.print(f"  {sentence(said['says'])}.", style="green" if said.get("right") else "bold red")


def show_log(console: Console, served: Served) -> None:
    """What a log says of acceptance."""
    console.print(f"{_name(served.engine)} {served.version}".rstrip(), style="bold")
    console.print(f"  τ {fixed(served.tau)}" + (f" over {served.rounds:,} rounds" if served.rounds else ""))
    own = ", ".join(f"{name} {value:g}" for name, value in served.said.items() if isinstance(value, int | float))
    console.print(f"  In its own words: {own}.")
    if served.unconditional:
        shown = ", ".join(f"≥{j} {percent(x)}" for j, x in enumerate(served.unconditional, 1))
        console.print(f"  Of all rounds: {shown}.")
    for note in served.notes:
        console.print(f"  {sentence(note)}", style="dim")
    for event in served.events:
        console.print(f"  {sentence(event.line)}: {sentence(event.meaning)}", style="yellow")
    console.print(TAU, style="dim")
