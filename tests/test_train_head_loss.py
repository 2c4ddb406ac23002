"""The head's loss against plain logits and autograd, over several steps that share positions."""

from __future__ import annotations

import pytest
import torch

from eyas.train.head_loss import HeadLoss, rows_held

P, D, H = 7, 11, 5
STEPS = [(torch.tensor([0, 2, 3, 6]), 0.5), (torch.tensor([3, 6]), 0.25), (torch.tensor([6]), 2.0)]


def tensors(dtype=torch.float64):
    torch.manual_seed(0)
    head = torch.randn(D, H, dtype=dtype)
    teacher = torch.randn(P, D, dtype=dtype).softmax(-1) * torch.rand(P, 1, dtype=dtype)  # some mass lies elsewhere
    states = [torch.randn(len(at), H, dtype=dtype) for at, _ in STEPS]
    wanted = [torch.tensor([3, -1, 0, 5]), torch.tensor([1, 10]), torch.tensor([-1])]
    return head, teacher, states, wanted


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("trained", [True, False])
def test_losses_and_gradients_equal_plain_logits(chunk, trained):
    head, teacher, states, wanted = tensors()
    head.requires_grad_(trained)
    mine = [x.clone().requires_grad_() for x in states]
    losses = HeadLoss(head, teacher, torch.float64, chunk)
    parts = [losses.step(x, at, w, scale) for x, (at, scale), w in zip(mine, STEPS, wanted, strict=True)]
    (3 * (sum(p[0] for p in parts) + losses.finish())).backward()

    plain_head = head.detach().clone().requires_grad_()
    plain = [x.clone().requires_grad_() for x in states]
    total = 0
    for x, (at, scale), w, (loss, raw, right) in zip(plain, STEPS, wanted, parts, strict=True):
        z = x @ plain_head.T
        each = -(teacher[at] * z.log_softmax(-1)).sum(-1)
        torch.testing.assert_close(raw, each.sum().detach())
        torch.testing.assert_close(loss, scale * each.sum().detach())
        assert right.tolist() == (z.argmax(-1) == w).tolist()
        total = total + scale * each.sum()
    (3 * total).backward()
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    if trained:
        torch.testing.assert_close(head.grad, plain_head.grad)
    else:
        assert head.grad is None


def test_bfloat16_products_stay_near():
    head, teacher, states, wanted = tensors(torch.float32)
    head.requires_grad_()
    gradients = []
    for compute in (torch.float32, torch.bfloat16):
        head.grad = None
        x = states[0].detach().to(compute).clone().requires_grad_()
        losses = HeadLoss(head, teacher, compute, 2)
        loss, raw, _ = losses.step(x, STEPS[0][0], wanted[0], 1.0)
        (loss + losses.finish()).backward()
        assert x.grad.dtype == compute and head.grad.dtype == torch.float32
        gradients.append((raw, x.grad.float(), head.grad))
    for one, other in zip(*gradients, strict=True):
        assert float((one - other).norm() / one.norm()) < 0.02


def test_a_tie_with_the_best_logit_is_right_and_nothing_outside_the_vocabulary_is():
    losses = HeadLoss(torch.ones(3, 2), torch.full((1, 3), 0.2), torch.float32, 8)
    _, _, right = losses.step(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64), torch.tensor([0, 2, -1]), 1.0)
    assert right.tolist() == [True, True, False]


def test_gradients_that_still_wait_are_not_taken_for_gradients():
    head, teacher, states, wanted = tensors()
    losses = HeadLoss(head, teacher, torch.float64, 100)
    loss, _, _ = losses.step(states[0].requires_grad_(), STEPS[0][0], wanted[0], 1.0)
    with pytest.raises(RuntimeError, match="finish"):
        loss.backward(retain_graph=True)
    losses.finish()
    loss.backward()
    assert torch.isfinite(states[0].grad).all()


def test_rows_that_wait_are_few_where_the_vocabulary_is_large():
    assert [rows_held(2048, d) for d in (8, 8192, 32_000, 163_840, 1 << 24)] == [2048, 2048, 512, 96, 1]
    assert rows_held(3, 32_000) == 3
