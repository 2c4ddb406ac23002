"""The draft before its first step: sizes and conventions of the target, and weights that know something.

pytest -q tests/test_train_start.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from eyas.conventions import Known
from eyas.errors import Mismatch
from eyas.target.weights import load_ends
from eyas.train import start
from eyas.train.settings import TrainSettings
from eyas.vocab import VocabMap
from training import Material, material


@pytest.fixture(scope="module")
def m(tiny_target, tmp_path_factory) -> Material:
    return material(tiny_target, tmp_path_factory)


def begun(m: Material, seed: int = 0, ends=None, **settings):
    chosen = TrainSettings(**settings)
    ends = ends or load_ends(m.target)
    draft = start.new_draft(chosen, ends.facts, m.features, m.vocab_map)
    draft.set_embedding(ends.embedding)
    start.initialise(draft, chosen, ends, m.features, m.vocab_map, seed)
    return draft, ends


def test_sizes_and_conventions_are_the_targets_and_declared(m):
    draft, ends = begun(m, num_layers=2)
    facts, c, s = ends.facts, draft.conventions, draft.shape
    assert (s.hidden_size, s.num_heads, s.num_kv_heads, s.head_dim) == (32, 2, 1, 16)
    assert (s.vocab_size, s.draft_vocab_size, s.num_taps, s.num_layers, s.intermediate_size) == (300, 150, 3, 2, 64)
    assert (c.taps, c.num_target_layers, c.d2t, c.norm_before_fc) == ((2, 4, 5), 8, "offset", True)
    assert (c.rms_norm_eps, c.rope_theta, c.max_position) == (facts.rms_norm_eps, facts.rope_theta, 256)
    assert {c.known(f.name) for f in dataclasses.fields(c) if f.name != "how"} == {Known.DECLARED}
    full = start.new_draft(TrainSettings(), facts, m.features, VocabMap.identity(300))
    assert full.conventions.d2t == "none"


def test_head_and_norm_are_the_targets(m):
    draft, ends = begun(m, start="target")
    assert torch.equal(draft.lm_head.weight, ends.head[m.vocab_map.ids])
    assert torch.equal(draft.norm.weight, ends.final_norm)
    assert float(draft.fc.weight.detach().abs().max()) < 0.2, "fc is still random"


def test_a_norm_stored_as_offset_is_read_as_what_it_means(m):
    ends = load_ends(m.target)
    gemma = dataclasses.replace(ends, facts=dataclasses.replace(ends.facts, norm_offset=True))
    draft, _ = begun(m, start="target", ends=gemma)
    torch.testing.assert_close(draft.norm.weight.detach(), ends.final_norm + 1)
    assert not draft.conventions.rms_norm_offset, "the draft stores plain factors"
    none = dataclasses.replace(ends, final_norm=None)
    draft, _ = begun(m, start="target", ends=none)
    assert torch.equal(draft.norm.weight, torch.ones(32))


def test_a_seed_decides_everything(m):
    for kind in ("regression", "target", "random"):
        one, again, other = (begun(m, seed=s, start=kind)[0].owned_state_dict() for s in (0, 0, 1))
        assert all(torch.equal(one[name], again[name]) for name in one)
        assert not torch.equal(one["midlayer.mlp.up_proj.weight"], other["midlayer.mlp.up_proj.weight"])
    assert float(one["lm_head.weight"].std()) == pytest.approx(start.INIT_STD, rel=0.1)
    assert torch.equal(one["norm.weight"], torch.ones(32))


def test_features_of_another_width_are_refused(m):
    facts = dataclasses.replace(load_ends(m.target).facts, hidden_size=64)
    with pytest.raises(Mismatch, match="states of width 32 and vocabulary 300, but the target has 64 and 300"):
        start.new_draft(TrainSettings(), facts, m.features, m.vocab_map)
