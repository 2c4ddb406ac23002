"""From measurements to words: each place where it can go wrong, and that a healthy draft is called healthy.

pytest -q tests/test_doctor_verdict.py
"""

from __future__ import annotations

from typing import Any

import pytest

from doctoring import make_patient
from eyas.decode.acceptance import Acceptance
from eyas.doctor.evidence import Gain
from eyas.doctor.finding import Finding, Severity
from eyas.doctor.groups import GROUPS, group
from eyas.doctor.hypotheses import Hypothesis
from eyas.doctor.maps import Aligned
from eyas.doctor.measure import Measured, Taken
from eyas.doctor.place import FORMS, LOW, summary, where
from eyas.doctor.search import Entry, Found
from eyas.doctor.verdict import Told, findings

BASE = make_patient(text={"documents": 2, "length": 8}).specimen
CONTROLS = {"declared": 1.0, "best": 1.0, "shuffled_states": 4.0, "random_draft": 5.6, "word_frequencies": 4.0,
            "knows_nothing": 5.7, "states_are_worth": 2.0}  # fmt: skip
WORSE, SAME, BETTER = Gain(-1.0, -1.2, -0.8), Gain(0.001, -0.01, 0.012), Gain(1.5, 1.2, 1.8)


def hypothesis(name: str, label: str, value: Any = ...) -> Hypothesis:
    return Hypothesis(name, label, label if value is ... else value, lambda s: s.with_(name, label), about="why")


def entry(name: str, label: str, gain: Gain = WORSE, value: Any = ...) -> Entry:
    verdict = "better" if gain.real else "refuted" if gain.worse else "inconclusive"
    return Entry(1, "declared", hypothesis(name, label, value), gain, verdict)


def measured(*last: Entry, taken: list[Taken] | None = None, aligned: Aligned | None = None, **controls: float):
    found = Found("declared", BASE, BASE, [t.hypothesis for t in taken or []], list(last), list(last))
    return Measured(found, taken or [], controls=CONTROLS | controls, aligned=aligned)


def taken(name: str, label: str, value: Any = ..., gain: Gain = BETTER, equivalents: Any = ()) -> Taken:
    return Taken(hypothesis(name, label, value), gain, 0.71236, (0.61236, 0.81), list(equivalents))


def static(id: str, severity: Severity = Severity.ERROR, **more: Any) -> Finding:
    return Finding(id, severity, "seen", "it breaks", "mend it", ("there",), **more)


def told(id: str, status: str = "static", severity: Severity = Severity.ERROR, convention: str | None = None) -> Told:
    return Told(id, status, severity, convention, "seen", "it breaks")


# ---------------------------------------------------------------- findings


def test_what_was_taken_is_confirmed_with_its_worth():
    [f] = findings([], measured(taken=[taken("taps", "2/4/5", [2, 4, 5])]))
    assert (f.id, f.status, f.severity, f.convention) == ("EY-MEASURED-TAPS", "confirmed", Severity.ERROR, "taps")
    assert (f.declared, f.best, f.delta_tau, f.interval) == ([2, 4, 5], [2, 4, 5], 0.7124, [0.6124, 0.81])
    assert "2/4/5 (why) fits the weights better than what was declared, by 1.500 nats a token [1.200" in f.evidence
    assert f.consequence and f.remedy and f.equivalents == []
    plain = f.to_dict()
    assert plain["severity"] == "error" and "weight" not in plain and plain["sources"] == []
    assert set(plain) >= {
        "id", "status", "severity", "convention", "declared", "best", "equivalents", "delta_tau", "interval",
        "evidence", "remedy",
    }  # fmt: skip


def test_what_fits_as_well_is_one_finding_with_it():
    others = [hypothesis("taps", "1/3/4", [1, 3, 4]), hypothesis("norm_output", "true", True)]
    [f] = findings([], measured(taken=[taken("taps", "2/4/5", [2, 4, 5], equivalents=others)]))
    assert f.equivalents == [[1, 3, 4], "norm_output = true"]
    assert f.evidence.endswith("; as well fit [1, 3, 4], norm_output = true")


