"""The differential diagnosis: static checks, each engine's reading, trials, hypotheses, and what follows from them.

    diagnose("path/to/draft", target="path/to/target")["summary"]        eyas doctor DRAFT --target TARGET

Nothing is written but recorded states of the target, below the user's cache.   pytest tests/test_doctor_diagnosis.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput, EyasError
from .examine import examine
from .finding import Severity
from .reporting import report

if TYPE_CHECKING:
    from ..engines.served import Served
    from .material import Material
    from .measure import Measured
    from .readings import Readings


def diagnose(
    draft: str | Path,
    *,
    target: str | Path | None = None,
    features: str | Path | None = None,
    engines: Sequence[str] = (),
    reference: str | Path | None = None,
    training: str | Path | None = None,
    served: Served | None = None,
    launch: Mapping[str, Any] | None = None,
    prompts: Sequence[str] | None = None,
    static: bool = False,
    budget: float = 60.0,
    k: int = 4,
    device: str = "cpu",
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Everything that can be said, as plain JSON values (docs/doctor.md gives the schema).

    target, features: folders; without both, the draft's own probe is used, if it has one. budget: seconds after which
    no further round of hypotheses is begun. k: drafted tokens a round. Raises BadInput where not even the files can be
    read, or an argument is none.
    """
    began = time.monotonic()
    from ..target.facts import read_facts

    facts = read_facts(target) if target is not None else None
    names = tuple(name.partition("@")[0] for name in engines)
    statics = examine(draft, facts, names, launch)
    if static:
        return report(draft, target, statics, None, None, None, served, None, [], began, k)
    from ..draft.directory import PROBE
    from .readings import Readings

    missing: list[dict[str, str]] = []
    material, probe = None, Path(draft) / PROBE
    readings = Readings.open(draft, Path(target) if target else None, engines, launch or {})
    unsupplied = not readings.has_target() or (target is None and features is None)
    if readings.reading is not None and unsupplied and probe.is_file():
        material = _probe(draft, readings)
    measured = None
    if readings.declared is None:
        missing.append({"what": f"trials: {readings.refusal or 'this draft cannot be replayed'}",
                        "supply": "mend what the files show first"})  # fmt: skip
    elif not readings.has_target() and material is None:
        missing.append({"what": "trials and hypotheses: nothing can be replayed without the target's embedding",
                        "supply": "--target T"})  # fmt: skip
    else:
        material = material or _material(readings, target, features, prompts, device, trust_remote_code, missing, tell)
        if features is not None and target is not None and material is not None:
            from .features_audit import audit

            tell("asking the target for a part of the features again")
            told = audit(material, target, str(features), device, trust_remote_code)
            statics = [*told, *statics]
            if any(f.severity is Severity.ERROR for f in told):  # the draft is judged on the target's own states then
                missing.append({"what": f"the draft on {features}, which are not this target's states",
                                "supply": "features extracted again"})  # fmt: skip
                material = _material(readings, target, None, prompts, device, trust_remote_code, missing, tell)
        if material is not None:
            measured = _measure(readings, material, reference, k, device, began + budget, missing, tell)
    predicted = _predicted(readings, training, missing)
    return report(draft, target, statics, readings, material, measured, served, predicted, missing, began, k)


# ---------------------------------------------------------------- what to run on


def _probe(draft: str | Path, readings: Readings) -> Material | None:
    """The probe, whose few embedding rows are all that is known of the target."""
    import torch

    from .material import Material

    assert readings.reading is not None
    try:
        material = Material.of_probe(draft, readings.reading.conventions.taps)
    except EyasError:
        return None
    from .specimen import declared

    known, rows = material.embedding or (torch.empty(0), torch.empty(0))
    table = torch.zeros(readings.reading.shape.vocab_size, rows.shape[1], dtype=rows.dtype)
    table[known] = rows
    readings.declared = declared(readings.reading, table)
    return material


def _material(
    readings: Readings, target: str | Path | None, features: str | Path | None, prompts: Sequence[str] | None,
    device: str, trust: bool, missing: list[dict[str, str]], tell: Callable[[str], None],
) -> Material | None:  # fmt: skip

    if features is not None:
        missing.append({"what": "layers other than those of the features", "supply": "--target T without --features"})
        assert readings.declared is not None
        return _features(Path(features), target, readings.declared.slices, tell)
    if target is None:
        missing.append({"what": "trials and hypotheses", "supply": "--target T, or --features DIR"})
        return None
    from .prompts import KINDS, PROMPTS
    from .record import record, useful_taps

    assert readings.facts is not None and readings.declared is not None
    near = {t + shift for t in readings.declared.slices for shift in (-2, -1, 0, 1, 2)}
    for read in readings.as_read.values():
        near |= set(read.slices)
    if readings.facts.num_layers >= 7:
        near |= {t + shift for t in readings.facts.default_taps for shift in (-1, 0, 1)} | {readings.facts.num_layers}
    taps = useful_taps(readings.facts, sorted(near))
    kinds = KINDS if prompts is None else None
    return record(
        target, taps, prompts or PROMPTS, kinds=kinds, device=device, trust_remote_code=trust, tell=tell
    )  # fmt: skip


