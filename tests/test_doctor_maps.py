"""The vocabulary map in each wrong form, and another run's map found again from what the draft says.

pytest -q tests/test_doctor_maps.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from doctoring import D, Patient, V, another_run, make_patient
from eyas.doctor.maps import align, align_freely, alternatives, inverted, of_head, usable
from eyas.doctor.measure import _aligned
from eyas.doctor.specimen import NOWHERE, Specimen, stored_ids
from eyas.doctor.trial import Bench

HERE = torch.arange(D)


@pytest.fixture(scope="module")
def patient() -> Patient:
    return make_patient(1)


def holding(patient: Patient, d2t: torch.Tensor | None, t2d: torch.Tensor | None = None) -> Specimen:
    tensors = {k: v for k, v in patient.tensors.items() if k not in ("d2t", "t2d")}
    tensors |= {k: v for k, v in (("d2t", d2t), ("t2d", t2d)) if v is not None}
    return replace(patient.specimen, tensors=tensors, ids=stored_ids(tensors, patient.draft.shape))


def forms(specimen: Specimen, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {label: ids for label, ids, _ in alternatives(specimen, others)}


# ---------------------------------------------------------------- the forms of one map


@pytest.mark.parametrize(
    ("label", "store"),
    [
        ("offsets", lambda ids: ids - HERE), ("absolute", lambda ids: ids),
        ("subtracted twice", lambda ids: ids - 2 * HERE), ("added twice", lambda ids: ids + HERE),
        ("sorted offsets", lambda ids: ids.roll(7) - HERE), ("sorted absolute", lambda ids: ids.roll(7)),
    ],
)  # fmt: skip
def test_each_form_has_its_reading(patient: Patient, label: str, store):
    ids = patient.vocab_map.ids
    found = forms(holding(patient, store(ids)))
    assert torch.equal(found[label], ids)
    assert list(found)[-1] == "identity"
    assert not torch.equal(found["identity"], ids)


def test_marks_are_read_from_either_table(patient: Patient):
    ids, t2d = patient.vocab_map.ids, patient.vocab_map.t2d
    assert torch.equal(forms(holding(patient, torch.zeros(D, dtype=torch.int64), t2d))["t2d"], ids)
    assert torch.equal(forms(holding(patient, None, t2d))["t2d"], ids)
    exchanged = holding(patient, t2d.long(), None)
    assert torch.equal(forms(exchanged)["marks"], ids), "d2t may hold the other table"
    assert set(forms(holding(patient, None))) == {"identity"}
    assert "t2d" not in forms(holding(patient, HERE, t2d[:-1]))


def test_of_equal_readings_the_first_is_named_and_nonsense_is_left_out(patient: Patient):
    ids, t2d = patient.vocab_map.ids, patient.vocab_map.t2d
    found = forms(holding(patient, ids - HERE, t2d), parent=ids)
    assert "sorted offsets" not in found and "t2d" not in found and "parent" not in found
    assert len({tuple(v.tolist()) for v in found.values()}) == len(found)
    for bad in (torch.full((D,), 7) - HERE, ids + 10_000, torch.full((D,), -1000)):
        assert "offsets" not in forms(holding(patient, bad))
    other = ids.flip(0)
    assert torch.equal(forms(holding(patient, ids - HERE, t2d), parent=other)["parent"], other)
    assert torch.equal(forms(holding(patient, ids - HERE), parent=other[:100])["parent"][100:], torch.full((20,), -1))


def test_a_map_must_lead_most_ids_to_one_of_their_own():
    assert usable(torch.tensor([1, 2, NOWHERE, NOWHERE])) and not usable(torch.tensor([1, NOWHERE, NOWHERE, NOWHERE]))
    assert usable(torch.tensor([1, 1, 2, 2])) and not usable(torch.tensor([1, 1, 1, 1]))


def test_the_inverse_map(patient: Patient):
    base = patient.specimen
    back = inverted(base)
    assert torch.equal(back[base.ids], HERE)
    assert int((back == NOWHERE).sum()) == V - D
    doubled = base.ids.clone()
    doubled[[5, 9]] = torch.stack([base.ids[3], torch.tensor(NOWHERE)])
    back = inverted(base.with_(ids=doubled))
    assert back[base.ids[3]] == 3 and back[base.ids[5]] == NOWHERE and back[base.ids[9]] == NOWHERE
    assert back.shape == (V,)


# ---------------------------------------------------------------- another run's map


@pytest.mark.parametrize(("seed", "moved"), [(0, 3), (0, 25), (1, 10), (2, 40), (3, 10)])
def test_another_runs_map_is_aligned_with_the_text(seed: int, moved: int):
    patient = make_patient(seed)
    right, wrong = patient.vocab_map.ids, another_run(patient.vocab_map.ids, moved, seed)
    specimen = patient.specimen.with_(ids=wrong)
    bench = Bench(patient.material, steps=1)
    made = bench.document % 2 == 0
    found = align(*bench.lit(specimen, made), specimen)
    assert 0 < found.moved <= found.asked
    assert found.ids.shape == (D,) and int(found.ids.max()) < V
    shared = torch.isin(right, wrong)
    assert (found.ids == right)[shared].float().mean() > 0.6 > (wrong == right)[shared].float().mean()
    before, after = bench.surprise([specimen, specimen.with_(ids=found.ids)])[:, ~made].mean((1, 2)).tolist()
    assert after < before - 0.5, "on text that was not used"
    judged = _aligned(bench, specimen)
    assert judged is not None and judged.gain.real and judged.gain.low > 0.3


@pytest.mark.parametrize("seed", range(6))
def test_a_right_map_is_not_called_wrong(seed: int):
    patient = make_patient(seed)
    bench = Bench(patient.material, steps=1)
    assert _aligned(bench, patient.specimen) is None
    untrained = patient.specimen.with_(tensors={"lm_head.weight": torch.randn(D, 32) * 0.02})
    assert _aligned(bench, untrained) is None


def test_there_is_nothing_to_align_without_text_of_the_map(patient: Patient):
    base = patient.specimen
    outside = (inverted(base) == NOWHERE).nonzero().squeeze(1)[:4]
    nothing = align(outside, torch.rand(4, D), base)
    assert (nothing.moved, nothing.asked) == (0, 0) and torch.equal(nothing.ids, base.ids)
    dark = align(base.ids[:5], torch.full((5, D), float("nan")), base)
    assert dark.moved == 0 and torch.equal(dark.ids, base.ids), "of logits that are no numbers"
    whole = make_patient(1, sizes={"draft_vocab_size": V}, text={"documents": 4, "length": 10})
    assert _aligned(Bench(whole.material, steps=1), whole.specimen) is None
    one = Bench(patient.material.first([0]), steps=1)
    assert _aligned(one, base) is None, "one document cannot be both made of and tried on"


def test_a_token_that_lights_up_elsewhere_takes_its_neighbours_along(patient: Patient):
    """The stored map is one place behind from the 20th on; only four tokens of the text say so."""
    base = patient.specimen
    free = min(set(range(V)) - set(base.ids.tolist()))
    shifted = base.with_(ids=torch.cat([base.ids[1:], torch.tensor([free])]))  # the token of place i+1 at place i
    tokens = base.ids[[20, 21, 60, 100]]
    light = torch.zeros(4, D)
    light[torch.arange(4), torch.tensor([20, 21, 60, 100])] = 10.0
    found = align(tokens, light, shifted)
    assert found.moved == 4
    assert torch.equal(found.ids[20:120], base.ids[20:120])


# ---------------------------------------------------------------- maps of which the stored one says nothing


def test_a_map_of_another_vocabulary_is_found_again_where_the_text_has_its_tokens(patient: Patient):
    right = patient.specimen
    other = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:D].sort().values
    bench = Bench(patient.material, steps=1)
    tokens, light = bench.lit(right.with_(ids=other), torch.ones(len(bench.rows), dtype=torch.bool))
    found = align_freely(tokens, light, right.with_(ids=other))
    somewhere = (found.ids != NOWHERE).nonzero().squeeze(1)
    assert not found.whole and found.asked == len(tokens) == len(somewhere)
    assert bool((found.ids[somewhere].diff() > 0).all()), "a map ascends"
    had = torch.isin(tokens, right.ids)
    agree = inverted(right)[tokens[had]] == inverted(right.with_(ids=found.ids))[tokens[had]]
    assert float(agree.float().mean()) > 0.6
    assert found.moved == int((other[somewhere] != found.ids[somewhere]).sum())


def test_free_alignment_of_nothing_is_nothing(patient: Patient):
    none = align_freely(torch.empty(0, dtype=torch.int64), torch.empty(0, D), patient.specimen)
    assert (none.moved, none.asked) == (0, 0)


def test_a_head_that_began_as_the_targets_rows_tells_its_map():
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(400, 48, generator=generator)
    ids = torch.randperm(400, generator=generator)[:120].sort().values
    head = target[ids] + 0.1 * torch.randn(120, 48, generator=generator)
    stored = torch.arange(120)
    told = of_head(head, target, stored)
    assert told is not None and torch.equal(told, ids)
    assert of_head(head, target, ids) is None, "what is stored says so already"
    head[5] = torch.randn(48, generator=generator)
    told = of_head(head, target, stored)
    assert told is not None and told[5] == NOWHERE and torch.equal(told[6:], ids[6:])


def test_equal_rows_of_the_target_are_told_apart_by_their_order():
    target = torch.randn(400, 48, generator=torch.Generator().manual_seed(0))
    target[5:17] = target[5]  # special tokens that nobody trained
    ids = torch.tensor([2, 5, 6, 7, 9, 20, 30])
    told = of_head(target[ids], target, torch.arange(7))
    assert told is not None and bool((told.diff() > 0).all())
    assert torch.equal(target[told], target[ids]) and torch.equal(told[[0, 1, 5, 6]], ids[[0, 1, 5, 6]])


def test_a_head_of_its_own_tells_no_map():
    generator = torch.Generator().manual_seed(0)
    target, head = torch.randn(400, 48, generator=generator), torch.randn(120, 48, generator=generator)
    assert of_head(head, target, torch.arange(120)) is None
    assert of_head(head[:, :40], target, torch.arange(120)) is None
    assert of_head(torch.ones(120, 48, dtype=torch.int64), target, torch.arange(120)) is None
