"""Functions with gradients of their own, against composed operations and gradcheck."""

from __future__ import annotations

import pytest
import torch

from eyas.draft.functions import gated, rms_norm, rotate
from eyas.draft.model import ACTIVATIONS


def leaf(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    ).requires_grad_()


def composed_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def test_rms_norm():
    x, weight = leaf(2, 3, 5), leaf(5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), composed_norm(x, weight, 1e-3))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda w: rms_norm(x.detach(), w, 1e-3), (weight,))


def test_rms_norm_of_half_precision_is_reduced_in_float32():
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # its square does not fit into float16
    assert rms_norm(x, torch.ones(4096), 1e-6).tolist() == [[1.0] * 4096]
    assert rms_norm(x, torch.ones(4096), 1e-6).dtype == torch.float16


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gated(name):
    gate, up = leaf(4, 6), leaf(4, 6, 1).squeeze(-1)
    torch.testing.assert_close(gated(ACTIVATIONS[name], gate, up), ACTIVATIONS[name](gate) * up)
    assert torch.autograd.gradcheck(lambda g, u: gated(ACTIVATIONS[name], g, u), (gate, up))


@pytest.mark.parametrize("half", [2, 4])
def test_rotate(half):
    x, angle = leaf(3, 2, 8), torch.linspace(0, 5, 3 * half, dtype=torch.float64).view(3, half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half : 2 * half]
    c, s = cos[:, None], sin[:, None]
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat([a * c - b * s, b * c + a * s, x[..., 2 * half :]], -1))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_dtypes_of_their_tensors(dtype):
    x, weight = torch.randn(3, 2, 8, dtype=dtype, requires_grad=True), torch.ones(8, requires_grad=True)
    y = rotate(rms_norm(x, weight, 1e-5), torch.ones(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype))
    gated(torch.nn.functional.silu, y, y).sum().backward()
    assert x.grad.dtype == dtype and weight.grad.dtype == torch.float32