def _features(folder: Path, target: str | Path | None, taps: Sequence[int], tell: Callable[[str], None]) -> Material:
    """Eyas's own features, or a sample of what speculators or SpecForge recorded."""
    from tempfile import TemporaryDirectory

    from ..features.foreign import Kind, import_foreign
    from ..features.reader import FeatureSet
    from .material import Material

    kind: Kind | None = None
    if not (folder / "manifest.json").is_file():
        kind = "speculators" if next(folder.rglob("hs_*.safetensors"), None) else None
        kind = kind or ("specforge" if next(folder.rglob("*.ckpt*"), None) else None)
    if kind is None:
        return Material.of_features(FeatureSet.open(folder))
    if target is None:
        raise BadInput(f"{folder} holds features of {kind}, which say neither taps nor template: give --target, too")
    tell(f"reading {kind}'s features")
    with TemporaryDirectory(prefix="eyas-") as scratch:
        import_foreign(kind, folder, target, scratch, taps, limit=FOREIGN_DOCUMENTS, skip_bad=True, progress=False)
        material = Material.of_features(FeatureSet.open(scratch))
        return replace(material.first(range(material.documents)), source=f"{folder} ({kind})")


FOREIGN_DOCUMENTS = 96


def _measure(
    readings: Readings, material: Material, reference_: str | Path | None, k: int, device: str, deadline: float,
    missing: list[dict[str, str]], tell: Callable[[str], None],
) -> Measured | None:  # fmt: skip
    from .hypothesis import Context
    from .maps import of_head
    from .measure import measure
    from .reference import Reference, reference
    from .specimen import HEAD
    from .trial import STEPS

    base = readings.declared
    assert base is not None
    judged = material.packing.document[material.judged(STEPS)].unique()
    if len(judged) < 2:
        what = "no document with" if not len(judged) else "one document alone with"
        missing.append({"what": f"trials: the text holds {what} {STEPS + 1} supervised tokens in a row",
                        "supply": "more or other --features"})  # fmt: skip
        return None
    absent = [t for t in base.slices if t not in material.states]
    if absent:
        missing.append({"what": f"the draft as declared: the states of layers {absent} were not recorded",
                        "supply": "--target T without --features"})  # fmt: skip
    compared = reference(reference_, base.shape, base.tensors) if reference_ is not None else Reference()
    if len(compared.differing) > len(compared.tensors):
        missing.append({"what": f"single tensors of the reference: {len(compared.differing)} differ, it is another run",
                        "supply": "a copy of the same run"})  # fmt: skip
    known = dict(compared.maps)
    if readings.ends is not None and HEAD in base.tensors and base.shape.draft_vocab_size < base.shape.vocab_size:
        told = of_head(base.tensors[HEAD], readings.ends.head, base.ids)
        known |= {} if told is None else {"the head's rows in the target": told}
    context = Context(
        facts=readings.facts,
        embedding=readings.ends.embedding if readings.ends else None,
        head=readings.ends.head if readings.ends else None,
        taps=frozenset(material.states),
        maps=known,
        tensors=compared.tensors,
        engines=readings.as_read,
    )
    measured = measure(readings, material, context, k=k, device=device, deadline=deadline, tell=tell)
    if material.embedding is not None:
        missing.append({"what": "accept lengths: the probe holds the embedding of its own text only",
                        "supply": "--target T"})  # fmt: skip
    if not measured.found.complete:
        missing.append({"what": "some hypotheses: the time was over before", "supply": "a longer --budget"})
    return measured


def _predicted(readings: Readings, training: str | Path | None, missing: list[dict[str, str]]) -> float | None:
    """The accept length that training measured itself, by our definition."""
    from .training import predicted_tau

    eyas = readings.case.folder.eyas or {}
    try:
        return predicted_tau(training, eyas)
    except BadInput as error:
        missing.append({"what": f"what training predicted: {error}", "supply": "--training RUN_DIR"})
        return None
