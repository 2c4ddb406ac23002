"""Three pieces of a layer with gradients of their own: they keep their inputs alone and pass over memory less often.

Composed of single operations, each would keep every intermediate result of every unrolled step.
    Exercise it:  pytest tests/test_draft_functions.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, reduced in float32 as the engines do. `offset`: the stored weight is `w - 1` (Gemma)."""

    def __init__(self, size: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight + 1 if self.offset else self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`, reduced in float32 or wider; x [..., n], weight [n] -> x's dtype."""
    return _RMSNorm.apply(x, weight, eps)


def gated(activation: Callable[[torch.Tensor], torch.Tensor], gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`activation(gate) * up`, elementwise."""
    return _Gated.apply(activation, gate, up)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., heads, d] by angles whose cos and sin are [..., rot/2] (broadcast over heads, without gradient).

    Half-rotation layout as in Hugging Face's Llama: pairs are (x[j], x[j + rot/2]) for j < rot/2; the rest stays.
    """
    return _Rotate.apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight.to(x.dtype))

    @staticmethod
    def backward(ctx, upstream):
        x, weight, scale = ctx.saved_tensors
        unit = x.to(scale.dtype) * scale
        d_weight = None
        per_weight = upstream * unit  # [..., n]
        if ctx.needs_input_grad[1]:
            d_weight = per_weight.flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:  # taps and embeddings have no gradient
            return None, d_weight, None
        mean = (per_weight @ weight.to(per_weight.dtype)).unsqueeze(-1) / x.shape[-1]
        d_x = (upstream * weight).to(scale.dtype).addcmul_(unit, mean.to(scale.dtype), value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, activation, gate, up):
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return activation(gate) * up

    @staticmethod
    def backward(ctx, upstream):
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            active = ctx.activation(gate)
        (d_gate,) = torch.autograd.grad(active, gate, upstream * up)
        return None, d_gate, upstream * active.detach()


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx, upstream):
        cos, sin = ctx.saved_tensors
        return _turn(upstream, cos, -sin), None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    if x.shape[-1] > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