@pytest.mark.parametrize(
    ("name", "value", "declared"),
    [("d2t", "absolute", "offsets"), ("state_shift", 1, 0), ("norm_output", True, False), ("gate_up", "x", "as stored"),
     ("rope_theta", 5e5, 10000.0), ("sliding_window", 4, None), ("slice_order", [5, 4, 2], [2, 4, 5])],
)  # fmt: skip
def test_declared_and_best(name: str, value: Any, declared: Any):
    [f] = findings([], measured(taken=[taken(name, "label", value)]))
    assert (f.declared, f.best) == (declared, value)


def test_seen_in_the_files_and_measured_is_one_finding():
    beside = [static("EY-D2T-ZERO-PREFIX", Severity.INFO), static("EY-ROPE-UNNAMED", Severity.INFO)]
    found = findings([static("EY-D2T-TWICE"), *beside], measured(taken=[taken("d2t", "subtracted twice")]))
    assert [(f.id, f.status) for f in found] == [("EY-D2T-TWICE", "confirmed"), ("EY-ROPE-UNNAMED", "static")]
    first = found[0]
    assert first.evidence.startswith("seen. Measured: the vocabulary map: subtracted twice")
    assert (first.consequence, first.remedy, first.sources) == ("it breaks", "mend it", ("there",))
    assert (first.best, first.delta_tau) == ("subtracted twice", 0.7124)


def test_a_warning_is_not_swallowed_by_what_is_measured():
    found = findings([static("EY-D2T-T2D", Severity.WARNING)], measured(taken=[taken("d2t", "t2d")]))
    assert [(f.id, f.status) for f in found] == [("EY-MEASURED-D2T", "confirmed"), ("EY-D2T-T2D", "static")]


def test_a_suspicion_that_trials_refute_is_acquitted():
    files = [static("EY-D2T-UNSORTED"), static("EY-D2T-DTYPE"), static("EY-FILES-BESIDE", Severity.WARNING)]
    tried = [entry("d2t", "sorted offsets", Gain(-2.0, -2.2, -1.8)), entry("d2t", "identity", Gain(-0.5, -0.7, -0.3))]
    found = {f.id: f for f in findings(files, measured(*tried))}
    acquitted = found["EY-D2T-UNSORTED"]
    assert (acquitted.status, acquitted.severity) == ("refuted", Severity.OK)
    assert acquitted.evidence.endswith("(2 tried) is worse, the nearest by 0.500 nats a token: right as declared")
    assert found["EY-D2T-DTYPE"].severity is Severity.ERROR, "a trial says nothing of how it is stored"
    assert found["EY-FILES-BESIDE"].status == "static"
    assert list(found)[-1] == "EY-D2T-UNSORTED", "what is right comes last"


@pytest.mark.parametrize(
    "this",
    [
        measured(entry("d2t", "identity"), entry("d2t", "t2d", SAME)),  # one of them is not refuted
        measured(),  # nothing of the kind was tried
        measured(entry("d2t", "identity"), best=5.5),  # the draft knows nothing: everything is equally bad
        measured(entry("d2t", "identity"), aligned=Aligned(BASE.ids, 5, 9, BETTER)),
    ],
    ids=["undecided", "not tried", "knows nothing", "another map"],
)
def test_nothing_is_acquitted_on_less(this: Measured):
    found = {f.id: f for f in findings([static("EY-D2T-UNSORTED")], this)}
    assert found["EY-D2T-UNSORTED"].severity is Severity.ERROR
    assert found["EY-D2T-UNSORTED"].status == "static"


def test_what_cannot_be_told_apart_is_one_finding():
    tried = [entry("norm_output", "true", SAME, True), entry("taps", "3/5/6", SAME, [3, 5, 6]),
             entry("taps", "1/3/4", Gain(-0.004, -0.01, 0.002), [1, 3, 4]), entry("taps", "0/1/2"),
             entry("embedding_scale", "5.6", SAME)]  # fmt: skip
    [f] = findings([], measured(*tried))
    assert (f.id, f.status, f.severity) == ("EY-UNDECIDED", "inconclusive", Severity.INFO)
    assert f.equivalents == ["norm_output = true", "taps = 3/5/6", "taps = 1/3/4"], "no scale under a norm"
    assert f.convention == "norm_output" and f.declared is f.best is False
    assert findings([], measured(*tried, best=5.5))[0].id == "EY-MEASURED-NOTHING", "then nothing is said of any"


