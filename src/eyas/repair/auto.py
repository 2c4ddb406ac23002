"""The loop: diagnose, try a repair on an overlay in memory, keep it if it measures better, until nothing is left.

    mended = mend(Overlay.of("draft", facts), target="path/to/target")
    mended.after, mended.done, mended.ledger, mended.left

No file is touched. What does not help is dropped and marked refuted, and the next candidate tried.
    pytest tests/test_repair_auto.py
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..doctor.diagnosis import diagnose
from ..doctor.groups import group
from ..draft.directory import PROBE
from ..errors import BadInput, EyasError
from .operations import Done, perform
from .overlay import Overlay
from .remedies import candidates, refusal, unrepairable
from .remedies_measured import REMEDIES as MEASURED
from .remedies_static import REMEDIES
from .step import Step
from .trials import Judged, Judgement, Trials

ROUNDS = 6
"""More than there are faults that can be told apart at once."""
ALIKE = 0.02
"""Nats per token within which two guesses fit alike, so that the likelier one is taken."""
Finding = Mapping[str, Any]


@dataclass
class Mended:
    """What was kept, what was tried, and what the doctor says before and after."""

    before: Overlay
    done: list[Done] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """What the steps that were kept are against, in their order."""
    ledger: list[dict[str, Any]] = field(default_factory=list)
    """{"round", "finding", "convention", "steps", "verdict": kept | refuted, "why", "gain", "tau"}"""
    diagnoses: list[dict[str, Any]] = field(default_factory=list)
    """The doctor's, one a round: the first of the draft as it was, the last of what came of it."""
    left: list[dict[str, str]] = field(default_factory=list)
    """{"finding", "why", "evidence"}: errors that remain."""

    @property
    def after(self) -> Overlay:
        """The draft with everything that was kept."""
        return self.done[-1].after if self.done else self.before

    @property
    def tau(self) -> tuple[float | None, float | None]:
        """Accept length as declared, before and after."""
        taus = [d["tau"]["declared"] for d in self.diagnoses]
        return (taus[0], taus[-1]) if taus else (None, None)


