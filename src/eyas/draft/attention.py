"""Attention of one unrolled step: causal over the step-0 keys of a row's document, plus the row's own later keys.

The scores of the step-0 part are never kept: they are made tile by tile, small enough for a cache, and made again in
the backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691). The own part is a handful of numbers a row. Both are
joined by their log-sum-exp, and since a softmax's gradient needs no more than the joined output and the joined
log-sum-exp, each part's backward pass is the usual one with these two.
    Exercise it:  pytest tests/test_draft_attention.py

Shapes: N tokens of all documents, R asked rows, B documents, h heads, kv key heads, g = h / kv, d head_dim, k own keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..machine import round_up

# (scores, rows) of one tile: as many as stay in a core's own cache, or keep another device busy. Few rows waste little
# on keys that their first row does not see.
TILE_ON_CPU, TILE_ELSEWHERE = (1 << 18, 64), (1 << 27, 512)
# Three times as fast as single operations; its backward pass is not, so that is made here.
FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def recurring(size: int, multiple: int) -> int:
    """A size not below `size` that recurs: a multiple, and of large sizes at most sixteen between powers of two."""
    return size if multiple == 1 else round_up(size, max(multiple, 1 << size.bit_length() >> 5))


class Packing:
    """Where documents lie in the packed sequence: document b is [offsets[b], offsets[b+1]), `offsets` int64 [B+1].

    multiple: what is laid out, and its tiles, are padded to multiples of this (machine.row_multiple).
    """

    def __init__(self, offsets: torch.Tensor, multiple: int = 1) -> None:
        lengths, total = offsets.diff(), int(offsets[-1])
        self.offsets, self.multiple = offsets, multiple
        self.document = torch.repeat_interleave(lengths)  # [N] document of a token
        self.position = torch.arange(total, device=offsets.device) - offsets[self.document]  # [N] place in its document
        places = torch.arange(recurring(int(lengths.max()), multiple), device=offsets.device)
        self.grid = (offsets[:-1, None] + places).clamp_(max=total - 1)  # [B, longest]; past an end: any token

    def lay(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values of all tokens [N, kv, d] -> [B * kv, longest, d]"""
        return x[self.grid].transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Tile:
    """Rows [rows] of documents [documents] see no key outside [keys]; all of them see those before `common`."""

    documents: slice
    rows: slice
    keys: slice
    common: int