def test_the_default_taps_among_those_that_fit_are_suspicious():
    tried = [entry("taps", "3/5/6", SAME, [3, 5, 6])]
    [f] = findings([], measured(*tried), usual=(3, 5, 6))
    assert f.severity is Severity.WARNING and "[3, 5, 6], the default, is among them" in f.evidence
    [f] = findings([], measured(*tried), usual=(2, 4, 5))
    assert f.severity is Severity.INFO


def test_a_suspicion_that_trials_do_not_decide_is_a_warning():
    files = [static("EY-ROPE-UNNAMED", Severity.INFO)]
    [f] = findings(files, measured(entry("rope_theta", "500000", SAME)))
    assert (f.id, f.status, f.severity) == ("EY-ROPE-UNNAMED", "inconclusive", Severity.WARNING)
    assert f.evidence.startswith("seen. Measured: rope_theta: 500000 fit")
    found = findings([static("EY-ROPE-OTHER")], measured(entry("rope_theta", "500000", SAME)))
    assert [(f.id, f.status) for f in found] == [("EY-ROPE-OTHER", "static")], "what is certain is not undecided"


def test_a_draft_that_knows_nothing():
    [f] = findings([], measured(best=5.4))
    assert (f.id, f.status, f.severity) == ("EY-MEASURED-NOTHING", "confirmed", Severity.ERROR)
    assert "5.40 nats a token at best" in f.evidence and "5.70" in f.evidence
    assert findings([], measured(best=3.9)) == []
    [f] = findings([], measured(best=3.9, random_draft=3.95))
    assert f.id == "EY-MEASURED-NOTHING", "little text: not even random weights are worse than its frequencies"


def test_a_draft_that_does_not_use_its_states():
    [f] = findings([], measured(entry("qkv", "k <-> v", SAME), states_are_worth=0.04))
    assert (f.id, f.status, f.severity) == ("EY-MEASURED-BLIND", "confirmed", Severity.ERROR)
    assert "0.04 nats a token" in f.evidence
    files = [static("EY-TENSOR-FRESH", convention="tensor fc")]
    assert [f.id for f in findings(files, measured(states_are_worth=0.04))] == ["EY-TENSOR-FRESH", "EY-MEASURED-BLIND"]
    assert findings([], measured(states_are_worth=0.2)) == []


@pytest.mark.parametrize(("accepted", "severity"), [(3, Severity.WARNING), (0, Severity.ERROR)])
def test_a_matrix_that_looks_untrained_is_no_error_in_a_draft_that_is_accepted(accepted: int, severity: Severity):
    told_of = measured()
    told_of.taus["best"] = [Acceptance.of([0] * 10, 4), Acceptance.of([accepted] * 10, 4)]
    [f] = findings([static("EY-TENSOR-FRESH", convention="tensor gate_proj")], told_of)
    assert (f.severity, "accept length of 2.50" in f.evidence) == (severity, bool(accepted))
    assert ("Train it for longer" in f.remedy) == bool(accepted)


def test_another_runs_map():
    found = findings([], measured(aligned=Aligned(BASE.ids, 70, 88, BETTER), best=5.4))
    assert [f.id for f in found] == ["EY-D2T-OTHER"], "it knows something, in other words"
    assert "70 of 88 tokens" in found[0].evidence and "1.50 nats a token [1.20, 1.80]" in found[0].evidence
    assert (found[0].status, found[0].convention) == ("confirmed", "d2t")


