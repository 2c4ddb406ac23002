"""Latent attention (MLA) of DeepSeek's and Kimi's drafts, multiplied out: every head gets its own keys and values.

Queries come from a low-rank projection (or one `q_proj`), keys and values from one latent that all heads share, and a
slice of each query meets one rotated key slice, shared as well (DeepSeek-V2, arXiv 2405.04434, section 2.1; vLLM 0.32.0
models/deepseek_v2.py, DeepseekV2MLAAttention). Engines keep the latent and fold `kv_b_proj` into queries and outputs;
the numbers are the same, and here they only judge drafts, so the plain form serves.
    Exercise it:  pytest tests/test_draft_latent.py

It offers what `model.Attention` does. Queries, keys and values are padded to one width d, so that whoever attends needs
to know neither that values are narrower nor what their scale is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ..conventions import Conventions
from ..errors import BadInput
from .functions import RMSNorm, rotate
from .rope import latent_scale
from .shape import DraftShape


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values are made of latents; its input has `width` features."""

    def __init__(self, shape: DraftShape, conventions: Conventions, width: int) -> None:
        super().__init__()
        mla = shape.mla
        if mla is None:
            raise BadInput(
                "conventions.attention is 'mla', but the draft's shape has no `mla` sizes; give them, or correct "
                "`attention`"
            )
        if mla.output_gate:
            raise BadInput(
                "this draft gates what attention gives (g_proj, Kimi K3), which Eyas does not run; serve it with "
                "SGLang or vLLM, or train a draft without the gate"
            )
        self.sizes, self.rank = mla, mla.kv_lora_rank
        self.num_heads = self.num_kv_heads = shape.num_heads
        self.head_dim = max(mla.qk_head_dim, mla.v_head_dim)  # d
        # Whoever attends divides by sqrt(d); a query is scaled by what is left of its own factor.
        self.scale = latent_scale(conventions) * (self.head_dim / mla.qk_head_dim) ** 0.5
        heads, eps, bias = shape.num_heads, conventions.rms_norm_eps, conventions.attention_bias
        offset = conventions.rms_norm_offset
        if mla.q_lora_rank is None:
            self.q_proj = nn.Linear(width, heads * mla.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, mla.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, eps, offset)
            self.q_b_proj = nn.Linear(mla.q_lora_rank, heads * mla.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, eps, offset)
        self.kv_b_proj = nn.Linear(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * mla.v_head_dim, shape.hidden_size, bias=bias)

    def inputs(self) -> list[nn.Linear]:
        """The projections of the layer's input: the one for queries first."""
        return [self.q_proj if self.sizes.q_lora_rank is None else self.q_a_proj, self.kv_a_proj_with_mqa]

    def queries(self, flat: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Output [..., n] of the first projection -> queries [..., h, d]."""
        if self.sizes.q_lora_rank is not None:
            flat = self.q_b_proj(self.q_a_layernorm(flat))
        q = flat.unflatten(-1, (self.num_heads, -1))
        still, turning = q.split([self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim], -1)
        q = torch.cat([still, self._rotated(turning, cos, sin)], -1)
        return self._padded(q * self.scale)

    def keys(
        self, flat: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of the other projection, [..., rank + rope] -> keys and values [..., h, d]."""
        latent, turning = flat[0].split([self.rank, self.sizes.qk_rope_head_dim], -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        still, values = both.split([self.sizes.qk_nope_head_dim, self.sizes.v_head_dim], -1)
        shared = self._rotated(turning.unsqueeze(-2), cos, sin)  # [..., 1, rope]: one slice for all heads
        keys = torch.cat([still, shared.expand(*still.shape[:-1], -1)], -1)
        return self._padded(keys), self._padded(values)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """What was attended [..., h * d] -> [..., H]."""
        per_head = attended.unflatten(-1, (self.num_heads, -1))[..., : self.sizes.v_head_dim]
        return self.o_proj(per_head.flatten(-2))

    def _rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Pairs of neighbours are laid out as halves first: both sides of a product alike, so it stays what it was."""
        if self.sizes.rope_interleave:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x, cos, sin)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, self.head_dim - x.shape[-1])) if x.shape[-1] < self.head_dim else x
