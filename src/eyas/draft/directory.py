"""A draft directory as a whole, without its numbers and without torch.

Interpret one, compare its tensors with what they should be, declare what it holds, let a new one appear whole or not
at all.

    reading = read_draft("path/to/draft", "path/to/target"); check_tensors(reading, skip=set())

pytest tests/test_checkpoint.py tests/test_checkpoint_files.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .._version import __version__
from ..conventions import Conventions
from ..errors import BadInput, Mismatch
from ..locks import beside
from ..target.facts import TargetFacts, read_facts
from ..writes import atomic_dir
from .dialects import Reading, interpret, native
from .expected import Inventory
from .files import CONFIG, EYAS_JSON, open_folder
from .shape import DraftShape

WEIGHTS = "model.safetensors"
PROBE = "eyas/probe.safetensors"
CARD = "README.md"
# All that may lie in a directory for Eyas to replace it.
OURS = {CONFIG, WEIGHTS, EYAS_JSON, PROBE, "eyas", "manifest.json", CARD}


def read_draft(path: str | Path, target_dir: str | Path | None = None) -> Reading:
    """Interpret a draft directory without reading its weights: dialect, shape, conventions, where each tensor lies.

    `target_dir` is needed where the draft leaves the taps to its target. Raises BadInput naming file and field.
    """
    layers = read_facts(target_dir).num_layers if target_dir is not None else None
    return interpret(open_folder(path), layers)


def check_target(reading: Reading, vocab_size: int, hidden_size: int, target_dir: str | Path | None) -> None:
    """Raises Mismatch where a draft was made for a target of other sizes."""
    shape = reading.shape
    mine = {"vocab_size": shape.vocab_size, "hidden size": shape.target_hidden_size}
    theirs = {"vocab_size": vocab_size, "hidden size": hidden_size}
    for name, value in mine.items():
        if value != theirs[name]:
            raise Mismatch(
                f"{reading.folder.path} was made for a target with {name} {value}, but {target_dir} has "
                f"{theirs[name]}; name the draft's own target"
            )


def check_tensors(reading: Reading, skip: set[str]) -> None:
    """Compare what the module needs with what the files hold; one error for everything.

    Nothing is allocated: a config may name any size.
    """
    shape, held = reading.shape, reading.canonical.num_layers()
    if shape.num_layers > held:
        raise BadInput(
            f"{reading.folder.path}: the config asks for {shape.num_layers} layers, the tensors make {held}; repair "
            f"the config"
        )
    found, sources = Inventory.of(reading), reading.canonical.sources
    problems = [f"{name} {list(wanted)} is missing" for name, wanted in found.missing.items() if name not in skip]
    for name in found.unknown:
        ref = sources[name].ref
        problems.append(f"{ref.name} {list(ref.shape)} in {ref.file.name} is unknown")
    for name, (held_shape, wanted) in found.misshapen.items():
        ref = sources[name].ref
        problems.append(f"{ref.name} in {ref.file.name} is {list(held_shape)}, expected {list(wanted)}")
    if problems:
        files = ", ".join(file.name for file in reading.folder.files)
        raise BadInput(
            f"{reading.folder.path} ({reading.dialect} dialect, {files}): tensors and config do not make one draft: "
            f"{'; '.join(problems)}. Engines would skip or leave these in silence; repair the file or its config"
        )


def declaration(
    shape: DraftShape,
    conventions: Conventions,
    vocab_map: str,
    *,
    facts: TargetFacts | None,
    fingerprints: Mapping[str, str] | None,
    tensors: Mapping[str, Any],
    predicted: Mapping[str, Any] | None,
    provenance: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The content of eyas.json.

    vocab_map: its digest. tensors: canonical name -> `checkpoint.describe_tensor`, {} where none was read.
    """
    return {
        "schema": native.SCHEMA,
        "eyas_version": __version__,
        "shape": shape.to_dict(),
        "conventions": conventions.to_dict(),
        "target": {**dict(fingerprints or {}), "facts": facts.to_dict() if facts else None,
                   "special_ids": _special_ids(facts)},
        "vocab_map": vocab_map,
        "tensors": dict(tensors),
        "predicted": dict(predicted) if predicted else None,
        "provenance": dict(provenance or {}),
        **dict(extra or {}),
    }  # fmt: skip


def _special_ids(facts: TargetFacts | None) -> dict[str, Any]:
    return {key: facts.raw.get(key) for key in ("bos_token_id", "pad_token_id")} if facts else {}


def facts_of(eyas: Mapping[str, Any] | None) -> TargetFacts | None:
    """The target's facts as eyas.json keeps them, None where it has none."""
    target = (eyas or {}).get("target") or {}
    values = target.get("facts")
    if not isinstance(values, dict):
        return None
    names = {f.name for f in dataclasses.fields(TargetFacts)} - {"raw"}
    kept: dict[str, Any] = {k: tuple(v) if k == "eos_ids" else v for k, v in values.items() if k in names}
    try:
        return TargetFacts(**kept, raw=dict(target.get("special_ids") or {}))
    except (BadInput, TypeError, ValueError):  # an eyas.json that somebody edited: as if it named no target
        return None


@contextlib.contextmanager
def fresh_directory(out_dir: str | Path) -> Iterator[Path]:
    """Yield an empty private folder beside `out_dir`; on success it becomes `out_dir`, on any error it is removed.

    An existing `out_dir` is replaced only if Eyas wrote everything in it. Raises BadInput otherwise.
    """
    out = Path(out_dir)
    with beside(out), _fresh(out) as temporary:
        yield temporary


@contextlib.contextmanager
def _fresh(out: Path) -> Iterator[Path]:
    _remove_stale(out)
    check_replaceable(out)
    with atomic_dir(out) as temporary:
        yield temporary
        if (temporary / CONFIG).is_file():
            # safetensors makes its files private to their owner; servers often run as somebody else.
            mode = (temporary / CONFIG).stat().st_mode
            for path in temporary.rglob("*"):
                if path.is_file():
                    path.chmod(mode)


def _remove_stale(out: Path) -> None:
    """Clear what a killed writer of `out` left beside it; put an old version back that it had moved aside."""
    for path in sorted(out.parent.glob(f".eyas-tmp-*-{out.name}*")):
        pid = path.name.removeprefix(".eyas-tmp-").split("-", 1)[0]
        if not path.is_dir() or (pid.isdigit() and int(pid) != os.getpid() and Path(f"/proc/{pid}").exists()):
            continue
        if path.name.endswith(f"-{out.name}-old") and not out.exists():
            path.rename(out)
        elif path.name.endswith((f"-{out.name}-old", f"-{out.name}")):
            shutil.rmtree(path, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raise BadInput unless `out` is free, empty, or a draft directory in which everything is Eyas's own."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise BadInput(f"{out} exists and is not a plain directory; choose another --out")
    held = {str(path.relative_to(out)) for path in out.rglob("*")}
    if held and (EYAS_JSON not in held or held - OURS):
        other = sorted(held - OURS) or sorted(held)
        raise BadInput(f"{out} holds files that Eyas did not write ({', '.join(other[:4])}); choose another --out")
