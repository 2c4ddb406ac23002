"""A diagnosis as plain JSON values: what `--json` prints and both renderings show. The schema is in docs/doctor.md.

pytest tests/test_doctor_diagnosis.py
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from .finding import Finding, Severity

if TYPE_CHECKING:
    from ..engines.served import Served
    from .evidence import Gain
    from .located import Located
    from .material import Material
    from .measure import Measured
    from .readings import Readings
    from .search import Entry
    from .verdict import Told

SHOWN_POINTS = 200


def report(
    draft: str | Path, statics: Sequence[Finding], readings: Readings | None,
    material: Material | None, measured: Measured | None, served: Served | None, predicted: float | None,
    missing: list[dict[str, str]], began: float, k: int, located: Located | None = None,
) -> dict[str, Any]:  # fmt: skip
    from ..decode.acceptance import Acceptance
    from . import verdict
    from .by_text import by_kind, by_length
    from .place import summary, where
    from .signatures import signatures

    replayed = None
    if measured is not None:
        replayed = Acceptance.merged(measured.taus["declared"], k)
    settled = located is not None and located.settled  # then a replay on other prompts adds nothing
    extra = signatures(served, None if settled else replayed) if served is not None else []
    facts = readings.facts if readings else None
    usual = facts.default_taps if facts is not None and facts.num_layers >= 7 else None
    told = verdict.findings([*statics, *extra], measured, usual)
    taus = _taus(measured, k) | {"training": predicted}
    off = _engines_off(readings, measured, taus)
    measured_too = {(t.evidence.split()[0], t.convention) for t in off}  # what a trial priced is told once
    told = [t for t in told if t.id != "EY-ENGINE" or (t.evidence.split(":")[0], _field(t)) not in measured_too]
    told = verdict.ordered([*told, *off, *by_length(measured), *by_kind(measured), *_not_evaluated(missing)])
    place = where(told, measured, taus, served.tau if served else None, [t.id for t in off if
                          t.severity is Severity.ERROR], located)  # fmt: skip
    broken = any(t.severity is Severity.ERROR for t in told)
    engines = list(readings.as_read) if readings else []
    out: dict[str, Any] = {
        "draft": str(draft),
        "eyas": __version__,
        "verdict": "faulty" if broken or place in ("launch", "engine", "export") else "undecided" if
        place == "unknown" else "healthy",
        "where": place,
        "summary": summary(told, place, measured, taus, served.tau if served else None),
        "findings": [t.to_dict() for t in told],
        "tau": {
            "declared": taus.get("declared"), "best": taus.get("best"),
            "as_read": {name: taus.get(name) for name in (readings.engines if readings else {})},
            "served": served.tau if served else None, "training": predicted,
        },
        "not_evaluated": missing,
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
    return _plain(out)


def _plain(value: Any) -> Any:
    """Without numbers that JSON does not have: a ratio of no rounds has no value."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _taus(measured: Measured | None, k: int) -> dict[str, float | None]:
    from ..decode.acceptance import Acceptance

    if measured is None:
        return {}
    taus = {name: Acceptance.merged(parts, k).tau for name, parts in measured.taus.items()}
    return {name: None if math.isnan(tau) else round(tau, 4) for name, tau in taus.items()}


def _field(told: Told) -> str:
    """The convention that a finding of checks.engines begins with: "sglang: norm_before_residual is true, ..." """
    return told.evidence.partition(": ")[2].split(" ")[0]


def _engines_off(readings: Readings | None, measured: Measured | None, taus: Mapping[str, float | None]) -> list[Told]:
    """Engines that would run the draft worse than it is: errors for those that were named."""
    from ..engines.compare import EXPORT, differences
    from .verdict import ENGINE, Told

    if readings is None or measured is None:
        return []
    out = []
    for name, costs in measured.engine_costs.items():
        best, tau = taus.get("best"), taus.get(name)
        real = [(what, gain) for what, gain in costs if gain.worse and gain.mean < -0.02]
        if not real or best is None or tau is None or tau > best - 0.02:
            continue
        wanted = name in readings.named
        ways = (
            {d.what: d.way_out for d in differences(readings.reading, readings.engines[name])}
            if readings.reading
            else {}
        )
        way = ways.get(real[0][0], EXPORT)
        points = "; ".join(f"{what} costs {-gain.mean:.3f} nats a token" for what, gain in real[:3])
        mend = measured.engine_mends.get(name)
        if mend is not None:
            h = mend.hypothesis
            points += (
                f"; of all single changes to what it reads {h.group} = {h.label} helps most (+{mend.gain.mean:.3f})"
            )
        out.append(
            Told(
                ENGINE, "confirmed" if wanted else "static",
                Severity.ERROR if wanted else Severity.WARNING, real[0][0],
                f"{name} would run it with an accept length of {tau:.2f} instead of {best:.2f}: {points}",
                "It serves, and accepts less than this draft is worth", way[:1].upper() + way[1:],
                None, None, [], round(tau - best, 4), None, (), -real[0][1].mean,
            )
        )  # fmt: skip
    return out


def _not_evaluated(missing: Sequence[Mapping[str, str]]) -> list[Told]:
    from .verdict import Told

    return [
        Told("EY-NOT-EVALUATED", "not_evaluated", Severity.INFO, None, f"not evaluated: {m['what']}", "", m["supply"])
        for m in missing
    ]


def _measured_parts(
    measured: Measured, material: Material, readings: Readings, engines: Sequence[str], k: int
) -> dict[str, Any]:
    from .measure import summary

    shown = {name: summary(parts, k) for name, parts in measured.taus.items()}
    verdicts = {"taken": "confirmed", "better": "inconclusive", "reversed": "refuted"}
    confirmed = {t.hypothesis: t for t in measured.taken}
    base, best = readings.declared, measured.found.best
    assert base is not None

    def gain(e: Entry) -> Gain:
        """What its finding says: of the confirmation in float32, on all the text, where there was one."""
        return confirmed[e.hypothesis].gain if e.verdict == "taken" and e.hypothesis in confirmed else e.gain

    return {
        "acceptance": {"declared": shown["declared"], "best": shown["best"],
                       "as_read": {n: shown[n] for n in engines if n in shown}},
        "controls": measured.controls,
        "ledger": [
            {"order": i, "round": e.round, "convention": e.hypothesis.group, "hypothesis": e.hypothesis.label,
             "from": e.start, "gain": round(gain(e).mean, 4), "interval": gain(e).to_list(),
             "verdict": "refuted" if e.verdict == "taken" and e.hypothesis not in confirmed else
             "helps" if e.verdict == "better" and e.start.startswith("as ") else verdicts.get(e.verdict, e.verdict),
             "delta_tau": round(confirmed[e.hypothesis].delta_tau, 4) if e.hypothesis in confirmed else None,
             "note": e.note}
            for i, e in enumerate(e for e in measured.ledger if e.verdict != "better" or e.hypothesis not in confirmed)
        ],
        "positions": measured.positions,
        "kinds": measured.kinds,
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


def _peak() -> float:
    """Peak memory of this process in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)
