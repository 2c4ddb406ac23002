"""Export: write the planned directory whole or not at all, then read it back and prove it.

    eyas export RUN_OR_DRAFT OUT --for sglang,vllm            eyas export DRAFT OUT --to speculators

A trained draft's float32 masters are rounded to bfloat16 here and nowhere else; whatever else is exported keeps its
bytes. A draft's rounding cannot touch losslessness, which the target alone decides; it changes some near-ties of the
draft and so, a little, the accept length: prove the exported draft, whose numbers every engine then loads alike.

    pytest tests/test_export.py
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifacts import write_manifest
from ..digests import sha256_file, sha256_json
from ..draft.assemble import assemble
from ..draft.dialects.spellings import CANONICAL, SPELLINGS, Spelling
from ..draft.directory import CARD, PROBE, WEIGHTS, declaration, facts_of, fresh_directory, read_draft
from ..draft.files import CONFIG, EYAS_JSON
from ..engines.profiles import ENGINES
from ..errors import BadInput, EyasError, Mismatch
from ..target.facts import read_facts
from ..writes import atomic_write, atomic_write_json
from .plan import CODES, NAMES, NotExpressible, Plan, engine_differences, make_plan, spelled_otherwise
from .verify import compare_written

if TYPE_CHECKING:
    from ..features.reader import FeatureSet

STAGE, SCHEMA = "export", "eyas-export/2"
DTYPES = ("auto", "keep", *CODES)
# Where the draft lies in the folder of a run or of a training stage, best first.
PLACES = ("", "draft", "train/draft", "train", "export")


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    path: str
    source: str
    dialect: str
    to: str
    dtype: str
    tensors: int
    bytes: int
    verified: bool
    """Every tensor was read back and found equal to its source, bit by bit."""
    probe_rows: int
    """Rows of the probe; 0 where there is none."""
    taps: list[int]
    engines: dict[str, list[str]]
    """Engine -> what it would run otherwise than trained; [] where the directory runs as it stands."""
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
    to: str | None = None,
    dtype: str = "auto",
    engines: Sequence[str] = (),
    target_dir: str | Path | None = None,
    features: FeatureSet | None = None,
    predicted: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    verify: bool = True,
    card: Callable[[Mapping[str, Any], Path], str] | None = None,
) -> ExportReport:
    """Write the draft of `source` to `out_dir`, with a probe and a manifest, whole or not at all.

    to: a name of SPELLINGS; None writes the canonical directory. dtype: `keep`, a name, or `auto` (see above). The
    probe is made of `features` (then the target is needed for its embedding rows) or of the probe that `source`
    carries. verify: read every tensor back and compare it with its source, record digests, replay the probe.
    card: makes README.md of eyas.json and the folder as written so far (report/card.py); it belongs to no manifest, so
    that it may be edited. `predicted` and `provenance` add to what the source's eyas.json says.

    Raises NotExpressible when `to` or one of `engines` cannot run the draft as declared, BadInput for what is
    unreadable, Mismatch for another target's features, EyasError where the output is not what was to be written.
    """
    started = time.monotonic()
    spelling = _spelling(to)
    if dtype not in DTYPES:
        raise BadInput(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    folder = find_draft(source)
    reading = read_draft(folder, target_dir)
    declared = reading.folder.eyas or {}
    if dtype == "auto":  # only training leaves masters
        dtype = "bfloat16" if reading.dialect == "eyas" and "engines" not in declared else "keep"
    facts = read_facts(target_dir) if target_dir is not None else facts_of(declared)
    prints = {k: v for k, v in (declared.get("target") or {}).items() if k in ("target", "tokenizer", "template") and v}
    if target_dir is not None:
        prints = _fingerprints(Path(target_dir), prints, folder)
    if features is not None:
        features.check(target=prints.get("target"), taps=reading.conventions.taps)
    plan = make_plan(reading, spelling, dtype, facts, target_dir)
    found = engine_differences(plan, Path(out_dir), ENGINES)
    wanted = (*spelling.readers, *parse_engines(engines))
    refused = [d.sentence for name in dict.fromkeys(wanted) for d in found[name] if d.certain]
    refused += _unspellable(plan, Path(out_dir)) if to is not None else []
    if refused:
        raise NotExpressible(f"{folder} cannot be exported to {to or ','.join(engines)}. " + ". ".join(refused))

    notes = list(plan.notes)
    with fresh_directory(out_dir) as out:
        atomic_write_json(out / CONFIG, plan.config)
        assemble(out / WEIGHTS, list(plan.pieces()), {"format": "pt"})
        digests = compare_written(plan, out) if verify else {}
        sentences = {name: [d.sentence for d in ds] for name, ds in found.items()}
        eyas = declaration(
            reading.shape, plan.conventions, plan.vocab_map, facts=facts, fingerprints=prints, tensors=digests,
            predicted={**(declared.get("predicted") or {}), **(predicted or {})},
            provenance={**(declared.get("provenance") or _origin(reading.dialect, folder)), **(provenance or {})},
            extra={"engines": sentences, "spelled_for": spelling.name},
        )  # fmt: skip
        atomic_write_json(out / EYAS_JSON, eyas)
        rows = _write_probe(out, (folder, Path(source) / "export"), features, target_dir, notes, dtype == "keep")
        if card is not None:
            atomic_write(out / CARD, card(eyas, out))
        files = [CONFIG, EYAS_JSON] + ([PROBE] if rows else []) + ([WEIGHTS] if verify else [])
        inputs = {"draft": sha256_json({f.name: _identity(f, verify) for f in reading.folder.files})}
        if features is not None:
            inputs["features"] = sha256_json(features.manifest["files"])
        write_manifest(
            out, STAGE, inputs=inputs, config={"to": spelling.name, "dtype": dtype, "engines": list(engines)},
            schema=SCHEMA, conventions=plan.conventions.to_dict(), counts={"probe_rows": rows}, files=files,
            duration_s=time.monotonic() - started,
        )  # fmt: skip
        size = (out / WEIGHTS).stat().st_size
    stored = {i.dtype for i in plan.items if i.dtype in NAMES}
    return ExportReport(
        str(out_dir), str(folder), reading.dialect, spelling.name, ", ".join(sorted(NAMES[code] for code in stored)),
        len(plan.items), size, verify, rows, list(plan.conventions.taps), sentences, notes,
    )  # fmt: skip


def _spelling(to: str | None) -> Spelling:
    if to is None:
        return CANONICAL
    if to not in SPELLINGS:
        raise BadInput(f"--to {to}: unknown; choose one of {', '.join(SPELLINGS)}")
    return SPELLINGS[to]


def _unspellable(plan: Plan, out: Path) -> list[str]:
    """Why the spelling cannot say what was trained, one sentence each."""
    spelling, c, shape = plan.spelling, plan.conventions, plan.reading.shape
    reasons = [
        f"{spelling.name}: it knows no {name} = {getattr(c, name)}; choose another destination, or fine-tune under its "
        f"convention (eyas train --init-from, --set change.…)"
        for name in spelling.lacks
        if getattr(c, name) != getattr(type(c)(taps=c.taps), name)
    ]
    if spelling.plain and (shape.num_layers != 1 or shape.num_taps != 3):
        reasons.append(f"{spelling.name}: it knows one layer and three taps only; choose another destination")
    layers = plan.facts.num_layers if plan.facts else c.num_target_layers
    try:
        otherwise = spelled_otherwise(plan.folder(out), c, layers)
    except BadInput as error:
        return [*reasons, f"{spelling.name}: it could not be read back ({error})"]
    return reasons + [
        f"{spelling.name}: {name} is {mine}, its config would be read as {theirs}; choose another destination"
        for name, mine, theirs in otherwise
        if name not in spelling.lacks
    ]


def _identity(file: Path, whole: bool) -> str:
    """Digest of a source file: of all its bytes, or of its size and its header where it is not to be read."""
    if whole:
        return sha256_file(file)
    with open(file, "rb") as handle:
        return sha256_json([file.stat().st_size, hashlib.sha256(handle.read(1 << 16)).hexdigest()])


def _write_probe(
    out: Path, held: Iterable[Path], features: FeatureSet | None, target_dir: str | Path | None, notes: list[str],
    kept: bool,
) -> int:  # fmt: skip
    """Record the probe of the draft just written; returns its rows, 0 where there is nothing to make one of.

    `held`: directories whose own probe may lend its sequences; where bytes were `kept`, its choices must come again.
    """
    lender = next((p for p in held if (p / PROBE).is_file()), None)
    if (features is None and lender is None) or (features is not None and target_dir is None):
        missing = "features (--features)" if features is None else "the target's embedding (--target)"
        notes.append(
            f"no probe was written, for want of {missing}: a copy of this draft can be checked by digests only"
        )
        return 0
    from ..draft.checkpoint import load_draft
    from ..draft.probe import answer, collect, compare, read_probe, write_probe
    from ..target.weights import load_ends

    if features is not None and target_dir is not None:
        inputs = collect(features, load_ends(target_dir).embedding)
        recorded = None
    else:
        assert lender is not None
        inputs, recorded = read_probe(lender)
    draft, vocab_map, _ = load_draft(out, target_dir)  # the stored weights, as anyone will load them
    answers = answer(draft, vocab_map, inputs)
    if recorded is not None and kept and not (replay := compare(recorded, answers, str(lender))).ok:
        raise EyasError(
            f"{lender}: {replay.changed} of {replay.choices} recorded choices are others after the export, though "
            "its bytes are the same; the probe is another draft's, or the conventions were misread; take eyas/ "
            "from the draft's own export, or export with --features"
        )
    write_probe(out, inputs, answers)
    return len(answers.rows)


def _origin(dialect: str, folder: Path) -> dict[str, Any]:
    path = folder.resolve()
    if path.parent.name == "snapshots":  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        return {"converted_from": dialect, "name": path.parents[1].name.removeprefix("models--").replace("--", "/", 1),
                "revision": path.name}  # fmt: skip
    return {"converted_from": dialect, "name": path.name}


def _fingerprints(target_dir: Path, declared: Mapping[str, str], draft: Path) -> dict[str, str]:
    """Fingerprints of the target; refuse one that is not the draft's."""
    from ..target import source

    found = {**source.identify(target_dir), "ends": source.ends_fingerprint(target_dir)}
    other = source.other_target(declared.get("target", ""), declared.get("ends", ""), target_dir)
    words = (declared.get("tokenizer") or found["tokenizer"], found["tokenizer"])
    for name, (mine, theirs) in {"target": other or ("", ""), "tokenizer": words}.items():
        if mine != theirs:
            raise Mismatch(
                f"{draft} was trained for {name} {mine[:16]}, but {target_dir} is {name} {theirs[:16]}; "
                f"name the target that it was trained for"
            )
    return {**found, **declared}
