"""Fifty steps of the fast path against fifty of the plain one: the same losses, so the same draft."""

from __future__ import annotations

import copy

import pytest
import torch

from eyas.draft.unroll import Packing
from eyas.train.muon import Muon
from eyas.train.objective import Batch, ttt_loss
from plain_training import plain_loss
from test_draft_model import make

STEPS, K, DECAY = 50, 4, 0.8
IDS = torch.arange(0, 40, 2)  # D = 20 of V = 50


def batches(n):
    """Documents of several turns and lengths, packed; the target knows its next token fairly well."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(50, 16, generator=generator)
    for _ in range(n):
        lengths = torch.randint(2, 24, (5,), generator=generator)
        total = int(lengths.sum())
        final = torch.randn(total, 16, generator=generator)
        logits = final @ head.T
        yield Batch(
            ids=torch.randint(0, 50, (total,), generator=generator),
            mask=(torch.rand(total, generator=generator) < 0.8).to(torch.uint8),
            aux=torch.randn(total, 48, generator=generator).bfloat16(), final=final, logsumexp=logits.logsumexp(-1),
            top1=logits.argmax(-1), packing=Packing(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])),
        ), head[IDS]  # fmt: skip


def curve(draft, loss_of, optimizers):
    losses = []
    for batch, head_rows in batches(STEPS):
        loss = loss_of(draft, batch, head_rows)
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def fast(draft, batch, head_rows):
    draft_of = torch.full((50,), -1)
    draft_of[IDS] = torch.arange(len(IDS))
    weights = batch.weights(K).clamp(min=1)
    return ttt_loss(draft, batch, head_rows, draft_of, steps=K, decay=DECAY, denominators=weights, chunk=16)[0]


def plain(draft, batch, head_rows):
    return plain_loss(draft, batch, head_rows, None, K, DECAY)


def adamw(draft):
    return [torch.optim.AdamW(draft.parameters(), lr=3e-3, fused=True)]


def muon(draft):
    matrices = [p for n, p in draft.named_parameters() if p.ndim == 2 and "lm_head" not in n and p.requires_grad]
    rest = [p for p in draft.parameters() if p.requires_grad and not any(p is m for m in matrices)]
    return [Muon(matrices, lr=2e-2), torch.optim.AdamW(rest, lr=3e-3, fused=True)]


@pytest.mark.parametrize("optimizers", [adamw, muon])
@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}])
def test_the_loss_curve_is_that_of_plain_float32_training(flags, optimizers):
    one = make(flags, dtype=torch.float32)
    other = copy.deepcopy(one)
    found = torch.tensor(curve(one, fast, optimizers(one)))
    expected = torch.tensor(curve(other, plain, optimizers(other)))
    assert float(((found - expected) / expected).abs().max()) < 1e-3
    assert float(expected[-5:].mean()) < 0.95 * float(expected[:5].mean())  # and it was training that was compared
