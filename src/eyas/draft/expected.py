"""Names and shapes of a draft's tensors, from its sizes and conventions alone: what a checkpoint must hold.

The same as the state dict of `model.Draft` (pytest tests/test_expected.py), without building it and without torch; and
beyond it for latent attention (MLA), which Eyas describes but does not run.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..conventions import Conventions
from .dialects.common import Reading
from .dialects.keys import MAPS
from .shape import DraftShape, MlaShape

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(shape: DraftShape, c: Conventions) -> Shapes:
    """Canonical name -> shape; neither the embedding nor the maps, which may lie elsewhere."""
    s = shape
    h, inter, wide = s.hidden_size, s.intermediate_size, s.num_taps * s.target_hidden_size
    out: Shapes = {"fc.weight": (h, wide)}
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
        attention = _latent(s, s.mla, c, width) if s.mla else _grouped(s, c, width)
        out |= {f"{prefix}self_attn.{name}": size for name, size in attention.items()}
        for name, rows, columns in (("gate", inter, h), ("up", inter, h), ("down", h, inter)):
            out[f"{prefix}mlp.{name}_proj.weight"] = (rows, columns)
            if c.mlp_bias:
                out[f"{prefix}mlp.{name}_proj.bias"] = (rows,)
    return out | {"norm.weight": (h,), "lm_head.weight": (s.draft_vocab_size, h)}


def _grouped(s: DraftShape, c: Conventions, width: int) -> Shapes:
    """Attention with one projection each for queries, keys and values, over an input of `width`."""
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    out: Shapes = {}
    for name, rows, columns in (("q", q, width), ("k", kv, width), ("v", kv, width), ("o", s.hidden_size, q)):
        out[f"{name}_proj.weight"] = (rows, columns)
        if c.attention_bias:
            out[f"{name}_proj.bias"] = (rows,)
    if c.qk_norm:
        out |= {f"{name}_norm.weight": (s.head_dim,) for name in "qk"}
    return out


def _latent(s: DraftShape, mla: MlaShape, c: Conventions, width: int) -> Shapes:
    """MLA (vLLM 0.32 deepseek_eagle3.py; biases as transformers' DeepSeek classes have them)."""
    q, values = s.num_heads * mla.qk_head_dim, s.num_heads * mla.v_head_dim
    down = mla.kv_lora_rank + mla.qk_rope_head_dim  # the latent, and the key slice that all heads share
    out: Shapes = {"q_proj.weight": (q, width)}
    if mla.q_lora_rank is not None:
        rank = mla.q_lora_rank
        out = {"q_a_proj.weight": (rank, width), "q_a_layernorm.weight": (rank,), "q_b_proj.weight": (q, rank)}
    out |= {
        "kv_a_proj_with_mqa.weight": (down, width),
        "kv_a_layernorm.weight": (mla.kv_lora_rank,),
        "kv_b_proj.weight": (s.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "o_proj.weight": (s.hidden_size, values),
    }
    if mla.output_gate:
        out["g_proj.weight"] = (values, width)
    if c.attention_bias:
        biased = {"kv_a_proj_with_mqa.bias": (down,), "o_proj.bias": (s.hidden_size,)}
        out |= biased if mla.q_lora_rank is None else {"q_a_proj.bias": (mla.q_lora_rank,), **biased}
    return out


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
