"""The sizes of a draft. With `Conventions`, all that is needed to build the module."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DraftShape:
    """Sizes only; what they mean is in `Conventions`. Raises ValueError naming the field for impossible sizes."""

    hidden_size: int  # H of the draft
    target_hidden_size: int  # H of the target: width of one tap
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # D
    num_taps: int = 3
    num_layers: int = 1

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if getattr(self, f.name) < 1:
                raise ValueError(f"draft shape: {f.name} = {getattr(self, f.name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"draft shape: {self.num_heads} heads do not divide into {self.num_kv_heads} key heads")
        if self.head_dim % 2:
            raise ValueError(f"draft shape: head_dim = {self.head_dim} must be even for RoPE")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft shape: draft vocabulary {self.draft_vocab_size} exceeds the target's {self.vocab_size}"
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DraftShape:
        return cls(**values)
