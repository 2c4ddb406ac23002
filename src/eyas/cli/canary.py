"""`eyas canary`: a draft that proves a deployment, made in minutes, served and judged.

eyas canary --target smollm2 --out runs/canary --engine vllm          # pytest tests/test_canary.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.terminal import console, echo

if TYPE_CHECKING:
    from eyas.canary.check import Heard, Judged

HELP = """Make a canary for TARGET: a tiny draft that proves an engine and its flags, not itself.

It knows the target's own greedy answers to a few prompts by heart, and was trained to fail under every neighbouring
reading: other layers, norms elsewhere, another RoPE base, the map read otherwise, EAGLE instead of EAGLE3. Served on
those prompts by a deployment that reads it as it was trained, every draft of every round is accepted (accept length
K + 1); anything less indicts the engine or its flags.

Once made, the same command uses it: with --engine it is served here and judged, with --url a running server is asked
that serves OUT/draft with K drafted tokens, with --check counts from elsewhere are judged (JSON: rounds, accepted, and
where known at_least, tokens, k). What is asked and what must come back is in OUT/canary.json.

\b
Examples:
  eyas canary --target smollm2 --out runs/canary
  eyas canary --target smollm2 --out runs/canary --engine vllm --engine sglang
  eyas canary --target Qwen/Qwen3-8B --out canary --url http://localhost:8000 --json      # in CI
  eyas canary --target smollm2 --out runs/canary --engine vllm -- --max-model-len 512

