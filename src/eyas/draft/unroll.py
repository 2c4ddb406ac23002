"""Unrolling a draft over packed documents: the same rows at steps 0, 1, ... K-1, as training and replay need them.

Row i, step k reads the token x_{i+1+k} and the output of row i at step k-1, and attends to the step-0 keys of rows
<= i of its document and to the keys of its own row at steps 1..k (design.md, section 3). Two facts make it cheap:
a row that nobody asks about matters only through its step-0 key and value in the last layer, and after step 0 rows do
not see each other at all. So documents lie packed without padding, projections run on exactly the rows that matter, and
only the attention scores are laid out per document.   Exercise it:  pytest tests/test_draft_model.py

Shapes: N tokens of all documents, R asked rows, B documents, h heads, kv key heads, d head_dim, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .attention import AskedRows, Packing, attend
from .model import Draft, DraftLayer

__all__ = ["Packing", "Unroll"]

KeysValues = tuple[torch.Tensor, torch.Tensor]
# Weights of q, k, v are joined for one product instead of three, up to so many numbers. For a draft 7,168 wide the copy
# and what its gradient takes would be 2.4 GB, and its products are large enough by themselves.
JOINED = 1 << 26


class Unroll:
    """One unrolled pass. `start` runs step 0, each `step` the next; both return the outputs h [R, H] of asked rows.

    `ids` int64 [N], `aux` [N, T*Ht], `rows` int64 [R] ascending: rows i whose outputs are wanted (i + 1 < its
    document's end). Gradients flow through everything but `ids`. recompute: of each step only inputs, outputs, keys and
    values are kept for the backward pass, which runs the step again.
    """

    def __init__(self, draft: Draft, packing: Packing, rows: torch.Tensor, recompute: bool = False) -> None:
        self.draft, self.packing, self.recompute = draft, packing, recompute
        self.asked = AskedRows(packing, rows)
        self._own: list[list[KeysValues]] = [[] for _ in draft.all_layers()]  # [R, kv, d]
        self._first: list[KeysValues] = []  # step-0 keys and values [B * kv, longest, d]
        self.k = 0
        layer = draft.midlayer
        size, wide = draft.shape.hidden_size, layer.self_attn.inputs()
        self._sizes = [len(projection.weight) for projection in wide]
        weights: list[torch.Tensor] = [projection.weight for projection in wide]
        biases: list[torch.Tensor | None] = [projection.bias for projection in wide]
        if any(bias is not None for bias in biases):
            zeros = [weight.new_zeros(n) for weight, n in zip(weights, self._sizes, strict=True)]
            biases = [zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)]
        if sum(w.numel() for w in weights) <= JOINED:
            weights = [torch.cat(weights)]  # [(h + 2 kv) d, 2H]
            held = [bias for bias in biases if bias is not None]  # all or none
            biases = [torch.cat(held) if held else None]
        # split makes one gradient of both halves; a slice each would make two of full size
        halves = [w.split(size, 1) for w in weights]
        first = 0 if layer.embedding_first else 1
        self._w_embed, self._w_state = [h[first] for h in halves], [h[1 - first] for h in halves]
        self._biases = biases

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The embedding's share of what the first layer's attention reads (of q, k, v): it depends on the token alone,
        so one call serves every step."""
        normed = self.draft.midlayer.input_layernorm(self.draft.embed(ids))
        parts = [F.linear(normed, w, b) for w, b in zip(self._w_embed, self._biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def start(self, embedded: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        """Step 0. embedded [N, (h+2kv)d]: row i's entry is that of its input token x_{i+1}; aux [N, T*Ht] -> [R, H]."""
        x, self._first = self._run(self._start, embedded, aux, self.asked)
        self.k = 1
        return x

    def step(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Step k >= 1 for the asked rows: embedded [R, (h+2kv)d] of x_{i+1+k}, state [R, H] from `Draft.feedback`."""
        x, self._own = self._run(self._step, embedded, state, self.asked, self._own, self.k)
        self.k += 1
        return x

    def keep(self, kept: torch.Tensor) -> None:
        """Go on with a subset of the asked rows: `kept` int64 [R'] indexes the present ones, ascending."""
        self.asked = AskedRows(self.packing, self.asked.rows[kept])
        self._own = [[(k.index_select(0, kept), v.index_select(0, kept)) for k, v in own] for own in self._own]

    def _run(self, step: Callable[..., Any], *given: Any) -> Any:
        """`step` must change nothing of this object: it may run twice."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(step, *given, use_reentrant=False, preserve_rng_state=False)
        return step(*given)

    def _start(
        self, embedded: torch.Tensor, aux: torch.Tensor, asked: AskedRows
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        draft, rows, first = self.draft, asked.rows, []
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
            first.append((self.packing.lay(k.to(v.dtype)), self.packing.lay(v)))
            out = self._attend(q, first[-1], [], asked if last else AskedRows(self.packing, everything))
            residual = layer.residual(x, normed)
            x = layer.finish(residual.index_select(0, rows) if last else residual, out)
        return x, first

    def _step(
        self, embedded: torch.Tensor, state: torch.Tensor, asked: AskedRows, own: list[list[KeysValues]], k: int
    ) -> tuple[torch.Tensor, list[list[KeysValues]]]:
        cos, sin = self.draft.angles(self.packing.position[asked.rows] + k * self.draft.conventions.rope_step)
        x, grown = state, []
        for index, layer in enumerate(self.draft.all_layers()):
            normed = layer.hidden_norm(x)
            flat_q, *flat = self._project(layer, normed, embedded, None)
            q = layer.self_attn.queries(flat_q, cos, sin)
            key, value = layer.self_attn.keys(flat, cos, sin)
            grown.append([*own[index], (key.to(value.dtype), value)])
            out = self._attend(q, self._first[index], grown[-1], asked)
            x = layer.finish(layer.residual(x, normed), out)
        return x, grown

    def _project(
        self, layer: DraftLayer, normed: torch.Tensor, embedded: torch.Tensor, q_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Outputs of the layer's input projections; with `q_rows` that for queries is made for those rows alone."""
        if not layer.first:
            first, *others = layer.self_attn.inputs()
            q = first(normed if q_rows is None else normed.index_select(0, q_rows))
            return q, *(projection(normed) for projection in others)
        split = self._sizes[0]
        if len(self._w_state) > 1:
            shares, inputs = list(embedded.split(self._sizes, -1)), [normed] * len(self._sizes)
            if q_rows is not None:
                shares[0], inputs[0] = shares[0].index_select(0, q_rows), normed.index_select(0, q_rows)
            return tuple(F.linear(x, w) + e for x, w, e in zip(inputs, self._w_state, shares, strict=True))
        weight = self._w_state[0]
        if q_rows is None:
            return (F.linear(normed, weight) + embedded).split(self._sizes, -1)
        kv = F.linear(normed, weight[split:]) + embedded[:, split:]
        q = F.linear(normed.index_select(0, q_rows), weight[:split]) + embedded[:, :split].index_select(0, q_rows)
        return q, *kv.split(self._sizes[1:], -1)

    def _attend(self, q: torch.Tensor, first: KeysValues, own: list[KeysValues], asked: AskedRows) -> torch.Tensor:
        """q [R, h, d] over step-0 keys (causal) and the row's own later keys -> [R, h*d]."""
        return attend(q, *first, own, asked, self.draft.conventions.sliding_window)
