"""From what was seen and measured to what a user is told: findings in their order.

Pure functions of their arguments.   pytest tests/test_doctor_verdict.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .finding import ORDER, Finding, Severity
from .groups import GROUPS, group

if TYPE_CHECKING:  # static checks need no torch
    from .hypothesis import Hypothesis
    from .maps import Aligned
    from .measure import Measured, Taken
    from .search import Entry


@dataclass
class Told:
    """A finding as it is reported: a static one, a measured one, or both in one."""

    id: str
    status: str
    severity: Severity
    convention: str | None
    evidence: str
    consequence: str = ""
    remedy: str = ""
    declared: Any = None
    best: Any = None
    equivalents: list[Any] = field(default_factory=list)
    delta_tau: float | None = None
    interval: list[float] | None = None
    sources: tuple[str, ...] = ()
    weight: float = 0.0
    """Nats per token: the order among findings of one severity."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        out = {k: v for k, v in self.__dict__.items() if k not in ("weight", "severity", "sources")}
        return {**out, "severity": self.severity.value, "sources": list(self.sources)}


def findings(statics: Sequence[Finding], measured: Measured | None, usual: Any = None) -> list[Told]:
    """All findings, the most important first. usual: default taps of the target, where it is known."""
    told = [_static(f) for f in statics]
    if measured is not None:
        for taken in measured.taken:
            told = _with_confirmed(told, taken, measured)
        _acquit(told, measured)
        _works_all_the_same(told, measured)
        told += _undecided(told, measured, usual)
        if measured.aligned is not None:
            told.append(_another_map(measured, measured.aligned))
        elif measured.knows_nothing:
            told.append(_nothing(measured))
    return ordered(told)


def ordered(told: Sequence[Told]) -> list[Told]:
    """The most important first."""
    rank = {"confirmed": 0, "static": 1, "inconclusive": 2, "not_evaluated": 3, "refuted": 4}
    place = {NOTHING: 1, BLIND: 1, "EY-READ": 1, UNDECIDED: -1}  # the first two say less than any other fault
    return sorted(told, key=lambda t: (ORDER[t.severity], place.get(t.id, 0), rank[t.status], -t.weight))


NOTHING, BLIND, ENGINE = "EY-MEASURED-NOTHING", "EY-MEASURED-BLIND", "EY-AS-READ"


def _static(f: Finding) -> Told:
    return Told(
        f.id,
        "static",
        f.severity,
        f.convention or concerns(f.id),
        f.evidence,
        f.consequence,
        f.remedy,
        sources=f.sources,
    )


def concerns(id_: str) -> str | None:
    """The convention that a static finding is about."""
    return next((name for name, g in GROUPS.items() if any(id_.startswith(f"EY-{s}") for s in g.statics)), None)


def _with_confirmed(told: list[Told], taken: Taken, measured: Measured) -> list[Told]:
    """Add a confirmed substitution; a static finding about the same becomes part of it."""
    h, g = taken.hypothesis, group(taken.hypothesis.group)
    mine = [t for t in told if t.status == "static" and any(t.id.startswith(f"EY-{s}") for s in g.statics)
            and t.severity in (Severity.ERROR, Severity.WARNING, Severity.INFO)]  # fmt: skip
    best = mine[0] if mine and mine[0].severity is Severity.ERROR else None
    evidence = (
        f"{g.what}: {h.label} ({h.about}) fits the weights better than what was declared, by {taken.gain.mean:.3f} "
        f"nats a token [{taken.gain.low:.3f}, {taken.gain.high:.3f}]"
    )
    if best is not None:
        evidence = f"{best.evidence}. Measured: {evidence}"
    equivalents = [_value(other, h.group) for other in taken.equivalents]
    if h.group == "head" and measured.found.base.conventions.head == "own":
        equivalents.append("d2t = the map of this head")
        evidence += "; head and map do not belong together, and either may be the wrong one"
    elif equivalents:
        evidence += f"; as well fit {', '.join(map(str, equivalents[:6]))}"
    confirmed = Told(
        best.id if best else g.id, "confirmed", Severity.ERROR, h.group, evidence, best.consequence if best else
        g.consequence, best.remedy if best else g.remedy, _declared(h, measured), h.value, equivalents,
        round(taken.delta_tau, 4), [round(x, 4) for x in taken.interval], best.sources if best else (), taken.gain.mean,
    )  # fmt: skip
    rest = [t for t in told if t is not best and not (t in mine and t.severity is Severity.INFO)]
    return [confirmed, *rest]


