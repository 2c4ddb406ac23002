"""Is a changed draft better? What is kept, what is dropped, and on which text that is measured.

pytest -q tests/test_repair_trials.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doctoring import Patient, patient_of, save
from eyas.doctor import features_audit
from eyas.doctor import record as recording
from eyas.doctor.evidence import Paired
from eyas.doctor.finding import Finding, Severity
from eyas.repair.operations import perform
from eyas.repair.overlay import Overlay
from eyas.repair.step import Step
from eyas.repair.trials import Judged, Seen, Trials
from eyas.target.facts import read_facts

DOCUMENTS = torch.arange(8).repeat_interleave(4)
NOISE = torch.rand(32, 2, generator=torch.Generator().manual_seed(1)) * 0.01


def trials(frequent: float = 9.0) -> Trials:
    out = Trials()
    out._paired, out._frequent = Paired(DOCUMENTS), frequent
    return out


def seen(*ids: str, severity: Severity = Severity.ERROR) -> tuple[Seen, ...]:
    """ "ID" or "ID convention"."""
    return tuple(Seen(*(f"{id_} ".split(" ", 1)[0], id_.partition(" ")[2]), severity, id_) for id_ in ids)


def judged(*ids: str, readable: bool = True, amiss: str = "", **nats: float) -> Judged:
    surprise = {name: NOISE + value for name, value in nats.items()}
    return Judged(seen(*ids), readable, frozenset(amiss.split()), surprise, 5.0)


def finding(id_: str, status: str = "static", convention: str | None = None, severity: str = "error") -> dict[str, Any]:
    return {"id": id_, "status": status, "convention": convention, "severity": severity}


A, MEASURED = finding("EY-A"), finding("EY-MEASURED-TAPS", "confirmed", "taps")
BOTH = finding("EY-A", "confirmed", "d2t")  # seen in the files, and measured
NAN = finding("EY-TENSOR-NAN", "static", "tensor fc")

SUSPECTED = finding("EY-ROPE-OTHER", "inconclusive", "rope_theta", "warning")

CASES: dict[str, tuple[Judged, Judged, list[dict[str, Any]], bool, str]] = {
    # name: (before, after, findings, sure, "+" or "-" and a part of the reason)
    "gone, by files alone": (judged("EY-A"), judged(), [A], True, "+the files no longer show it"),
    "still there": (judged("EY-A"), judged("EY-A"), [A], True, "-EY-A is still there"),
    "a warning that was asked for is still there": (
        Judged(seen("EY-A", severity=Severity.WARNING), True), Judged(seen("EY-A", severity=Severity.WARNING), True),
        [finding("EY-A", severity="warning")], True, "-EY-A is still there",
    ),
    "one of two with the same id": (
        judged("EY-TENSOR-NAN tensor fc", "EY-TENSOR-NAN tensor norm"), judged("EY-TENSOR-NAN tensor norm"), [NAN],
        True, "+the files no longer show it",
    ),
    "the other of two with the same id": (
        judged("EY-TENSOR-NAN tensor fc", "EY-TENSOR-NAN tensor norm"), judged("EY-TENSOR-NAN tensor fc"), [NAN],
        True, "-EY-TENSOR-NAN is still there",
    ),
    "one of two that say nothing of a convention": (
        judged("EY-ENGINE", "EY-ENGINE"), judged("EY-ENGINE"), [finding("EY-ENGINE", convention="taps")], True, "+",
    ),
    "fewer tensors are misshapen": (
        judged("EY-TENSOR-SHAPE", amiss="fc k"), judged("EY-TENSOR-SHAPE", amiss="fc"), [finding("EY-TENSOR-SHAPE")],
        True, "+fewer tensors are amiss",
    ),
    "another tensor is misshapen": (
        judged("EY-TENSOR-SHAPE", amiss="fc"), judged("EY-TENSOR-SHAPE", amiss="k"), [finding("EY-TENSOR-SHAPE")],
        True, "-EY-TENSOR-SHAPE is still there",
    ),
    "a guess, by files alone": (judged("EY-A"), judged(), [A], False, "-only a replay could tell"),
    "measured, and nothing to replay": (judged(), judged(), [MEASURED], True, "-only a replay could tell"),
    "measured and seen, and nothing to replay": (judged("EY-A"), judged(), [BOTH], True, "+the files no longer"),
    "another fault comes up": (judged("EY-A"), judged("EY-B"), [A], True, "-it brings up EY-B"),
    "the same id of another tensor comes up": (
        judged("EY-A", "EY-TENSOR-NAN tensor k"), judged("EY-TENSOR-NAN tensor k", "EY-TENSOR-NAN tensor fc"), [A],
        True, "-it brings up EY-TENSOR-NAN",
    ),
    "more shows once it can be read": (
        judged("EY-READ", readable=False), judged("EY-B"), [finding("EY-READ")], True, "+the files no longer show it",
    ),
    "unreadable before and after": (
        judged("EY-READ", "EY-A", readable=False), judged("EY-READ", readable=False), [A], True, "+",
    ),
    "unreadable before and after, another fault": (
        judged("EY-READ", "EY-A", readable=False), judged("EY-READ", "EY-B", readable=False), [A], True, "-it brings",
    ),
    "unreadable after": (judged("EY-A"), judged(readable=False), [A], True, "-its conventions could not be told"),
    "a tensor would be missing": (judged("EY-A"), judged(amiss="fc_norm"), [A], True, "-fc_norm would be missing"),
    "gone, and a convention is worse": (
        judged("EY-A", declared=2.0), judged(declared=2.5), [A], True, "-the draft is more surprised, by 0.5",
    ),
    "gone, and all as before": (judged("EY-A", declared=2.0), judged(declared=2.001), [A], True, "+the files no"),
    "suspected, and a little better": (
        judged(declared=4.0), judged(declared=3.985), [SUSPECTED], False, "+the files spoke for it",
    ),
    "suspected, and next to nothing better": (
        judged(declared=4.0), judged(declared=3.99), [SUSPECTED], False, "-it does not help",
    ),
    "measured, and better": (judged(declared=4.0), judged(declared=2.0), [MEASURED], True, "+less surprised, by 2.0"),
    "measured, and no better": (judged(declared=4.0), judged(declared=3.995), [MEASURED], True, "-it does not help"),
    "measured and seen, hidden by another fault": (
        judged("EY-A", declared=4.0), judged(declared=4.0), [BOTH], True, "+the files no longer show it",
    ),
    "one seen and one measured that does not help": (
        judged("EY-A", declared=4.0), judged(declared=4.0), [A, MEASURED], True, "-it does not help",
    ),
    "a guess that is better": (judged("EY-A", declared=4.0), judged(declared=2.0), [A], False, "+less surprised"),
    "a guess that is no better": (judged("EY-A", declared=2.0), judged(declared=2.0), [A], False, "-it does not help"),
    "an engine gets better, the draft stays": (
        judged(declared=2.0, sglang=4.0), judged(declared=2.0, sglang=2.0), [finding("EY-AS-READ", "confirmed")],
        False, "+less surprised, by 2.0",
    ),
    "an engine gets worse, the draft better": (
        judged(declared=4.0, sglang=2.0), judged(declared=2.0, sglang=4.0), [MEASURED], True, "-more surprised, by 2.0",
    ),
    "an engine would not start any more": (
        judged(declared=4.0, sglang=4.0), judged(declared=2.0), [MEASURED], True, "-sglang could not run the draft",
    ),
    "it cannot be run any more": (judged("EY-A", declared=4.0), judged(), [A], True, "-it could not run the draft"),
    "it can be run now": (judged("EY-A"), judged(declared=2.0), [A], True, "+it can be replayed now"),
    "it can be run now, and knows nothing": (judged("EY-A"), judged(declared=5.0), [A], True, "+it can be replayed"),
    "a guess makes it run": (judged("EY-A"), judged(declared=2.0), [A], False, "+it can be replayed now"),
    "a guess makes it run, and it knows nothing": (judged("EY-A"), judged(declared=5.0), [A], False, "-does not help"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept(name: str):
    before, after, findings, sure, said = CASES[name]
    verdict = trials().judge(before, after, findings, sure)
    assert verdict.keep is (said[0] == "+"), verdict
    assert said[1:] in verdict.why


def test_a_guess_must_know_more_than_how_often_each_token_comes():
    before, after = judged("EY-A", declared=5.0), judged(declared=4.5)
    assert trials(4.6).judge(before, after, [A], sure=False).keep
    assert "how often each token comes" in trials(4.4).judge(before, after, [A], sure=False).why
    assert trials(4.4).judge(before, after, [MEASURED], sure=True).keep, "the doctor measured it beside other faults"


def test_what_is_only_worse_is_told_for_plans():
    assert trials().worse(judged("EY-A", declared=2.0), judged("EY-A", declared=2.0)) == ""
    assert trials().worse(judged(), judged()) == ""
    assert "brings up EY-A" in trials().worse(judged(), judged("EY-A"))


# ---------------------------------------------------------------- the text


@pytest.fixture(scope="module")
def who(tiny_target: Path) -> Patient:
    return patient_of(tiny_target, text={"documents": 8, "length": 24})


def test_layers_that_a_later_state_reads_are_recorded_then(
    tmp_path: Path, tiny_target: Path, who: Patient, monkeypatch: pytest.MonkeyPatch
):
    """Of a large target only the layers near those that a draft names are recorded."""
    asked: list[tuple[int, ...]] = []

    def record(folder: Any, taps: Any, *args: Any, **options: Any) -> Any:
        asked.append(tuple(taps))
        few = tuple(t for t in who.material.states if t < 6) if len(asked) == 1 else tuple(who.material.states)
        return replace(who.material, states={t: who.material.states[t] for t in few})

    monkeypatch.setattr(recording, "record", record)
    facts = read_facts(tiny_target)
    draft = Overlay.of(save(who, tmp_path / "d", tiny_target, lambda t, c: None), facts)
    far = perform(draft, Step("write-taps", {"taps": [5, 7, 8]})).after
    trial = Trials(target=tiny_target, facts=facts)
    before, after = trial.of(draft), trial.of(far)
    assert len(asked) == 2 and set(trial._bench.material.states) == set(who.material.states)
    assert after.surprise["declared"].mean() > before.surprise["declared"].mean() + 1
    assert "more surprised" in trial.judge(before, after, [MEASURED]).why
    assert torch.equal(trial.of(draft).surprise["declared"], before.surprise["declared"])

    # Another text would be no comparison.
    other = replace(who.material, ids=who.material.ids.flip(0))
    monkeypatch.setattr(recording, "record", lambda *a, **o: replace(other, states={0: other.states[0]}))
    trial._bench.material.states.pop(8)
    lacking = trial.of(far)
    assert lacking.unrecorded == (8,) and not lacking.surprise
    assert "layers 8 were not recorded" in trial.judge(before, lacking, [MEASURED]).why


@pytest.mark.parametrize("found", [[], ["EY-FEATURES-SHIFT"]], ids=str)
def test_features_that_are_not_the_targets_are_not_judged_by(
    tmp_path: Path, tiny_target: Path, who: Patient, monkeypatch: pytest.MonkeyPatch, found: list[str]
):
    """As the diagnosis does it."""
    from eyas.doctor import texts

    wrong = replace(who.material, source="features")
    monkeypatch.setattr(texts, "_features", lambda *a: wrong)
    monkeypatch.setattr(recording, "record", lambda *a, **o: who.material)
    told = [Finding(id_, Severity.ERROR, "") for id_ in found]
    monkeypatch.setattr(features_audit, "audit", lambda *a: told)
    facts = read_facts(tiny_target)
    trial = Trials(target=tiny_target, facts=facts, features=tmp_path)
    state = trial.of(Overlay.of(save(who, tmp_path / "d", tiny_target), facts))
    assert state.tau is not None and trial._bench.material.source == ("written by the draft" if found else "features")