def test_the_most_important_comes_first():
    files = [static("EY-ROPE-UNNAMED", Severity.INFO), static("EY-D2T-ZERO-PREFIX", Severity.OK),
             static("EY-FILES-BESIDE", Severity.WARNING), static("EY-TENSOR-MISSING")]  # fmt: skip
    small, large = taken("qkv", "k <-> v", gain=Gain(0.3, 0.2, 0.4)), taken("taps", "1/3/4", gain=Gain(2.0, 1.8, 2.2))
    found = findings(files, measured(entry("rope_step", "0", SAME), taken=[large, small]))
    assert [f.id for f in found] == [
        "EY-MEASURED-TAPS", "EY-MEASURED-QKV", "EY-TENSOR-MISSING", "EY-FILES-BESIDE", "EY-UNDECIDED",
        "EY-ROPE-UNNAMED", "EY-D2T-ZERO-PREFIX",
    ]  # fmt: skip
    assert [f.id for f in findings(files, None)] == [
        "EY-TENSOR-MISSING", "EY-FILES-BESIDE", "EY-ROPE-UNNAMED", "EY-D2T-ZERO-PREFIX",
    ]  # fmt: skip
    order = [f.id for f in findings([static("EY-READ"), static("EY-TENSOR-NAN")], measured(best=5.5))]
    assert order[0] == "EY-TENSOR-NAN" and set(order[1:]) == {"EY-READ", "EY-MEASURED-NOTHING"}


def test_every_group_can_be_told():
    for name in [*GROUPS, "name of fc", "tensor down_proj"]:
        g = group(name)
        assert g.id.startswith("EY-MEASURED-") and g.what and g.consequence and g.remedy and g.where in FORMS
        [f] = findings([], measured(taken=[taken(name, "x")]))
        assert f.id == g.id and f.convention == name


# ---------------------------------------------------------------- where


ANY = measured()
CONFIRMED = [told("EY-MEASURED-TAPS", "confirmed", convention="taps")]
NOTHING = told("EY-MEASURED-NOTHING", "confirmed")
GOOD = {"declared": 2.6, "best": 2.6}
PLACES: list[tuple[str, str, list[Told], Measured | None, dict, float | None, list[str]]] = [
    ("none", "nothing is wrong", [], ANY, GOOD, None, []),
    ("none", "served as replayed", [], ANY, GOOD, 2.5, []),
    ("none", "files alone", [], None, {}, None, []),
    ("none", "worth knowing", [told("EY-ROPE-UNNAMED", severity=Severity.INFO)], ANY, GOOD, None, []),
    ("none", "undecided is no fault", [told("EY-X", "inconclusive", Severity.WARNING)], ANY, GOOD, None, []),
    ("none", "trained as predicted", [], ANY, GOOD | {"training": 2.7}, None, []),
    ("training", "weak and served so", [], ANY, {"declared": 1.5}, 1.45, []),
    ("training", "no weights at all", [NOTHING], ANY, {"declared": 1.0}, None, []),
    ("training", "none that training saw", [NOTHING], ANY, {"declared": 1.0, "training": 1.05}, None, []),
    ("training", "another token predicted", [told("EY-X", "confirmed", convention="label_shift")], ANY, GOOD, None, []),
    ("export", "training saw more in them", [NOTHING], ANY, {"declared": 1.0, "training": 2.4}, None, []),
    ("checkpoint", "a tensor is missing", [told("EY-TENSOR-MISSING"), NOTHING], ANY, {"declared": 1.0}, None, []),
    ("training", "however it is served", [told("EY-SERVED-NOTHING"), NOTHING], ANY, {"declared": 1.0}, 1.0, []),
    ("unknown", "nothing, and more", [NOTHING, *CONFIRMED], ANY, {"declared": 1.0}, None, []),
    ("data", "less than training said", [], ANY, {"declared": 1.5, "training": 2.6}, None, []),
    ("none", "training held out text of its own kind", [], ANY, {"declared": 1.22, "training": 1.48}, None, []),
    ("data", "shifted states", [told("EY-X", "confirmed", convention="state_shift")], ANY, GOOD, None, []),
    ("checkpoint", "another reading is better", CONFIRMED, ANY, GOOD, None, []),
    ("checkpoint", "seen in the files", [told("EY-TENSOR-MISSING")], ANY, GOOD, None, []),
    ("checkpoint", "the files alone show it", [told("EY-D2T-ABSOLUTE")], None, {}, 1.0, []),
    ("export", "an engine reads otherwise", [], ANY, GOOD, None, ["EY-AS-READ"]),
    ("export", "an engine stops at it", [told("EY-ENGINE")], ANY, GOOD, None, []),
    ("launch", "its command is wrong", [told("EY-LAUNCH-ALGORITHM")], ANY, GOOD, None, []),
    ("launch", "odd flags, little served",
     [told("EY-LAUNCH-STEPS", severity=Severity.WARNING)], ANY, GOOD, 1.4, []),
    ("engine", "served far below", [], ANY, GOOD, 1.4, []),
    ("engine", "served nothing", [told("EY-SERVED-NOTHING")], ANY, GOOD, 1.0, []),
    ("unknown", "served, never replayed", [], None, {}, 1.4, []),
    ("unknown", "served nothing, never replayed", [told("EY-SERVED-NOTHING")], None, {}, 1.0, []),
    ("unknown", "served nothing, replayed without a round",
     [told("EY-SERVED-NOTHING")], ANY, {"declared": None}, 1.0, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "told", "this", "taus", "served", "off"), [(p, *rest) for p, _, *rest in PLACES],
    ids=[f"{place}: {why}" for place, why, *_ in PLACES],
)  # fmt: skip
def test_where_it_went_wrong(place, told, this, taus, served, off):
    assert where(told, this, taus, served, off) == place


