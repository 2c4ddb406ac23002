"""Rotary frequencies of a draft; `functions.rotate` applies them.   pytest tests/test_draft_model.py"""

from __future__ import annotations

import math

import torch

from ..conventions import Conventions
from .shape import DraftShape


def draft_frequencies(shape: DraftShape, conventions: Conventions) -> tuple[torch.Tensor, float]:
    """`(inv_freq float32 [rot/2], factor on cos and sin)` of a draft; raises ValueError as `inverse_frequencies`.

    Under latent attention the rotated slice alone counts, and YaRN's factor follows DeepSeek's rule (vLLM 0.32.0
    layers/rotary_embedding/deepseek_scaling_rope.py:52), which transformers has where both mscales are named, or none.
    """
    if shape.mla is None:
        return inverse_frequencies(conventions, shape.head_dim)
    size = shape.mla.qk_rope_head_dim
    if conventions.rope_type == "none":  # Kimi K3: nothing is rotated
        return torch.zeros(size // 2, device="cpu"), 1.0
    inv_freq, factor = inverse_frequencies(conventions, size)
    told = conventions.rope_scaling
    if conventions.rope_type == "yarn" and told.get("attention_factor") is None:
        factor = _mscale(told["factor"], told.get("mscale", 1)) / _mscale(told["factor"], told.get("mscale_all_dim", 0))
    return inv_freq, factor


def latent_scale(conventions: Conventions) -> float:
    """Factor on the scores of latent attention beside 1 / sqrt(width of a query).

    Under YaRN the square of the mscale of all dimensions (vLLM 0.32.0 models/deepseek_v2.py, "scaling * mscale *
    mscale"; transformers 5.19 modeling_deepseek_v3.py).
    """
    told = conventions.rope_scaling
    if conventions.rope_type != "yarn" or not told.get("mscale_all_dim") or "factor" not in told:
        return 1.0
    return _mscale(told["factor"], told["mscale_all_dim"]) ** 2


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def inverse_frequencies(conventions: Conventions, head_dim: int) -> tuple[torch.Tensor, float]:
    """`(inv_freq float32 [rot/2], attention factor)`; kinds other than default come from transformers.

    Raises ValueError for a RoPE kind that transformers does not know.
    """
    rot = int(head_dim * conventions.partial_rotary_factor) // 2 * 2
    if conventions.rope_type == "default":
        exponent = torch.arange(0, rot, 2, dtype=torch.float64, device="cpu") / rot
        return (1.0 / conventions.rope_theta**exponent).float(), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if conventions.rope_type not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"conventions.rope_type = {conventions.rope_type!r}: known are default, {sorted(ROPE_INIT_FUNCTIONS)}"
        )
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=conventions.max_position,
        rope_parameters={
            "rope_type": conventions.rope_type,
            "rope_theta": conventions.rope_theta,
            "partial_rotary_factor": conventions.partial_rotary_factor,
            **conventions.rope_scaling,
        },
    )
    with torch.device("cpu"):  # transformers computes with numbers, also where a module is built without memory
        inv_freq, factor = ROPE_INIT_FUNCTIONS[conventions.rope_type](config, torch.device("cpu"))
    return inv_freq.float(), float(factor)
