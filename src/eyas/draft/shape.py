"""The sizes of a draft. With `Conventions`, all that is needed to build the module."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

# Far beyond any draft. A config may name any number, and readers make lists as long as these.
MOST_LAYERS = 256
MOST_TAPS = 64
MOST_TOKENS = 1 << 24
FLAGS = ("output_gate", "rope_interleave")


@dataclass(frozen=True)
class MlaShape:
    """Latent attention (DeepSeek, Kimi): queries, keys and values come from low-rank projections of the layer's input.

    Raises ValueError naming the field for impossible sizes.
    """

    q_lora_rank: int | None  # None: one q_proj instead of q_a_proj, q_b_proj
    kv_lora_rank: int
    qk_nope_head_dim: int  # of a query and a key, without rotation
    qk_rope_head_dim: int  # rotated; one key slice is shared by all heads
    v_head_dim: int
    output_gate: bool = False
    """`g_proj` gates what attention gives, before `o_proj` (Kimi K3)."""
    rope_interleave: bool = True
    """Rotated pairs are neighbours, as every engine's draft class has it; else halves (`rope_interleave: false`)."""

    def __post_init__(self) -> None:
        _check_sizes(self, "draft shape: mla.")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"draft shape: mla.{name} = {getattr(self, name)!r} must be true or false")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"draft shape: mla.qk_rope_head_dim = {self.qk_rope_head_dim} must be even for RoPE")

    @property
    def qk_head_dim(self) -> int:
        """Width of one query, and of one key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class DraftShape:
    """Sizes only; what they mean is in `Conventions`. Raises ValueError naming the field for impossible sizes."""

    hidden_size: int  # H of the draft
    target_hidden_size: int  # H of the target: width of one tap
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # under MLA qk_nope_head_dim + qk_rope_head_dim
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # D
    num_taps: int = 3
    num_layers: int = 1
    mla: MlaShape | None = None
    """Where `Conventions.attention` is "mla"."""

    def __post_init__(self) -> None:
        _check_sizes(self, "draft shape: ")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"draft shape: {self.num_heads} heads do not divide into {self.num_kv_heads} key heads")
        if self.head_dim % 2:
            raise ValueError(f"draft shape: head_dim = {self.head_dim} must be even for RoPE")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft shape: draft vocabulary {self.draft_vocab_size} exceeds the target's {self.vocab_size}"
            )
        for name, most in (("num_layers", MOST_LAYERS), ("num_taps", MOST_TAPS), ("vocab_size", MOST_TOKENS)):
            if getattr(self, name) > most:
                raise ValueError(f"draft shape: {name} = {getattr(self, name)}; at most {most} is believed")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `mla` only where there is one."""
        values = dataclasses.asdict(self)
        return values if self.mla else {name: value for name, value in values.items() if name != "mla"}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DraftShape:
        """The inverse of `to_dict`. Raises TypeError for fields that this version does not know, or lacks."""
        mla = values.get("mla")
        return cls(**{**values, "mla": None if mla is None else MlaShape(**mla)})


def _check_sizes(shape: MlaShape | DraftShape, prefix: str) -> None:
    for f in dataclasses.fields(shape):
        value = getattr(shape, f.name)
        if f.name in ("mla", *FLAGS) or (value is None and f.name == "q_lora_rank"):
            continue
        if type(value) is not int or value < 1:
            raise ValueError(f"{prefix}{f.name} = {value!r} must be a whole number of at least 1")
