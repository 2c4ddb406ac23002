"""The draft model of the EAGLE-3 contract (design.md, section 3), in plain PyTorch.   pytest tests/test_draft_model.py

Parameters carry the names of the canonical checkpoint: `fc`, `midlayer.*` (the first layer, whose q, k, v read
`[input_layernorm(e); hidden_norm(g)]`, width 2H), `layers.N.*` for any further layer (width H), `norm`, `lm_head`.
Decoding goes through `Draft.step` with a `KVCache`; training unrolls the same modules in `draft/unroll.py`.
Shapes: B batch, S rows, H hidden, T taps, h heads, kv key heads, d head_dim, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ..conventions import Conventions
from ..errors import BadInput
from .functions import RMSNorm, gated, rotate
from .latent import LatentAttention
from .rope import draft_frequencies
from .shape import DraftShape


class KVCache:
    """Keys and values of every layer, appended in place; `truncate` forgets the newest rows (keys of steps >= 1).

    Buffers are [B, kv, capacity, d] and grow by doubling.
    """

    def __init__(self, num_layers: int) -> None:
        self._kv: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._length = [0] * num_layers

    @property
    def length(self) -> int:
        """Rows held by every layer."""
        return self._length[-1]

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows."""
        self._length = [min(length, n) for n in self._length]

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k, v [B, kv, S, d]; returns all keys and values so far [B, kv, length, d]."""
        start, end = self._length[layer], self._length[layer] + k.shape[2]
        held = self._kv[layer]
        if held is None or held[0].shape[2] < end:
            size = max(64, 2 * end)
            grown = tuple(torch.empty(*x.shape[:2], size, x.shape[3], dtype=x.dtype, device=x.device) for x in (k, v))
            if held is not None:
                for new, old in zip(grown, held, strict=True):
                    new[:, :, :start] = old[:, :, :start]
            held = self._kv[layer] = (grown[0], grown[1])
        held[0][:, :, start:end], held[1][:, :, start:end] = k, v
        self._length[layer] = end
        return held[0][:, :, :end], held[1][:, :, :end]


class Attention(nn.Module):
    """Grouped-query attention whose q, k, v read `width` features."""

    def __init__(self, shape: DraftShape, conventions: Conventions, width: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        q, kv, bias = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, conventions.attention_bias
        self.q_proj = nn.Linear(width, q, bias=bias)
        self.k_proj = nn.Linear(width, kv, bias=bias)
        self.v_proj = nn.Linear(width, kv, bias=bias)
        self.o_proj = nn.Linear(q, shape.hidden_size, bias=bias)
        eps = conventions.rms_norm_eps
        self.q_norm = RMSNorm(shape.head_dim, eps, conventions.rms_norm_offset) if conventions.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, eps, conventions.rms_norm_offset) if conventions.qk_norm else None

    def inputs(self) -> list[nn.Linear]:
        """The projections of the layer's input: the one for queries first."""
        return [self.q_proj, self.k_proj, self.v_proj]

    def queries(self, flat: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Flat projection [..., h * d] -> per head [..., h, d], normed if the draft does so, rotated."""
        q = flat.unflatten(-1, (-1, self.head_dim))
        return rotate(q if self.q_norm is None else self.q_norm(q), cos, sin)

    def keys(
        self, flat: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the other projections, each [..., kv * d] -> keys and values [..., kv, d]."""
        k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in flat)
        k = rotate(k if self.k_norm is None else self.k_norm(k), cos, sin)
        return k, v

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """What was attended [..., h * d] -> [..., H]."""
        return self.o_proj(attended)


