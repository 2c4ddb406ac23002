"""The best linear guess in closed form, and a draft that holds it.

pytest -q tests/test_train_linear.py
"""

from __future__ import annotations

import pytest
import torch

from eyas.draft.unroll import Unroll
from eyas.target.weights import load_ends
from eyas.train import linear, ridge, start
from eyas.train.batches import make_batch
from eyas.train.objective import Batch
from eyas.train.settings import TrainSettings
from training import Material, material


@pytest.fixture(scope="module")
def m(tiny_target, tmp_path_factory) -> Material:
    return material(tiny_target, tmp_path_factory)


def begun(m: Material, **settings):
    chosen, ends = TrainSettings(**settings), load_ends(m.target)
    draft = start.new_draft(chosen, ends.facts, m.features, m.vocab_map)
    draft.set_embedding(ends.embedding)
    start.initialise(draft, chosen, ends, m.features, m.vocab_map, 0)
    return draft, ends


def rows_of(m: Material, draft, scale):
    """Inputs [R, T*Ht + H] and outputs [R, H] of every supervised row, one by one."""
    xs, ys = [], []
    for i in range(m.features.num_docs):
        part = m.features.document(i)
        for row in range(len(part["ids"]) - 2):
            if part["mask"][row + 1] and part["mask"][row + 2]:
                taps = linear.fc_input(draft, part["taps"][row].float()[None])[0]
                token = draft.midlayer.input_layernorm(draft.embed(part["ids"][row + 1].long()))
                xs.append(torch.cat([taps, token]))
                ys.append(part["final"][row + 1].float() / scale)
    return torch.stack(xs).detach().double(), torch.stack(ys).detach().double()


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": False}, {"norm_before_fc": False, "fc_norm": True}])
def test_the_guess_equals_least_squares(m, flags, few, monkeypatch):
    """Against lstsq on the stacked ridge problem, in float64. Tolerance: float32 products, fewer rows than unknowns.

    Both by a square of the rows and by one of the unknowns, in panels that divide neither evenly.
    """
    monkeypatch.setattr(ridge, "PANEL", 20)
    monkeypatch.setattr(linear, "keeps_rows", lambda unknowns, rows: few)
    draft, ends = begun(m, start="target", **flags)
    scale = ends.final_norm.float() * torch.linspace(0.5, 2, 32)
    guess = linear.fit_guess(draft, m.features, scale, seed=0)
    x, y = rows_of(m, draft, scale)
    strength = ridge.RIDGE * float((x.T @ x).diagonal().mean())
    stacked = torch.cat([x, strength**0.5 * torch.eye(128, dtype=torch.float64)])
    expected = torch.linalg.lstsq(stacked, torch.cat([y, torch.zeros(128, 32, dtype=torch.float64)])).solution.T
    found = torch.cat([guess.from_taps, guess.from_token], 1).double()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(guess.token_covariance.double(), x[:, 96:].T @ x[:, 96:] / len(x), rtol=1e-4, atol=1e-5)
    fewer = linear.fit_guess(draft, m.features, scale, seed=0, rows=20)
    assert not torch.allclose(fewer.from_taps, guess.from_taps)
    assert torch.equal(fewer.from_taps, linear.fit_guess(draft, m.features, scale, seed=0, rows=20).from_taps)
    assert not torch.equal(fewer.from_taps, linear.fit_guess(draft, m.features, scale, seed=1, rows=20).from_taps)


def test_a_draft_without_its_mlp_gives_the_guess(m, monkeypatch):
    """As far as its rank goes, and where the own row's weight is sharpened to 1."""
    monkeypatch.setattr(linear, "SHARPNESS", 400.0)
    draft, ends = begun(m)
    # An embedding without a mean has no constant direction: give the draft one.
    with torch.no_grad():
        draft.midlayer.mlp.down_proj.weight.zero_()
        draft.embed_tokens.weight.add_(1.0)
    guess = linear.fit_guess(draft, m.features, start._norm_weight(ends), 0)
    linear.write_guess(draft, guess)
    batch: Batch = make_batch(m.features, list(range(m.features.num_docs)))
    rows = batch.rows(0)
    unroll = Unroll(draft, batch.packing, rows)
    token = draft.midlayer.input_layernorm(draft.embed(batch.ids[rows + 1]))
    following = torch.cat([batch.ids[1:], batch.ids[-1:]])
    found = unroll.start(unroll.embed(following), batch.aux.float()).detach()
    value, out = linear._low_rank(guess.from_token, guess.token_covariance, 16)
    expected = draft.fuse(batch.aux[rows].float()) + token @ value.T @ out.T
    torch.testing.assert_close(found, expected.detach(), rtol=1e-3, atol=2e-3)


def test_a_folded_norm_changes_no_choice_of_step_0(m):
    """Logits are those without `norm_output`; the state that is fed back is normed and scaled by c."""
    plain, _ = begun(m)
    folded, _ = begun(m, norm_output=True)
    h = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(folded.logits(h), plain.logits(h), rtol=1e-4, atol=1e-4)
    share = folded.norm.weight.detach()
    assert torch.equal(share, share[:1].expand(32)) and float(share[0]) > 0
    torch.testing.assert_close(folded.feedback(h), share * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5))


@pytest.mark.parametrize("panel", [5, 8, 64])
def test_panels_solve_what_the_library_solves(panel, monkeypatch):
    """Only the lower triangle is read: the upper one holds NaN."""
    monkeypatch.setattr(ridge, "PANEL", panel)
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(32, 40, generator=generator, dtype=torch.float64)
    matrix, right = root @ root.T + torch.eye(32), torch.randn(32, 3, generator=generator, dtype=torch.float64)
    expected = torch.linalg.solve(matrix, right)
    upper = torch.ones(32, 32).triu(1).bool()
    found = ridge.solve_in_place(matrix.masked_fill(upper, torch.nan), right.clone())
    torch.testing.assert_close(found, expected)


def test_few_rows_need_little_memory():
    """A square of the unknowns of a target that is 7,168 wide is 6.6 GB; of 1,000 rows it is nothing."""
    unknowns, outputs = 4 * 7168, 7168
    assert ridge.fit_bytes(unknowns, outputs, 100_000) > 8 * unknowns**2
    assert ridge.fit_bytes(unknowns, outputs, 1_000) < 1e9


def test_low_rank_is_the_best_of_its_rank():
    generator = torch.Generator().manual_seed(0)
    matrix, basis = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
    covariance = basis @ basis.T
    x = torch.linalg.cholesky(covariance.double())  # columns whose outer products sum to the covariance
    errors = []
    for rank in (2, 4, 8, 12):
        value, out = linear._low_rank(matrix, covariance, rank)
        assert value.shape == (rank, 8) and out.shape == (8, rank)
        errors.append(float((((out @ value) - matrix).double() @ x).square().sum()))
    strength = torch.linalg.svdvals(matrix.double() @ x).square()
    expected = [float(strength[rank:].sum()) for rank in (2, 4, 8, 12)]
    assert errors == pytest.approx(expected, rel=1e-3, abs=1e-5)
