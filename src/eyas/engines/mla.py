"""Sizes of latent attention (MLA) in a draft's first layer, as DeepSeek's and Kimi's configs give them."""

from __future__ import annotations

from .hf_config import HfConfig


def mla_sizes(config: HfConfig) -> dict[str, tuple[int, ...]] | None:
    """Projection or norm -> shape of its weight; None without `q_lora_rank`, which no engine's draft class runs."""
    rank = config.get("q_lora_rank")
    if not rank:
        return None
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    kv, nope, rope, value = (
        config.whole(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return {
        "q_a_proj": (rank, 2 * hidden),
        "q_a_layernorm": (rank,),
        "q_b_proj": (heads * (nope + rope), rank),
        "kv_a_proj_with_mqa": (kv + rope, 2 * hidden),
        "kv_a_layernorm": (kv,),
        "kv_b_proj": (heads * (nope + value), kv),
        "o_proj": (hidden, heads * value),
    }
