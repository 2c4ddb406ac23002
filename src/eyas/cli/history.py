"""`eyas history`: what was done to a draft.   eyas history draft"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from eyas.terminal import echo

HELP = """Show what repairs did to a draft, oldest first: each change's number, which `eyas revert` takes, its reason,
and the tensors and files that it changed.

A change that a crash or a full disk interrupted is finished first: all that it is made of was on the disk before it
began, so a draft is always in its old state or in its new one.

\b
Examples:
  eyas history draft
  eyas history draft --json

Exit codes: 0 shown (also where nothing was ever changed), 2 not a directory, or a damaged journal.
"""


@click.command("history", help=HELP)
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(draft: Path, as_json: bool) -> None:
    from eyas.repair.history import history

    changes = history(draft)
    if as_json:
        echo(json.dumps({"draft": str(draft), "changes": changes}))
        return
    if not changes:
        echo(f"{draft}: nothing was changed here")
    for change in changes:
        for line in lines(change):
            echo(line)


def lines(change: dict[str, Any]) -> list[str]:
    """A change for people: what it was, then what became of which tensor and file."""
    entry = change["entry"]
    said = ": ".join(str(entry[key]) for key in ("finding", "operation") if entry.get(key))
    if change["kind"] == "revert":
        said = f"back to the state before change {change['to']}"
    elif change["kind"] == "new":
        said = f"{said}, written as a copy of {change.get('source', 'another directory')}".removeprefix(", ")
    out = [f"{change['number']:4}  {change['when']}  {change['kind']:6}  {said}".rstrip()]
    out += [f"        {text}" for text in entry.get("told") or () if isinstance(text, str)]
    for name, tensor in change.get("tensors", {}).items():
        out.append(f"        {name}: {_tensor(tensor['before'])} -> {_tensor(tensor['after'])}")
    for file in change["files"]:
        out.append(f"        {file['file']}: {file['how']}, {file['undo_bytes']:,} bytes kept to undo it")
    tried = [row for row in entry.get("ledger") or () if row["verdict"] != "kept"]
    out += [f"        tried in vain: {' + '.join(s['operation'] for s in row['steps'])}: {row['why']}" for row in tried]
    before, after = entry.get("tau") or (None, None)
    if before is not None and after is not None:
        out.append(f"        accept length as declared: {before:.2f} -> {after:.2f} (replayed)")
    out += [f"        forced over: {text}" for text in (*(entry.get("forced") or ()), *(change.get("forced") or ()))]
    return out


def _tensor(value: dict[str, Any] | None) -> str:
    if value is None:
        return "none"
    digest = f" {value['sha256'][:12]}" if "sha256" in value else ""
    return f"{value['dtype']} {value['shape']}{digest}"
