"""`eyas run`: all stages of a recipe in order.   eyas run demo --out runs/demo"""

from __future__ import annotations

from pathlib import Path

import click

from eyas.terminal import echo

HELP = """Run all stages of the recipe CONFIG, a YAML file or the name of a shipped one (demo, long).

The stages are target, prompts, regenerate, split, extract, heldout, vocab, train, export and prove; each writes its
own folder under --out, and the numbers end in summary.json. What is done and unchanged is skipped. Killed at any
moment, the same command goes on and ends in the same files.

\b
Examples:
  eyas run demo --out runs/demo
  eyas run my.yaml --override train.steps=2000 --override vocab.size=16384
  eyas run my.yaml --override target.source=Qwen/Qwen3-1.7B --json
"""


@click.command("run", help=HELP, short_help="Run all stages of a YAML recipe, skipping what is done.")
@click.argument("config")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the run [default: runs/NAME of the recipe].")
@click.option("--override", "overrides", multiple=True, metavar="A.B=VALUE", help="Change one value; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print summary.json on stdout, the progress on stderr.")
def command(config: str, out: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    run_and_show(config, out, overrides, as_json)


def run_and_show(recipe: str, out: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Run a recipe; then print its summary, as a table and a story or as one JSON object."""
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
