"""`eyas doctor`: what is wrong with this draft?   eyas doctor path/to/draft --target path/to/target"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from eyas.doctor.finding import Finding

HELP = """Examine a draft's files: tensors, vocabulary map, config, and what engines make of them.

Nothing is changed and nothing is run: these are the static checks, which read configs, headers, the maps and the norm
weights. They cannot see what only a measurement shows (`eyas prove` measures). A finding names what was seen, what
happens if the draft is served so, and what to do. Oddities that are right are said to be right.

\b
Examples:
  eyas doctor path/to/draft
  eyas doctor path/to/draft --target path/to/target --engine sglang
  eyas doctor path/to/draft --format github --fail-on warning     # in CI

Exit codes: 0 nothing of --fail-on or worse, 1 findings, 2 the files cannot be read.
"""
ANNOTATIONS = {"error": "error", "warning": "warning", "info": "notice", "ok": "notice"}


@click.command("doctor", help=HELP, short_help="Examine a draft's files for faults: map, tensors, config, engines.")
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--target", help="Its target: folder, .gguf file, hub id or 'smollm2'.")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice(["sglang", "vllm", "llamacpp"]),
    help="What it is to be served with; repeatable  [default: all, for information].",
)
@click.option("--static", is_flag=True, help="Files only. There are no other checks yet, so this changes nothing.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "info", "never"]),
    default="error",
    show_default=True,
    help="Exit with 1 from this severity on.",
)
@click.option("--format", "form", type=click.Choice(["text", "json", "github"]), default="text", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def command(
    draft: Path, target: str | None, engines: tuple[str, ...], static: bool, fail_on: str, form: str, as_json: bool
) -> None:
    from eyas.doctor.examine import examine
    from eyas.doctor.finding import ORDER, Severity

    facts = None
    if target is not None:
        from eyas.target.facts import read_facts
        from eyas.target.source import resolve_target

        facts = read_facts(resolve_target(target))
    findings = examine(draft, facts, engines)
    worst = min((ORDER[f.severity] for f in findings), default=len(ORDER))
    failed = fail_on != "never" and worst <= ORDER[Severity(fail_on)]
    if as_json or form == "json":
        verdict = "faulty" if any(f.severity is Severity.ERROR for f in findings) else "no fault in the files"
        click.echo(json.dumps({"draft": str(draft), "verdict": verdict, "findings": [f.to_dict() for f in findings]}))
    elif form == "github":
        for f in findings:
            text = f"{f.evidence}. {f.remedy}".replace("%", "%25").replace("\n", "%0A")
            click.echo(f"::{ANNOTATIONS[f.severity]} file={draft},title={f.id}::{text}")
    else:
        _print(draft, findings)
    raise SystemExit(1 if failed else 0)


def _print(draft: Path, findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.padding import Padding

    from eyas.doctor.finding import Severity

    console = Console(highlight=False, markup=False)
    counts = {severity: sum(f.severity is severity for f in findings) for severity in Severity}
    if counts[Severity.ERROR]:
        said = f"{counts[Severity.ERROR]} error(s), {counts[Severity.WARNING]} warning(s)"
    elif counts[Severity.WARNING]:
        said = f"no error in the files, {counts[Severity.WARNING]} warning(s)"
    else:
        said = "no fault in the files"
    console.print(f"{draft}: {said}\n", soft_wrap=True)
    styles = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.OK: "green", Severity.INFO: "dim"}
    for f in findings:
        console.print(f"{f.severity.value:8}{f.id}", style=styles[f.severity])
        sources = f"Seen in: {', '.join(f.sources)}" if f.sources else ""
        for text in (f.evidence, f.consequence, f.remedy, sources):
            if text:
                console.print(Padding(text, (0, 0, 0, 8), expand=False))
        console.print()
