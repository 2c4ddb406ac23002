"""The measured half as a whole: what is confirmed on all of the text, what fits as well, what each engine costs.

pytest -q tests/test_doctor_measure.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doctoring import Patient, make_patient, patient_of, save
from eyas.decode.acceptance import Acceptance
from eyas.doctor.breakdown import by_kind, by_position
from eyas.doctor.by_text import by_kind as by_kind_told
from eyas.doctor.case import Case
from eyas.doctor.departures import departures, same
from eyas.doctor.evidence import Gain
from eyas.doctor.finding import Severity
from eyas.doctor.hypotheses import hypotheses
from eyas.doctor.hypothesis import Context
from eyas.doctor.material import Material
from eyas.doctor.measure import Measured, delta_tau, measure
from eyas.doctor.readings import Readings
from eyas.doctor.scale import frequencies
from eyas.doctor.search import Found, Search, applied
from eyas.doctor.specimen import Specimen
from eyas.doctor.trial import Bench

TEXT = {"documents": 16, "length": 30}
WRONG = {("norm_output", "true"), ("gate_up", "gate_proj <-> up_proj"), ("taps", "2/4/5")}


@pytest.fixture(scope="module")
def patient(tiny_target: Path) -> Patient:
    return patient_of(tiny_target, text=TEXT)


@pytest.fixture(scope="module")
def case(patient: Patient, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.open(save(patient, tmp_path_factory.mktemp("case") / "d", tiny_target))


def measured(case: Case, who: Patient, declared: Specimen, material: Material | None = None, **more: Any) -> Measured:
    engines = more.pop("engines", {})
    readings = Readings(case, case.reading, declared=declared, as_read=engines)
    context = replace(Context(taps=frozenset(who.material.states), engines=engines), **more)
    return measure(readings, material or who.material, context)


def tau(parts: list[Acceptance]) -> float:
    return Acceptance.merged(parts, 4).tau


# ---------------------------------------------------------------- numbers


def test_a_difference_of_accept_lengths_has_its_interval():
    before = [Acceptance((8, 2)), Acceptance((5, 5)), Acceptance((0, 0)), Acceptance((9, 1))]
    after = [Acceptance((2, 8)), Acceptance((3, 7)), Acceptance((1, 1)), Acceptance((4, 6))]
    delta, low, high = delta_tau(before, after)
    assert delta == pytest.approx(21 / 30 - 8 / 30), "documents without a round on one side do not count"
    assert low < delta < high and low > 0.1
    assert delta_tau(before, before) == (0.0, 0.0, 0.0)
    assert all(map(math.isnan, delta_tau([Acceptance((0, 0))], [Acceptance((0, 0))])))
    assert delta_tau(after, before)[0] == pytest.approx(-delta)
    assert delta_tau(before, after) == delta_tau(before, after)


def test_rounds_are_told_by_where_they_begin(patient: Patient):
    long = make_patient(text={"documents": 3, "length": 150})
    accepted = Bench(long.material).accepted(long.specimen, 4)
    buckets = by_position(long.material, accepted, 4)
    assert [(b["from"], b["to"]) for b in buckets] == [(0, 64), (64, 128), (128, 256)]
    parts = Bench(long.material).counted(accepted, 4)
    assert sum(b["rounds"] for b in buckets) == Acceptance.merged(parts, 4).rounds
    mean = sum(b["tau"] * b["rounds"] for b in buckets) / sum(b["rounds"] for b in buckets)
    assert mean == pytest.approx(tau(parts), abs=1e-3)
    torn = accepted.clone()
    torn[long.material.packing.position >= 64] = 0
    assert [b["tau"] == 1.0 for b in by_position(long.material, torn, 4)] == [False, True, True]


def test_frequencies_are_learnt_on_other_documents(patient: Patient):
    m = patient.material
    bench = Bench(m)
    value = frequencies(m, bench.rows, bench.document, 300)
    assert 0 < value < math.log(300)
    again = replace(m, choice=torch.full_like(m.choice, 7), ids=torch.full_like(m.ids, 7))
    assert frequencies(again, bench.rows, bench.document, 300) < 0.8, "one word for all is known at once"
    strange = m.choice.clone()
    strange[(m.packing.document % 2 == 1)] = 299
    apart = frequencies(replace(m, choice=strange), bench.rows, bench.document, 300)
    assert apart > math.log(300), "a word that only the others use is not known"


# ---------------------------------------------------------------- what is confirmed


def test_a_healthy_draft_and_its_controls(case: Case, patient: Patient):
    out = measured(case, patient, patient.specimen)
    assert out.taken == [] and out.aligned is None and not out.knows_nothing and out.found.complete
    c = out.controls
    assert c["declared"] == c["best"] < c["word_frequencies"] < c["shuffled_states"] < c["knows_nothing"]
    assert tau(out.taus["declared"]) == tau(out.taus["best"]) > 2


def test_a_confirmed_step_is_worth_what_it_changes(case: Case, patient: Patient):
    broken = replace(patient.specimen, slices=(3, 5, 6)).with_(conventions={"norm_output": True})
    out = measured(case, patient, broken)
    assert {t.hypothesis.group for t in out.taken} == {"taps", "norm_output"}
    best = tau(out.taus["best"])
    assert best == tau(Bench(patient.material).acceptance(patient.specimen, 4)) > tau(out.taus["declared"])
    for taken in out.taken:
        rest = [t.hypothesis for t in out.taken if t is not taken]
        without = rest[0].apply(broken)
        alone = tau(Bench(patient.material).acceptance(without, 4))
        assert taken.delta_tau == pytest.approx(best - alone) and taken.gain.real
        assert taken.interval[0] <= taken.delta_tau <= taken.interval[1]
        assert taken.equivalents == []


def test_alternatives_that_fit_equally_well_are_told_together(case: Case, patient: Patient):
    """The states of tap 1 are nearly those of tap 2: nothing tells 1/4/5 from 2/4/5."""
    m = patient.material
    generator = torch.Generator().manual_seed(0)
    near = m.states[2] + 1e-3 * torch.randn(m.states[2].shape, generator=generator)
    material = replace(m, states={**m.states, 1: near})
    out = measured(case, patient, replace(patient.specimen, slices=(0, 4, 5)), material)
    [taken] = out.taken
    fit = [taken.hypothesis, *taken.equivalents]
    assert {tuple(h.value) for h in fit} == {(1, 4, 5)} or {tuple(h.value) for h in fit} == {(1, 4, 5), (2, 4, 5)}
    healthy = measured(case, patient, patient.specimen, material)
    assert healthy.taken == []
    undecided = [e.hypothesis.value for e in healthy.found.last if e.verdict == "inconclusive"]
    assert [1, 4, 5] in undecided


def test_a_step_that_does_not_hold_on_all_of_the_text_is_none(case: Case, patient: Patient, monkeypatch):
    """Screening sees a few documents only; where they mislead, the rest puts it right."""
    taken = []

    def misled(self: Search, start: str, base: Specimen, tell: Any = None) -> Found:
        found = Found(start, base, base)
        taken[:] = [h for h in hypotheses(base, self.context) if (h.group, h.label) in WRONG]
        for h in taken:
            self._take(found, [h], Gain(1.0, 0.5, 1.5), 1)
        return found

    monkeypatch.setattr(Search, "run", misled)
    out = measured(case, patient, patient.specimen)
    assert out.taken == [] and len(taken) == 2
    last = [e for e in out.ledger if e.verdict == "reversed"]
    assert {e.hypothesis for e in last} == set(taken)
    assert all("does not hold in float32" in e.note for e in last)
    assert out.taus["best"] == out.taus["declared"] and out.controls["best"] == out.controls["declared"]
    half = measured(case, patient, replace(patient.specimen, slices=(3, 5, 6)))
    assert [t.hypothesis.label for t in half.taken] == ["2/4/5"], "what holds stays"
    assert tau(half.taus["best"]) == tau(out.taus["declared"])


# ---------------------------------------------------------------- engines


def test_what_an_engine_reads_otherwise_is_priced_point_by_point(case: Case, patient: Patient):
    base = patient.specimen
    same = replace(base, changed={"as vllm reads it": "x"})
    noisy = torch.randn(32, generator=torch.Generator().manual_seed(1))
    off = replace(base, slices=(3, 4, 5)).with_(
        conventions={"norm_before_residual": True, "max_position": 9}, tensors={"norm.weight": noisy}
    )
    out = measured(case, patient, base, engines={"vllm": same, "sglang": off})
    assert set(out.engine_costs) == {"sglang"}, "who reads what was declared costs nothing"
    costs = out.engine_costs["sglang"]
    assert {name for name, _ in costs} == {"taps", "norm_before_residual", "max_position", "norm.weight"}
    by_name = dict(costs)
    assert all(by_name[n].worse for n in ("taps", "norm_before_residual", "norm.weight"))
    assert by_name["max_position"].mean == pytest.approx(0, abs=1e-4)
    assert [g.mean for _, g in costs] == sorted(g.mean for _, g in costs), "the dearest first"
    assert tau(out.taus["sglang"]) < tau(out.taus["vllm"]) == tau(out.taus["declared"])
    bench = Bench(patient.material)
    assert tau(out.taus["sglang"]) == tau(bench.acceptance(off, 4))


def test_what_is_wrong_as_declared_is_not_an_engines_doing(case: Case, patient: Patient):
    broken = replace(patient.specimen, slices=(3, 5, 6))
    right = replace(patient.specimen, changed={"as sglang reads it": "x"})
    out = measured(case, patient, broken, engines={"vllm": broken, "sglang": right})
    assert out.engine_costs == {} and [t.hypothesis.label for t in out.taken] == ["2/4/5"]
    assert tau(out.taus["sglang"]) == tau(out.taus["best"]) > tau(out.taus["vllm"]) == tau(out.taus["declared"])


# ---------------------------------------------------------------- from what an engine reads


def test_an_engines_departures_are_substitutions(patient: Patient):
    """Each alone makes one point of the engine's reading; all together make the whole."""
    mine = patient.specimen
    read = mine.with_(conventions={"norm_output": True, "rope_theta": 5e5}, slices=(1, 3, 4))
    points = departures(mine, read, mine)
    assert {h.group: h.value for h in points} == {"norm_output": True, "rope_theta": 5e5, "taps": [1, 3, 4]}
    assert same(applied(mine, points), read) and not same(mine, read)
    assert departures(mine, read, declared=read) == [], "what was declared so is no departure of the engine's"


