"""`eyas ask`: prompts out of nothing but the target.   eyas ask --count 5000 --out runs/asked"""

from __future__ import annotations

import json
from pathlib import Path

import click

from eyas.terminal import echo

HELP = """Let the target write requests itself, as prompts for `eyas regenerate`.

An instruction-tuned model knows what users say: given its chat template up to where a user's message begins, it goes on
with one. Use it where there are too few prompts, or none. --opening steers it towards what the draft will be used for;
several are taken in turn, and an empty one leaves the choice to the target.

OUT gets prompts.jsonl and manifest.json. A message that does not end in time is shortened to its last whole sentence
or line; those that repeat themselves, that are too short or that another one equals are left out and counted. Killed
at any moment, the same command goes on.

\b
Examples:
  eyas ask --count 5000 --out runs/asked
  eyas ask --count 2000 --target Qwen/Qwen3-1.7B --opening "" --opening "Write a function" --out runs/asked
  eyas regenerate runs/asked/prompts.jsonl --out runs/answers
"""


@click.command("ask", help=HELP)
@click.option("--count", type=click.IntRange(min=1), required=True, help="Messages to begin; most are usable.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the prompts.")
@click.option("--target", help="Folder, .gguf file, hub id or 'smollm2'  [default: smollm2].")
@click.option("--opening", "openings", multiple=True, help="First words of a message; repeatable  [default: none].")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=48, show_default=True, help="Of one message.")
@click.option("--temperature", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True)
@click.option(
    "--top-k", type=click.IntRange(min=1), default=50, show_default=True, help="Likeliest tokens to draw from."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--slots", type=click.IntRange(min=1), default=96, show_default=True, help="Messages generated at once.")
@click.option("--device", default="cpu", show_default=True, help="Where the target runs: cpu, cuda, cuda:1, auto.")
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="float32", show_default=True
)
@click.option("--trust-remote-code", is_flag=True, help="Run modelling code that comes with the target.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as one JSON object on stdout.")
def command(
    count: int,
    out: Path,
    target: str | None,
    openings: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    slots: int,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    from eyas.ask import PROMPTS, Asking, ask
    from eyas.console import bar
    from eyas.machine import choose_precision
    from eyas.stages import describe
    from eyas.target.source import resolve_target

    how = Asking(
        openings or ("",), max_new_tokens, temperature, top_k, seed, device, choose_precision(dtype, device), slots,
        trust_remote_code,
    )  # fmt: skip
    with bar(total=count, desc="ask", unit="message") as shown:
        counts = ask(resolve_target(target), out, count, how, shown.update)
    echo(json.dumps({"out": str(out), **counts}) if as_json else f"{out / PROMPTS}: {describe(counts)}")
