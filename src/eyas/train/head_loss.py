"""The head and the loss of all unrolled steps in one pass, with gradients made on the way: few logits are kept.

Per row: l = S lse(z) - p.z with z = x W^T, S = sum_d p_d <= 1, so that dl/dx = S softmax(z) W - p W. The teacher's part
does not depend on the step: p W is made once for each position, and the weights' part of it once for all steps, since
sum_k p^T x_k = p^T sum_k x_k. What is left for each step is the product, one pass for the largest logit and one for
the exponentials, whose normalisation is a factor of rows. Nobody needs a gradient before the backward pass, so the
exponentials of several steps wait for one another: two large products are faster than many small ones.
    Exercise it:  pytest tests/test_train_head_loss.py

Shapes: P positions where a teacher is read, R rows of a step, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Logits that are worked on at once: on a CPU as many as its core's own cache holds.
PASS_ON_CPU = 1 << 18
HELD = 1 << 24
"""Exponentials that wait at most: 2,048 rows of 8,192 ids, 512 of 32,000, whose products are large enough by then."""


def rows_held(chunk: int, draft_vocab: int) -> int:
    """How many rows wait at most where `chunk` is asked for; in round numbers (machine.row_multiple)."""
    most = max(1, HELD // draft_vocab)
    return min(chunk, most if most < 32 else most // 32 * 32)


@dataclass
class _Waiting:
    """Rows whose exponentials wait for the products: x [n, H]; factor [n, 1] of their gradient; scale of the step;
    taught [n, H]; d_x [n, H] to be filled, or None."""

    x: torch.Tensor
    factor: torch.Tensor
    scale: float
    taught: torch.Tensor
    d_x: torch.Tensor | None


class HeadLoss:
    """Call `step` for each unrolled step, then add `finish` to the loss, and only then go backward.

    head [D, H]: the draft's head (a float32 master, trained or frozen); teacher [P, D]: the target's probabilities of
    the draft ids, float32, not renormalised; compute: dtype of the products; chunk: rows whose exponentials are held,
    or fewer (rows_held).
    """

    def __init__(self, head: torch.Tensor, teacher: torch.Tensor, compute: torch.dtype, chunk: int) -> None:
        self.head, self.chunk = head, rows_held(chunk, len(head))
        self.weight = head.detach().to(compute)
        self.mass = teacher.sum(-1)  # [P]
        self.teacher = teacher.to(compute)
        self.taught = (self.teacher @ self.weight).to(self.mass.dtype)  # [P, H]: p W
        self.d_weight = self.read = None
        if head.requires_grad:
            self.d_weight = head.new_zeros(head.shape[::-1])  # [H, D]: so lie the exponentials
            self.read = torch.zeros_like(self.taught)  # [P, H]: sum_k scale_k x_k
        self._held = torch.empty(self.chunk, len(head), dtype=compute, device=head.device)
        self._waiting: list[_Waiting] = []
        self._filled = 0

    def step(
        self, x: torch.Tensor, at: torch.Tensor, wanted: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scale * sum of losses [], sum of losses float64 [] detached, right bool [R]).

        x [R, H] what the head reads; at int64 [R]: position of each row's teacher; wanted int64 [R]: draft id of the
        target's choice, -1 outside the draft vocabulary, which is never right. A tie with the best logit is right.
        """
        return _Step.apply(x, self, at, wanted, scale)

    def finish(self) -> torch.Tensor:
        """Make the gradients that still wait. A zero whose gradient is that of all steps' losses in the head."""
        self._multiply()
        if self.d_weight is None or self.read is None:
            return self.mass.new_zeros(())
        self._add_products(self.read, self.teacher, -1.0)
        return _Deposit.apply(self.head, self.d_weight)

    def forward(self, x, at, wanted, scale, wants_gradient):
        """Loss, counts and, when `finish` has been called, the gradient in x of one step."""
        wide = self.mass.dtype
        mass, taught = self.mass[at], self.taught[at]  # [R], [R, H]
        total = -torch.dot(x.to(wide).flatten(), taught.flatten()).double()
        d_x = torch.empty_like(x) if wants_gradient else None
        right = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        start = 0
        while start < len(x):
            size = min(len(x) - start, self.chunk - self._filled)
            part, start = slice(start, start + size), start + size
            powers = self._held[self._filled : self._filled + size]  # [n, D]
            torch.mm(x[part], self.weight.T, out=powers)
            lse, sums, right[part] = self._exponentials(powers, wanted[part])
            total += (mass[part] * lse).sum().double()
            if d_x is not None or self.d_weight is not None:
                factor = (mass[part] / sums).unsqueeze(1) * scale
                self._waiting.append(_Waiting(x[part], factor, scale, taught[part], None if d_x is None else d_x[part]))
                self._filled += size
                if self._filled == self.chunk:
                    self._multiply()
        if self.read is not None:
            self.read.index_add_(0, at, x.to(wide), alpha=scale)
        return (total * scale).to(wide), total, right, d_x

    def _exponentials(self, z, wanted):
        """Logits z [n, D] become exp(z - best) in place: (log-sum-exp [n], sum of them [n], right [n])."""
        wide = self.mass.dtype
        lse, sums = (torch.empty(len(z), dtype=wide, device=z.device) for _ in range(2))
        right = torch.empty(len(z), dtype=torch.bool, device=z.device)
        rows = max(1, PASS_ON_CPU // z.shape[1]) if z.device.type == "cpu" else len(z)
        for start in range(0, len(z), rows):
            part = slice(start, start + rows)
            powers = z[part].to(wide)
            best = powers.amax(-1, keepdim=True)
            chosen = powers.gather(1, wanted[part].clamp(min=0).unsqueeze(1))
            torch.logical_and((chosen == best).squeeze(1), wanted[part] >= 0, out=right[part])
            torch.sum(powers.sub_(best).exp_(), -1, out=sums[part])
            torch.add(best.squeeze(1), sums[part].log(), out=lse[part])
            if powers.dtype != z.dtype:
                z[part] = powers
        return lse, sums, right

    def _multiply(self) -> None:
        """The gradients of all rows that wait."""
        if not self._waiting:
            return
        powers, waiting, wide = self._held[: self._filled], self._waiting, self.mass.dtype
        sizes = [len(w.x) for w in waiting]
        if any(w.d_x is not None for w in waiting):
            for found, w in zip((powers @ self.weight).split(sizes), waiting, strict=True):
                if w.d_x is not None:
                    w.d_x.copy_((found.to(wide) * w.factor).sub_(w.taught, alpha=w.scale))
        if self.d_weight is not None:
            self._add_products(torch.cat([w.x.to(wide) * w.factor for w in waiting]), powers, 1.0)
        waiting.clear()
        self._filled = 0

    def _add_products(self, left: torch.Tensor, right: torch.Tensor, alpha: float) -> None:
        """d_weight += alpha left^T right: left [n, H], right [n, D] in the products' dtype."""
        assert self.d_weight is not None
        turned = left.to(right.dtype).T.contiguous()
        if self.d_weight.dtype == right.dtype:
            self.d_weight.addmm_(turned, right, alpha=alpha)
        else:
            self.d_weight.add_(turned @ right, alpha=alpha)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, head_loss, at, wanted, scale):
        # d_x is filled later, which autograd would take for a change of something that was saved. The rest of
        # head_loss, which is large, need not live until the backward pass.
        loss, total, right, ctx.d_x = head_loss.forward(x, at, wanted, scale, ctx.needs_input_grad[0])
        ctx.waiting = head_loss._waiting
        ctx.mark_non_differentiable(total, right)
        return loss, total, right

    @staticmethod
    def backward(ctx, upstream, _total, _right):
        if ctx.waiting:
            raise RuntimeError("HeadLoss.finish must be called before the backward pass")
        return ctx.d_x * upstream.to(ctx.d_x.dtype), None, None, None, None


class _Deposit(torch.autograd.Function):
    """Zero, with a gradient [D, H] that is already known, as its transpose."""

    @staticmethod
    def forward(ctx, weight, turned):
        ctx.save_for_backward(turned)
        return turned.new_zeros(())

    @staticmethod
    def backward(ctx, upstream):
        (turned,) = ctx.saved_tensors
        return turned.T.contiguous().mul_(upstream), None  # faster than the product of a transpose
