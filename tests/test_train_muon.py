"""Muon: orthogonal updates, and step by step the same as PyTorch's own.

pytest -q tests/test_train_muon.py
"""

from __future__ import annotations

import pytest
import torch

from eyas.train import muon
from eyas.train.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 5)])
def test_singular_values_end_near_one_and_directions_stay(shape):
    """Jordan's quintic does not converge to 1: it leaves every singular value that is not tiny between 0.7 and 1.2."""
    torch.manual_seed(0)
    matrix = torch.randn(shape) * 37
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    out = orthogonalise(matrix, dtype=torch.float32)
    assert out.shape == matrix.shape
    values = torch.linalg.svdvals(out)
    large = s > 0.05 * s.norm()
    inner = (u.T @ out @ v.T).diagonal()  # singular vectors are kept, so this is diagonal
    assert ((inner[large] > 0.6) & (inner[large] < 1.25)).all()
    assert values.max() < 1.25
    off = u.T @ out @ v.T - torch.diag(inner)
    assert off.abs().max() < 1e-4
    assert torch.isfinite(orthogonalise(torch.zeros(shape))).all()


@pytest.mark.parametrize("shape", [(12, 12), (12, 17), (12, 40), (40, 12)])
def test_iterating_on_the_gram_matrix_is_the_same_iteration(monkeypatch, shape):
    """Singular values over five orders of magnitude: squared, the smallest still counts in float32."""
    torch.manual_seed(0)
    matrix = torch.randn(shape) * torch.logspace(0, -5, shape[1])
    exact = orthogonalise(matrix, dtype=torch.float64)
    monkeypatch.setattr(muon, "WIDE", float("inf"))
    direct = orthogonalise(matrix, dtype=torch.float64).to(torch.float32)
    torch.testing.assert_close(exact.float(), direct, rtol=0, atol=1e-6)
    monkeypatch.undo()
    torch.testing.assert_close(orthogonalise(matrix, dtype=torch.float32), direct, rtol=0, atol=1e-4)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with PyTorch 2.9")
def test_three_steps_against_torch():
    """The same momentum and scale rule. Tolerance: theirs iterates in bfloat16 (8 bits), so an update differs by a few
    percent of its size; the weights are small, so that nothing hides."""
    torch.manual_seed(0)
    lr = 0.02
    start = [torch.randn(24, 12) * 0.01, torch.randn(12, 36) * 0.01]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    mine = Muon(ours, lr=lr, momentum=0.95, weight_decay=0.1)
    torchs = torch.optim.Muon(theirs, lr=lr, momentum=0.95, weight_decay=0.1, nesterov=True,
                              adjust_lr_fn="match_rms_adamw")  # fmt: skip
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        before = [a.detach().clone() for a in ours]
        mine.step()
        torchs.step()
        for a, b, old in zip(ours, theirs, before, strict=True):
            update = (a - old).square().mean().sqrt()
            assert 0.1 * lr < update < 0.3 * lr, "as large as AdamW's, whose root mean square is about 0.2 lr"
            assert (a - b).square().mean().sqrt() < 0.04 * update


def test_only_matrices():
    with pytest.raises(ValueError, match=r"found a parameter of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def test_parameters_without_gradient_stay():
    p, q = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([p, q], lr=0.1)
    p.grad = torch.eye(2)
    optimizer.step()
    assert torch.equal(q, torch.ones(2, 2))
    assert not torch.equal(p, torch.ones(2, 2))
    assert list(optimizer.state[p]) == ["momentum"]
