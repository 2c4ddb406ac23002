"""`eyas report`: a run, or two side by side, as one HTML file.   eyas report runs/demo"""

from __future__ import annotations

import json
from pathlib import Path

import click

from eyas.terminal import echo

HELP = """Write one HTML file about RUN, the folder of `eyas run` or `eyas train`; with OTHER side by side.

It shows the stages and what they cost, loss and predicted accept length over the tokens seen, acceptance by drafted
position, the coverage of the draft vocabulary, the loss mask of some conversations, rounds of some answers with what
was drafted and accepted, and where all of it comes from. A run that is still at work, or that stopped, gives a page
that says what is not there yet. The file needs nothing else: no network, no server.

The masks are shown with the target's tokenizer, which is looked for where the run found it; --target names it
otherwise. Nothing in RUN is changed; the page is written into it unless --out says where.

\b
Examples:
  eyas report runs/demo --open
  eyas report runs/demo runs/long --out comparison.html
  eyas report runs/demo --json | jq '.runs[0].training.predicted[-1]'
"""


@click.command("report", help=HELP)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              help="The file.  [default: RUN/report.html, RUN/comparison.html of two]")  # fmt: skip
@click.option("--target", help="Whose tokenizer shows the masks: folder, .gguf file, hub id or 'smollm2'.")
@click.option("--json", "as_json", is_flag=True, help="Print the data of the page instead of writing it.")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
def command(run: Path, other: Path | None, out: Path | None, target: str | None, as_json: bool, show: bool) -> None:
    from eyas.artifacts import REPORTS
    from eyas.report.run import read_report
    from eyas.report.run_html import render
    from eyas.writes import atomic_write

    report = read_report([run] if other is None else [run, other], target)
    if as_json:
        echo(json.dumps(report, ensure_ascii=False))
        return
    out = out or run / REPORTS[other is not None]
    atomic_write(out, render(report))
    echo(out)
    if show:
        click.launch(str(out))
