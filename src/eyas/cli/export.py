"""`eyas export`: a trained draft becomes a directory that engines load, or such a directory is checked.

eyas export runs/demo --out draft --for sglang,vllm
eyas export --check draft                               # pytest tests/test_export.py
"""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("export")
@click.argument("source", required=False, type=click.Path(path_type=Path), metavar="RUN_OR_DRAFT")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Directory to write; replaced only if Eyas wrote all of it."
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="How weights are stored.",
)
@click.option(
    "--for",
    "engines",
    default="",
    metavar="ENGINES",
    help="Comma-separated: sglang, vllm, llamacpp. Refuse what one of them cannot express.",
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    source: Path | None, out: Path | None, dtype: str, engines: str, target: str | None, features: Path | None,
    check: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Write the draft of RUN_OR_DRAFT as one directory that SGLang, vLLM and llama.cpp load as it stands.

    \b
    Examples:
      eyas export runs/demo --out draft --for sglang,vllm
      eyas export path/to/foreign-draft --target smollm2 --features runs/demo/features --out draft
      eyas export --check draft

    \b
    Exit codes: 0 written (or the check found nothing), 1 the check found something, 2 unreadable input,
    3 an engine of --for cannot run this draft as it was trained, or target and draft do not belong together.
    """
    if check is not None:
        if source is not None or out is not None:
            raise click.UsageError("--check DIR checks a directory and takes no RUN_OR_DRAFT and no --out")
        _check(check, as_json)
    elif source is None or out is None:
        raise click.UsageError("name what to export and where: eyas export RUN_OR_DRAFT --out DIR")
    else:
        _export(source, out, dtype, engines, target, features, as_json)


def _export(
    source: Path, out: Path, dtype: str, engines: str, target: str | None, features: Path | None, as_json: bool
) -> None:
    from eyas.draft.export import export_draft, parse_engines

    wanted = parse_engines(engines)
    target_dir = None
    if target is not None:
        from eyas.target.source import resolve_target

        target_dir = resolve_target(target)
    recorded = None
    if features is not None:
        from eyas.features.reader import FeatureSet

        recorded = FeatureSet.open(features)
    report = export_draft(source, out, dtype=dtype, engines=wanted, target_dir=target_dir, features=recorded)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
        return
    click.echo(
        f"{report.path}: {report.tensors} tensors, {report.bytes / 2**20:.1f} MiB, {report.dtype}, "
        f"from the {report.dialect} dialect"
    )
    for engine, obstacles in report.engines.items():
        click.echo(f"  {engine}: {'runs as it stands' if not obstacles else 'cannot run it as trained'}")
        for text in obstacles:
            click.echo(f"    {text.removeprefix(engine + ': ')}")
    if report.probe_rows:
        click.echo(f"  probe: {report.probe_rows} rows; check any copy with `eyas export --check DIR`")
    for note in report.notes:
        click.echo(f"  note: {note}")


def _check(path: Path, as_json: bool) -> None:
    from eyas.draft.export import check_draft

    report = check_draft(path)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        for problem in report.problems:
            click.echo(f"  {problem}")
        probe = "no probe" if report.probe is None else f"{report.probe.choices} recorded choices"
        click.echo(f"{path}: {report.tensors} tensors, {probe}: {'as exported' if report.ok else 'NOT as exported'}")
    if not report.ok:
        raise click.exceptions.Exit(1)
