"""`eyas export`: a draft becomes a directory that an engine or another trainer reads, or such a directory is checked.

eyas export runs/demo draft --for sglang,vllm
eyas export draft other --to speculators
eyas export --check draft                               # pytest tests/test_export.py
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from eyas.terminal import echo


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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    source: Path | None, directory: Path | None, out: Path | None, to: str | None, dtype: str, engines: str,
    target: str | None, features: Path | None, check: Path | None, verify: bool, converted: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Write the draft of RUN_OR_DRAFT as a directory that engines, or another trainer, read as it was trained.

    OUT is replaced only if Eyas wrote all of it. Bytes are copied as they are; a draft of any size needs the memory of
    one tensor.

    \b
    Examples:
      eyas export runs/demo draft --for sglang,vllm
      eyas export path/to/specforge-draft draft --to sglang --target path/to/target
      eyas export draft for-speculators --to speculators
      eyas export draft for-llamacpp --to llamacpp --target path/to/target --convert draft.gguf
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
            raise click.UsageError("--check DIR checks a directory and takes no RUN_OR_DRAFT and no OUT")
        _check(check, as_json)
    elif source is None or out is None:
        raise click.UsageError("name what to export and where: eyas export RUN_OR_DRAFT OUT")
    else:
        _export(source, out, to, dtype, engines, target, features, verify, converted, as_json)


def _export(
    source: Path, out: Path, to: str | None, dtype: str, engines: str, target: str | None, features: Path | None,
    verify: bool, converted: Path | None, as_json: bool,
) -> None:  # fmt: skip
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
        source, out, to=to, dtype=dtype, engines=wanted, target_dir=target_dir, features=recorded, verify=verify
    )
    next_steps = []
    if to in CONVERTED:
        taps = tuple(report.taps)
        if converted is not None and target_dir is not None:
            convert(to, out, target_dir, converted, taps)
        else:
            next_steps = how(to, out, target or "TARGET", taps)
    if as_json:
        echo(json.dumps({**report.to_dict(), "converted": converted and str(converted), "next": next_steps}))
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
