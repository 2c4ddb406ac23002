"""`eyas prove`: decode with draft and target, and say what the draft is worth.

eyas prove runs/demo/export --limit 4                   # pytest tests/test_prove.py
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from eyas.cli.sets import SETS, read_sets
from eyas.cli.workers import template_options
from eyas.terminal import console, echo

RESULT = "result.json"

HELP = f"""Decode with DRAFT and its target: is it lossless, how long is the accept length, how much faster is it?

Every prompt is answered twice by the same code, plainly and speculatively, in float32. The answers must be the same
token for token; where they first differ, both logits are shown (a near-tie of two logits is no fault). The accept
length τ = 1 + accepted / rounds leaves out prefill's token, rounds whose drafts reach past the end of the answer, and
answers from where they repeat themselves endlessly. To compare with an engine, use --ignore-eos in both.

A chain of --k tokens is drafted each round. With --topk or --nodes it is EAGLE-2's tree of that depth: each node has
the draft's --topk likeliest tokens as children, the --topk most promising nodes of a layer are gone on from, and the
--nodes most promising of all are verified (engines count the root too: 16 here are 17 of SGLang's draft tokens).

DRAFT is any draft directory that Eyas reads, or a hub id. Prompts come from --prompts (JSONL or Parquet, one set a
file) and --sets ({SETS}; these alone where neither is given).

\b
Examples:
  eyas prove runs/demo/export
  eyas prove my-draft --target Qwen/Qwen3-1.7B --sets mt_bench --limit 80 --max-new-tokens 256
  eyas prove my-draft --k 5 --topk 8 --nodes 32
  eyas prove my-draft --target path/to/target --prompts chats.jsonl --fail-below 1.8 --json

\b
Exit codes: 0 measured; 1 with --strict or --fail-below: not lossless, or τ too small; 2 unreadable input; 3 draft and
target do not belong together.
"""


@click.command("prove", help=HELP)
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--target", default="smollm2", show_default=True, help="Folder, .gguf file, hub id or 'smollm2'.")
@click.option("--prompts", "files", multiple=True, metavar="FILE", help="A prompt file, a set of its own; repeatable.")
@click.option("--sets", "names", metavar="A,B", help=f"Held-out sets by name: {SETS}.")
@click.option("--limit", type=click.IntRange(min=1), default=16, show_default=True, help="Prompts of each set.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens an answer.")
@click.option(
    "--k",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Tokens drafted a round; of a tree: its depth.",
)
@click.option("--topk", type=click.IntRange(min=1), help="Draft a tree: children of a node.  [default: 4 with --nodes]")
@click.option("--nodes", type=click.IntRange(min=1), help="Draft a tree: its nodes.  [default: topk * k with --topk]")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--ignore-eos", is_flag=True, help="Go on behind the end of an answer, to compare with engines run so.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of sampling.")
@click.option("--batch", type=click.IntRange(min=1), default=24, show_default=True, help="Answers decoded together.")
@click.option(
    "--timed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Prompts of each set decoded alone: of these the speed-up is made.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1.")
@click.option("--trust-remote-code", is_flag=True, help="Run modelling code that comes with the target.")
@template_options()
@click.option("--out", type=click.Path(path_type=Path), help=f"Folder for {RESULT} and its manifest.")
@click.option("--strict", is_flag=True, help="Exit code 1 unless lossless (greedy only).")
@click.option("--fail-below", type=float, metavar="TAU", help="Exit code 1 unless lossless and mean τ at least TAU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    draft: Path, target: str, files: tuple[str, ...], names: str | None, limit: int, out: Path | None, strict: bool,
    fail_below: float | None, as_json: bool, template_args: tuple[str, ...], **settings: Any,
) -> None:  # fmt: skip
    from eyas.draft.source import resolve_draft

    draft = resolve_draft(draft)  # before the seconds that all other modules take
    from eyas.artifacts import check_out
    from eyas.cli.pairs import note_other_target
    from eyas.console import bar
    from eyas.decode.prove import prove
    from eyas.features.conversations import parse_template_kwargs
    from eyas.locks import inside
    from eyas.machine import reuse_large_allocations
    from eyas.target.source import resolve_target

    started, kwargs = time.monotonic(), parse_template_kwargs(template_args)
    if out is not None:
        check_out(out, "prove")
    reuse_large_allocations()
    sets = read_sets(files, names, limit)
    folder = resolve_target(target)
    note_other_target(draft, folder)
    total = 2 * sum(map(len, sets.values()))
    shown = bar(total=total, desc="prove", unit="answer", leave=False)
    with shown, contextlib.nullcontext() if out is None else inside(out):
        result = prove(draft, folder, sets, on_answer=shown.update, template_kwargs=kwargs, **settings)
        if out is not None:
            _write(out, result, draft, folder, started)
    if as_json:
        echo(json.dumps(result))
    else:
        _show(result)
    _judge(result, strict, fail_below)


def _write(out: Path, result: Mapping[str, Any], draft: Path, target: Path, started: float) -> None:
    from eyas.artifacts import write_manifest
    from eyas.digests import sha256_file
    from eyas.target.source import fingerprint
    from eyas.writes import atomic_write_json

    atomic_write_json(out / RESULT, result)
    weights = {path.name: sha256_file(path) for path in sorted(draft.glob("*.safetensors"))}
    write_manifest(
        out,
        "prove",
        inputs={**{f"draft/{name}": digest for name, digest in weights.items()}, "target": fingerprint(target)},
        config=result["settings"],
        counts={name: result[name] for name in ("tau_mean", "rounds", "lossless")},
        duration_s=time.monotonic() - started,
        files=[RESULT],
        seed=result["settings"]["seed"],
    )


def _judge(result: Mapping[str, Any], strict: bool, fail_below: float | None) -> None:
    """Raise EyasError (exit code 1) where the caller asked for more than there is."""
    from eyas.errors import EyasError

    if (strict or fail_below is not None) and result["lossless"] is False:
        raise EyasError(
            "decoding with this draft is not lossless; the differences are listed above; report them: a draft "
            "cannot cause this, the decoder can"
        )
    if fail_below is not None and (result["tau_mean"] is None or result["tau_mean"] < fail_below):
        raise EyasError(
            f"mean accept length {result['tau_mean']} is below the --fail-below of {fail_below}; `eyas doctor DRAFT "
            "--target T` looks for the reason"
        )


# ---------------------------------------------------------------- for the eye


def _show(result: Mapping[str, Any]) -> None:
    from rich.table import Table

    settings, k = result["settings"], result["settings"]["k"]
    how = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    screen = console(markup=True)
    what = f"{k} drafted a round"
    if settings["drafting"] == "tree":
        what = f"tree of {settings['nodes']} nodes, depth {k}, top {settings['topk']}"
    table = Table(title=f"accept length τ, {what}, {how}, {settings['dtype']}", title_justify="left")
    for heading in ("prompts", "τ", "95 % interval", "answers", "rounds", "loops", *(f"≥{j}" for j in range(1, k + 1))):
        table.add_column(heading, justify="left" if heading == "prompts" else "right")
    for name, row in result["tau"].items():
        numbers = [_number(row["tau"]), _range(row["low"], row["high"])]
        numbers += [f"{row['prompts']}", f"{row['rounds']:,}", f"{row['loops']}"]
        table.add_row(name, *numbers, *_rates(row["unconditional"]))
    table.add_section()
    rates = result["per_position"]
    over = ("", f"{result['rounds']:,}", "")
    mean = _range(result["tau_mean_low"], result["tau_mean_high"])
    table.add_row("mean of sets", _number(result["tau_mean"]), mean, *over, *_rates(rates["unconditional"]))
    table.add_row("conditional", "", "", *over, *_rates(rates["conditional"]))
    screen.print(table)
    tree = " (along the tree's accepted path)" if settings["drafting"] == "tree" else ""
    screen.print(f"≥j: share of all rounds in which the first j drafts{tree} were all accepted;")
    screen.print("conditional: share of the rounds in which the first j-1 were.")
    screen.print(f"Counted as engines do, every round in full and loops too: τ {result['all_rounds']['tau']} overall.")
    for name, row in result["tau"].items():
        if row["left_out"]:
            screen.print(f"{name}: {row['left_out']} prompts left out, too long for the target's context.")
    _show_losslessness(screen, result)
    speed = result["speed"]
    if result["speedup"] is not None:
        screen.print(
            f"Speed: {speed['plain_tokens_per_s']} tokens/s plain, {speed['speculative_tokens_per_s']} with the draft, "
            f"{result['speedup']} times ({speed['prompts']} prompts one by one, {settings['threads']} threads)."
        )


def _show_losslessness(screen: Any, result: Mapping[str, Any]) -> None:
    if result["lossless"] is None:
        screen.print("Sampled: the text is distributed as the target's own, so there is nothing to compare by token.")
        return
    verdict = "Lossless" if result["lossless"] else "NOT lossless"
    screen.print(f"{verdict}: {result['identical']} of {result['compared']} answers are token for token the same.")
    for kind, rows in (("near-tie", result["near_ties"]), ("DIFFERS", result["differences"])):
        for row in rows:
            sides = " | ".join(
                f"{side} {row[side]['token']} {row[side]['text']!r} logit {row[side]['logit']}"
                for side in ("plain", "speculative")
            )
            where = f"{row['set']} prompt {row['prompt']}, token {row['position']}"
            screen.print(f"  {kind}: {where}: {sides}; gap {row['gap']}", markup=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _range(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _rates(rates: list[float | None]) -> list[str]:
    return ["-" if rate is None else f"{rate:.1%}" for rate in rates]
