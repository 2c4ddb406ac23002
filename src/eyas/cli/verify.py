"""`eyas verify`: is this copy of a draft intact?   eyas verify draft"""

from __future__ import annotations

import json
from pathlib import Path

import click

from eyas.terminal import echo

HELP = """Prove that a draft is what Eyas wrote: after a copy, an upload, a conversion. The target is not needed.

Every tensor is compared with its digest in eyas.json, under its canonical name and in its recorded dtype, so that a
conversion that renamed, fused or widened it is checked as well; tensors that are missing, additional or changed are
named. Then the vocabulary map, config.json as engines read it, and the probe: the draft is run on the few recorded
sequences that it carries, and must choose what it chose when it was exported.

`eyas export --check DIR` compares the same; this verb refuses a draft that carries no digests.

\b
Examples:
  eyas verify draft
  eyas verify path/to/downloaded/draft --json
  eyas verify owner/draft               # what the hub has of it

Exit codes: 0 intact, 1 something differs, 2 it cannot be checked (no eyas.json, no digests, unreadable).
"""


@click.command("verify", help=HELP)
@click.argument("draft", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(draft: Path, as_json: bool) -> None:
    from eyas.draft.source import resolve_draft

    read = resolve_draft(draft)  # before the seconds that all other modules take
    from eyas.repair.verify import verify_draft

    report = verify_draft(read)
    if as_json:
        echo(json.dumps({**report.to_dict(), "path": str(draft)}))
        raise SystemExit(0 if report.ok else 1)
    for problem in report.problems:
        echo(f"  {problem}")
    if report.compared.converted:
        echo(f"  stored in another dtype, the recorded numbers: {', '.join(report.compared.converted)}")
    probe = "it carries no probe" if report.probe is None else f"{report.probe.choices} recorded choices replayed"
    said = "intact" if report.ok else f"NOT intact ({len(report.problems)} differences)"
    echo(f"{draft}: {report.tensors} tensors compared, {probe}: {said}")
    raise SystemExit(0 if report.ok else 1)
