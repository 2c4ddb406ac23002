"""The TTT objective: which rows are supervised at which step, against which teacher, with which weight.

Contract (design.md, section 3): the teacher of row i, step k is the target's distribution for x_{i+2+k}, read from the
final state at i+1+k; its weight is w(i,k) = m_{i+1} ... m_{i+2+k}; the loss is sum_k lambda_k sum_i w l / sum_i w, sums
over the whole optimizer batch; l is the cross-entropy -sum_d p_d log q_d over the draft vocabulary, where p_d are the
target's probabilities over the WHOLE vocabulary (not renormalised) and q the draft's softmax over D.
    Exercise it:  pytest tests/test_train_objective.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..draft.model import Draft
from ..draft.unroll import Packing, Unroll
from .head_loss import HeadLoss


def run_lengths(mask: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """For each token j the number of supervised tokens j, j+1, ... in a row within its document. int64 [N].

    mask bool/uint8 [N], offsets int64 [B+1]. So w(i,k) = 1 exactly where run[i+1] >= k + 2.
    """
    n = len(mask)
    index = torch.arange(n, device=mask.device)
    # A run ends before the next unsupervised token and before the next document: two minima over what follows.
    unsupervised = torch.where(mask.bool(), n, index).flip(0).cummin(0).values.flip(0)
    begins = torch.full((n + 1,), n, device=mask.device)
    begins[offsets] = offsets  # a document's own first token does not end its run: look strictly ahead
    next_document = begins[1:].flip(0).cummin(0).values.flip(0)
    return (torch.minimum(unsupervised, next_document) - index) * mask.bool()


def weights_of_runs(runs: torch.Tensor, steps: int) -> torch.Tensor:
    """How many of `runs` (int64, each the run length of the token after a row) reach k + 2, float64 [steps]."""
    counts = torch.bincount(runs.clamp(max=steps + 1), minlength=steps + 2)
    return counts.flip(0).cumsum(0).flip(0)[2 : steps + 2].double()


@dataclass
class Batch:
    """Packed documents. ids int64 [N], mask [N], aux [N, T*Ht], final [N, H], logsumexp float32 [N], top1 int64 [N]."""

    ids: torch.Tensor
    mask: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor
    logsumexp: torch.Tensor
    top1: torch.Tensor
    packing: Packing
    run: torch.Tensor = field(init=False)  # run length of the token after row i: w(i,k) = run[i] >= k + 2

    def __post_init__(self) -> None:
        run = run_lengths(self.mask, self.packing.offsets)
        same = torch.zeros_like(run, dtype=torch.bool)
        same[:-1] = self.packing.document[:-1] == self.packing.document[1:]
        self.run = torch.where(same, torch.cat([run[1:], run.new_zeros(1)]), 0)

    def rows(self, step: int) -> torch.Tensor:
        """Rows supervised at `step`, ascending int64."""
        return (self.run >= step + 2).nonzero().squeeze(1)

    def weights(self, steps: int) -> torch.Tensor:
        """sum_i w(i,k) for k < steps, float64 [K]."""
        return weights_of_runs(self.run, steps)


@dataclass
class StepSums:
    """Sums over a batch, float64 [K] each: weighted loss, rows, rows where the draft's choice is the target's `top1`
    at this step, and at all steps so far (both count a choice outside the draft vocabulary as wrong)."""

    loss: torch.Tensor
    rows: torch.Tensor
    right: torch.Tensor
    chain: torch.Tensor

    @classmethod
    def zeros(cls, steps: int) -> StepSums:
        """Nothing yet."""
        return cls(*(torch.zeros(steps, dtype=torch.float64) for _ in range(4)))

    def __add__(self, other: StepSums) -> StepSums:
        return StepSums(*(getattr(self, n) + getattr(other, n) for n in ("loss", "rows", "right", "chain")))


@torch.no_grad()
def teacher_probabilities(
    final: torch.Tensor, logsumexp: torch.Tensor, head_rows: torch.Tensor, logits_of: object = None
) -> torch.Tensor:
    """Target probabilities of the draft ids: exp(final @ head_rows.T - logsumexp). [P, H], [P], [D, H] -> [P, D].

    `logits_of` maps raw logits to the target's (logit scale, soft-cap); the identity when None. In the dtype of
    head_rows even under autocast: logits of 20 rounded to bfloat16 would be wrong by 6 % as probabilities.
    """
    with torch.autocast(final.device.type, enabled=False):
        z = (final.to(head_rows.dtype) @ head_rows.T).float()
    if callable(logits_of):
        z = logits_of(z)
    return z.sub_(logsumexp[:, None]).exp_()


def ttt_loss(
    draft: Draft,
    batch: Batch,
    head_rows: torch.Tensor,
    draft_of: torch.Tensor,
    *,
    steps: int,
    decay: float,
    denominators: torch.Tensor,
    logits_of: object = None,
    chunk: int = 512,
    compute: torch.dtype = torch.float32,
    recompute: bool = False,
) -> tuple[torch.Tensor, StepSums]:
    """The loss of one (micro-)batch, and its sums.

    head_rows [D, H]: the target's head on the draft ids; draft_of int64 [V]: draft id of a target id, -1 outside;
    denominators float64 [K]: sum_i w(i,k) over the whole optimizer batch and all ranks. Loss is a scalar to be summed
    over micro-batches and ranks. compute: dtype of the head's products (the rest follows autocast). recompute: see
    Unroll.
    """
    multiple = batch.packing.multiple
    rows = batch.rows(0)
    count = taught = len(rows)  # further rows, repeated for the sake of round numbers, carry no weight
    # The teacher of (i, k) sits at i+1+k: make each once, at the positions that some row reads.
    reads = _padded(rows + 1, multiple, spare=multiple > 1)
    rows = _padded(rows, multiple)
    unroll = Unroll(draft, batch.packing, rows, recompute)
    dtype = draft.fc.weight.dtype
    following = torch.cat([batch.ids[1:], batch.ids[-1:]])  # x_{i+1}; nobody reads it across a document's end
    embedded = unroll.embed(following)
    place = torch.zeros(len(batch.ids), dtype=torch.int64, device=rows.device)
    place[reads[:count]] = torch.arange(count, device=rows.device)
    teacher = teacher_probabilities(batch.final[reads], batch.logsumexp[reads], head_rows, logits_of)
    teacher[count:] = 0
    head = HeadLoss(draft.lm_head.weight, teacher, compute, chunk)
    del teacher
    wanted = draft_of[batch.top1.clamp(min=0)]  # [N] draft id of the target's choice after each token, -1 outside
    h = unroll.start(embedded, batch.aux.to(dtype))
    loss = torch.zeros((), device=h.device)
    counted = []  # per step: loss, rows, right, chain; fetched at the end, so that a device never waits in between
    alive = torch.ones(count, dtype=torch.bool, device=rows.device)
    for k in range(steps):
        if k:
            kept = (batch.run[rows[:count]] >= k + 2).nonzero().squeeze(1)
            if not len(kept):
                break
            alive, count, kept = alive[kept], len(kept), _padded(kept, multiple)
            rows, h = rows[kept], h.index_select(0, kept)
            unroll.keep(kept)
            h = unroll.step(embedded.index_select(0, rows + k), draft.feedback(h))
        scale = decay**k / float(denominators[k])
        at, choice = place[rows + 1 + k], wanted[rows + 1 + k]
        at[count:], choice[count:] = taught, -1
        part, raw, right = head.step(draft.head_input(h).to(compute), at, choice, scale)
        loss = loss + part
        alive = alive & right[:count]
        counted.append(torch.stack([raw, raw.new_tensor(count), right.sum().double(), alive.sum().double()]))
    sums = StepSums.zeros(steps)
    for k, values in enumerate(torch.stack(counted).cpu() if counted else ()):  # [steps reached, 4]
        sums.loss[k], sums.rows[k], sums.right[k], sums.chain[k] = values
    return loss + head.finish(), sums


def _padded(indices: torch.Tensor, multiple: int, spare: int = 0) -> torch.Tensor:
    """At least `spare` more indices, all the last one, so that their number is a multiple. int64 [n] -> [n']"""
    more = spare + -(len(indices) + spare) % multiple
    return torch.cat([indices, indices[-1:].expand(more)]) if more else indices


class Objective(nn.Module):
    """The loss as a module around the draft, which is what PyTorch's data parallelism wraps (ranks.py).

    Its arguments are `ttt_loss`'s. Without a batch, or with one where nothing is supervised, the loss is a zero that
    reaches every trained weight: processes that have nothing to do must still take part.
    """

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, batch: Batch | None, **arguments: Any) -> tuple[torch.Tensor, StepSums]:
        if batch is not None and bool((batch.run >= 2).any()):
            return ttt_loss(self.draft, batch, **arguments)
        zero = torch.stack([p.sum() * 0 for p in self.draft.parameters() if p.requires_grad]).sum()
        return zero, StepSums.zeros(arguments["steps"])