class MLP(nn.Module):
    """Gated MLP as in Llama."""

    def __init__(self, shape: DraftShape, conventions: Conventions) -> None:
        super().__init__()
        h, i, bias = shape.hidden_size, shape.intermediate_size, conventions.mlp_bias
        self.gate_proj, self.up_proj = nn.Linear(h, i, bias=bias), nn.Linear(h, i, bias=bias)
        self.down_proj = nn.Linear(i, h, bias=bias)
        if conventions.hidden_act not in ACTIVATIONS:
            raise BadInput(
                f"hidden_act = {conventions.hidden_act!r}: Eyas knows {sorted(ACTIVATIONS)}; correct hidden_act in "
                "the config"
            )
        self.act = ACTIVATIONS[conventions.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(gated(self.act, self.gate_proj(x), self.up_proj(x)))


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class DraftLayer(nn.Module):
    """One decoder layer. The first reads embedding and state; the others read the stream, as any Llama layer."""

    def __init__(self, shape: DraftShape, conventions: Conventions, first: bool) -> None:
        super().__init__()
        size, eps, offset = shape.hidden_size, conventions.rms_norm_eps, conventions.rms_norm_offset
        self.first = first
        self.norm_before_residual = conventions.norm_before_residual
        self.embedding_first = conventions.layer_input == "embedding_state"
        if first:
            self.input_layernorm = RMSNorm(size, eps, offset)  # on the embedding
        self.hidden_norm = RMSNorm(size, eps, offset)  # on the state
        self.post_attention_layernorm = RMSNorm(size, eps, offset)
        attention = LatentAttention if conventions.attention == "mla" else Attention
        self.self_attn = attention(shape, conventions, 2 * size if first else size)
        self.mlp = MLP(shape, conventions)

    def residual(self, state: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Where the residual stream starts."""
        return normed if self.first and self.norm_before_residual else state

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Everything after attention: attended [..., h*d] -> output state [..., H]."""
        h = residual + self.self_attn.output(attended)
        return h + self.mlp(self.post_attention_layernorm(h))


class Draft(nn.Module):
    """An EAGLE-3 draft: `shape` gives the sizes, `conventions` the meaning. Weights start random.

    `embed_tokens` is None until `set_embedding`; it is the target's table [V, H] (frozen, not part of the state dict)
    unless `conventions.embedding == "own"`. Raises BadInput for conventions that this module does not run.
    """

    def __init__(self, shape: DraftShape, conventions: Conventions) -> None:
        super().__init__()
        if len(conventions.taps) != shape.num_taps:
            raise BadInput(
                f"taps {list(conventions.taps)} are {len(conventions.taps)}, but fc is {shape.num_taps} taps wide; "
                "name as many taps"
            )
        self.shape, self.conventions = shape, conventions
        c, size, eps = conventions, shape.hidden_size, conventions.rms_norm_eps
        wide = shape.num_taps * shape.target_hidden_size
        self.fc = nn.Linear(wide, size, bias=c.fc_bias)
        self.input_norm = RMSNorm(wide, eps, c.rms_norm_offset) if c.norm_before_fc else None
        slices = shape.num_taps if c.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(shape.target_hidden_size, eps, c.rms_norm_offset) for _ in range(slices))
        self.midlayer = DraftLayer(shape, c, first=True)
        self.layers = nn.ModuleDict({str(i): DraftLayer(shape, c, first=False) for i in range(1, shape.num_layers)})
        self.norm = RMSNorm(size, eps, c.rms_norm_offset)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        self.embed_tokens: nn.Embedding | None = None
        inv_freq, self._rope_factor = draft_frequencies(shape, c)
        self.register_buffer("_inv_freq", inv_freq, persistent=False)
        self._inv_freq: torch.Tensor

    def set_embedding(self, weight: torch.Tensor, trainable: bool = False) -> None:
        """Use `weight` [V, H] as the embedding table. Raises BadInput when its size differs from the shape."""
        expected = (self.shape.vocab_size, self.shape.hidden_size)
        if tuple(weight.shape) != expected:
            raise BadInput(f"embedding is {list(weight.shape)}, this draft needs {list(expected)}")
        self.embed_tokens = nn.Embedding.from_pretrained(weight, freeze=not trainable)

    def all_layers(self) -> list[DraftLayer]:
        """First to last."""
        return [self.midlayer, *self.layers.values()]  # type: ignore[list-item]

    def owned_state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors that belong in a checkpoint: all but an embedding that is the target's."""
        own = self.conventions.embedding == "own"
        return {k: v for k, v in self.state_dict().items() if own or not k.startswith("embed_tokens.")}

    def load_owned(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set what `owned_state_dict` holds. Raises RuntimeError, naming them, for missing and unknown tensors."""
        borrowed = self.state_dict().keys() - self.owned_state_dict().keys()
        self.load_state_dict({**tensors, **{name: self.get_parameter(name) for name in borrowed}})

    def new_cache(self) -> KVCache:
        """An empty cache for this draft."""
        return KVCache(self.shape.num_layers)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows of target ids, scaled as the conventions say. int64 [...] -> [..., H]."""
        if self.embed_tokens is None:
            raise BadInput("this draft has no embedding table yet: load it with its target")
        rows = F.embedding(ids, self.embed_tokens.weight).to(self.fc.weight.dtype)
        return rows * self.conventions.embedding_scale if self.conventions.embedding_scale != 1 else rows

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Aux states, taps ascending [..., T*Ht] -> g [..., H]. Step 0 only."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        elif len(self.fc_norm):
            parts = aux.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            aux = torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [..., rot/2] for int positions [...]."""
        angle = (positions + self.conventions.rope_offset).float().unsqueeze(-1) * self._inv_freq
        dtype = self.fc.weight.dtype
        return (angle.cos() * self._rope_factor).to(dtype), (angle.sin() * self._rope_factor).to(dtype)

    def feedback(self, h: torch.Tensor) -> torch.Tensor:
        """The state that the next step reads: h, or norm(h) under `norm_output`."""
        return self.norm(h) if self.conventions.norm_output else h

    def head_input(self, h: torch.Tensor) -> torch.Tensor:
        """What the head reads of a layer output [..., H]: normed, and scaled so that its product is the logits."""
        x = self.norm(h) if self.conventions.norm_before_head else h
        return x * self.conventions.logit_scale if self.conventions.logit_scale != 1 else x

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Layer output [..., H] -> logits over the draft vocabulary [..., D]."""
        return self.lm_head(self.head_input(h))

    def step(
        self,
        embeds: torch.Tensor,
        state: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run S rows through the layers: embeds, state [B, S, H], positions int [S] or [B, S] -> output h [B, S, H].

        Rows attend to everything in `cache` and causally to each other, and are appended to it. So at step 0 pass the
        new rows (the states from `fuse`); at steps >= 1 pass one row (the state from `feedback`) and `truncate`
        the cache to the step-0 rows after the round. mask: bool [B, length + S], False where a sequence of a batch
        must not look (its rejected rows); None where there is no such slot. Rows that do not follow each other (a
        tree's) bring a mask [B, S, length + S] that says all of it, order and window too.
        """
        cos, sin = self.angles(positions)
        x = state
        for index, layer in enumerate(self.all_layers()):
            attn = layer.self_attn
            normed = layer.hidden_norm(x)
            wide = normed
            if layer.first:
                halves = [layer.input_layernorm(embeds), normed]
                wide = torch.cat(halves if layer.embedding_first else halves[::-1], -1)  # [B, S, 2H]
            flat_q, *flat = (projection(wide) for projection in attn.inputs())
            q, (k, v) = attn.queries(flat_q, cos, sin), attn.keys(flat, cos, sin)
            past = cache._length[index]
            keys, values = cache.extend(index, k.transpose(1, 2), v.transpose(1, 2))
            if mask is not None and mask.ndim == 3:
                seen = mask[:, None]  # [B, 1, S, length]
            else:
                rows = torch.arange(past, past + q.shape[1], device=q.device)
                places = torch.arange(keys.shape[2], device=q.device)
                seen = places <= rows[:, None]  # [S, length]
                if self.conventions.sliding_window is not None:
                    seen &= places > rows[:, None] - self.conventions.sliding_window
                if mask is not None:
                    seen = seen & mask[:, None, None, :]  # [B, 1, S, length]
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=attn.num_heads != attn.num_kv_heads
            )
            x = layer.finish(layer.residual(x, normed), out.transpose(1, 2).flatten(-2))
        return x
