"""`eyas export`: a draft becomes a directory that an engine or another trainer reads, or such a directory is checked.

eyas export runs/demo draft --for sglang,vllm
eyas export draft other --to speculators
eyas export --check draft                               # pytest tests/test_export.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.terminal import echo

if TYPE_CHECKING:
    from eyas.export.push import Destination


@click.command("export")
@click.argument("source", required=False, type=click.Path(path_type=Path), metavar="RUN_OR_DRAFT")
@click.argument("directory", required=False, type=click.Path(path_type=Path), metavar="[OUT]")
@click.option("--out", type=click.Path(path_type=Path), help="The same as OUT.")
@click.option(
    "--to",
    type=click.Choice(["sglang", "vllm", "llamacpp", "openvino", "speculators", "specforge", "eagle"]),
    help="Spell it for one engine or trainer, and refuse what that one cannot express.  "
    "[default: the canonical directory, which SGLang, vLLM and llama.cpp all read]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "keep", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="How weights are stored. auto: as they are; float32 masters of a training run become bfloat16.",
)
@click.option(
    "--for",
    "engines",
    default="",
    metavar="ENGINES",
    help="Comma-separated engines that must run it, too: refuse what one of them cannot express.",
)
@click.option("--target", help="The draft's target: folder, .gguf, hub id or 'smollm2'. Needed for foreign drafts.")
@click.option(
    "--features", type=click.Path(path_type=Path), help="Features of which the probe is made (needs --target)."
)
@click.option(
    "--check",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Check an exported directory: digests, config, probe. Writes nothing.",
)
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Read everything back, compare it bit by bit with the source, record digests.",
)
@click.option(
    "--convert",
    "converted",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="With --to llamacpp or openvino: also run the engine's own converter and write its format here "
    "(eyas engines setup installs it).",
)
@click.option("--card", is_flag=True, help="Also write a model card, README.md, filled from eyas.json.")
@click.option("--proof", type=click.Path(path_type=Path), metavar="PATH",
              help="For the card: what `eyas prove --out` wrote of this draft  [default: the run's own].")  # fmt: skip
@click.option("--base-model", metavar="ID", help="For the card: the target's hub id  [default: --target].")
@click.option("--push-to-hub", "repo", metavar="OWNER/NAME",
              help="Upload OUT, with its card, to the Hugging Face hub.")  # fmt: skip
@click.option("--private", is_flag=True, help="The repository that is made there is private.")
@click.option("--revision", metavar="BRANCH", help="Push to this branch  [default: main].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    source: Path | None, directory: Path | None, out: Path | None, to: str | None, dtype: str, engines: str,
    target: str | None, features: Path | None, check: Path | None, verify: bool, converted: Path | None, card: bool,
    proof: Path | None, base_model: str | None, repo: str | None, private: bool, revision: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write the draft of RUN_OR_DRAFT as a directory that engines, or another trainer, read as it was trained.

    OUT is replaced only if Eyas wrote all of it. Bytes are copied as they are; a draft of any size needs the memory of
    one tensor.

    --push-to-hub writes a model card and uploads OUT in one commit, with the token of `hf auth login` or HF_TOKEN;
    without a token or a network it stops before anything is written. Eyas reads the draft from there by OWNER/NAME.

    \b
    Examples:
      eyas export runs/demo draft --for sglang,vllm
      eyas export path/to/specforge-draft draft --to sglang --target path/to/target
      eyas export draft for-speculators --to speculators
      eyas export draft for-llamacpp --to llamacpp --target path/to/target --convert draft.gguf
      eyas export draft published --proof proof --push-to-hub me/my-draft --private
      eyas export --check draft

    \b
    Exit codes: 0 written (or the check found nothing), 1 the check found something, 2 unreadable input,
    3 an engine of --for cannot run this draft as it was trained, or target and draft do not belong together.
    """
    if directory is not None and out is not None:
        raise click.UsageError("name the directory to write once: OUT or --out")
    out = directory or out
    if check is not None:
        if source is not None or out is not None:
            raise click.UsageError(
                "--check DIR checks a directory and takes no RUN_OR_DRAFT and no OUT; leave them out"
            )
        _check(check, as_json)
    elif repo is None and (private or revision is not None):
        raise click.UsageError("--private and --revision go with --push-to-hub; give it OWNER/NAME, or leave them out")
    elif not card and repo is None and (proof is not None or base_model is not None):
        raise click.UsageError("--proof and --base-model are for the card: add --card or --push-to-hub OWNER/NAME")
    elif source is None or out is None:
        raise click.UsageError("name what to export and where: eyas export RUN_OR_DRAFT OUT")
    else:
        from eyas.export.push import Destination, ready

        destination = None if repo is None else Destination(repo, revision, private)
        if destination is not None:
            ready(destination)
        about = {"repo": repo, "base_model": base_model, "proof": proof} if card or repo is not None else None
        _export(source, out, to, dtype, engines, target, features, verify, converted, about, destination, as_json)