def test_where_the_declared_reading_leads_nowhere_an_engines_may(case: Case, patient: Patient):
    """A map in no form that is known, which the engine does not look at, beside two faults more."""
    right = patient.specimen
    other = torch.randint(right.shape.vocab_size, right.ids.shape, generator=torch.Generator().manual_seed(0))
    maps = {"d2t": other - torch.arange(len(other)), "t2d": torch.zeros(right.shape.vocab_size, dtype=torch.bool)}
    wrong = right.with_(conventions={"norm_before_residual": True}, tensors=maps, slices=(8, 7, 0), ids=other)
    engine = right.with_(conventions={"norm_before_residual": True})
    found = measured(case, patient, wrong, engines={"vllm": engine}, taps=frozenset({0, 2, 4, 5, 7, 8}))
    assert not found.knows_nothing
    assert {t.hypothesis.group for t in found.taken} == {"d2t", "taps", "norm_before_residual"}
    assert tau(found.taus["best"]) == pytest.approx(tau(Bench(patient.material).acceptance(right, 4)), abs=0.05)
    assert any(e.start == "as vllm reads it" for e in found.ledger)


def test_what_helps_an_engine_most_is_known(case: Case, patient: Patient):
    read = patient.specimen.with_(conventions={"norm_output": not patient.specimen.conventions.norm_output})
    found = measured(case, patient, patient.specimen, engines={"vllm": read})
    mend = found.engine_mends["vllm"]
    assert found.taken == [] and mend is not None and mend.hypothesis.group == "norm_output"
    assert measured(case, patient, patient.specimen, engines={"vllm": patient.specimen}).engine_mends == {}


