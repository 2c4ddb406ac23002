"""The manifest of a stage's directory: what it read, with which settings, and what it wrote, by content hash.

    write_manifest("features", "extract", inputs={...}, files=["index.json"])          pytest tests/test_artifacts.py

A stage's directory is finished exactly when it has a manifest, which is therefore written last.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas._version import __version__
from eyas.digests import plain, sha256_file, sha256_json
from eyas.errors import BadInput
from eyas.untrusted import content, inside, parse_json
from eyas.writes import atomic_write_json

MANIFEST = "manifest.json"
REPORTS = ("report.html", "comparison.html")
"""What `eyas report` writes into the folder that it is about."""
MANIFEST_SCHEMA = "eyas-manifest/1"


@functools.cache
def code_version() -> str:
    """The version of Eyas, and of the working copy where there is one: `0.1.0` or `0.1.0+g1a2b3c4`."""
    here = Path(__file__).resolve().parent
    for folder in (here, *here.parents):
        head = folder / ".git" / "HEAD"
        if not head.is_file():
            continue
        reference = head.read_text().strip()
        if reference.startswith("ref: "):
            loose = folder / ".git" / reference.removeprefix("ref: ")
            reference = loose.read_text().strip() if loose.is_file() else ""
        return f"{__version__}+g{reference[:10]}" if reference else __version__
    return __version__


def write_manifest(
    directory: str | os.PathLike[str],
    stage: str,
    *,
    inputs: Mapping[str, str],
    config: Any = None,
    conventions: Any = None,
    counts: Mapping[str, Any] | None = None,
    duration_s: float | None = None,
    files: Mapping[str, str] | list[str] | None = None,
    seed: int | None = None,
    schema: str | None = None,
) -> dict[str, Any]:
    """Finish a stage: write `directory/manifest.json` and return it. Call it last.

    inputs: what the stage read, name -> hex digest of the content. files: what it wrote, name in `directory` ->
    SHA-256; a list of names is hashed here. schema: version of the stage's own format, part of what makes it current.
    """
    folder = Path(directory)
    if isinstance(files, list):
        files = {name: sha256_file(folder / name) for name in files}
    manifest: dict[str, Any] = {
        "schema": MANIFEST_SCHEMA,
        "stage": stage,
        "stage_schema": schema,
        "code_version": code_version(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "inputs": dict(inputs),
        "config": config,
        "config_digest": sha256_json(config),
        "conventions": conventions,
        "seed": seed,
        "counts": dict(counts or {}),
        "duration_s": None if duration_s is None else round(duration_s, 3),
        "files": dict(files or {}),
    }
    atomic_write_json(folder / MANIFEST, manifest)
    return json.loads(json.dumps(manifest, default=plain))  # as a reader would get it


def read_manifest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a finished stage. Raises BadInput where there is none or it is not one of ours."""
    path = Path(directory) / MANIFEST
    try:
        manifest = parse_json(content(path))
    except FileNotFoundError:
        raise BadInput(
            f"{directory} has no {MANIFEST}, so no stage finished there. Run that stage again with the same --out."
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON ({error}). Remove it and run its stage again.") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != MANIFEST_SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else type(manifest).__name__
        raise BadInput(f"{path}: expected schema '{MANIFEST_SCHEMA}', found {found!r}. Run its stage again.")
    if not all(isinstance(manifest.get(name), dict) for name in ("files", "inputs", "counts")):
        raise BadInput(f"{path}: files, inputs and counts must be objects. Run its stage again.")
    for name, digest in manifest["files"].items():
        inside(Path(directory), name, path)
        if not isinstance(digest, str):
            raise BadInput(f"{path}: the digest of {name} is a {type(digest).__name__}. Run its stage again.")
    return manifest


def check_out(out: str | os.PathLike[str], stage: str) -> None:
    """Raise BadInput where `out` cannot become a folder of `stage`, before anything is computed for it.

    That is: a file is there or on the way to it, it may not be written, or another stage finished there, whose manifest
    and files would be lost.
    """
    folder = Path(out)
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise BadInput(f"--out {out}{'' if there == folder else f': {there}'} is a file; choose a folder")
    if (folder / MANIFEST).exists():
        try:
            found = read_manifest(folder)["stage"]
        except BadInput:  # damaged: the stage is run again
            found = stage
        if found != stage:
            raise BadInput(f"--out {out} is what `eyas {found}` wrote; choose another --out")
        return  # maybe finished, and then only read
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"--out {out}: {there} may not be written to; choose another --out, or mend its permissions")


def check_files(directory: str | os.PathLike[str], *, hashes: bool = True) -> None:
    """Raise BadInput, naming the first file that the manifest of `directory` lists and that is missing or changed."""
    folder = Path(directory)
    for name, digest in read_manifest(folder)["files"].items():
        if not (folder / name).is_file():
            raise BadInput(f"{folder / name} is listed in {MANIFEST} but missing. Run its stage again.")
        if hashes and sha256_file(folder / name) != digest:
            raise BadInput(
                f"{folder / name} is not what {MANIFEST} recorded (SHA-256 differs): truncated or changed since. "
                f"Remove {folder} and run its stage again."
            )


def is_current(
    directory: str | os.PathLike[str],
    stage: str,
    inputs: Mapping[str, str],
    config: Any = None,
    schema: str | None = None,
) -> bool:
    """Has `stage` finished in `directory` with exactly these inputs, this config and schema, and are its files there?

    Files are checked for presence only; use `check_files` to compare their contents.
    """
    try:
        manifest = read_manifest(directory)
    except BadInput:
        return False
    return (
        manifest.get("stage") == stage
        and manifest.get("inputs") == dict(inputs)
        and manifest.get("config_digest") == sha256_json(config)
        and manifest.get("stage_schema") == schema
        and all((Path(directory) / name).is_file() for name in manifest.get("files", {}))
    )