def _export(
    source: Path, out: Path, to: str | None, dtype: str, engines: str, target: str | None, features: Path | None,
    verify: bool, converted: Path | None, about: dict[str, Any] | None, destination: Destination | None, as_json: bool,
) -> None:  # fmt: skip
    from eyas.draft.source import resolve_draft

    source = resolve_draft(source)  # before the seconds that all other modules take
    from eyas.export import export_draft, parse_engines
    from eyas.export.convert import CONVERTED, convert, how

    if converted is not None and (to not in CONVERTED or target is None):
        raise click.UsageError(f"--convert goes with --to {' or '.join(CONVERTED)}, and needs --target")

    wanted = parse_engines(engines)
    target_dir = None
    if target is not None:
        from eyas.target.source import resolve_target

        target_dir = resolve_target(target, part="ends")
    recorded = None
    if features is not None:
        from eyas.features.reader import FeatureSet

        recorded = FeatureSet.open(features)
    report = export_draft(
        source, out, to=to, dtype=dtype, engines=wanted, target_dir=target_dir, features=recorded, verify=verify,
        card=None if about is None else _card(source, target, out, about),
    )  # fmt: skip
    next_steps = []
    if to in CONVERTED:
        taps = tuple(report.taps)
        if converted is not None and target_dir is not None:
            convert(to, out, target_dir, converted, taps)
        else:
            next_steps = how(to, out, target or "TARGET", taps)
    pushed = None
    if destination is not None:
        from eyas.export.push import push

        pushed = push(out, destination, f"{destination.repo.partition('/')[2]}, exported by Eyas")
    if as_json:
        told = {**report.to_dict(), "converted": converted and str(converted), "next": next_steps}
        echo(json.dumps({**told, **({"pushed": pushed} if pushed else {})}))
        return
    echo(
        f"{report.path}: {report.tensors} tensors, {report.bytes / 2**20:.1f} MiB, {report.dtype}, "
        f"from the {report.dialect} dialect" + (", read back and found equal" if report.verified else "")
    )
    for engine, differences in report.engines.items():
        echo(f"  {engine}: {'runs as it stands' if not differences else 'cannot run it as trained'}")
        for text in differences:
            echo(f"    {text.removeprefix(engine + ': ')}")
    for line in next_steps:
        echo(f"  next: {line}")
    if report.probe_rows:
        echo(f"  probe: {report.probe_rows} rows; check any copy with `eyas export --check DIR`")
    for note in report.notes:
        echo(f"  note: {note}")
    if pushed is not None:
        echo(f"  pushed to {pushed['repo']} ({pushed['revision']}): {pushed['url']}")


def _card(
    source: Path, target: str | None, out: Path, about: dict[str, Any]
) -> Callable[[Mapping[str, Any], Path], str]:  # fmt: skip
    """Makes the card once the weights are there, by which the proof is known to be of this draft."""
    from eyas.report.card import About, card, hub_name, proof_of

    base = about["base_model"] or hub_name(target)
    known = About(about["repo"] or out.resolve().name, about["repo"], base, target)
    given = about["proof"]

    def made(eyas: Mapping[str, Any], folder: Path) -> str:
        return card(eyas, known, proof_of(given, source, folder))

    return made


def _check(path: Path, as_json: bool) -> None:
    from eyas.export.check import check_draft

    report = check_draft(path)
    if as_json:
        echo(json.dumps(report.to_dict()))
    else:
        for problem in report.problems:
            echo(f"  {problem}")
        probe = "no probe" if report.probe is None else f"{report.probe.choices} recorded choices"
        echo(f"{path}: {report.tensors} tensors, {probe}: {'as exported' if report.ok else 'NOT as exported'}")
    if not report.ok:
        raise click.exceptions.Exit(1)
