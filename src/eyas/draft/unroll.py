"""Unrolling a draft over packed documents: the same rows at steps 0, 1, ... K-1, as training and replay need them.

Row i, step k reads the token x_{i+1+k} and the output of row i at step k-1, and attends to the step-0 keys of rows
<= i of its document and to the keys of its own row at steps 1..k (design.md, section 3). Two facts make it cheap:
a row that nobody asks about matters only through its step-0 key and value in the last layer, and after step 0 rows do
not see each other at all. So documents lie packed without padding, projections run on exactly the rows that matter, and
only the attention scores are laid out per document.   Exercise it:  pytest tests/test_draft_model.py

Shapes: N tokens of all documents, R asked rows, B documents, h heads, kv key heads, d head_dim, H hidden.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .model import Draft, DraftLayer
from .rope import rotate


class Packing:
    """Where documents lie in the packed sequence: document b is [offsets[b], offsets[b+1]), `offsets` int64 [B+1]."""

    def __init__(self, offsets: torch.Tensor) -> None:
        lengths, total = offsets.diff(), int(offsets[-1])
        self.offsets = offsets
        self.document = torch.repeat_interleave(lengths)  # [N] document of a token
        self.position = torch.arange(total, device=offsets.device) - offsets[self.document]  # [N] place in its document
        places = torch.arange(int(lengths.max()), device=offsets.device)
        self.grid = (offsets[:-1, None] + places).clamp_(max=total - 1)  # [B, longest]; past an end: any token


class AskedRows:
    """The rows whose outputs are wanted, laid out per document: `grid` [B, most rows] -> row, `slot` [R] -> place."""

    def __init__(self, packing: Packing, rows: torch.Tensor) -> None:
        self.rows = rows  # int64 [R], ascending, indices into the packed sequence
        document = packing.document[rows]
        counts = torch.bincount(document, minlength=len(packing.offsets) - 1)
        starts = counts.cumsum(0) - counts
        most = max(1, int(counts.max()))
        places = torch.arange(most, device=rows.device)
        self.grid = (starts[:, None] + places).clamp_(max=max(0, len(rows) - 1))
        self.slot = document * most + torch.arange(len(rows), device=rows.device) - starts[document]
        position = packing.position[rows]
        self.limit = position[self.grid]  # [B, most]: last step-0 key that a row sees

    def lay(self, x: torch.Tensor) -> torch.Tensor:
        """[R, ...] -> [B, most, ...]"""
        return x[self.grid]

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """[B, most, ...] -> [R, ...]"""
        return x.flatten(0, 1)[self.slot]


class Unroll:
    """One unrolled pass. `start` runs step 0, each `step` the next; both return the outputs h [R, H] of asked rows.

    `ids` int64 [N], `aux` [N, T*Ht], `rows` int64 [R] ascending: rows i whose outputs are wanted (i + 1 < its
    document's end). Gradients flow through everything but `ids`.
    """

    def __init__(self, draft: Draft, packing: Packing, rows: torch.Tensor) -> None:
        self.draft, self.packing = draft, packing
        self.asked = AskedRows(packing, rows)
        self._own: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in draft.all_layers()]
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []  # step-0 keys and values laid out [B, kv, longest, d]
        self.k = 0
        layer = draft.midlayer
        attn, size = layer.self_attn, draft.shape.hidden_size
        weight = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])  # [(h + 2 kv) d, 2H]
        halves = (weight[:, :size], weight[:, size:])
        self._w_embed, self._w_state = halves if layer.embedding_first else halves[::-1]
        self._bias = None
        if attn.q_proj.bias is not None:
            self._bias = torch.cat([attn.q_proj.bias, attn.k_proj.bias, attn.v_proj.bias])
        self._sizes = [attn.num_heads * attn.head_dim] + [attn.num_kv_heads * attn.head_dim] * 2

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The embedding's share of q, k, v: it depends on the token alone, so one call serves every step."""
        return F.linear(self.draft.midlayer.input_layernorm(self.draft.embed(ids)), self._w_embed, self._bias)

    def start(self, embedded: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        """Step 0. embedded [N, (h+2kv)d]: row i's entry is that of its input token x_{i+1}; aux [N, T*Ht] -> [R, H]."""
        draft, rows = self.draft, self.asked.rows
        cos, sin = draft.angles(self.packing.position)
        x = draft.fuse(aux)  # [N, H]
        everything = torch.arange(len(x), device=x.device)
        layers = draft.all_layers()
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            normed = layer.hidden_norm(x)
            out_rows = rows if last else everything
            q, k, v = self._project(layer, normed, embedded, None if not last else rows)
            q, k = self._heads(layer, q, k, (cos[out_rows], sin[out_rows]), (cos, sin))
            grid = self.packing.grid
            self._first.append(
                (k[grid].permute(0, 2, 3, 1), v.unflatten(-1, (-1, layer.self_attn.head_dim))[grid].transpose(1, 2))
            )
            asked = self.asked if last else AskedRows(self.packing, everything)
            out = self._attend(layer, index, q, asked)
            residual = layer.residual(x, normed)
            x = layer.finish(residual[out_rows] if last else residual, out)
        self.k = 1
        return x

    def step(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Step k >= 1 for the asked rows: embedded [R, (h+2kv)d] of x_{i+1+k}, state [R, H] from `Draft.feedback`."""
        step = self.k * self.draft.conventions.rope_step
        cos, sin = self.draft.angles(self.packing.position[self.asked.rows] + step)
        x = state
        for index, layer in enumerate(self.draft.all_layers()):
            normed = layer.hidden_norm(x)
            q, k, v = self._project(layer, normed, embedded, None)
            q, k = self._heads(layer, q, k, (cos, sin), (cos, sin))
            own_k, own_v = self._own[index]
            own_k.append(k)
            own_v.append(v.unflatten(-1, (-1, layer.self_attn.head_dim)))
            out = self._attend(layer, index, q, self.asked)
            x = layer.finish(layer.residual(x, normed), out)
        self.k += 1
        return x

    def keep(self, kept: torch.Tensor) -> None:
        """Go on with a subset of the asked rows: `kept` int64 [R'] indexes the present ones, ascending."""
        self.asked = AskedRows(self.packing, self.asked.rows[kept])
        self._own = [([k[kept] for k in ks], [v[kept] for v in vs]) for ks, vs in self._own]

    def _project(
        self, layer: DraftLayer, normed: torch.Tensor, embedded: torch.Tensor, q_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Flat q, k, v; with `q_rows` queries are made for those rows alone."""
        attn = layer.self_attn
        if not layer.first:
            q = attn.q_proj(normed if q_rows is None else normed[q_rows])
            return q, attn.k_proj(normed), attn.v_proj(normed)
        split = self._sizes[0]
        if q_rows is None:
            return (F.linear(normed, self._w_state) + embedded).split(self._sizes, -1)
        kv = F.linear(normed, self._w_state[split:]) + embedded[:, split:]
        q = F.linear(normed[q_rows], self._w_state[:split]) + embedded[q_rows, :split]
        return q, *kv.split(self._sizes[1:], -1)

    def _heads(self, layer: DraftLayer, q, k, at_q, at_k):  # type: ignore[no-untyped-def]
        attn = layer.self_attn
        q, k = q.unflatten(-1, (-1, attn.head_dim)), k.unflatten(-1, (-1, attn.head_dim))
        if attn.q_norm is not None and attn.k_norm is not None:
            q, k = attn.q_norm(q), attn.k_norm(k)
        return rotate(q, *at_q), rotate(k, *at_k)

    def _attend(self, layer: DraftLayer, index: int, q: torch.Tensor, asked: AskedRows) -> torch.Tensor:
        """q [R, h, d] over step-0 keys (causal) and the row's own later keys -> [R, h*d]."""
        attn = layer.self_attn
        kv, group = attn.num_kv_heads, attn.num_heads // attn.num_kv_heads
        keys, values = self._first[index]  # [B, kv, d, longest], [B, kv, longest, d]
        window = self.draft.conventions.sliding_window
        own_k, own_v = (own[-window:] if window else own for own in self._own[index])
        q = (q * attn.head_dim**-0.5).unflatten(1, (kv, group))  # [R, kv, group, d]
        most = asked.grid.shape[1]
        laid = asked.lay(q).permute(0, 2, 3, 1, 4)  # [B, kv, group, most, d]
        scores = laid.flatten(2, 3) @ keys  # [B, kv, group*most, longest]
        scores = scores.unflatten(2, (group, most))
        places = torch.arange(keys.shape[-1], device=q.device)
        hidden = places > asked.limit[:, None, None, :, None]  # [B, 1, 1, most, longest]
        if window is not None:
            hidden = hidden | (places <= asked.limit[:, None, None, :, None] + self.k - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if own_k:
            own = torch.stack([(q * k.unsqueeze(2)).sum(-1) for k in own_k], -1)  # [R, kv, group, k]
            scores = torch.cat([scores, asked.lay(own).permute(0, 2, 3, 1, 4)], -1)
        weights = scores.softmax(-1)
        longest = keys.shape[-1]
        out = weights[..., :longest].flatten(2, 3) @ values  # [B, kv, group*most, d]
        out = asked.pick(out.unflatten(2, (group, most)).permute(0, 3, 1, 2, 4))  # [R, kv, group, d]
        if own_k:
            shares = asked.pick(weights[..., longest:].permute(0, 3, 1, 2, 4))  # [R, kv, group, k]
            for j, v in enumerate(own_v):
                out = out + shares[..., j : j + 1] * v.unsqueeze(2)
        return out.flatten(1)
