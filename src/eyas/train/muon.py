"""Muon: momentum whose matrix updates are orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

torch.optim.Muon iterates in bfloat16 always; on a CPU without bf16 instructions that costs several times the backward
pass (docs/experiments.md), and rounding grows there: two float32 runs that differ in the last digit are 1e-3 apart
after 30 steps. This one iterates in the precision that it is told and is otherwise the same rule: Nesterov
momentum, five Newton-Schulz steps, update scaled to AdamW's root mean square (0.2 sqrt(max(rows, columns)), Liu et al.
2025, arXiv 2502.16982, eq. 4), decoupled weight decay. Of
a matrix in shards (FSDP2) every process makes the whole update and keeps its part.
    Exercise it:  pytest tests/test_train_muon.py
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .ranks import like, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: steepest at zero, singular values end in about 0.7..1.2

WIDE = 1.5  # columns a row, from which on iterating on the gram matrix alone takes fewer operations


def orthogonalise(matrix: torch.Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An approximation of U V^T for matrix = U S V^T; float [m, n] -> same shape, iterated in `dtype`."""
    x = matrix.to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    if x.dtype.itemsize >= 4 and x.shape[1] > WIDE * x.shape[0]:
        x = _polynomial(x @ x.T, steps) @ x
        return x.T if tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _polynomial(gram: torch.Tensor, steps: int) -> torch.Tensor:
    """The product of all iterations' factors: polynomials in the first gram matrix, so nothing wide is multiplied.

    gram [m, m]. Squares the singular values, which bfloat16 does not bear.
    """
    a, b, c = COEFFICIENTS
    product = None
    for step in range(steps):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        product = factor if product is None else factor @ product
        if step < steps - 1:
            gram = factor @ (gram @ factor)
    assert product is not None
    return product


class Muon(torch.optim.Optimizer):
    """For 2-D weights inside the model; embeddings, heads and vectors belong to AdamW. lr is on AdamW's scale.

    dtype: of the Newton-Schulz steps.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "ns_steps": ns_steps})
        self.dtype = dtype
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon takes matrices; found a parameter of shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients present."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                buffer = state["momentum"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(whole(p.grad.lerp(buffer, group["momentum"])), group["ns_steps"], self.dtype)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(like(update.to(p.dtype), p), alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)
