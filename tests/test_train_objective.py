"""The objective: a conversation worked by hand, and one training step against a float64 reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.draft.unroll import Packing
from eyas.train.objective import Batch, run_lengths, ttt_loss
from test_draft_model import make, naive


def batch_of(lengths, mask, seed=0, dtype=torch.float64, multiple=1):
    torch.manual_seed(seed)
    n = sum(lengths)
    return Batch(
        ids=torch.randint(0, 50, (n,)), mask=torch.tensor(mask, dtype=torch.uint8), aux=torch.randn(n, 48, dtype=dtype),
        final=torch.randn(n, 16, dtype=dtype), logsumexp=torch.zeros(n), top1=torch.randint(0, 50, (n,)),
        packing=Packing(torch.tensor([0, *lengths]).cumsum(0), multiple),
    )  # fmt: skip


def test_rows_and_weights_of_a_conversation_worked_by_hand():
    """x: 0 1 2 [3 4 5 6] 7 [8 9]: an answer from P=3 of four tokens, another of two; then a second document."""
    b = batch_of([10, 3], [0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1])
    # Row i, step k is supervised when x_{i+1} .. x_{i+2+k} are: row P-1 = 2 is the first, predicting x_4.
    assert b.rows(0).tolist() == [2, 3, 4, 7, 10]
    assert b.rows(1).tolist() == [2, 3]  # row 4 would need x_7; row 10 would need a token past the end
    assert b.rows(2).tolist() == [2]
    assert b.rows(3).tolist() == []
    assert b.weights(4).tolist() == [5, 2, 1, 0]


def test_run_lengths_stop_at_prompts_and_documents():
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1])
    assert run_lengths(mask, torch.tensor([0, 5, 7])).tolist() == [2, 1, 0, 2, 1, 2, 1]


@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}])
@pytest.mark.parametrize("multiple", [1, 2, 8])  # with 2 the rows of a later step alone need padding
def test_one_training_step_against_a_float64_reference(flags, multiple):
    """Loss, counts and every gradient, against loops over rows and steps and autograd on the naive model."""
    draft = make(flags)
    b = batch_of([9, 8], [0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0], multiple=multiple)
    ids_of_draft = torch.arange(0, 40, 2)  # D = 20
    draft_of = torch.full((50,), -1)
    draft_of[ids_of_draft] = torch.arange(20)
    head = torch.randn(50, 16, dtype=torch.float64)
    b.logsumexp = (b.final @ head.T).logsumexp(-1)
    steps, decay = 3, 0.8
    loss, sums = ttt_loss(draft, b, head[ids_of_draft], draft_of, steps=steps, decay=decay,
                          denominators=b.weights(steps), chunk=2, compute=torch.float64)  # fmt: skip
    loss.backward()

    model = naive(draft)
    model.w = {k: v.clone().requires_grad_() for k, v in model.w.items()}
    whole = (b.final @ head.T).softmax(-1)  # over all 50 ids
    expected = torch.zeros(3, dtype=torch.float64)
    rows, right = torch.zeros(3), torch.zeros(3)
    offsets, mask, ids = b.packing.offsets.tolist(), b.mask.tolist(), b.ids.tolist()
    for start, end in pairwise(offsets):
        for i in range(start, end):
            for k in range(steps):
                needed = range(i + 1, i + 3 + k)
                if i + 2 + k >= end or not all(mask[j] for j in needed):
                    continue
                outputs = model.unroll(ids[start:end], b.aux[start:end], i - start, ids[i + 1 : i + 2 + k])
                z = model.logits(outputs[k])
                p = whole[i + 1 + k][ids_of_draft]
                expected[k] = expected[k] - (p * z.log_softmax(-1)).sum()
                rows[k] += 1
                right[k] += int(ids_of_draft[z.argmax()] == b.top1[i + 1 + k])
    total = sum(decay**k * expected[k] / rows[k] for k in range(steps))
    total.backward()
    assert sums.rows.tolist() == rows.tolist()
    assert sums.right.tolist() == right.tolist()
    torch.testing.assert_close(sums.loss, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.double(), total.detach(), rtol=1e-5, atol=1e-6)
    for name, p in draft.named_parameters():
        if not name.startswith("embed"):
            # The naive weights are float64, the head's gradient is gathered in float32: hence the tolerance.
            torch.testing.assert_close(
                p.grad.double(), model.w[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m
            )


class Products(TorchDispatchMode):
    """Collects the sizes of all products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.sizes.add((*args[0].shape[-2:], args[1].shape[-1]))
        return func(*args, **(kwargs or {}))


def test_padded_batches_of_unlike_conversations_need_products_of_like_sizes():
    """What oneDNN compiles anew for each size (machine.row_multiple): rows come in multiples, forward and backward."""
    draft, head = make(dtype=torch.float32), torch.randn(20, 16)

    def products(lengths, multiple):
        n = sum(lengths)
        b = batch_of([*lengths, *([-n % multiple] if -n % multiple else [])],
                     [*[1] * n, *[0] * (-n % multiple)], dtype=torch.float32, multiple=multiple)  # fmt: skip
        with Products() as seen:
            ttt_loss(draft, b, head, torch.arange(50) % 20, steps=4, decay=0.8, denominators=b.weights(4))[0].backward()
        return seen.sizes

    assert products([29, 30, 28], 32) == products([31, 27, 25], 32) != products([32, 32, 32, 32], 32)
    assert len(products([29, 30, 28], 1) - products([31, 27, 25], 1)) > 20


def test_micro_batches_add_up_to_one_batch():
    draft = make()
    parts = [batch_of([9], [0, 0, 1, 1, 1, 1, 0, 1, 1]), batch_of([8], [0, 1, 1, 1, 1, 0, 0, 0], seed=1)]
    names = ("ids", "mask", "aux", "final", "logsumexp", "top1")
    packed = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    whole = Batch(**packed, packing=Packing(torch.tensor([0, 9, 17])))
    head = torch.randn(20, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    denominators = whole.weights(3)
    assert torch.equal(denominators, sum(p.weights(3) for p in parts))

    def gradients(batches):
        draft.zero_grad()
        for b in batches:
            loss, _ = ttt_loss(draft, b, head, torch.arange(50) % 20, steps=3, decay=0.8, denominators=denominators,
                               compute=torch.float64)  # fmt: skip
            loss.backward()
        return [p.grad.clone() for n, p in draft.named_parameters() if not n.startswith("embed")]

    for one, many in zip(gradients([whole]), gradients(parts), strict=True):
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-7)


def test_a_choice_outside_the_draft_vocabulary_counts_as_wrong():
    draft = make()
    b = batch_of([6], [0, 1, 1, 1, 1, 1])
    nowhere = torch.full((50,), -1)
    _, sums = ttt_loss(draft, b, torch.randn(20, 16, dtype=torch.float64), nowhere, steps=2, decay=1.0,
                       denominators=b.weights(2), compute=torch.float64)  # fmt: skip
    assert sums.rows.tolist() == [4, 3] and sums.right.tolist() == [0, 0]


def test_steps_that_no_row_reaches_add_nothing():
    draft = make()
    b = batch_of([4, 3], [1] * 7)
    counts = b.weights(4)
    _, sums = ttt_loss(draft, b, torch.randn(20, 16, dtype=torch.float64), torch.arange(50).clamp(max=19), steps=4,
                       decay=0.8, denominators=counts.clamp(min=1), compute=torch.float64)  # fmt: skip
    assert sums.rows.tolist() == counts.tolist() == [3, 1, 0, 0] and sums.loss[2:].tolist() == [0, 0]
