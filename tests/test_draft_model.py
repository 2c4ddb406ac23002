"""The draft module against the naive float64 reference: every norm placement, decoding with a cache, unrolling."""

from __future__ import annotations

import pytest
import torch

from eyas.conventions import Conventions
from eyas.draft import unroll as unroll_module
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.draft.unroll import Packing, Unroll
from eyas.errors import BadInput
from reference import Naive

SHAPE = DraftShape(
    hidden_size=16, target_hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8,
    vocab_size=50, draft_vocab_size=20,
)  # fmt: skip
FLAGS = [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_before_residual": True}, {"norm_output": True},
         {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}]  # fmt: skip


# Unknown to the naive reference, but both must agree. One window is shorter than the unrolled steps.
RARE = [
    {"sliding_window": 2},
    {"sliding_window": 5, "rope_offset": 1},
    {"layer_input": "state_embedding"},
    {"qk_norm": True, "attention_bias": True, "mlp_bias": True, "fc_bias": True},
    {"rms_norm_offset": True, "partial_rotary_factor": 0.5, "embedding_scale": 4.0, "logit_scale": 0.5},
]


def make(flags=None, shape=SHAPE, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    conventions = Conventions(taps=(2, 4, 5), num_target_layers=8, rope_theta=1000.0, **(flags or {}))
    draft = Draft(shape, conventions).to(dtype)
    for name, p in draft.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.3)
    draft.set_embedding(torch.randn(shape.vocab_size, shape.hidden_size, dtype=dtype))
    return draft


def naive(draft):
    return Naive(draft.owned_state_dict(), draft.embed_tokens.weight, draft.conventions, 4, 2)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "+".join(f) or "plain")
def test_decoding_equals_the_reference(flags):
    """Step 0 over a prefix, then three steps on the draft's own state. Tolerance: float64 with float32 RoPE angles."""
    draft = make(flags)
    ids, aux = torch.randint(0, 50, (9,)), torch.randn(9, 48, dtype=torch.float64)
    row, tokens = 5, [int(ids[6]), 7, 11, 3]
    expected = naive(draft).unroll(ids.tolist(), aux, row, tokens)
    cache = draft.new_cache()
    h = draft.step(draft.embed(ids[1:7])[None], draft.fuse(aux[:6])[None], torch.arange(6), cache)[:, -1:]
    for k, want in enumerate(expected):
        if k:
            h = draft.step(draft.embed(torch.tensor([[tokens[k]]])), draft.feedback(h), torch.tensor([row + k]), cache)
        torch.testing.assert_close(h[0, 0], want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(draft.logits(h)[0, 0], naive(draft).logits(want), rtol=1e-5, atol=1e-5)
    cache.truncate(6)
    assert cache.length == 6


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("flags", [*FLAGS, *RARE], ids=lambda f: "+".join(f) or "plain")
def test_unrolling_equals_decoding(flags, layers):
    """Packed documents, a subset of rows, rows dropped on the way: each row as if it were decoded alone."""
    draft = make(flags, DraftShape(**{**SHAPE.to_dict(), "num_layers": layers}))
    lengths = [9, 4, 12]
    packing = Packing(torch.tensor([0, *lengths]).cumsum(0))
    ids, aux = torch.randint(0, 50, (25,)), torch.randn(25, 48, dtype=torch.float64)
    rows = torch.tensor([2, 3, 4, 5, 9, 15, 16, 17, 20])
    unroll = Unroll(draft, packing, rows)
    embedded = unroll.embed(torch.cat([ids[1:], ids[-1:]]))
    outputs = [unroll.start(embedded, aux)]
    kept = torch.tensor([0, 2, 4, 5, 7])
    unroll.keep(kept)
    left = rows[kept]
    outputs.append(unroll.step(embedded[left + 1], draft.feedback(outputs[0][kept])))
    outputs.append(unroll.step(embedded[left + 2], draft.feedback(outputs[1])))
    for n, row in enumerate(left.tolist()):
        start = int(packing.offsets[packing.document[row]])
        local = row - start
        cache = draft.new_cache()
        h = draft.step(draft.embed(ids[start + 1 : row + 2])[None], draft.fuse(aux[start : row + 1])[None],
                       torch.arange(local + 1), cache)[:, -1:]  # fmt: skip
        torch.testing.assert_close(outputs[0][kept[n]], h[0, 0])
        for k in (1, 2):
            h = draft.step(
                draft.embed(ids[row + 1 + k])[None, None], draft.feedback(h), torch.tensor([local + k]), cache
            )
            torch.testing.assert_close(outputs[k][n], h[0, 0])


@pytest.mark.parametrize("flags", [{}, {"attention_bias": True}, {"layer_input": "state_embedding"}])
def test_projections_of_wide_drafts_apart_are_those_joined(flags, monkeypatch):
    """Outputs and gradients of every weight."""
    found = []
    for joined in (1 << 26, 0):
        monkeypatch.setattr(unroll_module, "JOINED", joined)
        draft = make(flags)
        ids, aux = torch.randint(0, 50, (13,)), torch.randn(13, 48, dtype=torch.float64)
        unroll = Unroll(draft, Packing(torch.tensor([0, 9, 13])), torch.tensor([2, 3, 6, 9]))
        assert len(unroll._w_state) == (1 if joined else 3)
        embedded = unroll.embed(torch.cat([ids[1:], ids[-1:]]))
        h = unroll.start(embedded, aux)
        h = unroll.step(embedded[unroll.asked.rows + 1], draft.feedback(h))
        draft.logits(h).square().sum().backward()
        found.append([h.detach(), *(p.grad for p in draft.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 10
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_of_one_document_never_see_another():
    draft = make()
    packing = Packing(torch.tensor([0, 6, 12]))
    ids, aux = torch.randint(0, 50, (12,)), torch.randn(12, 48, dtype=torch.float64)
    rows = torch.tensor([7, 8])

    def run(aux):
        unroll = Unroll(draft, packing, rows)
        return unroll.start(unroll.embed(torch.cat([ids[1:], ids[-1:]])), aux)

    changed = aux.clone()
    changed[:6] += 1
    torch.testing.assert_close(run(aux), run(changed), rtol=0, atol=0)


def test_what_cannot_run_is_refused():
    with pytest.raises(BadInput, match="has no `mla` sizes"):
        Draft(SHAPE, Conventions(taps=(2, 4, 5), attention="mla"))
    with pytest.raises(BadInput, match="fc is 3 taps wide"):
        Draft(SHAPE, Conventions(taps=(2, 4)))
    with pytest.raises(BadInput, match=r"\[50, 16\]"):
        make().set_embedding(torch.zeros(51, 16))


def test_other_rope_kinds_come_from_transformers():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    plain = make().angles(torch.arange(5))[0]
    llama3 = Draft(SHAPE, Conventions(taps=(2, 4, 5), rope_theta=1000.0, rope_type="llama3", rope_scaling=scaling))
    assert llama3.angles(torch.arange(5))[0].shape == plain.shape
    assert not torch.allclose(llama3.angles(torch.arange(5))[0], plain.float())
