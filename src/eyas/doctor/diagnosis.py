"""The differential diagnosis: static checks, each engine's reading, trials, hypotheses, and what follows from them.

    diagnose("path/to/draft", target="path/to/target")["summary"]        eyas doctor DRAFT --target TARGET

Nothing is written but recorded states of the target, below the user's cache.   pytest tests/test_doctor_diagnosis.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..draft.files import DraftFolder
from ..errors import BadInput
from .examine import examine
from .finding import Severity
from .located import Located
from .located import findings as about
from .reporting import report

if TYPE_CHECKING:
    from ..engines.served import Served
    from .material import Material
    from .measure import Measured
    from .readings import Readings


def diagnose(
    draft: str | Path | DraftFolder,
    *,
    target: str | Path | None = None,
    features: str | Path | None = None,
    engines: Sequence[str] = (),
    reference: str | Path | None = None,
    training: str | Path | None = None,
    served: Served | None = None,
    located: Located | None = None,
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

    draft: a directory, or one that is open, with changes laid over it (repair/overlay.py). target, features: folders;
    without both, the draft's own probe is used, if it has one. located: what `eyas measure` found over the prompts that
    were served. budget: seconds after which no further round of
    hypotheses is begun. k: drafted tokens a round. Raises BadInput where not even the files can be
    read, or an argument is none.
    """
    began = time.monotonic()
    from ..target.facts import read_facts

    folder, draft = (draft, draft.path) if isinstance(draft, DraftFolder) else (draft, draft)

    facts = read_facts(target) if target is not None else None
    names = tuple(name.partition("@")[0] for name in engines)
    statics = examine(folder, facts, names, launch)
    if located is not None:
        statics = [*statics, *about(located)]
    if static:
        return report(draft, statics, None, None, None, served, None, [], began, k, located)
    from ..draft.directory import PROBE
    from . import texts
    from .readings import Readings
    from .verdict import concerns

    missing: list[dict[str, str]] = []
    material, probe = None, Path(draft) / PROBE
    readings = Readings.open(folder, Path(target) if target else None, engines, launch or {})
    unsupplied = not readings.has_target() or (target is None and features is None)
    if readings.reading is not None and unsupplied and probe.is_file():
        material = texts.probe(draft, readings)
    measured = None
    if readings.declared is None:
        missing.append({"what": f"trials: {readings.refusal or 'this draft cannot be replayed'}",
                        "supply": "mend what the files show first"})  # fmt: skip
    elif not readings.has_target() and material is None:
        missing.append({"what": "trials and hypotheses: nothing can be replayed without the target's embedding",
                        "supply": "--target T"})  # fmt: skip
    else:
        material = material or texts.text(readings, target, features, prompts, device, trust_remote_code, missing, tell)
        if features is not None and target is not None and material is not None:
            from .features_audit import audit

            tell("asking the target for a part of the features again")
            told = audit(material, target, str(features), device, trust_remote_code)
            statics = [*told, *statics]
            if any(f.severity is Severity.ERROR for f in told):  # the draft is judged on the target's own states then
                missing.append({"what": f"the draft on {features}, which are not this target's states",
                                "supply": "features extracted again"})  # fmt: skip
                material = texts.text(readings, target, None, prompts, device, trust_remote_code, missing, tell)
        if material is not None:
            suspected = {f.convention or concerns(f.id) for f in statics if f.severity is Severity.ERROR}
            measured = _measure(readings, material, reference, k, device, began + budget, suspected, missing, tell)
    predicted = _predicted(readings, training, missing)
    return report(draft, statics, readings, material, measured, served, predicted, missing, began, k, located)


def _measure(
    readings: Readings, material: Material, reference_: str | Path | None, k: int, device: str, deadline: float,
    suspected: set[str | None], missing: list[dict[str, str]], tell: Callable[[str], None],
) -> Measured | None:  # fmt: skip
    from .groups import HEAD_ROWS
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
        known |= {} if told is None else {HEAD_ROWS: told}
    context = Context(
        facts=readings.facts,
        embedding=readings.ends.embedding if readings.ends else None,
        head=readings.ends.head if readings.ends else None,
        taps=frozenset(material.states),
        maps=known,
        tensors=compared.tensors,
        engines=readings.as_read,
        suspected=frozenset(name for name in suspected if name),
        trained=_written_by_training(readings.case.folder),
    )
    measured = measure(readings, material, context, k=k, device=device, deadline=deadline, tell=tell)
    if material.embedding is not None:
        missing.append({"what": "accept lengths: the probe holds the embedding of its own text only",
                        "supply": "--target T"})  # fmt: skip
    if not measured.found.complete:
        missing.append({"what": "some hypotheses: the time was over before", "supply": "a longer --budget"})
    return measured


def _written_by_training(folder: DraftFolder) -> frozenset[str]:
    """The conventions for which eyas.json answers: all that it declares, where its digests say that the weights are
    those that training wrote. The map may be another one: it is no convention, and is looked at by itself."""
    from dataclasses import fields

    from ..conventions import Conventions
    from ..draft.digests import compare, declared

    if not declared(folder.eyas):
        return frozenset()
    found = compare(folder)
    if found.missing or not {*found.changed, *found.additional} <= {"d2t", "t2d"}:
        return frozenset()
    return frozenset(f.name for f in fields(Conventions)) - {"d2t", "embedding", "head"}


def _predicted(readings: Readings, training: str | Path | None, missing: list[dict[str, str]]) -> float | None:
    """The accept length that training measured itself, by our definition."""
    from .training import predicted_tau

    eyas = readings.case.folder.eyas or {}
    try:
        return predicted_tau(training, eyas)
    except BadInput as error:
        missing.append({"what": f"what training predicted: {error}", "supply": "--training RUN_DIR"})
        return None
