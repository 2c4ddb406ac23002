"""Attention of unrolled steps against one dense softmax, gradients included, however the scores are cut into tiles."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.draft import attention
from eyas.draft.attention import AskedRows, Packing, attend


def inputs(lengths, rows, own, kv=2, group=2, d=4, seed=0):
    torch.manual_seed(seed)
    n, asked = sum(lengths), len(rows)
    q = torch.randn(asked, kv * group, d, dtype=torch.float64)
    shapes = [(n, kv, d), (n, kv, d)] + [(asked, kv, d)] * (2 * own)
    return [q, *(torch.randn(shape, dtype=torch.float64) for shape in shapes)]


def dense(packing, rows, window, q, k, v, *own):
    """Row by row: all visible keys side by side, one softmax."""
    group = q.shape[1] // k.shape[1]
    out = []
    for r, row in enumerate(rows.tolist()):
        start = int(packing.offsets[packing.document[row]])
        keys = torch.cat([k[start : row + 1], *(x[r : r + 1] for x in own[::2])])
        values = torch.cat([v[start : row + 1], *(x[r : r + 1] for x in own[1::2])])
        if window is not None:
            keys, values = keys[-window:], values[-window:]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)  # [n, h, d]
        weights = (torch.einsum("hd,nhd->hn", q[r], keys) * q.shape[-1] ** -0.5).softmax(-1)
        out.append(torch.einsum("hn,nhd->hd", weights, values).flatten())
    return torch.stack(out)


def blocked(packing, rows, window, q, k, v, *own):
    asked = AskedRows(packing, rows)
    return attend(q, packing.lay(k), packing.lay(v), list(zip(own[::2], own[1::2], strict=True)), asked, window)


@pytest.mark.parametrize("tile", [(1 << 18, 128), (40, 3), (1, 1)], ids=["one", "few", "each"])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("fused", [True, False])
def test_output_and_gradients_equal_one_dense_softmax(monkeypatch, tile, window, own, multiple, fused):
    monkeypatch.setattr(attention, "TILE_ON_CPU", tile)
    if not fused:  # as on other devices
        monkeypatch.setattr(attention, "FUSED", None)
    packing = Packing(torch.tensor([0, 7, 8, 14, 17]), multiple)
    rows = torch.tensor([1, 2, 5, 7, 8, 9, 10, 13])  # of the last document none is asked
    given_ = inputs([7, 1, 6, 3], rows, own)
    found, expected = [], []
    upstream = torch.randn(len(rows), 16, dtype=torch.float64)
    for function, kept in ((blocked, found), (dense, expected)):
        leaves = [x.clone().requires_grad_() for x in given_]
        out = function(packing, rows, window, *leaves)
        out.backward(upstream)
        kept += [out.detach(), *(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves)]
    for n, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, msg=lambda m, n=n: f"tensor {n}: {m}")


def test_sizes_recur():
    """Padded ones are multiples, at most a sixteenth larger or less than one multiple, and few."""
    assert [attention.recurring(n, 1) for n in (1, 77, 5000)] == [1, 77, 5000]
    sizes = {n: attention.recurring(n, 32) for n in range(1, 1 << 16)}
    assert all(size >= n and size % 32 == 0 and size - n < max(32, n / 16 + 1) for n, size in sizes.items())
    assert len(set(sizes.values())) < 32 + 16 * 7


def test_gradcheck():
    packing, rows = Packing(torch.tensor([0, 5, 12])), torch.tensor([1, 2, 3, 6, 11])
    leaves = [x.requires_grad_() for x in inputs([5, 7], rows, 2)]
    assert torch.autograd.gradcheck(lambda *x: blocked(packing, rows, None, *x), leaves)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_score_that_counts_is_in_one_tile(data):
    """Tiles of a packing hold each (row, key it sees) once, and no row of another document."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    packing = Packing(torch.tensor([0, *lengths]).cumsum(0))
    rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, sum(lengths) - 1), min_size=1))))
    window = data.draw(st.none() | st.integers(1, 5))
    asked = AskedRows(packing, rows)
    with patch.object(attention, "TILE_ON_CPU", data.draw(st.tuples(st.integers(1, 500), st.integers(1, 9)))):
        tiles = asked.tiles(1, window)
    seen = torch.zeros(*asked.limit.shape, max(lengths), dtype=torch.int64)
    for tile in tiles:
        seen[tile.documents, tile.rows, tile.keys] += 1
        limit = asked.limit[tile.documents, tile.rows]
        assert not len(limit[limit >= 0]) or int(limit[limit >= 0].min()) + 1 >= tile.common
    for b in range(len(lengths)):
        for m, limit in enumerate(asked.limit[b].tolist()):
            first = 0 if window is None else max(0, limit + 1 - window)
            assert seen[b, m, first : limit + 1].eq(1).all()
    torch.testing.assert_close(asked.pick(asked.lay(rows[:, None, None], 1)), rows[:, None, None])
