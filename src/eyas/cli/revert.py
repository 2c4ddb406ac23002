"""`eyas revert`: bring back an earlier state of a draft.   eyas revert draft 2"""

from __future__ import annotations

import json
from pathlib import Path

import click

from eyas.terminal import echo

HELP = """Bring a draft back to the state before change N of its history, bit for bit; without N, before the last
change.

A revert is a change itself: it stands in the history, and `eyas revert DRAFT` a second time takes it back. Before
anything is written, the bytes that the changes wrote are compared with what the journal says of them; where something
else wrote there since, nothing is done, unless --force says so. What --force overwrites is kept in the journal.

\b
Examples:
  eyas history draft
  eyas revert draft
  eyas revert draft 2

Exit codes: 0 reverted, 1 the disk refused or another process is changing the draft, 2 there is no such change, or
something else changed the files since.
"""


@click.command("revert", help=HELP)
@click.argument("draft", type=click.Path(path_type=Path))
@click.argument("number", type=int, required=False, metavar="[N]")
@click.option("--force", is_flag=True, help="Revert although something else changed the files since.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(draft: Path, number: int | None, force: bool, as_json: bool) -> None:
    from eyas.repair.history import revert

    from .history import lines

    done = revert(draft, number, force=force)
    if as_json:
        echo(json.dumps({"draft": str(draft), **done}))
        return
    for line in lines(done):
        echo(line)
    echo(f"{draft}: as it was before change {done['to']}; `eyas revert {draft}` takes this back")