def _value(other: Hypothesis, mine: str) -> Any:
    return other.value if other.group == mine else f"{other.group} = {other.label}"


def _declared(h: Hypothesis, measured: Measured) -> Any:
    base = measured.found.base
    if h.group in ("taps", "slice_order"):
        return list(base.slices)
    if h.group == "d2t":
        return "offsets"
    if h.group in ("state_shift", "label_shift"):
        return getattr(base, h.group)
    value = getattr(base.conventions, h.group, None)
    return value if value is not None or hasattr(base.conventions, h.group) else "as stored"


ACQUITTABLE = (
    "EY-D2T-ZERO-PREFIX", "EY-D2T-ABSOLUTE", "EY-D2T-AMBIGUOUS", "EY-D2T-UNSORTED", "EY-D2T-PREFIX-VOCABULARY",
    "EY-D2T-TWICE", "EY-D2T-ARANGE", "EY-D2T-ZEROS", "EY-NORM-OUTPUT-MEANING", "EY-ROPE-OTHER", "EY-ROPE-UNNAMED",
)  # fmt: skip
"""Suspicions about what a value means, which a trial can refute; a wrong dtype or size it cannot."""


ACCEPTED = 1.1
"""An accept length from which on a draft certainly helps; of random weights it is 1.00."""


def _acquit(told: list[Told], measured: Measured) -> None:
    """A static suspicion about something that is measured to be right as declared is no fault."""
    taken = {t.hypothesis.group for t in measured.taken}
    if measured.knows_nothing or measured.aligned is not None:
        return
    for t in told:
        tried = [e for e in measured.found.last if e.hypothesis.group == t.convention]
        if t.id not in ACQUITTABLE or t.status != "static" or t.convention in taken or not tried:
            continue
        if any(e.verdict != "refuted" for e in tried) or t.severity is Severity.INFO:
            continue
        t.evidence += (
            f". Measured: every other reading of it ({len(tried)} tried) is worse, the nearest by "
            f"{-max(e.gain.mean for e in tried):.3f} nats a token: right as declared"
        )
        t.status, t.severity = "refuted", Severity.OK


def _works_all_the_same(told: list[Told], measured: Measured) -> None:
    """Matrices that look untrained are no error in a draft that is accepted: it was trained for a short time."""
    from ..decode.acceptance import Acceptance

    parts = measured.taus.get("best") or []
    tau = Acceptance.merged(parts, parts[0].k).tau if parts else 1.0
    if measured.knows_nothing or measured.aligned is not None or not tau >= ACCEPTED:
        return
    for t in told:
        if t.id == "EY-TENSOR-FRESH" and t.status == "static":
            t.severity = Severity.WARNING
            t.evidence += f". Measured: the draft reaches an accept length of {tau:.2f} all the same"
            t.consequence = "Acceptance is lower than this draft could have"
            t.remedy = "Train it for longer; if it was trained for long, export the weights of the finished run"


