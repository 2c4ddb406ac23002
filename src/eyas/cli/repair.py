"""`eyas repair`: mend what the doctor found.   eyas repair broken --auto --target T --out mended"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from eyas.terminal import echo

if TYPE_CHECKING:
    from eyas.repair.apply import Repaired

HELP = """Mend a draft's files, in a new directory (--out) or in place, with a journal that brings every state back.

A repair needs a diagnosis of exactly these bytes. --finding names one of `eyas doctor`, which is looked for again;
--auto mends all that is found wrong; --plan replays one that was made before, on the bytes that it was made for.
Everything is tried on a copy in memory first: each operation checks the bytes, says what it found and what it writes,
and is kept only where the static checks and, with --target, the replay are better for it. What was tried in vain is
listed, and what remains is named with the reason.

\b
Examples:
  eyas repair broken --target T --auto --out mended
  eyas repair broken --target T --auto --dry-run --save-plan plan.json
  eyas repair broken --plan plan.json --in-place
  eyas repair broken --finding EY-D2T-T2D --reference path/to/d2t.pt --out mended
  eyas history broken; eyas revert broken

Exit codes: 0 mended, or nothing to mend; 1 errors remain, a plan would make it worse, or the disk refused; 2 the
finding, the plan or an operation's precondition does not hold.
"""


@click.command("repair", help=HELP)
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--auto", is_flag=True, help="Mend all that is found wrong.")
@click.option("--finding", metavar="ID", help="What to mend, such as EY-D2T-TWICE.")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan.json of --save-plan.")
@click.option("--out", type=click.Path(path_type=Path), help="New directory; the draft itself is only read.")
@click.option("--in-place", is_flag=True, help="Change the draft itself; `eyas revert` brings it back.")
@click.option("--dry-run", is_flag=True, help="Try and tell, write nothing.")
@click.option("--save-plan", type=click.Path(path_type=Path), help="Write what was decided, to review and replay.")
@click.option("--target", help="Its target: folder, .gguf file, hub id or 'smollm2'.")
@click.option("--features", type=click.Path(path_type=Path), help="Recorded features to replay, instead of recording.")
@click.option("--engine", "engines", multiple=True, metavar="NAME", help="An engine that must run it; repeatable.")
@click.option("--reference", type=click.Path(path_type=Path),
              help="A copy that is right: draft directory, d2t.pt, d2t.npy or vocab_mapping.pt.")  # fmt: skip
@click.option("--force", is_flag=True, help="Without evidence, or though it is no better; the journal says so.")
@click.option("--serve", multiple=True, metavar="ENGINE", help="Let a real engine serve the result, and count.")
@click.option("--budget", default="60s", show_default=True, metavar="TIME", help="Of each diagnosis.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--trust-remote-code", is_flag=True, help="Run code that the target's folder brings along.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    draft: Path, auto: bool, finding: str | None, plan_file: Path | None, out: Path | None, in_place: bool,
    dry_run: bool, save_plan: Path | None, target: str | None, features: Path | None, engines: tuple[str, ...],
    reference: Path | None, force: bool, serve: tuple[str, ...], budget: str, device: str, trust_remote_code: bool,
    as_json: bool,
) -> None:  # fmt: skip
    if [finding is not None, auto, plan_file is not None].count(True) != 1:
        raise click.UsageError("give one of --auto, --finding ID of `eyas doctor`, and --plan FILE")
    if [out is not None, in_place, dry_run].count(True) != 1:
        raise click.UsageError("say where to: one of --out NEW, --in-place and --dry-run")
    if force and auto:
        raise click.UsageError(
            "--auto keeps what measures better; --force goes with --finding or --plan; choose one of them"
        )
    from eyas.draft.source import resolve_draft

    read = resolve_draft(draft)  # before the seconds that all other modules take
    from eyas.cli.doctor import seconds
    from eyas.console import teller
    from eyas.engines.profiles import profile
    from eyas.repair.apply import repair
    from eyas.repair.plan import read_plan, write_plan

    for name in engines:
        profile(name)
    if save_plan is not None:
        _check_file(save_plan)
    if target is not None or features is not None:
        from eyas.machine import check_device

        check_device(device)
    folder = None
    if target is not None:
        from eyas.target.source import resolve_target

        folder = resolve_target(target)
    if in_place and read != draft and not draft.expanduser().exists():
        raise click.UsageError(f"{draft} is on the hub, and what was fetched of it is not changed: give --out NEW")
    done = repair(
        read, out=out, in_place=in_place, plan=read_plan(plan_file) if plan_file else None, finding=finding,
        target=folder, reference=reference, features=features, engines=engines, force=force, serve=serve,
        budget=seconds(budget), device=device, trust_remote_code=trust_remote_code, tell=teller(),
    )  # fmt: skip
    if save_plan is not None and done.plan is not None:
        write_plan(done.plan, save_plan)
    elif save_plan is not None:
        echo(f"eyas: nothing was decided, so {save_plan} was not written", err=True)
    if as_json:
        echo(json.dumps(done.to_dict()))
    else:
        for line in lines(done):
            echo(line)
    raise SystemExit(1 if done.left else 0)


def _check_file(path: Path) -> None:
    """Before minutes of trials and a change in place: can this file be written?"""
    import os

    from eyas.errors import BadInput

    above = next(p for p in path.absolute().parents if p.exists())
    if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK):
        raise BadInput(f"--save-plan {path} cannot be written; name a file in a folder that you may write to")


def lines(done: Repaired) -> list[str]:
    """A repair for people: what was tried, what the operations said, where it lies, what remains."""
    out = []
    for row in done.ledger:
        steps = " + ".join(step["operation"] for step in row["steps"])
        tau = "" if row["tau"] is None else f", accept length {row['tau']:.2f}"
        out.append(f"{row['finding']}: {steps}: {row['verdict']} ({row['why']}{tau})")
    out += [f"  {text}" for text in done.told]
    out += ["by force, in spite of this:"] * bool(done.forced) + [f"  {text}" for text in done.forced]
    before, after = done.tau
    if before is not None and after is not None and done.plan is not None:
        out.append(f"accept length as declared: {before:.2f} -> {after:.2f} (replayed)")
    for row in done.served:
        said = "" if row["predicted"] is None else f", the replay of what it reads says {row['predicted']:.3f}"
        out.append(f"{row['engine']} serves it with an accept length of {row['tau']:.3f} ({row['accepted']:,} accepted "
                   f"in {row['rounds']:,} rounds){said}")  # fmt: skip
    if done.plan is None:
        out.append(f"{done.source}: " + ("nothing could be mended" if done.left else "nothing is wrong that a repair "
                                         "would mend"))  # fmt: skip
    elif done.out is None:
        out.append(f"{done.source}: nothing was written (--dry-run)")
    else:
        out.append(f"{done.out}: " + ("errors remain:" if done.left else "no error left"))
    out += [f"  {row['finding']}: {row['evidence']}. Not mended: {row['why']}" for row in done.left]
    if done.out == done.source:
        out.append(f"change {done.number}; `eyas revert {done.source}` brings the earlier bytes back")
    return out
