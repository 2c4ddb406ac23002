"""`eyas repair`: mend what the doctor found, in a new directory.   eyas repair broken --auto --out mended"""

from __future__ import annotations

import json
from pathlib import Path

import click

HELP = """Mend a draft's files into a new directory; the draft itself is never written to.

A repair needs a diagnosis: --finding names one of `eyas doctor`, which must hold for exactly these bytes; --auto mends
every error that can be mended for certain. Each operation checks the bytes before it changes anything, says what it
found and what it writes, and the result is examined again: if it is no better, nothing is kept. What was done stands in
the new directory's repairs.json.

\b
Examples:
  eyas doctor broken --target T
  eyas repair broken --target T --auto --out mended
  eyas repair broken --finding EY-D2T-T2D --reference checkpoint --out mended

Exit codes: 0 mended, 1 errors remain or the result was no better, 2 the finding or the operation's precondition does
not hold.
"""


@click.command("repair", help=HELP, short_help="Mend what the doctor found, in a new directory.")
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New directory.")
@click.option("--finding", metavar="ID", help="What to mend, such as EY-D2T-TWICE.")
@click.option("--auto", is_flag=True, help="Mend every error that can be mended.")
@click.option("--reference", type=click.Path(path_type=Path), help="A checkpoint with the right map.")
@click.option("--target", help="Its target: folder, .gguf file, hub id or 'smollm2'.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    draft: Path,
    out: Path,
    finding: str | None,
    auto: bool,
    reference: Path | None,
    target: str | None,
    as_json: bool,
) -> None:
    if (finding is None) != auto:
        raise click.UsageError("name one --finding of `eyas doctor`, or give --auto")
    from eyas.repair.apply import repair

    facts = None
    if target is not None:
        from eyas.target.facts import read_facts
        from eyas.target.source import resolve_target

        facts = read_facts(resolve_target(target))
    done = repair(draft, out, finding=finding, reference=reference, facts=facts)
    if as_json:
        click.echo(json.dumps({"out": str(out), "steps": done.steps, "left": [f.to_dict() for f in done.left]}))
    else:
        for step in done.steps:
            click.echo(f"{step['finding']}: {step['operation']}")
            for line in step["told"]:
                click.echo(f"  {line}")
        left = ", ".join(f.id for f in done.left)
        click.echo(f"{out}: " + (f"errors that remain: {left}" if left else "no error left in the files"))
    raise SystemExit(1 if done.left else 0)