\b
Exit codes: 0 made, or every deployment passed; 1 one did not, or it could not be made; 2 bad usage, unreadable input,
an engine that is not set up; 3 the canary is another target's, or was measured with another K.
"""
LINES = 12  # neighbours shown


@click.command("canary", help=HELP)
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE'S OPTIONS]")
@click.option("--target", default="smollm2", show_default=True, help="Folder, .gguf file, hub id or 'smollm2'.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Its folder: draft/ and canary.json.")
@click.option("--k", type=click.IntRange(1, 16), help="Tokens drafted a round.  [default: 4]")
@click.option("--taps", metavar="A,B,C", help="Layers whose states it reads.  [default: the engines' own]")
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="Candidates for its prompts.  [default: 24 of our own]"
)
@click.option("--count", type=click.IntRange(1, 64), help="Prompts, the safest of the candidates.  [default: 8]")
@click.option("--budget", default="10m", show_default=True, metavar="TIME", help="Training ends then.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--trust-remote-code", is_flag=True, help="Run code that the target's folder brings along.")
@click.option("--force", is_flag=True, help="Make it again where there is one.")
@click.option("--engine", "engines", multiple=True, metavar="NAME", help="Serve it here and judge; repeatable.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True,
              help="Of what is served here.")  # fmt: skip
@click.option("--url", help="Judge a running server that serves it.")
@click.option("--check", "measured", type=click.Path(path_type=Path), help="Judge counts from elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-v", "--verbose", is_flag=True, help="Show every neighbour.")
def command(
    extra: tuple[str, ...], target: str, out: Path, k: int | None, taps: str | None, prompts: Path | None,
    count: int | None, budget: str, seed: int, device: str, trust_remote_code: bool, force: bool,
    engines: tuple[str, ...], dtype: str, url: str | None, measured: Path | None, as_json: bool, verbose: bool,
) -> None:  # fmt: skip
    from eyas.canary.check import of_file
    from eyas.canary.make import read
    from eyas.target.source import resolve_target

    _check_asked(engines, url, measured, extra)
    if measured is not None:
        of_file(measured)  # before minutes are spent on making the canary
    folder = resolve_target(target)
    asks = bool(engines or url or measured)
    if force or not (asks and out.is_dir() and any(out.iterdir())):
        options: dict[str, Any] = {"k": k or 4, "taps": _numbers(taps), "prompts": _messages(prompts), "seed": seed,
                                   "device": device, "trust_remote_code": trust_remote_code}  # fmt: skip
        canary = _make(folder, out, budget, force, options | ({"count": count} if count else {}))
    else:
        canary = read(out)
        _check_fits(canary, folder, out, k)
    judged = [_judged(canary, heard) for heard in _heard(canary, folder, out, engines, dtype, extra, url, measured)]
    if as_json:
        echo(json.dumps({"canary": canary, "judged": [j.to_dict() for j in judged]}))
    else:
        _show(canary, out, judged, verbose or not asks)
    raise SystemExit(0 if all(j.verdict == "pass" for j in judged) else 1)


def _make(folder: Path, out: Path, budget: str, force: bool, options: dict[str, Any]) -> dict[str, Any]:
    from eyas.canary.make import make
    from eyas.cli.doctor import seconds
    from eyas.console import teller
    from eyas.machine import check_device

    check_device(options["device"])
    return make(folder, out, budget=seconds(budget), force=force, tell=teller(), **options)


def _check_asked(engines: tuple[str, ...], url: str | None, measured: Path | None, extra: tuple[str, ...]) -> None:
    from eyas.engines.environment import required
    from eyas.engines.setup import ENGINES

    if sum(map(bool, (engines, url, measured))) > 1:
        raise click.UsageError("give one of --engine, --url and --check")
    if extra and not engines:
        raise click.UsageError(f"{' '.join(extra)}: the engine's own options need --engine")
    for name in engines:
        if name not in ENGINES:
            raise click.UsageError(f"--engine {name}: choose from {', '.join(ENGINES)}")
        required(name)


def _check_fits(canary: dict[str, Any], folder: Path, out: Path, k: int | None) -> None:
    from eyas.errors import BadInput, Mismatch
    from eyas.target.source import fingerprint

    if canary["target"]["target"] != fingerprint(folder):
        raise Mismatch(f"{out} is a canary of another target; make one for this target with --force, or elsewhere")
    if k is not None and k != canary["k"]:
        raise BadInput(f"{out} was made for --k {canary['k']}, not {k}; make it again with --force, or leave --k out")


def _heard(
    canary: dict[str, Any], folder: Path, out: Path, engines: tuple[str, ...], dtype: str, extra: tuple[str, ...],
    url: str | None, measured: Path | None,
) -> list[Heard]:  # fmt: skip
    from eyas.canary.check import of_file
    from eyas.canary.make import DRAFT
    from eyas.canary.served import heard_at, served
    from eyas.console import teller

    if measured is not None:
        return [of_file(measured)]
    if url is not None:
        return [heard_at(canary, url)]
    tell = teller()
    return [served(canary, name, folder, out / DRAFT, dtype=dtype, extra=extra, tell=tell) for name in engines]


def _judged(canary: dict[str, Any], heard: Heard) -> Judged:
    from eyas.canary.check import verdict

    return verdict(canary, heard)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--taps {text}: expected numbers such as 2,15,27") from None


def _messages(path: Path | None) -> list[Any] | None:
    if path is None:
        return None
    from eyas.canary.make import CANDIDATES
    from eyas.prompts import load_prompts

    return [prompt.messages for prompt in load_prompts(path, limit=CANDIDATES).prompts]


def _show(canary: dict[str, Any], out: Path, judged: list[Judged], neighbours: bool) -> None:
    from rich.table import Table

    screen = console()
    e, k = canary["expected"], canary["k"]
    screen.print(
        f"{out}: {len(canary['prompts'])} prompts x {canary['tokens']} tokens, K = {k}, taps {canary['taps']}, "
        f"{canary['draft']['bytes'] / 1e6:.1f} MB; made in {canary['seconds']:.0f} s "
        f"({canary['training']['steps']} steps)"
    )
    screen.print(
        f"Read rightly: {e['accepted']} of {e['rounds'] * k} drafts accepted in {e['rounds']} rounds, "
        f"tau = {e['tau']:.3f} (1 + accepted / rounds); least probability of a right token "
        f"{canary['least_probability']:.2f}"
    )
    if neighbours:
        table = Table(box=None, pad_edge=False)
        for title, side in (("tau", "right"), ("neighbour", "left"), ("rate at each position", "left")):
            table.add_column(title, justify=side)  # type: ignore[arg-type]
        rows = sorted(canary["neighbours"], key=lambda n: -(n["tau"] or 0))
        for n in rows[:LINES] if not judged else rows:
            table.add_row(f"{n['tau']:.3f}", n["name"], " ".join(f"{x:.2f}" for x in n["unconditional"]))
        screen.print(table)
        if not judged and len(rows) > LINES:
            screen.print(f"and {len(rows) - LINES} more, none above tau = {rows[LINES]['tau']:.3f} (all: --json)")
    if canary["not_told_apart"]:
        screen.print(f"Not told apart well enough: {'; '.join(canary['not_told_apart'])}")
    for j in judged:
        screen.print()
        screen.print(
            f"{j.verdict.upper():5} {j.engine or 'measured'}: tau = {j.tau:.3f} of {j.expected:.3f}, "
            f"{j.accepted} accepted in {j.rounds} rounds"
        )
        screen.print(f"      {j.says}", soft_wrap=True)