class AskedRows:
    """The rows whose outputs are wanted, laid out per document: `grid` [B, most rows] -> row, `slot` [R] -> place."""

    def __init__(self, packing: Packing, rows: torch.Tensor) -> None:
        self.rows, self.packing = rows, packing  # int64 [R], ascending, indices into the packed sequence
        document = packing.document[rows]
        counts = torch.bincount(document, minlength=len(packing.offsets) - 1)
        starts = counts.cumsum(0) - counts
        most = round_up(max(1, int(counts.max())), packing.multiple)
        places = torch.arange(most, device=rows.device)
        self.grid = (starts[:, None] + places).clamp_(max=max(0, len(rows) - 1))
        self.slot = document * most + torch.arange(len(rows), device=rows.device) - starts[document]
        # [B, most]: last step-0 key that a row sees; a place without a row sees none
        self.limit = torch.where(places < counts[:, None], packing.position[rows][self.grid], -1)
        self._tiles: dict[tuple[int, int | None], list[Tile]] = {}

    def lay(self, x: torch.Tensor, kv: int) -> torch.Tensor:
        """[R, h, ...] -> [B * kv, g, most, ...]"""
        laid = x[self.grid].unflatten(2, (kv, -1))  # [B, most, kv, g, ...]
        return laid.movedim(1, 3).flatten(0, 1)

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """[B * kv, g, most, ...] -> [R, h, ...]"""
        return x.unflatten(0, (len(self.grid), -1)).movedim(3, 1).flatten(0, 1)[self.slot].flatten(1, 2)

    def tiles(self, heads: int, window: int | None) -> list[Tile]:
        """All tiles, fit for the device. window: keys that a row sees at most."""
        key = (heads, window)
        if key not in self._tiles:
            self._tiles[key] = list(self._cut(heads, window))
        return self._tiles[key]

    def _cut(self, heads: int, window: int | None) -> Iterator[Tile]:
        most = self.limit.shape[1]
        budget, height = TILE_ON_CPU if self.limit.device.type == "cpu" else TILE_ELSEWHERE
        first = self.limit.masked_fill(self.limit < 0, torch.iinfo(torch.int64).max).split(height, 1)
        highs = torch.stack([part.amax(1) for part in self.limit.split(height, 1)]).tolist()  # [row tiles, B]
        lows = torch.stack([part.amin(1) for part in first]).tolist()
        for t, (high, low) in enumerate(zip(highs, lows, strict=True)):
            rows = slice(t * height, min(most, (t + 1) * height))
            size, b = rows.stop - rows.start, 0
            while b < len(high):
                begin, reach, common = b, high[b], low[b]
                b += 1
                while b < len(high):  # take in further documents while their scores fit
                    wider = max(reach, high[b])
                    if (b + 1 - begin) * heads * size * (wider + 1) > budget:
                        break
                    reach, common, b = wider, min(common, low[b]), b + 1
                if reach >= 0:
                    least = 0 if window is None else max(0, common + 1 - window)
                    m, longest = self.packing.multiple, self.packing.grid.shape[1]
                    yield Tile(
                        slice(begin, b), rows, slice(least // m * m, min(longest, recurring(reach + 1, m))), common + 1
                    )


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own: list[tuple[torch.Tensor, torch.Tensor]],
    asked: AskedRows,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of the asked rows; differentiable in every tensor.

    q [R, h, d] (rotated, not scaled); keys, values [B * kv, longest, d] from `Packing.lay`; own: keys and values
    [R, kv, d] of the row itself at steps 1, 2, ..., oldest first; window: how many keys a row sees in all, itself
    included. Returns [R, h * d] in q's dtype.
    """
    kept = own if window is None else own[-window:]  # a row's own keys are its newest
    limits = None if window is None else (window, len(own))
    own_keys, own_values = (torch.stack(x, 2) for x in zip(*kept, strict=True)) if kept else (None, None)
    return _Attend.apply(q, keys, values, own_keys, own_values, asked, limits)  # own [R, kv, k, d]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, keys, values, own_keys, own_values, asked, window):
        kv = keys.shape[0] // len(asked.grid)
        ctx.asked, ctx.window, ctx.kv, ctx.scale = asked, window, kv, q.shape[-1] ** -0.5
        laid = asked.lay(q, kv).mul_(ctx.scale).to(values.dtype)  # [B * kv, g, most, d]
        heads = laid.unflatten(0, (-1, kv)).flatten(1, 2)  # [B, h, most, d]
        out = torch.zeros(heads.shape, dtype=values.dtype, device=q.device)
        lse = q.new_full(heads.shape[:3], float("-inf"), dtype=_wide(q.dtype))
        for tile in asked.tiles(heads.shape[1], None if window is None else window[0]):
            docs, rows, here = tile.documents, tile.rows, tile.keys
            k, v = (x.unflatten(0, (-1, kv))[docs, :, here] for x in (keys, values))  # [documents, kv, keys, d]
            hidden = _hidden(asked, tile, here.start, window)
            out[docs, :, rows], lse[docs, :, rows] = _look(heads[docs, :, rows], k, v, hidden)
            if window is not None:  # its own keys may be all that a row sees
                lse[docs, :, rows].masked_fill_(hidden.all(-1)[:, None], float("-inf"))
        out, lse = (asked.pick(x.view(laid.shape[:3] + x.shape[3:])).to(lse.dtype) for x in (out, lse))  # [R, h, ...]
        shares = None
        if own_keys is not None:
            shares = (_grouped(q, kv).to(own_keys.dtype) @ own_keys.mT).to(lse.dtype).mul_(ctx.scale)  # [R, kv, g, k]
            joined = torch.logaddexp(lse, shares.logsumexp(-1).flatten(1))
            out *= (lse - joined).exp_().unsqueeze(-1)
            shares = shares.sub_(_grouped(joined, kv).unsqueeze(-1)).exp_().to(own_values.dtype)
            _grouped(out, kv).add_(shares @ own_values)
            lse = joined
        ctx.save_for_backward(q, keys, values, own_keys, own_values, out, lse, shares)
        return out.flatten(1).to(q.dtype)

    @staticmethod
    def backward(ctx, d_out):
        q, keys, values, own_keys, own_values, out, lse, shares = ctx.saved_tensors
        asked, kv, scale = ctx.asked, ctx.kv, ctx.scale
        d_out = d_out.unflatten(1, out.shape[1:]).to(out.dtype)  # [R, h, d]
        mean = (d_out * out).sum(-1)  # [R, h]: what the softmax's gradient takes off everywhere
        laid = asked.lay(q, kv).mul_(scale).to(values.dtype)
        laid_out = asked.lay(d_out, kv).to(values.dtype)
        # Places without a row repeat some row: there all weights must be nothing, or it would count twice.
        empty = (asked.limit < 0).repeat_interleave(kv, 0)[:, None]  # [B * kv, 1, most]
        laid_lse = asked.lay(lse, kv).masked_fill_(empty, float("inf")).unsqueeze(-1)
        laid_mean = asked.lay(mean, kv).unsqueeze(-1)
        d_laid = torch.zeros(laid.shape, dtype=laid.dtype, device=q.device)
        d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
        for part, rows, keys_of, scores in _scores(laid, keys, asked, ctx.window, kv):
            ours = laid_out[part, :, rows].flatten(1, 2)
            weights = scores.sub_(laid_lse[part, :, rows].flatten(1, 2)).exp_()
            d_scores = (ours @ values[part, keys_of].mT).to(weights.dtype)
            d_scores = d_scores.sub_(laid_mean[part, :, rows].flatten(1, 2)).mul_(weights).to(laid.dtype)
            d_values[part, keys_of] += weights.to(laid.dtype).mT @ ours
            d_keys[part, keys_of] += d_scores.mT @ laid[part, :, rows].flatten(1, 2)
            d_laid[part, :, rows] = (d_scores @ keys[part, keys_of]).unflatten(1, (laid.shape[1], -1))
        d_q = asked.pick(d_laid).to(out.dtype)
        d_own_keys = d_own_values = None
        if own_keys is not None:
            ours, mine = (_grouped(x, kv).to(own_keys.dtype) for x in (d_out, q))  # [R, kv, g, d]
            d_own_values = shares.mT @ ours
            d_shares = (ours @ own_values.mT - _grouped(mean, kv).unsqueeze(-1)).mul_(shares).to(own_keys.dtype)
            d_own_keys = (d_shares.mT @ mine).mul_(scale)
            _grouped(d_q, kv).add_(d_shares @ own_keys)
        return d_q.mul_(scale).to(q.dtype), d_keys, d_values, d_own_keys, d_own_values, None, None


def _look(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one tile: (output [n, h, rows, d], log-sum-exp [n, h, rows]) of n documents.

    q [n, h, rows, d], scaled; keys, values [n, kv, keys, d]; hidden bool [n, rows, keys]. A row that sees no key has
    output 0, and any log-sum-exp.
    """
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf")).unsqueeze(1)
    if q.device.type == "cpu" and FUSED is not None:  # elsewhere the fused ones take no such bias, or tell no sums
        return FUSED(q, keys, values, attn_mask=bias, scale=1.0)
    grouped = q.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [n, kv, g * rows, d]
    scores = (grouped @ keys.mT).to(_wide(q.dtype)).unflatten(2, (-1, q.shape[2])) + bias.unsqueeze(1)
    lse = scores.logsumexp(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(lse).exp_().to(values.dtype).flatten(2, 3)
    return (weights @ values).unflatten(2, (-1, q.shape[2])).flatten(1, 2), lse.squeeze(-1).flatten(1, 2)


def _scores(laid, keys, asked, window, kv):
    """Tile by tile: (documents' part of the first axis, rows, keys, masked scores [part, g * rows, keys])."""
    for tile in asked.tiles(kv * laid.shape[1], None if window is None else window[0]):
        part = slice(tile.documents.start * kv, tile.documents.stop * kv)
        scores = laid[part, :, tile.rows].flatten(1, 2) @ keys[part, tile.keys].mT
        scores = scores.to(_wide(scores.dtype))
        # Keys before `common` are seen by all rows of the tile, unless a window takes them away.
        since = tile.keys.start if window is not None else min(tile.common, tile.keys.stop)
        hidden = _hidden(asked, tile, since, window)  # [documents, rows, keys from there on]
        shape = (len(hidden), kv, laid.shape[1], hidden.shape[1], -1)
        scores[..., since - tile.keys.start :].view(shape).masked_fill_(hidden[:, None, None], float("-inf"))
        yield part, tile.rows, tile.keys, scores


def _hidden(asked, tile, since, window):
    """Which of the tile's keys from `since` on its rows do not see: bool [documents, rows, keys]."""
    limit = asked.limit[tile.documents, tile.rows, None]
    places = torch.arange(since, tile.keys.stop, device=limit.device)
    hidden = places > limit
    if window is not None:
        width, steps = window
        hidden |= places <= limit + steps - width
    return hidden


def _grouped(x: torch.Tensor, kv: int) -> torch.Tensor:
    """[R, h, ...] -> [R, kv, g, ...], a view."""
    return x.unflatten(1, (kv, -1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