def test_an_engine_that_reads_otherwise_is_no_fault_of_the_checkpoint():
    """Of an engine that the user named it is an error, and measured; the files are right all the same."""
    off = told("EY-AS-READ", "confirmed", convention="norm_before_residual")
    assert where([off], ANY, GOOD, None, ["EY-AS-READ"]) == "export"


def test_a_confirmed_warning_does_not_decide_the_place():
    long = told("EY-MEASURED-LONG", "confirmed", Severity.WARNING, "max_position")
    assert where([long], ANY, GOOD, None, []) != "checkpoint"


# ---------------------------------------------------------------- two sentences


def test_an_error_is_named_with_what_it_is_worth():
    text = summary(CONFIRMED, "checkpoint", ANY, {"declared": 1.02, "best": 2.61}, None)
    assert text.startswith("EY-MEASURED-TAPS (measured): The weights are good and the files say something else")
    assert text.endswith("the accept length goes from 1.02 to 2.61.")
    more = summary([*CONFIRMED, told("EY-X"), told("EY-Y", severity=Severity.INFO)], "checkpoint", ANY, GOOD, None)
    assert "(measured) and 1 more: " in more and more.endswith(". It breaks.")
    files = summary([told("EY-D2T-ABSOLUTE")], "checkpoint", None, {}, None)
    assert files.startswith("EY-D2T-ABSOLUTE (seen in the files): seen. ") and files.endswith(". It breaks.")


def test_an_undertrained_draft_is_called_healthy():
    text = summary([], "none", ANY, {"declared": 1.62, "best": 1.62}, None)
    assert text.startswith("Your draft is healthy: no other reading of it is better") and "1.62" in text
    assert "undertrained rather than broken; it needs more data" in text
    served = summary([], "training", ANY, {"declared": 1.62}, 1.6)
    assert served.startswith("Your draft is healthy") and "needs more data" in served
    good = summary([], "none", ANY, {"declared": LOW + 0.5}, None)
    assert good == f"Your draft is healthy. Its accept length on this text is {LOW + 0.5:.2f}."


@pytest.mark.parametrize("place", ["engine", "launch", "export", "data"])
def test_a_healthy_draft_in_the_wrong_place(place: str):
    text = summary([], place, ANY, GOOD, 1.2)
    assert text == f"The draft itself is healthy (replayed accept length 2.60). {FORMS[place]}."


def test_what_was_not_measured_is_not_praised():
    assert "Nothing was replayed" in summary([], "none", None, {}, None)
    assert "healthy" not in summary([], "unknown", None, {}, 1.0)
    assert "unknown" in summary([], "none", ANY, {"declared": None}, None)
    assert "nan" not in summary([], "engine", ANY, {}, 1.0)