def _undecided(told: list[Told], measured: Measured, usual: Any) -> list[Told]:
    """What this draft and this text cannot tell apart: a finding for each group that something else speaks against,
    and one for all the others together."""
    from .evidence import LEAST_GAIN

    if measured.knows_nothing:
        return []
    taken = {t.hypothesis.group for t in measured.taken}
    by_group: dict[str, list[Any]] = {}
    for e in measured.found.last:
        near = e.gain.mean > -LEAST_GAIN / 2 or not e.gain.worse
        if near and e.hypothesis.group not in taken and e.hypothesis.group not in SYMMETRIC:
            by_group.setdefault(e.hypothesis.group, []).append(e)
    out, rest = [], []
    for name, entries in by_group.items():
        g, values = group(name), [e.hypothesis.value for e in entries]
        static = [t for t in told if t.status == "static" and t.convention == name]
        if any(t.severity is Severity.ERROR for t in static):
            continue  # what the files show for certain is not undecided
        suspected = [t for t in static if t.severity is not Severity.OK]
        odd = bool(suspected) or (name == "taps" and usual is not None and list(usual) in values)
        if not odd:
            rest += entries
            continue
        labels = ", ".join(e.hypothesis.label for e in entries[:6])
        best = max(entries, key=lambda e: e.gain.mean)
        evidence = (
            f"{g.what}: {labels} fit as well as what was declared (within {LEAST_GAIN} nats a token), so this draft "
            f"and this text do not decide it"
        )
        if name == "taps":
            evidence += f"; {list(usual)}, the default, is among them" if usual and list(usual) in values else ""
        out.append(
            Told(
                suspected[0].id if suspected else g.id, "inconclusive",
                Severity.WARNING, name,
                f"{suspected[0].evidence}. Measured: {evidence}" if suspected else evidence, "",
                "Compare with the training run's settings; more text or a longer trained draft tells more",
                _declared(best.hypothesis, measured), _declared(best.hypothesis, measured), values,
                sources=suspected[0].sources if suspected else (), weight=max(0.0, best.gain.mean),
            )
        )  # fmt: skip
        for t in suspected[:1]:
            told.remove(t)
    return out + ([_together(rest, measured)] if rest else [])


def _together(entries: Sequence[Entry], measured: Measured) -> Told:
    """Alternatives that fit as well, of which nothing else makes one likely."""
    entries = sorted(entries, key=lambda e: -e.gain.mean)
    names = [f"{e.hypothesis.group} = {e.hypothesis.label}" for e in entries]
    first = entries[0].hypothesis
    return Told(
        UNDECIDED, "inconclusive", Severity.INFO, first.group,
        f"{len(names)} alternatives fit as well as what was declared, or nearly: {', '.join(names)}",
        "", "Nothing, while nothing else is wrong; a longer trained draft or more text tells them apart",
        _declared(first, measured), _declared(first, measured), names, weight=max(0.0, entries[0].gain.mean),
    )  # fmt: skip


UNDECIDED = "EY-UNDECIDED"
SYMMETRIC = ("embedding_scale",)
"""Where a scale lies under an RMSNorm nothing can be told, and nothing is wrong."""


def _nothing(measured: Measured) -> Told:
    controls = measured.controls
    if measured.blind and not measured.worthless:
        return Told(
            BLIND, "confirmed", Severity.ERROR, None,
            f"the draft does not use the target's states: with those of other positions in their place it loses "
            f"{controls['states_are_worth']:.2f} nats a token, healthy drafts lose about two",
            "It drafts what often follows a token, and little is accepted",
            "Look for what stands between the states and the layer: fc, hidden_norm, the halves of q, k and v",
        )  # fmt: skip
    return Told(
        NOTHING, "confirmed", Severity.ERROR, None,
        f"under no reading do these weights predict the target: {controls['best']:.2f} nats a token at best, token "
        f"frequencies alone give {controls['word_frequencies']:.2f}, a uniform guess {controls['knows_nothing']:.2f}",
        "Nothing is accepted, whatever the engine",
        "Look for the weights of the finished training run; name one with --reference to find the tensor that is wrong",
    )  # fmt: skip


def _another_map(measured: Measured, aligned: Aligned) -> Told:
    gain = aligned.gain
    return Told(
        "EY-D2T-OTHER", "confirmed", Severity.ERROR, "d2t",
        f"the map is not this draft's: {aligned.moved} of {aligned.asked} tokens of the text stand at another place of "
        f"the head than d2t says; moved there, the draft is less surprised by {gain.mean:.2f} nats a token "
        f"[{gain.low:.2f}, {gain.high:.2f}] on text that was not used to find them",
        "The draft knows the text and says it in other words: little is accepted",
        "Restore the map of this training run; --reference with its d2t.pt or vocab_mapping.pt tells if it is the one",
        "the stored map", "another map", [], None, None, ("SafeAILab/EAGLE#246",), gain.mean,
    )  # fmt: skip
