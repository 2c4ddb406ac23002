"""Trials against plain decoding, one row at a time with a cache; and what may be shared between specimens.

pytest -q tests/test_doctor_trial.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from doctoring import Patient, make_patient
from eyas.decode.acceptance import Acceptance
from eyas.doctor.material import Material
from eyas.doctor.specimen import NOWHERE, Specimen
from eyas.doctor.trial import Bench
from eyas.draft.model import Draft
from eyas.features.layout import NOT_READ

SMALL = {"documents": 3, "length": 14}
FLAGS = [
    {},
    {"norm_output": True, "norm_before_residual": True},
    {"norm_before_fc": True, "sliding_window": 5},
    {"rope_step": 0, "fc_norm": True, "layer_input": "state_embedding"},
]


@pytest.fixture(scope="module")
def patient() -> Patient:
    return make_patient(text=SMALL)


def chain(draft: Draft, material: Material, row: int, steps: int, tokens: list[int] | None = None):
    """Log-probabilities over the draft vocabulary of one row at each step: the prefix decoded token by token.

    tokens: what is fed from the second step on; the draft's recorded text where None.
    """
    start = int(material.offsets[material.offsets <= row].max())
    taps = list(draft.conventions.taps)
    cache, out = draft.new_cache(), []
    for i in range(start, row + 1):
        state = draft.fuse(torch.cat([material.states[t][i] for t in taps]))
        embedded = draft.embed(material.ids[i + 1])[None, None]
        h = draft.step(embedded, state[None, None], torch.tensor([i - start]), cache)
    for k in range(steps):
        out.append(draft.logits(h[0, 0]).log_softmax(-1))
        if k + 1 < steps:
            token = material.ids[row + 2 + k] if tokens is None else torch.tensor(tokens[k])
            place = torch.tensor([row - start + (k + 1) * draft.conventions.rope_step])
            h = draft.step(draft.embed(token)[None, None], draft.feedback(h), place, cache)
    return out


# ---------------------------------------------------------------- surprise


@pytest.mark.parametrize("flags", FLAGS, ids=[",".join(f) or "plain" for f in FLAGS])
def test_surprise_is_what_one_row_alone_gives(flags):
    patient = make_patient(2, text=SMALL, **flags)
    material = patient.material
    bench = Bench(material, steps=3)
    got = bench.surprise([patient.specimen])[0]
    assert got.shape == (len(bench.rows), 3)
    assert torch.equal(bench.rows, material.judged(3).nonzero().squeeze(1))
    limit, outside = math.log(300), 0
    for place, row in list(enumerate(bench.rows.tolist()))[::4]:
        for k, logs in enumerate(chain(patient.draft, material, row, 3)):
            token = int(patient.vocab_map.to_draft(material.choice[row + 1 + k]))
            expected = limit if token < 0 else min(limit, -float(logs[token]))
            outside += token < 0
            assert float(got[place, k]) == pytest.approx(expected, abs=2e-3), (row, k)
    assert float(got[:, 0].mean()) < 0.3 * limit, "the draft wrote this text"


def test_surprise_is_capped_at_that_of_a_uniform_guess(patient: Patient):
    bench = Bench(patient.material, steps=2)
    limit = bench.nothing(patient.specimen)
    assert limit == pytest.approx(math.log(300))
    base = patient.specimen
    loud = base.with_(tensors={"lm_head.weight": base.tensors["lm_head.weight"] * -50})
    wrong = base.with_(ids=torch.full_like(base.ids, NOWHERE))
    broken = base.with_(tensors={"lm_head.weight": base.tensors["lm_head.weight"] * float("nan")})
    lacking = base.with_(tensors={"fc.weight": torch.zeros(3, 3)})
    unseen = base.with_(slices=(2, 4, 99))
    values = bench.surprise([loud, wrong, broken, lacking, unseen, base])
    assert float(values.max()) <= limit + 1e-5
    assert (values[0] > limit - 1e-4).float().mean() > 0.5
    for place in (1, 2, 3, 4):
        assert torch.allclose(values[place], torch.tensor(limit)), place
    assert float(values[5].mean()) < 0.8 * limit


def test_a_choice_outside_the_map_knows_nothing(patient: Patient):
    material, base = patient.material, patient.specimen
    bench = Bench(material, steps=1)
    labels = material.label(bench.rows, 2)
    dropped = int(labels.mode().values)
    ids = torch.where(base.ids == dropped, NOWHERE, base.ids)
    before, after = bench.surprise([base, base.with_(ids=ids)])[..., 0]
    assert torch.equal(after[labels != dropped], before[labels != dropped])
    assert torch.allclose(after[labels == dropped], torch.tensor(bench.nothing(base)))


def test_of_two_heads_of_one_token_the_first_counts(patient: Patient):
    base, bench = patient.specimen, Bench(patient.material, steps=1)
    ids = base.ids.clone()
    ids[-1] = ids[0]
    before, after = bench.surprise([base, base.with_(ids=ids)])[..., 0]
    labels = patient.material.label(bench.rows, 2)
    assert torch.equal(after[labels != base.ids[-1]], before[labels != base.ids[-1]])


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Specimen]:
    made: list[Specimen] = []
    module = Specimen.module
    monkeypatch.setattr(Specimen, "module", lambda self, cast: (made.append(self), module(self, cast))[1])
    return made


def test_specimens_of_one_body_share_a_forward(patient: Patient, monkeypatch: pytest.MonkeyPatch):
    base = patient.specimen
    others = [
        base.with_(ids=base.ids.flip(0)),
        base.with_(conventions={"d2t": "absolute"}),
        base.with_(label_shift=-1),
        base.with_("d2t", "identity", ids=torch.arange(120)),
    ]
    apart = [
        base.with_(state_shift=1),
        base.with_(slices=(4, 2, 5)),
        base.with_(conventions={"rope_theta": 5e5}),
        base.with_(tensors={"norm.weight": base.tensors["norm.weight"].clone()}),
        base.with_(embedding=patient.embedding.flip(0)),
    ]
    bench = Bench(patient.material, steps=2)
    alone = torch.cat([bench.surprise([s]) for s in [base, *others, *apart]])
    made = counting(monkeypatch)
    together = bench.surprise([base, *others, *apart])
    assert torch.equal(together, alone)
    assert len(made) == 1 + len(apart)
    assert len({s.body for s in [base, *others]}) == 1
    assert len({s.body for s in [base, *apart]}) == 1 + len(apart)


@pytest.mark.parametrize("shift", [-1, 1, 2])
def test_a_state_shift_reads_the_states_of_another_token(patient: Patient, shift: int):
    """Within the document: at its ends the last token there is."""
    material = patient.material
    at = []
    for start, end in zip(material.offsets[:-1].tolist(), material.offsets[1:].tolist(), strict=True):
        at += [min(max(i + shift, start), end - 1) for i in range(start, end)]
    moved = replace(material, states={t: x[at] for t, x in material.states.items()})
    shifted = Bench(material, steps=2).surprise([patient.specimen.with_(state_shift=shift)])
    assert torch.equal(shifted, Bench(moved, steps=2).surprise([patient.specimen]))
    assert not torch.equal(shifted, Bench(material, steps=2).surprise([patient.specimen]))


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_label_shift_asks_for_another_token(patient: Patient, shift: int):
    material = patient.material
    bench = Bench(material, steps=2)
    got = bench.surprise([patient.specimen.with_(label_shift=shift)])[0]
    for place, row in list(enumerate(bench.rows.tolist()))[::5]:
        for k, logs in enumerate(chain(patient.draft, material, row, 2)):
            token = int(patient.vocab_map.to_draft(material.choice[row + 1 + k + shift]))
            expected = math.log(300) if token < 0 else min(math.log(300), -float(logs[token]))
            assert float(got[place, k]) == pytest.approx(expected, abs=2e-3), (row, k)


def test_fewer_rows_are_spread_over_the_text_and_agree(patient: Patient):
    whole, few = Bench(patient.material, steps=2), Bench(patient.material, steps=2, most_rows=7)
    assert len(few.rows) == 7 and few.rows[0] == whole.rows[0] and few.rows[-1] == whole.rows[-1]
    assert set(few.document.tolist()) == {0, 1, 2}
    known = {int(row): place for place, row in enumerate(whole.rows)}
    picked = whole.surprise([patient.specimen])[0][[known[int(row)] for row in few.rows]]
    assert torch.allclose(few.surprise([patient.specimen])[0], picked, atol=1e-4)


def test_bfloat16_says_nearly_the_same(patient: Patient):
    exact = Bench(patient.material, steps=2).surprise([patient.specimen])
    rough = Bench(patient.material, torch.bfloat16, steps=2).surprise([patient.specimen])
    assert rough.dtype == torch.float32
    assert 0 < float((rough - exact).abs().mean()) < 0.2


def test_light_is_what_a_choice_adds_to_the_average(patient: Patient):
    material, base = patient.material, patient.specimen
    bench = Bench(material, steps=1)
    rows = bench.document % 2 == 0
    tokens, light = bench.lit(base, rows)
    asked = bench.rows[rows]
    logs = torch.stack([chain(patient.draft, material, row, 1)[0] for row in asked.tolist()])
    labels = material.choice[asked + 1]
    assert tokens.tolist() == sorted(set(labels.tolist()))
    for y, token in enumerate(tokens.tolist()):
        here = logs[labels == token]
        assert torch.allclose(light[y], here.sum(0) - len(here) * logs.mean(0), atol=1e-2)
    known = torch.isin(tokens, base.ids)
    own = light[known].gather(1, patient.vocab_map.to_draft(tokens[known])[:, None])
    assert (own > 0).float().mean() > 0.8, "a token lights up its own place"


# ---------------------------------------------------------------- acceptance


def test_what_is_accepted_is_what_plain_drafting_gets(patient: Patient):
    material, k = patient.material, 3
    got = Bench(material).accepted(patient.specimen, k)
    run = material.run.tolist()
    expected = [0] * len(run)
    for row in range(len(run)):
        if run[row] < 2:
            continue
        said: list[int] = []
        for step in range(min(k, run[row] - 1)):
            logs = chain(patient.draft, material, row, step + 1, said)[step]
            said.append(int(patient.vocab_map.ids[int(logs.argmax())]))
            if said[-1] != int(material.ids[row + 2 + step]):
                break
            expected[row] += 1
    assert got.tolist() == expected
    assert {0, 1, k} <= set(expected)


def test_rounds_are_counted_for_each_document(patient: Patient):
    material, k = patient.material, 3
    bench = Bench(material)
    accepted = bench.accepted(patient.specimen, k)
    by_hand = []
    for start, end in zip(material.offsets[:-1].tolist(), material.offsets[1:].tolist(), strict=True):
        row = next(i for i in range(start, end) if material.run[i] >= 2)
        counts = [0] * (k + 1)
        while int(material.run[row]) >= k + 1:
            n = int(accepted[row])
            counts[n] += 1
            row += n + 1
        by_hand.append(Acceptance(tuple(counts)))
    assert bench.acceptance(patient.specimen, k) == by_hand
    assert Acceptance.merged(by_hand, k).tau > 1.5


def test_text_that_the_target_would_not_have_said_starts_no_round(patient: Patient):
    """Sampled text: only where it is the target's choice does a chain mean anything."""
    material, base = patient.material, patient.specimen
    foreign = replace(material, choice=(material.choice + 1) % 300)
    assert foreign.share_own == 0
    assert Acceptance.merged(Bench(foreign).acceptance(base, 4), 4).rounds == 0
    unasked = replace(material, choice=torch.full_like(material.choice, NOT_READ))
    assert Bench(unasked).acceptance(base, 4) == Bench(material).acceptance(base, 4)


def test_what_cannot_run_accepts_nothing(patient: Patient):
    base, bench = patient.specimen, Bench(patient.material)
    for specimen in (base.with_(embedding=None), base.with_(slices=(2, 4, 99)), base.with_(ids=base.ids * 0 + NOWHERE)):
        merged = Acceptance.merged(bench.acceptance(specimen, 4), 4)
        assert merged.tau == 1.0 and merged.rounds > 0
