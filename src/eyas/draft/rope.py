"""Rotary frequencies of a draft; `functions.rotate` applies them.   pytest tests/test_draft_model.py"""

from __future__ import annotations

import torch

from ..conventions import Conventions


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
