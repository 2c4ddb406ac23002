"""Export: a trained or foreign draft becomes the canonical directory that SGLang, vLLM and llama.cpp load as it stands.

    eyas export RUN_OR_DRAFT --out DIR --for sglang,vllm

What an engine cannot express is named, or refused when that engine was asked for. Stored values are rounded to `dtype`
here and nowhere else. bfloat16 (default) halves the file. A draft's rounding cannot touch losslessness, which the
target alone decides; it changes some near-ties of the draft and so, a little, the accept length: prove the exported
draft, whose numbers every engine then loads alike, whatever it computes in. float32 keeps the trained masters.
Exercise it:  pytest tests/test_export.py
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..artifacts import sha256_file, sha256_json, write_manifest
from ..errors import BadInput, Mismatch
from ..target.facts import read_facts
from .checkpoint import (
    CONFIG,
    EYAS_JSON,
    PROBE,
    WEIGHTS,
    canonical_tensors,
    describe_tensor,
    facts_of,
    fresh_directory,
    load_draft,
    read_draft,
    write_draft,
)  # fmt: skip
from .dialects import flat
from .dialects.canonical import max_position
from .files import open_folder
from .obstacles import ENGINES, obstacles
from .probe import ProbeReport, answer, collect, read_probe, verify_probe, write_probe

if TYPE_CHECKING:
    from ..features.reader import FeatureSet

STAGE, SCHEMA = "export", "eyas-export/1"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Where the draft lies in the folder of a run or of a training stage, best first.
PLACES = ("", "draft", "train/draft", "train", "export")


class NotExpressible(Mismatch):
    """A draft and an engine that do not belong together (exit code 3)."""


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    path: str
    source: str
    dialect: str
    dtype: str
    tensors: int
    bytes: int
    probe_rows: int
    """Rows of the probe; 0 where there is none."""
    engines: dict[str, list[str]]
    """Engine -> what it cannot express; [] where the directory runs as it stands."""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def find_draft(path: str | Path) -> Path:
    """The draft directory for a draft, a run or a training stage. Raises BadInput naming where it was looked for."""
    path = Path(path)
    if path.is_file():
        return path
    for place in PLACES:
        folder = path / place
        if (folder / CONFIG).is_file() and (
            any(folder.glob("*.safetensors*")) or any(folder.glob("*.bin*")) or any(folder.glob("*.pt"))
        ):
            return folder
    looked = ", ".join(place or "." for place in PLACES)
    raise BadInput(
        f"{path}: no draft there (config.json and weights; looked in {looked}); run `eyas train` first, or name "
        f"the draft"
    )


def parse_engines(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """ "sglang,vllm" -> ("sglang", "vllm"). Raises BadInput for an unknown engine."""
    listed = [n.strip() for n in (names.split(",") if isinstance(names, str) else names or ()) if n.strip()]
    unknown = [n for n in listed if n not in ENGINES]
    if unknown:
        raise BadInput(f"--for {','.join(listed)}: unknown engine {', '.join(unknown)}; known are {', '.join(ENGINES)}")
    return tuple(dict.fromkeys(listed))


def export_draft(
    source: str | Path,
    out_dir: str | Path,
    *,
    dtype: str = "bfloat16",
    engines: Sequence[str] = (),
    target_dir: str | Path | None = None,
    features: FeatureSet | None = None,
    predicted: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write the canonical directory of the draft in `source`, with a probe and a manifest, whole or not at all.

    The probe is made of `features` (then the target is needed for its embedding rows) or of the probe that `source`
    carries. `predicted` and `provenance` add to what the source's eyas.json says. Raises NotExpressible when one of
    `engines` cannot run the draft as declared, BadInput for what is unreadable, Mismatch for another target's features.
    """
    started = time.monotonic()
    if dtype not in DTYPES:
        raise BadInput(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    folder = find_draft(source)
    reading = read_draft(folder, target_dir)
    draft, vocab_map, conventions = load_draft(folder, target_dir)
    declared = reading.folder.eyas or {}
    facts = read_facts(target_dir) if target_dir is not None else facts_of(declared)
    fingerprints = {
        k: v for k, v in (declared.get("target") or {}).items() if k in ("target", "tokenizer", "template") and v
    }
    if target_dir is not None:
        fingerprints = _fingerprints(Path(target_dir), fingerprints, folder)
    if features is not None:
        features.check(target=fingerprints.get("target"), taps=conventions.taps)
    found = {name: [o.text for o in obstacles(name, draft.shape, conventions, facts)] for name in ENGINES}
    refused = [text for name in parse_engines(engines) for text in found[name]]
    if refused:
        raise NotExpressible(f"{folder} cannot be exported --for {','.join(engines)}. " + ". ".join(refused))

    notes = list(reading.notes)
    with fresh_directory(out_dir) as out:
        write_draft(
            draft, vocab_map, out, facts=facts, fingerprints=fingerprints, dtype=DTYPES[dtype],
            predicted={**(declared.get("predicted") or {}), **(predicted or {})},
            provenance={**(declared.get("provenance") or _origin(reading.dialect, folder)), **(provenance or {})},
            extra={"engines": found},
        )  # fmt: skip
        rows = _write_probe(out, (folder, Path(source) / "export"), features, target_dir, notes)
        files = [CONFIG, WEIGHTS, EYAS_JSON] + ([PROBE] if rows else [])
        inputs = {"draft": sha256_json({f.name: sha256_file(f) for f in reading.folder.files})}
        if features is not None:
            inputs["features"] = sha256_json(features.manifest["files"])
        write_manifest(
            out, STAGE, inputs=inputs, config={"dtype": dtype, "engines": list(engines)}, schema=SCHEMA,
            conventions=conventions.to_dict(), counts={"probe_rows": rows}, files=files,
            duration_s=time.monotonic() - started,
        )  # fmt: skip
        size = (out / WEIGHTS).stat().st_size
        tensors = len(open_folder(out).tensors)
    return ExportReport(str(out_dir), str(folder), reading.dialect, dtype, tensors, size, rows, found, notes)


def _write_probe(
    out: Path, held: Sequence[Path], features: FeatureSet | None, target_dir: str | Path | None, notes: list[str]
) -> int:
    """Record the probe of the draft just written; returns its rows, 0 where there is nothing to make one of.

    `held`: directories whose own probe may lend its sequences.
    """
    draft, vocab_map, _ = load_draft(out, target_dir)  # the rounded weights, as anyone will load them
    if features is not None and draft.embed_tokens is not None:
        inputs = collect(features, draft.embed_tokens.weight)
    elif features is None and (lender := next((p for p in held if (p / PROBE).is_file()), None)):
        inputs = read_probe(lender)[0]
    else:
        missing = "features (--features)" if features is None else "the target's embedding (--target)"
        notes.append(
            f"no probe was written, for want of {missing}: a copy of this draft can be checked by digests only"
        )
        return 0
    answers = answer(draft, vocab_map, inputs)
    write_probe(out, inputs, answers)
    return len(answers.rows)


def _origin(dialect: str, folder: Path) -> dict[str, Any]:
    return {"converted_from": dialect, "name": folder.resolve().name}


def _fingerprints(target_dir: Path, declared: Mapping[str, str], draft: Path) -> dict[str, str]:
    """Fingerprints of the target; refuse one that is not the draft's."""
    from ..target import source

    found = source.identify(target_dir)
    for name in ("target", "tokenizer"):
        if declared.get(name) and declared[name] != found[name]:
            raise Mismatch(
                f"{draft} was trained for {name} {declared[name][:16]}, but {target_dir} is {name} {found[name][:16]}; "
                f"name the target that it was trained for"
            )
    return {**found, **declared}


# ---------------------------------------------------------------- checking


@dataclass(frozen=True)
class CheckReport:
    """Does a draft directory still hold what Eyas wrote? `problems` is empty if so."""

    path: str
    tensors: int
    problems: list[str]
    probe: ProbeReport | None

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "ok": self.ok}


