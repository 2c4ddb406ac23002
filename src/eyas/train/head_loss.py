"""The head and the loss of all unrolled steps in one pass, with gradients made on the way: no logits are kept.

Per row: l = S lse(z) - p.z with z = x W^T, S = sum_d p_d <= 1, so that dl/dx = S softmax(z) W - p W. The teacher's part
does not depend on the step: p W is made once for each position, and the weights' part of it once for all steps, since
sum_k p^T x_k = p^T sum_k x_k. What is left for each step is the product, one pass for the largest logit and one for
the exponentials, whose normalisation is a factor of rows.   Exercise it:  pytest tests/test_train_head_loss.py

Shapes: P positions where a teacher is read, R rows of a step, D draft vocabulary, H hidden.
"""

from __future__ import annotations

import torch


class HeadLoss:
    """Call `step` for each unrolled step, then add `weight_term` to the loss.

    head [D, H]: the draft's head (a float32 master, trained or frozen); teacher [P, D]: the target's probabilities of
    the draft ids, float32, not renormalised; compute: dtype of the products; chunk: rows that are projected at once.
    """

    def __init__(self, head: torch.Tensor, teacher: torch.Tensor, compute: torch.dtype, chunk: int) -> None:
        self.head, self.chunk = head, chunk
        self.weight = head.detach().to(compute)
        self.mass = teacher.sum(-1)  # [P]
        self.teacher = teacher.to(compute)
        self.taught = (self.teacher @ self.weight).to(self.mass.dtype)  # [P, H]: p W
        self.d_weight = torch.zeros_like(head) if head.requires_grad else None
        self.read = torch.zeros_like(self.taught) if head.requires_grad else None  # [P, H]: sum_k scale_k x_k
        self._logits: torch.Tensor | None = None

    def step(
        self, x: torch.Tensor, at: torch.Tensor, wanted: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scale * sum of losses [], sum of losses float64 [] detached, right bool [R]).

        x [R, H] what the head reads; at int64 [R]: position of each row's teacher; wanted int64 [R]: draft id of the
        target's choice, -1 outside the draft vocabulary, which is never right. A tie with the best logit is right.
        """
        return _Step.apply(x, self, at, wanted, scale)

    def weight_term(self) -> torch.Tensor:
        """A zero whose gradient is that of all steps' losses in the head's weights."""
        if self.d_weight is None or self.read is None:
            return self.mass.new_zeros(())
        self._add_products(self.teacher, self.read, -1.0)
        return _Deposit.apply(self.head, self.d_weight)

    def forward(self, x, at, wanted, scale, wants_gradient):
        """Loss, counts and the gradient in x of one step; the weights' gradient is gathered on the way."""
        wide = self.mass.dtype
        mass, taught = self.mass[at], self.taught[at]  # [R], [R, H]
        total = -torch.dot(x.to(wide).flatten(), taught.flatten()).double()
        d_x = torch.empty(x.shape, dtype=wide, device=x.device) if wants_gradient else None
        right = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        for start in range(0, len(x), self.chunk):
            part = slice(start, start + self.chunk)
            z = self._project(x[part])  # [C, D]
            best = z.amax(-1, keepdim=True)
            chosen = z.gather(1, wanted[part].clamp(min=0).unsqueeze(1))
            right[part] = ((chosen == best).squeeze(1)) & (wanted[part] >= 0)
            sums = z.sub_(best).exp_().sum(-1, keepdim=True)  # z now holds softmax(z) * sums
            share = mass[part].unsqueeze(1) / sums
            total += (mass[part] * (best + sums.log()).squeeze(1)).sum().double()
            if d_x is not None or self.d_weight is not None:
                powers = z.to(self.weight.dtype)
                if d_x is not None:
                    d_x[part] = (powers @ self.weight).to(wide).mul_(share)
                if self.d_weight is not None:
                    self._add_products(powers, x[part].to(wide) * share, scale)
        if self.read is not None:
            self.read.index_add_(0, at, x.to(wide), alpha=scale)
        if d_x is not None:
            d_x = d_x.sub_(taught).mul_(scale).to(x.dtype)
        return (total * scale).to(wide), total, right, d_x

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T in the wide dtype, in a buffer that every chunk reuses."""
        if self._logits is None or len(self._logits) < len(x):
            self._logits = torch.empty(len(x), len(self.weight), dtype=self.mass.dtype, device=x.device)
        out = self._logits[: len(x)]
        if x.dtype == out.dtype:
            return torch.mm(x, self.weight.T, out=out)
        return out.copy_(x @ self.weight.T)

    def _add_products(self, left: torch.Tensor, right: torch.Tensor, alpha: float) -> None:
        """d_weight += alpha left^T right: left [n, D] in the products' dtype, right [n, H]."""
        assert self.d_weight is not None
        right = right.to(left.dtype)
        if self.d_weight.dtype == left.dtype:
            self.d_weight.addmm_(left.T, right, alpha=alpha)
        else:
            self.d_weight.add_(left.T @ right, alpha=alpha)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, head_loss, at, wanted, scale):
        loss, total, right, d_x = head_loss.forward(x, at, wanted, scale, ctx.needs_input_grad[0])
        ctx.save_for_backward(d_x)
        ctx.mark_non_differentiable(total, right)
        return loss, total, right

    @staticmethod
    def backward(ctx, upstream, _total, _right):
        (d_x,) = ctx.saved_tensors
        return d_x * upstream.to(d_x.dtype), None, None, None, None


class _Deposit(torch.autograd.Function):
    """Zero, with a gradient that is already known."""

    @staticmethod
    def forward(ctx, weight, gradient):
        ctx.save_for_backward(gradient)
        return gradient.new_zeros(())

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None
