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

from .attention import AskedRows, Packing, attend
from .model import Draft, DraftLayer

__all__ = ["Packing", "Unroll"]


class Unroll:
    """One unrolled pass. `start` runs step 0, each `step` the next; both return the outputs h [R, H] of asked rows.

    `ids` int64 [N], `aux` [N, T*Ht], `rows` int64 [R] ascending: rows i whose outputs are wanted (i + 1 < its
    document's end). Gradients flow through everything but `ids`.
    """

    def __init__(self, draft: Draft, packing: Packing, rows: torch.Tensor) -> None:
        self.draft, self.packing = draft, packing
        self.asked = AskedRows(packing, rows)
        self._own: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in draft.all_layers()]  # [R, kv, d]
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []  # step-0 keys and values [B * kv, longest, d]
        self.k = 0
        layer = draft.midlayer
        size, wide = draft.shape.hidden_size, layer.self_attn.inputs()
        weight = torch.cat([projection.weight for projection in wide])  # [(h + 2 kv) d, 2H]
        halves = (weight[:, :size], weight[:, size:])
        self._w_embed, self._w_state = halves if layer.embedding_first else halves[::-1]
        self._sizes = [len(projection.weight) for projection in wide]
        self._bias = None
        if any(projection.bias is not None for projection in wide):
            zeros = [weight.new_zeros(n) for n in self._sizes]
            self._bias = torch.cat([z if p.bias is None else p.bias for p, z in zip(wide, zeros, strict=True)])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The embedding's share of what the first layer's attention reads (of q, k, v): it depends on the token alone,
        so one call serves every step."""
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
            flat_q, *flat = self._project(layer, normed, embedded, None if not last else rows)
            q = layer.self_attn.queries(flat_q, cos[out_rows], sin[out_rows])
            k, v = layer.self_attn.keys(flat, cos, sin)
            self._first.append((self.packing.lay(k.to(v.dtype)), self.packing.lay(v)))
            asked = self.asked if last else AskedRows(self.packing, everything)
            out = self._attend(layer, index, q, asked)
            residual = layer.residual(x, normed)
            x = layer.finish(residual.index_select(0, rows) if last else residual, out)
        self.k = 1
        return x

    def step(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Step k >= 1 for the asked rows: embedded [R, (h+2kv)d] of x_{i+1+k}, state [R, H] from `Draft.feedback`."""
        step = self.k * self.draft.conventions.rope_step
        cos, sin = self.draft.angles(self.packing.position[self.asked.rows] + step)
        x = state
        for index, layer in enumerate(self.draft.all_layers()):
            normed = layer.hidden_norm(x)
            flat_q, *flat = self._project(layer, normed, embedded, None)
            q = layer.self_attn.queries(flat_q, cos, sin)
            self._own[index].append(layer.self_attn.keys(flat, cos, sin))
            out = self._attend(layer, index, q, self.asked)
            x = layer.finish(layer.residual(x, normed), out)
        self.k += 1
        return x

    def keep(self, kept: torch.Tensor) -> None:
        """Go on with a subset of the asked rows: `kept` int64 [R'] indexes the present ones, ascending."""
        self.asked = AskedRows(self.packing, self.asked.rows[kept])
        self._own = [[(k.index_select(0, kept), v.index_select(0, kept)) for k, v in own] for own in self._own]

    def _project(
        self, layer: DraftLayer, normed: torch.Tensor, embedded: torch.Tensor, q_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Outputs of the layer's input projections; with `q_rows` that for queries is made for those rows alone."""
        if not layer.first:
            first, *others = layer.self_attn.inputs()
            q = first(normed if q_rows is None else normed.index_select(0, q_rows))
            return q, *(projection(normed) for projection in others)
        split = self._sizes[0]
        if q_rows is None:
            return (F.linear(normed, self._w_state) + embedded).split(self._sizes, -1)
        kv = F.linear(normed, self._w_state[split:]) + embedded[:, split:]
        q = F.linear(normed.index_select(0, q_rows), self._w_state[:split]) + embedded[:, :split].index_select(
            0, q_rows
        )
        return q, *kv.split(self._sizes[1:], -1)

    def _attend(self, layer: DraftLayer, index: int, q: torch.Tensor, asked: AskedRows) -> torch.Tensor:
        """q [R, h, d] over step-0 keys (causal) and the row's own later keys -> [R, h*d]."""
        keys, values = self._first[index]
        return attend(q, keys, values, self._own[index], asked, self.draft.conventions.sliding_window)
