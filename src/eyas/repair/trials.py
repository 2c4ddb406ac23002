"""Is a changed draft better? Static checks again, and the same replay over the same text as before.

    trials = Trials(target="path/to/target"); before = trials.of(overlay); after = trials.of(changed)
    trials.judge(before, after, findings, sure=True)        -> Judgement(keep, why)

Nothing is written: an overlay is run as it lies in memory.   pytest tests/test_repair_trials.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..doctor.examine import examine
from ..doctor.finding import Severity
from ..draft.expected import Inventory
from ..target.facts import TargetFacts
from .overlay import Overlay

if TYPE_CHECKING:
    import torch

    from ..decode.acceptance import Acceptance
    from ..doctor.evidence import Gain, Paired
    from ..doctor.material import Material
    from ..doctor.readings import Readings
    from ..doctor.specimen import Specimen
    from ..doctor.trial import Bench

ROWS, STEPS = 2048, 2
K = 4
LEAST_SUSPECTED = 0.0125
"""Nats per token that what the files speak for must win for certain; wrong alternatives win up to 0.012."""
OF_TENSORS = ("EY-TENSOR-MISSING", "EY-TENSOR-SHAPE")
"""One finding about several tensors: fewer of them is better already."""


@dataclass(frozen=True)
class Seen:
    """What a static check asks for: an error or a warning."""

    id: str
    convention: str
    severity: Severity
    evidence: str


@dataclass(frozen=True)
class Judged:
    """One state of a draft."""

    seen: tuple[Seen, ...]
    """By static checks."""
    readable: bool
    """Can its conventions be told at all? Until then most checks are not made."""
    amiss: frozenset[str] = frozenset()
    """Canonical tensors that are missing or misshapen."""
    surprise: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """"declared" and each engine that was named -> nats [R, K]; {} where nothing can be replayed."""
    nothing: float = 0.0
    """Nats of a guess that knows nothing."""
    accepted: tuple[Acceptance, ...] = ()
    """As declared: greedy rounds, one for each document."""
    specimen: Specimen | None = None
    """As declared, where it was replayed."""
    unrecorded: tuple[int, ...] = ()
    """Taps that it reads and that the text does not hold, which is why it was not replayed."""

    @property
    def errors(self) -> frozenset[tuple[str, str]]:
        """(id, convention) of what is an error."""
        return frozenset((s.id, s.convention) for s in self.seen if s.severity is Severity.ERROR)

    def shows(self, id_: str) -> list[str]:
        """The conventions of all findings of this id."""
        return [s.convention for s in self.seen if s.id == id_]

    @property
    def tau(self) -> float | None:
        """Accept length as declared, None where it was not replayed."""
        from ..decode.acceptance import Acceptance

        merged = Acceptance.merged(self.accepted, K) if self.accepted else None
        return merged.tau if merged is not None and merged.rounds else None


@dataclass(frozen=True)
class Judgement:
    """Keep a change?"""

    keep: bool
    why: str
    gain: float | None = None
    """Nats per token that it wins, over knowing nothing where the state before could not be run; None where nothing
    was replayed."""
    alike: bool = False
    """Not kept only because it measures as before."""


class Trials:
    """One text, for every state that a draft goes through."""

    def __init__(
        self,
        *,
        target: Path | None = None,
        facts: TargetFacts | None = None,
        features: Path | None = None,
        engines: Sequence[str] = (),
        prompts: Sequence[str] | None = None,
        device: str = "cpu",
        trust_remote_code: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.target, self.facts, self.features, self.engines = target, facts, features, tuple(engines)
        self.names = tuple(name.partition("@")[0] for name in engines)
        self.prompts, self.device, self.trust, self.tell = prompts, device, trust_remote_code, tell
        self._bench: Bench | None = None
        self._paired: Paired | None = None
        self._frequent = 0.0
        """Nats of a guess that knows how often each token comes, and nothing else."""

    # ---------------------------------------------------------------- looking

    def of(self, overlay: Overlay) -> Judged:
        """Look at one state, and replay it where that can be done."""
        found = examine(overlay.folder, self.facts, self.names)
        asking = (Severity.ERROR, Severity.WARNING)
        seen = tuple(Seen(f.id, f.convention or "", f.severity, f.evidence) for f in found if f.severity in asking)
        if overlay.reading is None:
            return Judged(seen, False)
        inventory = Inventory.of(overlay.reading)
        out = Judged(seen, True, frozenset(inventory.missing) | frozenset(inventory.misshapen))
        if self.target is None and self.features is None:
            return out
        from ..doctor.readings import Readings

        readings = Readings.open(overlay.folder, self.target, self.engines, {})
        bench = self._prepared(readings)
        if bench is None or readings.declared is None:
            return out
        if not bench.has_states(readings.declared):
            absent = tuple(t for t in readings.declared.slices if t not in bench.material.states)
            return replace(out, unrecorded=absent)
        runs = {"declared": readings.declared} | {n: s for n, s in readings.as_read.items() if n in self.names}
        surprise = dict(zip(runs, bench.surprise(list(runs.values())), strict=True))
        rounds = tuple(bench.acceptance(readings.declared, K))
        return replace(out, surprise=surprise, nothing=bench.nothing(readings.declared), accepted=rounds,
                       specimen=readings.declared)  # fmt: skip

    def _prepared(self, readings: Readings) -> Bench | None:
        """The bench, recorded for the first state that can be replayed; layers that a later one reads are added."""
        if not readings.has_target() or readings.declared is None:
            return None
        if self._bench is None or not self._bench.has_states(readings.declared):
            material = self._text(readings)
            if material is not None and self._bench is not None:
                material = _joined(self._bench.material, material)
            if material is None or len(material.packing.document[material.judged(STEPS)].unique()) < 2:
                return self._bench
            self._on(material)
        return self._bench

    def _on(self, material: Material) -> None:
        import torch

        from ..doctor.evidence import Paired
        from ..doctor.scale import frequencies
        from ..doctor.trial import Bench
        from ..machine import choose_precision

        quick = getattr(torch, choose_precision("auto", self.device))
        self._bench = Bench(material, quick, self.device, STEPS, ROWS)
        self._paired = Paired(self._bench.document)
        tokens = int(torch.maximum(material.ids, material.choice).max()) + 1
        self._frequent = frequencies(material, self._bench.rows, self._bench.document, tokens)

    def _text(self, readings: Readings) -> Material | None:
        """As the diagnosis has it: features that are not this target's states are not judged by."""
        from ..doctor import texts

        def text(features: Path | None) -> Material | None:
            return texts.text(
                readings, self.target, features, self.prompts, self.device, self.trust, [], self.tell
            )  # fmt: skip

        material = text(self.features)
        if material is None or self.features is None or self.target is None:
            return material
        from ..doctor.features_audit import audit

        told = audit(material, self.target, str(self.features), self.device, self.trust)
        if any(f.severity is Severity.ERROR for f in told):
            self.features = None
            return text(None)
        return material

    # ---------------------------------------------------------------- judging

    def gains(self, before: Judged, after: Judged) -> dict[str, Gain]:
        """How much less surprised the later state is, for each reading that both have; where the earlier one could not
        be run, against a guess that knows nothing."""
        if self._paired is None:
            return {}
        then = before.surprise or {n: s.new_full(s.shape, after.nothing) for n, s in after.surprise.items()}
        both = [name for name in then if name in after.surprise]
        return {n: self._paired.gain(then[n], after.surprise[n], len(both)) for n in both}

    def worse(self, before: Judged, after: Judged) -> str:
        """What is worse than before, in a few words; "" where nothing is."""
        if before.readable and not after.readable:
            return "its conventions could not be told any more"
        fresh = {id_ for id_, _ in after.errors - before.errors} if before.readable or not after.readable else set()
        if fresh:
            return f"it brings up {', '.join(sorted(fresh))}"
        spoilt = after.amiss - before.amiss if before.readable else set()
        if spoilt:
            return f"{', '.join(sorted(spoilt))} would be missing, or of another shape than the config's"
        if after.unrecorded and before.surprise:
            layers = ", ".join(map(str, after.unrecorded))
            return f"it cannot be measured, since the states of layers {layers} were not recorded"
        lost = [name for name in before.surprise if name not in after.surprise]
        if lost:
            return f"{' and '.join('it' if n == 'declared' else n for n in lost)} could not run the draft any more"
        if not before.surprise:
            return ""
        gain = min(self.gains(before, after).values(), key=lambda g: g.mean)
        if gain.worse and gain.mean < -_least():
            return f"the draft is more surprised, by {-gain.mean:.3f} nats a token"
        return ""

    def _knows_nothing(self, after: Judged) -> bool:
        """As the doctor has it (doctor/starts.py): guesses that make such a draft are no repair."""
        from ..doctor.scale import BARELY, BLIND, controls

        least = min(float(s.mean()) for s in after.surprise.values())
        if least >= self._frequent or self._bench is None or after.specimen is None:
            return least >= self._frequent
        known = controls(self._bench, after.specimen)
        return known["states_are_worth"] < BLIND or least > BARELY * known["random_draft"]

    def judge(
        self, before: Judged, after: Judged, findings: Sequence[Mapping[str, Any]], sure: bool = True
    ) -> Judgement:
        """Keep what the findings led to? They must be gone and nothing worse; and the draft must measure better, unless
        files alone prove every finding and every step against them (`sure`)."""
        for f in findings:
            if _remains(f, before, after):
                return Judgement(False, f"{f['id']} is still there")
        gains = self.gains(before, after)
        worst = min((g.mean for g in gains.values()), default=None)
        if why := self.worse(before, after):
            return Judgement(False, why, worst if before.surprise else None)
        proven = sure and all(f["status"] == "static" or before.shows(f["id"]) for f in findings)
        gone = (
            "fewer tensors are amiss" if after.amiss and after.amiss < before.amiss else "the files no longer show it"
        )
        if not gains:
            if not proven:
                more = ": give --target" if self.target is None else ", and it could not be replayed"
                return Judgement(False, f"only a replay could tell whether it is right{more}")
            return Judgement(True, gone)
        best = max(gains.values(), key=lambda g: g.mean)
        suspected = bool(findings) and all(f["status"] == "inconclusive" for f in findings)
        if suspected and best.low > 0 and best.mean >= LEAST_SUSPECTED and not best.real:
            why = f"the files spoke for it, and the draft is less surprised, by {best.mean:.3f} nats a token"
            return Judgement(True, why, best.mean)
        if not sure and best.real and self._knows_nothing(after):
            why = "the draft would know no more of the text than how often each token comes"
            return Judgement(False, why, best.mean)
        if best.real and before.surprise:
            return Judgement(True, f"the draft is less surprised, by {best.mean:.3f} nats a token", best.mean)
        if not before.surprise and (best.real or proven):
            return Judgement(True, "it can be replayed now", best.mean)
        if proven:
            return Judgement(True, f"{gone}, and the draft runs as before", best.mean)
        return Judgement(False, f"it does not help: {best.mean:+.3f} nats a token [{best.low:+.3f}, {best.high:+.3f}]",
                         best.mean, alike=bool(before.surprise))  # fmt: skip


def _remains(f: Mapping[str, Any], before: Judged, after: Judged) -> bool:
    """Do static checks still say the same? Of several findings with one id, those about the same convention count,
    else how many there are."""
    id_, convention = f["id"], f["convention"] or ""
    if f["severity"] not in ("error", "warning"):
        return False
    if id_ in OF_TENSORS and after.readable and after.amiss < before.amiss:
        return False
    earlier, later = before.shows(id_), after.shows(id_)
    if convention in earlier:
        return later.count(convention) >= earlier.count(convention)
    return bool(later) and len(later) >= len(earlier)


def _joined(old: Material, new: Material) -> Material | None:
    """The same text with the layers of both; None where it is another text."""
    import torch

    if not torch.equal(old.ids, new.ids) or not torch.equal(old.choice, new.choice):
        return None
    return replace(old, states={**old.states, **new.states})


def _least() -> float:
    from ..doctor.evidence import LEAST_GAIN

    return LEAST_GAIN
