"""`eyas engines`: the real engines, on a CPU, in environments of their own.   eyas engines setup vllm"""

from __future__ import annotations

import json
from typing import Any

import click

from eyas.terminal import echo

HELP = """Set up real engines on this machine's CPU, each in a private environment, and list them.

They are for checking, not for speed: what an engine loads of a draft, and which accept length it reaches.

\b
Examples:
  eyas engines list
  eyas engines setup vllm
  eyas engines setup sglang llamacpp --json
"""

SETUP_HELP = """Build the environments of ENGINES: vllm, sglang, llamacpp, openvino.

Each goes into a folder of its own below $EYAS_CACHE, else $XDG_CACHE_HOME/eyas, else ~/.cache/eyas, with every version
pinned. Removing that folder removes it. A setup that was killed goes on where it stopped; one that is finished says so
at once. Packages come from pip's index as you have configured it; llama.cpp is compiled and needs cmake and a C++
compiler.

\b
Examples:
  eyas engines setup vllm
  eyas engines setup sglang llamacpp --jobs 1
  eyas engines setup vllm --force --json

Exit codes: 0 ready, 1 a step failed (the message says why and what to do), 2 no such engine.
"""


@click.group("engines", help=HELP,
             options_metavar="", subcommand_metavar="setup|list ...")  # fmt: skip
def command() -> None:
    pass


@command.command("setup", help=SETUP_HELP, short_help="Build what is missing of engines' environments.")
@click.argument("engines", nargs=-1, required=True, metavar="ENGINE...")
@click.option("--force", is_flag=True, help="Start from nothing, whatever is there.")
@click.option("--jobs", type=click.IntRange(1), help="Compilers at a time. Default: one a processor.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def setup_command(engines: tuple[str, ...], force: bool, jobs: int | None, as_json: bool) -> None:
    from eyas import console
    from eyas.engines.setup import recipe
    from eyas.engines.setup.recipe import setup

    recipes = [recipe(name) for name in dict.fromkeys(engines)]  # all names are known before anything is built
    reports = {}
    for wanted in recipes:
        _, report = setup(
            wanted, force=force, jobs=jobs,
            say=lambda line: None if console.quiet() else echo(line, err=as_json),
        )  # fmt: skip
        reports[wanted.engine] = report
        if not as_json:
            _print(report)
    if as_json:
        echo(json.dumps(reports))


def _print(report: dict[str, Any]) -> None:
    took = f"built in {report['seconds_total'] / 60:.1f} minutes" if report["built"] else "was ready"
    echo(
        f"{report['engine']} {report['version']}: {took}, {report['disk_bytes'] / 2**30:.1f} GiB in {report['folder']}"
    )


@command.command("list", short_help="Which engines are ready, what they take and would take.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(as_json: bool) -> None:
    """Show which engines are ready, where, and what they take on disk or would take.

    \b
    Examples:
      eyas engines list
      eyas engines list --json
    """
    from eyas.engines.setup import ENGINES, recipe
    from eyas.engines.setup.recipe import state

    states = {name: state(recipe(name)) for name in ENGINES}
    if as_json:
        echo(json.dumps(states))
        return
    for name, found in states.items():
        if found["state"] == "ready":
            what = f"ready, {found['disk_bytes'] / 2**30:.1f} GiB"
        else:
            begun = f"{found['steps_done']} of {found['steps']} steps done" if found["steps_done"] else "not set up"
            what = f"{begun}; takes about {found['disk_mib'] / 1024:.1f} GiB and {found['minutes']:.0f} minutes"
        echo(f"{name:<9} {found['version']:<10} {what}")
        echo(f"{'':<20} {found['folder']}")
