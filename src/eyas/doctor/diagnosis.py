"""The differential diagnosis: static checks, each engine's reading, trials, hypotheses, and what follows from them.

    diagnose("path/to/draft", target="path/to/target")["summary"]        eyas doctor DRAFT --target TARGET

Nothing is written but recorded states of the target, below the user's cache.   pytest tests/test_doctor_diagnosis.py
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..errors import BadInput, EyasError
from .examine import examine
from .finding import Finding, Severity

if TYPE_CHECKING:
    from ..engines.served import Served
    from .material import Material
    from .measure import Measured
    from .readings import Readings
    from .verdict import Told

SHOWN_POINTS = 200


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
        return _report(draft, statics, None, None, None, served, None, [], began, k)
    from ..draft.directory import PROBE
    from .readings import Readings

    missing: list[dict[str, str]] = []
    material, probe = None, Path(draft) / PROBE
    readings = Readings.open(draft, Path(target) if target else None, engines, launch or {})
    if readings.reading is not None and not readings.has_target() and probe.is_file():
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
        if material is not None:
            measured = _measure(readings, material, reference, k, device, began + budget, missing, tell)
    predicted = _predicted(readings, training, missing)
    return _report(draft, statics, readings, material, measured, served, predicted, missing, began, k)


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
    from .material import Material

    if features is not None:
        from ..features.reader import FeatureSet

        found = FeatureSet.open(features)
        missing.append({"what": "layers other than those of the features", "supply": "--target T without --features"})
        return Material.of_features(found)
    if target is None:
        missing.append({"what": "trials and hypotheses", "supply": "--target T, or --features DIR"})
        return None
    from .prompts import PROMPTS
    from .record import record, useful_taps

    assert readings.facts is not None and readings.declared is not None
    near = {t + shift for t in readings.declared.slices for shift in (-2, -1, 0, 1, 2)}
    for read in readings.as_read.values():
        near |= set(read.slices)
    if readings.facts.num_layers >= 7:
        near |= {t + shift for t in readings.facts.default_taps for shift in (-1, 0, 1)} | {readings.facts.num_layers}
    taps = useful_taps(readings.facts, sorted(near))
    return record(target, taps, prompts or PROMPTS, device=device, trust_remote_code=trust, tell=tell)


def _measure(
    readings: Readings, material: Material, reference_: str | Path | None, k: int, device: str, deadline: float,
    missing: list[dict[str, str]], tell: Callable[[str], None],
) -> Measured | None:  # fmt: skip
    from .hypotheses import Context
    from .measure import measure
    from .reference import Reference, reference

    base = readings.declared
    assert base is not None
    if not any(material.judged(1).tolist()):
        missing.append({"what": "trials: the text holds no supervised tokens", "supply": "other --features"})
        return None
    absent = [t for t in base.slices if t not in material.states]
    if absent:
        missing.append({"what": f"the draft as declared: the states of layers {absent} were not recorded",
                        "supply": "--target T without --features"})  # fmt: skip
    compared = reference(reference_, base.shape, base.tensors) if reference_ is not None else Reference()
    if len(compared.differing) > len(compared.tensors):
        missing.append({"what": f"single tensors of the reference: {len(compared.differing)} differ, it is another run",
                        "supply": "a copy of the same run"})  # fmt: skip
    context = Context(
        facts=readings.facts,
        embedding=readings.ends.embedding if readings.ends else None,
        head=readings.ends.head if readings.ends else None,
        taps=frozenset(material.states),
        maps=compared.maps,
        tensors=compared.tensors,
        engines=readings.as_read,
    )
    return measure(readings, material, context, k=k, device=device, deadline=deadline, tell=tell)


def _predicted(readings: Readings, training: str | Path | None, missing: list[dict[str, str]]) -> float | None:
    """The accept length that training measured itself, by our definition."""
    from .training import predicted_tau

    eyas = readings.case.folder.eyas or {}
    try:
        return predicted_tau(training, eyas)
    except BadInput as error:
        missing.append({"what": f"what training predicted: {error}", "supply": "--training RUN_DIR"})
        return None


# ---------------------------------------------------------------- the report


def _report(
    draft: str | Path, statics: Sequence[Finding], readings: Readings | None, material: Material | None,
    measured: Measured | None, served: Served | None, predicted: float | None, missing: list[dict[str, str]],
    began: float, k: int,
) -> dict[str, Any]:  # fmt: skip
    from ..decode.acceptance import Acceptance
    from . import verdict
    from .signatures import signatures

    replayed = None
    if measured is not None:
        replayed = Acceptance.merged(measured.taus["declared"], k)
    extra = signatures(served, replayed) if served is not None else []
    facts = readings.facts if readings else None
    usual = facts.default_taps if facts is not None and facts.num_layers >= 7 else None
    told = verdict.findings([*statics, *extra], measured, usual)
    taus = _taus(measured, k) | {"training": predicted}
    off = _engines_off(readings, measured, taus)
    told += off
    place = verdict.where(told, measured, taus, served.tau if served else None, [t.id for t in off if
                          t.severity is Severity.ERROR])  # fmt: skip
    broken = any(t.severity is Severity.ERROR or t.status == "confirmed" for t in told)
    engines = list(readings.as_read) if readings else []
    out: dict[str, Any] = {
        "draft": str(draft),
        "eyas": __version__,
        "verdict": "faulty" if broken or place in ("launch", "engine", "export") else "undecided" if
        place == "unknown" else "healthy",
        "where": place,
        "summary": verdict.summary(told, place, measured, taus, served.tau if served else None),
        "findings": [t.to_dict() for t in told],
        "tau": {
            "declared": taus.get("declared"), "best": taus.get("best"),
            "as_read": {name: taus.get(name) for name in (readings.engines if readings else {})},
            "served": served.tau if served else None, "training": predicted,
        },
        "not_evaluated": missing,
        "next": _next(draft, told, readings, measured),
        "seconds": round(time.monotonic() - began, 2),
        "peak_mib": _peak(),
    }  # fmt: skip
    if readings is not None:
        out["engines"] = {
            name: {"version": read.version, "starts": read.starts, "differences": readings.differences.get(name, []),
                   "needs": list(read.needs)}
            for name, read in readings.engines.items()
        }  # fmt: skip
    if served is not None:
        out["served"] = served.to_dict()
    if measured is not None and material is not None and readings is not None:
        out |= _measured_parts(measured, material, readings, engines, k)
    return out


def _taus(measured: Measured | None, k: int) -> dict[str, float | None]:
    from ..decode.acceptance import Acceptance

    if measured is None:
        return {}
    taus = {name: Acceptance.merged(parts, k).tau for name, parts in measured.taus.items()}
    return {name: None if math.isnan(tau) else round(tau, 4) for name, tau in taus.items()}


def _engines_off(readings: Readings | None, measured: Measured | None, taus: Mapping[str, float | None]) -> list[Told]:
    """Engines that would run the draft worse than it is: errors for those that were named."""
    from .verdict import Told

    if readings is None or measured is None:
        return []
    out = []
    for name, costs in measured.engine_costs.items():
        best, tau = taus.get("best"), taus.get(name)
        real = [(what, gain) for what, gain in costs if gain.worse and gain.mean < -0.02]
        if not real or best is None or tau is None or tau > best - 0.02:
            continue
        wanted = name in readings.named
        points = "; ".join(f"{what} costs {-gain.mean:.3f} nats a token" for what, gain in real[:3])
        out.append(
            Told(
                "EY-AS-READ", "confirmed" if wanted else "static",
                Severity.ERROR if wanted else Severity.WARNING, real[0][0],
                f"{name} would run it with an accept length of {tau:.2f} instead of {best:.2f}: {points}",
                "It serves, and accepts less than this draft is worth", f"eyas export DRAFT --to {name} OUT",
                None, None, [], round(tau - best, 4), None, (), -real[0][1].mean,
            )
        )  # fmt: skip
    return out


def _measured_parts(
    measured: Measured, material: Material, readings: Readings, engines: Sequence[str], k: int
) -> dict[str, Any]:
    from .measure import summary

    shown = {name: summary(parts, k) for name, parts in measured.taus.items()}
    verdicts = {"taken": "confirmed", "better": "inconclusive", "reversed": "refuted"}
    confirmed = {t.hypothesis for t in measured.taken}
    base, best = readings.declared, measured.found.best
    assert base is not None
    return {
        "acceptance": {"declared": shown["declared"], "best": shown["best"],
                       "as_read": {n: shown[n] for n in engines if n in shown}},
        "controls": measured.controls,
        "ledger": [
            {"order": i, "round": e.round, "convention": e.hypothesis.group, "hypothesis": e.hypothesis.label,
             "from": e.start, "gain": round(e.gain.mean, 4), "interval": e.gain.to_list(),
             "verdict": "refuted" if e.verdict == "taken" and e.hypothesis not in confirmed else
             verdicts.get(e.verdict, e.verdict),
             "delta_tau": next((round(t.delta_tau, 4) for t in measured.taken if t.hypothesis is e.hypothesis), None),
             "note": e.note}
            for i, e in enumerate(e for e in measured.ledger if e.verdict != "better" or e.hypothesis not in confirmed)
        ],
        "positions": measured.positions,
        "map": {"size": base.shape.draft_vocab_size, "target_size": base.shape.vocab_size,
                "points": _points(base.ids), "best_points": _points(best.ids)},
        "tensors": _tensors(base.tensors),
        "features": {"source": material.source, "positions": material.positions, "documents": material.documents,
                     "share_top1": None if math.isnan(material.share_own) else round(material.share_own, 4)},
    }  # fmt: skip


def _points(ids: Any) -> list[list[int]]:
    step = max(1, len(ids) // SHOWN_POINTS)
    return [[i, int(ids[i])] for i in range(0, len(ids), step)]


def _tensors(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    out = []
    for name, t in tensors.items():
        entry: dict[str, Any] = {"name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape),
                                 "std": None, "max": None, "note": ""}  # fmt: skip
        if t.dtype.is_floating_point and t.numel():
            sample = t.flatten()[:: max(1, t.numel() // (1 << 18))].float()  # every so manieth number: statistics only
            spread = float(sample.std(correction=0))
            entry |= {"std": round(spread, 6) if math.isfinite(spread) else None}
            top = float(sample.abs().max())
            entry |= {"max": round(top, 6) if math.isfinite(top) else None}
            if t.dim() == 1 and spread == 0:
                entry["note"] = "the same number everywhere"
        out.append(entry)
    return out


def _next(draft: str | Path, told: Sequence[Told], readings: Readings | None, measured: Measured | None) -> str:
    from ..repair.operations import mending

    for t in told:
        if t.severity is Severity.ERROR and mending(t.id) is not None:
            return f"eyas repair {draft} --finding {t.id} --out {draft}-mended"
    for t in told:
        if t.id == "EY-AS-READ":
            return f"eyas export {draft} --to {t.evidence.split()[0]} {draft}-export"
    if measured is None and readings is not None:
        return f"eyas doctor {draft} --target TARGET"
    if measured is None:
        return f"eyas doctor {draft} --target TARGET    # the same without --static"
    return f"eyas prove {draft} --target TARGET"


def _peak() -> float:
    """Peak memory of this process in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)
