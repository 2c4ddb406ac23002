"""`eyas inspect`: what is this draft?   eyas inspect runs/demo/export"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from eyas.terminal import console, echo

HELP = """Describe a draft: who wrote it, its sizes, every convention and how it is known, its vocabulary map, its
tensors, and which engines can run it.

DRAFT is a directory with config.json and weights (safetensors, sharded or not, .bin, .pt), one weight file beside its
config, or a hub id. Nothing is changed and, without --stats, no weight is read: configs, headers, `d2t` and `t2d` are
enough.

How a value is known: declared (written down), inferred (from the tensors), default (the format's), guessed.

\b
Examples:
  eyas inspect runs/demo/export
  eyas inspect path/to/draft --target path/to/target
  eyas inspect owner/draft                  # from the hub, or its cache
  eyas inspect path/to/draft --stats --json
  eyas inspect path/to/draft --target T --launch "--speculative-algorithm EAGLE --context-length 2048"

Exit codes: 0 described, 2 not a readable EAGLE-3 draft.
"""


RUNS = {
    "as trained": "runs it as trained",
    "depends": "runs it as trained, under a condition",
    "otherwise": "RUNS ANOTHER MODEL",
    "not": "DOES NOT START",
}


@click.command("inspect", help=HELP)
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--target", help="Its target: names the taps where the draft leaves them out, and the engines' rules.")
@click.option(
    "--launch", default="", metavar="COMMAND", help="The command line that serves it: its flags change what engines do."
)
@click.option("--stats", is_flag=True, help="Read every tensor: root mean square, extremes, zeros, NaN.")
@click.option("--all", "everything", is_flag=True, help="Show conventions at their defaults, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(draft: Path, target: str | None, launch: str, stats: bool, everything: bool, as_json: bool) -> None:
    from eyas.draft.source import resolve_draft

    read = resolve_draft(draft)
    from eyas.describe import inspect_draft

    folder = None
    if target is not None:
        from eyas.target.source import resolve_target

        folder = resolve_target(target, part="ends")
    report = {**inspect_draft(read, folder, stats, launch), "path": str(draft)}
    if as_json:
        echo(json.dumps(report))
    else:
        _print(report, everything)


def _print(report: Mapping[str, Any], everything: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    screen = console()
    shape = report["shape"]
    screen.print(f"{report['path']}: {report['producer']}, read in the {report['dialect']} dialect")
    screen.print(
        f"{report['parameters']:,} parameters, {report['bytes'] / 2**20:,.1f} MiB; {shape['num_layers']} layer, "
        f"{shape['hidden_size']:,} wide, MLP {shape['intermediate_size']:,}, {_heads_text(shape)}, "
        f"{shape['num_taps']} taps of {shape['target_hidden_size']:,}"
    )
    screen.print(_map_text(report["map"]) + "\n")

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("convention", "value", "known"):
        table.add_column(heading)
    for name, entry in report["conventions"].items():
        if everything or name == "taps" or entry["how"] != "default":
            table.add_row(name, _text(entry["value"]), entry["how"])
    screen.print(table)

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("tensor", no_wrap=True)
    table.add_column("dtype")
    table.add_column("shape", no_wrap=True)
    table.add_column("is")
    for column in ("rms", "min", "max", "not finite") if any("stats" in t for t in report["tensors"]) else ():
        table.add_column(column, justify="right")
    for t in report["tensors"]:
        meaning = "" if t["canonical"] == t["name"] else t["canonical"] or f"not used: {t.get('ignored', 'unknown')}"
        numbers = [_number(t["stats"][key]) for key in ("rms", "min", "max", "not_finite")] if "stats" in t else []
        table.add_row(t["name"], t["dtype"], " x ".join(map(str, t["shape"])), meaning, *numbers)
    screen.print(table)

    for note in report["notes"]:
        screen.print(f"note: {note}")
    where = f" on a {report['target']['model_type']} target" if report["target"] else ""
    screen.print(f"as it stands, each engine{where}:")
    for name, engine in report["engines"].items():
        said = RUNS[engine["runs"]]
        screen.print(f"  {name} {engine['version']}: {said}")
        for difference in engine["differences"]:
            screen.print(f"    {difference['what']}; {difference['way_out']}")
        if engine["dropped"]:
            screen.print(f"    drops {', '.join(engine['dropped'])}")
        for need in engine["needs"]:
            screen.print(f"    needs {need}")


def _heads_text(shape: Mapping[str, Any]) -> str:
    """Heads of either kind of attention."""
    mla = shape.get("mla")
    if mla is None:
        return f"{shape['num_heads']} heads and {shape['num_kv_heads']} key heads of {shape['head_dim']}"
    queries = f"queries from {mla['q_lora_rank']:,}" if mla["q_lora_rank"] else "queries not compressed"
    gate = ", output gate" if mla["output_gate"] else ""
    return (
        f"latent attention (MLA) of {shape['num_heads']} heads: {queries}, keys and values from "
        f"{mla['kv_lora_rank']:,}, keys {mla['qk_nope_head_dim']} + {mla['qk_rope_head_dim']} wide, values "
        f"{mla['v_head_dim']}{gate}"
    )


def _map_text(m: Mapping[str, Any]) -> str:
    """The vocabulary map in one or two sentences."""
    if "first" not in m:
        return f"draft vocabulary {m['size']:,} of {m['target']:,}; no d2t" + (
            "" if m["size"] < m["target"] else ", as befits a full vocabulary"
        )
    said = f"draft vocabulary {m['size']:,} of {m['target']:,}; d2t begins {m['first']}"
    if m["at_1000"] is not None:
        said += f", d2t[1000] = {m['at_1000']}"
    if not m["first"]:
        return said + "; D2T IS EMPTY"
    sound = m["ascending"] and m["in_range"]
    if sound and m["identity_prefix"]:
        said += f"; the first {m['identity_prefix']:,} ids coincide, so their offsets are rightly 0"
    if not sound:
        names = {"in_range": "out of range", "distinct": "doubled", "ascending": "out of order"}
        faults = ", ".join(text for key, text in names.items() if not m[key])
        said += f"; READ AS OFFSETS, AS ENGINES DO, it gives ids {m['lowest']:,} to {m['highest']:,}: {faults}"
    agrees = {True: "t2d marks the same ids", False: "T2D MARKS OTHER IDS", None: "no t2d"}[m["agrees_with_t2d"]]
    return f"{said}; {agrees}"


def _text(value: Any) -> str:
    return "yes" if value is True else "no" if value is False else "none" if value is None else str(value)


def _number(value: float | int | None) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