def check_draft(path: str | Path, device: str = "cpu") -> CheckReport:
    """Compare an exported directory with its eyas.json and probe: tensors, map, config as engines read it, choices.

    Raises BadInput where it cannot be read at all.
    """
    folder = open_folder(path)
    if folder.eyas is None:
        raise BadInput(
            f"{folder.path} has no {EYAS_JSON}, so nothing says what it should hold; export it with Eyas first"
        )
    draft, vocab_map, conventions = load_draft(path)
    problems = []
    declared = folder.eyas.get("tensors") or {}
    # Compared under canonical names, so that a copy with renamed or fused tensors is checked as well.
    now = canonical_tensors(draft, vocab_map, None)
    for name in sorted(declared.keys() | now.keys()):
        if name not in now or name not in declared:
            problems.append(f"{name} is {'missing' if name in declared else 'not declared'}")
            continue
        dtype = getattr(torch, str(declared[name].get("dtype")), None)
        if not isinstance(dtype, torch.dtype) or describe_tensor(now[name].to(dtype)) != dict(declared[name]):
            problems.append(f"{name} is not what {EYAS_JSON} recorded (SHA-256 differs)")
    if folder.eyas.get("vocab_map") != vocab_map.digest():
        problems.append("the vocabulary map is not the recorded one")
    problems += _spelled(path, conventions)
    probe = verify_probe(path, device) if (folder.path / PROBE).is_file() else None
    if probe is not None and not probe.ok:
        problems.append(
            f"the probe: {probe.changed} of {probe.choices} choices changed, margins differ by up to "
            f"{probe.largest_margin_difference:.3g}"
        )
    return CheckReport(str(path), len(now), problems, probe)


# What config.json cannot say, so that it is not compared.
UNSPELLED = {
    "layer_input",
    "rms_norm_offset",
    "norm_before_head",
    "token_shift",
    "num_target_layers",
    "embedding",
    "head",
    "rope_offset",
    "final_state",
    "teacher",
    "mask_shift",
    "embedding_scale",
}


def _spelled(path: str | Path, conventions: Any) -> list[str]:
    """Fields where config.json, read without eyas.json, says something else than was declared."""
    from dataclasses import replace

    folder = open_folder(path)
    read = flat.read(replace(folder, eyas=None), conventions.num_target_layers)
    promised = max_position(conventions, facts_of(folder.eyas))
    return [
        f"config.json makes {name} = {theirs}, declared is {mine}"
        for name, (mine, theirs) in conventions.differences(read.conventions).items()
        if name not in UNSPELLED and not (name == "max_position" and theirs == promised)
    ]
