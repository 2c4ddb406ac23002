"""Names and shapes of a draft's tensors, from its sizes and conventions alone: what a checkpoint must hold.

The same as the state dict of `model.Draft` (pytest tests/test_expected.py), without building it and without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..conventions import Conventions
from .dialects.common import Reading
from .dialects.keys import MAPS
from .shape import DraftShape


def expected_tensors(shape: DraftShape, c: Conventions) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape; neither the embedding nor the maps, which may lie elsewhere."""
    s = shape
    h, inter, q, kv = s.hidden_size, s.intermediate_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    wide = s.num_taps * s.target_hidden_size
    out: dict[str, tuple[int, ...]] = {"fc.weight": (h, wide)}
    if c.fc_bias:
        out["fc.bias"] = (h,)
    if c.norm_before_fc:
        out["input_norm.weight"] = (wide,)
    if c.fc_norm:
        out |= {f"fc_norm.{i}.weight": (s.target_hidden_size,) for i in range(s.num_taps)}
    for layer in range(s.num_layers):
        prefix, width = ("midlayer.", 2 * h) if layer == 0 else (f"layers.{layer}.", h)
        if layer == 0:
            out[prefix + "input_layernorm.weight"] = (h,)
        out[prefix + "hidden_norm.weight"] = (h,)
        out[prefix + "post_attention_layernorm.weight"] = (h,)
        for name, rows, columns in (("q", q, width), ("k", kv, width), ("v", kv, width), ("o", h, q)):
            out[f"{prefix}self_attn.{name}_proj.weight"] = (rows, columns)
            if c.attention_bias and name != "o":
                out[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        if c.attention_bias:
            out[prefix + "self_attn.o_proj.bias"] = (h,)
        if c.qk_norm:
            out |= {f"{prefix}self_attn.{name}_norm.weight": (s.head_dim,) for name in "qk"}
        for name, rows, columns in (("gate", inter, h), ("up", inter, h), ("down", h, inter)):
            out[f"{prefix}mlp.{name}_proj.weight"] = (rows, columns)
            if c.mlp_bias:
                out[f"{prefix}mlp.{name}_proj.bias"] = (rows,)
    return out | {"norm.weight": (h,), "lm_head.weight": (s.draft_vocab_size, h)}


@dataclass(frozen=True)
class Inventory:
    """What a checkpoint holds against what its sizes and conventions ask for; canonical names, sorted."""

    missing: dict[str, tuple[int, ...]]
    """Name -> expected shape."""
    unknown: list[str]
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Name -> (shape in the file, expected shape)."""

    @classmethod
    def of(cls, reading: Reading) -> Inventory:
        """Compare by headers alone; the embedding and the maps are other checks' matter."""
        wanted = expected_tensors(reading.shape, reading.conventions)
        held = {name: source.shape for name, source in reading.canonical.sources.items()}
        return cls(
            {name: wanted[name] for name in sorted(wanted.keys() - held.keys())},
            sorted(held.keys() - wanted.keys() - set(MAPS) - {"embed_tokens.weight"}),
            {n: (held[n], wanted[n]) for n in sorted(held.keys() & wanted.keys()) if held[n] != wanted[n]},
        )