# ---------------------------------------------------------------- kinds of text


def test_a_kind_of_text_on_which_it_is_poor_is_told_and_is_no_fault(case: Case, patient: Patient):
    kinds = ("code", "talk") * 8
    parts = [Acceptance((60, 6)) if kind == "code" else Acceptance((30, 40)) for kind in kinds]
    rows = by_kind(kinds, parts, 1)
    assert [row["kind"] for row in rows] == ["code", "talk"] and rows[0]["rounds"] == 8 * 66
    told = by_kind_told(Measured(Found("declared", patient.specimen, patient.specimen), [], kinds=rows))
    assert [t.id for t in told] == ["EY-MEASURED-KIND"] and told[0].severity is Severity.INFO
    assert "1.09 on code and 1.57 on everything else" in told[0].evidence
    even = by_kind(kinds, [Acceptance((30, 40))] * 16, 1)
    assert by_kind_told(Measured(Found("declared", patient.specimen, patient.specimen), [], kinds=even)) == []
    assert by_kind(("code",) * 16, parts, 1) == [] and by_kind_told(None) == []


def test_the_kinds_of_text_come_with_the_material(case: Case, patient: Patient):
    kinds = tuple("ab"[i % 2] for i in range(patient.material.documents))
    found = measured(case, patient, patient.specimen, replace(patient.material, kinds=kinds))
    assert {row["kind"] for row in found.kinds} == {"a", "b"}
    assert replace(patient.material, kinds=kinds).first([1, 2]).kinds == ("b", "a")


@pytest.mark.parametrize("suspected", [True, False])
def test_what_the_files_show_is_put_right_first_where_another_fault_hides_it(
    case: Case, patient: Patient, suspected: bool
):
    """An embedding of noise beside exchanged k and v: each alone gains nothing. The files show the one."""
    right = patient.specimen
    generator = torch.Generator().manual_seed(4)
    k, v = (f"midlayer.self_attn.{x}_proj.weight" for x in "kv")
    noise = torch.randn(right.shape.vocab_size, right.shape.hidden_size, generator=generator)
    wrong = right.with_(
        tensors={k: right.tensors[v], v: right.tensors[k], "embed_tokens.weight": noise}, embedding=noise,
        conventions={"embedding": "own"},
    )  # fmt: skip
    told = frozenset({"embedding"} if suspected else ())
    found = measured(case, patient, wrong, embedding=patient.embedding, suspected=told)
    assert {t.hypothesis.group for t in found.taken} == ({"embedding", "qkv"} if suspected else set())
    assert ("with what the files show put right" in {e.start for e in found.ledger}) is suspected