def mend(
    overlay: Overlay,
    *,
    target: Path | None = None,
    reference: Path | None = None,
    features: Path | None = None,
    engines: Sequence[str] = (),
    only: str | None = None,
    first: Mapping[str, Any] | None = None,
    budget: float = 60.0,
    device: str = "cpu",
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Mended:
    """Repair all that the doctor finds wrong, or `only` one finding, by its id. first: a diagnosis of these very bytes,
    where one was just made.

    Raises BadInput where `only` is not found in these bytes.
    """
    trials = Trials(target=target, facts=overlay.facts, features=features, engines=engines, device=device,
                    trust_remote_code=trust_remote_code, tell=tell)  # fmt: skip
    loop, out = _Loop(trials, target, reference, tell), Mended(overlay)
    files_only = target is None and features is None and not (overlay.path / PROBE).is_file()
    for round_ in range(1, ROUNDS + 2):  # the last only looks
        tell(f"round {round_}: diagnosing")
        said = dict(first) if first is not None and round_ == 1 else diagnose(
            out.after.folder, target=target, features=features, engines=engines, reference=reference, budget=budget,
            static=files_only, device=device, trust_remote_code=trust_remote_code, tell=tell,
        )  # fmt: skip
        out.diagnoses.append(said)
        wrong = [f for f in said["findings"] if _is_wrong(f) or _is_suspected(f)]
        if only is not None:
            wrong = _asked_for(said, only, overlay) if round_ == 1 else [f for f in wrong if f["id"] == only]
        if not wrong or round_ > ROUNDS or not loop.round(round_, out, wrong):
            break
    asked = [f for f in wrong if not _is_suspected(f) and not out.done]
    remain = [f for f in out.diagnoses[-1]["findings"] if _is_wrong(f) or f in asked]
    out.left = [{"finding": f["id"], "why": loop.reason(f) if only in (None, f["id"]) else "it was not asked for",
                 "evidence": f["evidence"]} for f in remain]  # fmt: skip
    return out


def _is_wrong(f: Finding) -> bool:
    return f["severity"] == "error" and f["status"] in ("static", "confirmed")


def _is_suspected(f: Finding) -> bool:
    """The files speak against it, and the doctor's text did not decide: a guess is tried."""
    return f["id"] == "EY-ROPE-OTHER" and f["status"] == "inconclusive" and f["severity"] == "warning"


def _asked_for(said: Mapping[str, Any], only: str, overlay: Overlay) -> list[Finding]:
    wanted = [f for f in said["findings"] if f["id"] == only and f["status"] in ("static", "confirmed")]
    if not wanted:
        found = ", ".join(f["id"] for f in said["findings"] if f["severity"] in ("error", "warning")) or "nothing"
        asked = {"id": only, "status": "static", "severity": "error", "convention": None, "best": None}
        refused = next((why for step in candidates(asked, overlay) if (why := refusal(overlay, step))), "")
        why = refused.removeprefix(f"{overlay.path}: ") or _like(only)
        raise BadInput(
            f"{overlay.path}: the doctor does not find {only} in these files (it finds {found}); nothing was done. "
            f"{why}".rstrip()
        )
    return wanted


def _like(only: str) -> str:
    """A hint for an id that no operation mends; "" where one does, and the files simply do not have the fault."""
    ids = {*REMEDIES, *(group(name).id for name in MEASURED)}
    if only in ids:
        return ""
    near = difflib.get_close_matches(only, ids, n=1, cutoff=0.8)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"No operation mends {only}: {meant}`eyas doctor` prints the ids of what it finds"


class _Loop:
    """One repair's memory: the state that it is at, and what was tried in vain on it."""

    def __init__(
        self, trials: Trials, target: Path | None, reference: Path | None, tell: Callable[[str], None]
    ) -> None:
        self.trials, self.target, self.reference, self.tell = trials, target, reference, tell
        self.state: Judged | None = None
        self.refuted: set[str] = set()
        """Forgotten when something is kept, as another fault may have hidden what a step does."""
        self.why: dict[tuple[str, str], str] = {}
        self.refused: dict[tuple[str, str], str] = {}

    def round(self, number: int, out: Mended, wrong: Sequence[Finding]) -> bool:
        """Try what the findings of one diagnosis ask for; was anything kept?"""
        if self.state is None:
            self.state = self.trials.of(out.after)
        began = self.state
        # Faults hide each other: all at once, as the diagnosis measured them, before one by one.
        sure = [(f, step) for f in wrong if (step := next(filter(_sure, self._candidates(f, out.after)), None))]
        if self._together(number, out, sure):
            return True
        kept = False
        for f in wrong:
            if not began.shows(f["id"]) or self.state.shows(f["id"]):  # else it went with what was kept before
                kept = self._alone(number, out, f) or kept
        if kept or len(sure) < 3:
            return kept
        return any(self._together(number, out, [pair for pair in sure if pair is not one]) for one in sure)

    def reason(self, f: Finding) -> str:
        """Why an error remains: what came of its candidates, and the way out."""
        said = (self.why.get(_about(f)), self.refused.get(_about(f)), unrepairable(f))
        return "; ".join(filter(None, said)) or "no operation mends it"

    def _together(self, number: int, out: Mended, pairs: Sequence[tuple[Finding, Step]]) -> bool:
        """The first sure step against each of several findings; what two of them ask for is done once."""
        done: list[Done] = []
        findings: list[Finding] = []
        for f, step in pairs:
            with contextlib.suppress(EyasError):  # refused after the others: another round
                if all(_key(step) != _key(d.step) for d in done):
                    done.append(perform(done[-1].after if done else out.after, step))
                findings.append(f)
        if len(findings) < 2 or _key(*(d.step for d in done)) in self.refuted:
            return False
        return self._noted(number, out, done, findings, *self._tried(done, findings))

    def _alone(self, number: int, out: Mended, f: Finding) -> bool:
        """Against one finding: the first sure step that helps, else of all guesses the one that helps most."""
        steps = self._candidates(f, out.after)
        for step in filter(_sure, steps):
            done = [perform(out.after, step)]
            if self._noted(number, out, done, [f], *self._tried(done, [f])):
                return True
        tried = [(done, *self._tried(done, [f])) for step in steps if not step.sure
                 if (done := [perform(out.after, step)])]  # fmt: skip
        guesses = [guess for guess in tried if guess[2].keep]
        alike, others = ([guess for guess in tried if guess[2].alike is flag] for flag in (True, False))
        if not guesses and len(alike) == 1 and others and all((v.gain or 0.0) < -ALIKE for _, _, v in others):
            # Of two maps, say, the one that changes nothing is right where the other one is measured to be wrong.
            why = f"the draft runs as before, while {others[0][0][0].step} measures worse"
            guesses = [(alike[0][0], alike[0][1], replace(alike[0][2], keep=True, why=why))]
        for done, after, verdict in tried:
            if not any(done is guess[0] for guess in guesses):
                self._noted(number, out, done, [f], after, verdict)
        if not guesses:
            return False
        most = max(verdict.gain or 0.0 for _, _, verdict in guesses)
        best = next(guess for guess in guesses if (guess[2].gain or 0.0) >= most - ALIKE)
        for done, after, verdict in guesses:
            if done is not best[0]:
                less = replace(verdict, keep=False, why=f"{best[0][0].step} fits better, or as well and is likelier")
                self._noted(number, out, done, [f], after, less)
        return self._noted(number, out, best[0], [f], best[1], best[2])

    def _candidates(self, f: Finding, overlay: Overlay) -> list[Step]:
        """Those that may be done and were not tried in vain; why others may not is remembered, where a reference was
        named for nothing, or nothing is left."""
        steps, refused = [], []
        for step in candidates(f, overlay, target=self.target, reference=self.reference):
            if why := refusal(overlay, step):
                refused.append((step, why))
            else:
                steps.append(step)
        telling = [why for step, why in refused if "reference" in step.arguments or not steps]
        if telling:
            self.refused[_about(f)] = telling[0]
        return [step for step in steps if _key(step) + str(_about(f)) not in self.refuted]

    def _tried(self, done: Sequence[Done], findings: Sequence[Finding]) -> tuple[Judged, Judgement]:
        self.tell(f"trying {', '.join(str(d.step) for d in done)}")
        assert self.state is not None
        after = self.trials.of(done[-1].after)
        return after, self.trials.judge(self.state, after, findings, all(d.step.sure for d in done))

    def _noted(
        self, number: int, out: Mended, done: Sequence[Done], findings: Sequence[Finding], after: Judged,
        verdict: Judgement,
    ) -> bool:  # fmt: skip
        """Into the ledger, and kept or remembered as tried in vain."""
        out.ledger.append(_entry(number, findings, done, verdict, after))
        if verdict.keep:
            out.done += done
            out.findings += [f for f in findings if f not in out.findings]
            self.state = after
            self.refuted.clear()
            self.why.clear()
            self.refused.clear()
        elif len(findings) == 1:
            self.refuted.add(_key(done[0].step) + str(_about(findings[0])))
            self.why[_about(findings[0])] = f"{done[0].step} was tried and dropped: {verdict.why}"
        else:
            self.refuted.add(_key(*(d.step for d in done)))
        return verdict.keep


def _sure(step: Step) -> bool:
    return step.sure


def _about(f: Finding) -> tuple[str, str]:
    return f["id"], f["convention"] or ""


def _key(*steps: Step) -> str:
    return json.dumps([[step.operation, step.arguments] for step in steps], sort_keys=True)


def _entry(
    number: int, findings: Sequence[Finding], done: Sequence[Done], verdict: Judgement, after: Judged
) -> dict[str, Any]:
    tau = after.tau
    return {
        "round": number,
        "finding": ", ".join(f["id"] for f in findings),
        "convention": ", ".join(f["convention"] or "" for f in findings),
        "steps": [d.step.to_dict() for d in done],
        "verdict": "kept" if verdict.keep else "refuted",
        "why": verdict.why,
        "gain": None if verdict.gain is None else round(verdict.gain, 4),
        "tau": None if tau is None else round(tau, 4),
    }
