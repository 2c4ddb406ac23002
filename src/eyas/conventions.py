"""Conventions: everything beside the tensors that one must know to run a draft, as one frozen value.

A draft is weights plus conventions. The trainer declares them, a checkpoint spells some of them, an engine reads them
under its own rules. So they are data here, and each value remembers how it is known. This module imports nothing from
the rest of Eyas.   Exercise it:  pytest tests/test_conventions.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args, get_type_hints


class Known(StrEnum):
    """How a value is known, strongest first."""

    DECLARED = "declared"  # written down by whoever trained it
    INFERRED = "inferred"  # follows from tensors: their presence, shape or values
    DEFAULT = "default"  # the format leaves it out and documents what that means
    GUESSED = "guessed"  # nobody says; the likeliest value


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The taps `(2, n//2, n-3)` of SafeAILab/EAGLE, vLLM and SGLang's default for `num_layers` blocks.

    Raises ValueError where they would coincide or leave the range (n < 7).
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if num_layers < 7:
        raise ValueError(f"a target of {num_layers} layers has no default taps (2, n//2, n-3); name the taps")
    return taps


@dataclass(frozen=True)
class Conventions:
    """How the tensors of one draft are meant. Field docs give the value of the EAGLE-3 contract first.

    Raises ValueError, naming the field and the value, for anything that contradicts itself.
    """

    taps: tuple[int, ...]
    """Tap j = residual stream after j blocks of the target (tap 0: embedding output); concatenated ascending."""
    num_target_layers: int | None = None
    """Blocks of the target; needed to tell tap n and the engines' numberings apart."""

    d2t: Literal["offset", "absolute", "none"] = "offset"
    """Meaning of the numbers in `d2t`: target id = i + d2t[i] | target id = d2t[i] | full vocabulary, no map."""

    # Where the norms sit.
    norm_before_fc: bool = False
    """One RMSNorm `input_norm` over the concatenated taps, before `fc`."""
    fc_norm: bool = False
    """One RMSNorm `fc_norm.i` per tap slice, before `fc`."""
    norm_before_residual: bool = False
    """The residual stream starts from `hidden_norm(g)` instead of `g`."""
    norm_before_head: bool = True
    """`lm_head(norm(h))`; False is the broken reading `lm_head(h)` seen in the field."""
    norm_output: bool = False
    """The state fed back to the next step is `norm(h)` (EAGLE-3.1) instead of `h`."""

    # The layer.
    layer_input: Literal["embedding_state", "state_embedding"] = "embedding_state"
    """Order of the two halves that q, k, v read in the first layer."""
    fc_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k (Qwen3)."""
    attention: Literal["gqa", "mla"] = "gqa"
    sliding_window: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    rms_norm_offset: bool = False
    """Norm weights are stored as `w - 1` (Gemma)."""

    # Positions.
    rope_theta: float = 10000.0
    rope_type: str = "default"
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """Further RoPE parameters (factor, low_freq_factor, ...), empty for the default kind."""
    partial_rotary_factor: float = 1.0
    rope_offset: int = 0
    """Row i, step k sits at position i + k*rope_step + rope_offset. The offset is a symmetry for the default RoPE."""
    rope_step: int = 1
    """0: every step keeps the position of its row, as a draft unrolled without advancing positions was trained."""
    max_position: int = 2048

    # Shifts between ids and states: row i, step k reads e(x_{i+token_shift+k}) and predicts x_{i+token_shift+1+k}.
    token_shift: int = 1
    mask_shift: int = 2
    """The loss mask is read at the predicted token (2); SafeAILab and SpecForge read it at the row itself (0)."""

    # Embedding, head, teacher.
    embedding: Literal["target", "own"] = "target"
    embedding_scale: float = 1.0
    """Factor on the embedding rows before the first norm (Gemma's sqrt(H) where an engine applies it)."""
    head: Literal["own", "target", "target_rows"] = "own"
    logit_scale: float = 1.0
    final_state: Literal["post_norm", "pre_norm"] = "post_norm"
    """How the recorded final state is stored: after the target's final norm, exactly what its head reads."""
    teacher: Literal["whole_vocabulary", "draft_vocabulary"] = "whole_vocabulary"
    """Teacher probabilities are normalised over all V ids, or renormalised over the D draft ids."""

    how: Mapping[str, Known] = field(default_factory=dict, compare=False)
    """How each field is known; a field not named here is a default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(int(t) for t in self.taps))
        object.__setattr__(self, "rope_scaling", dict(self.rope_scaling))
        names = {f.name for f in dataclasses.fields(self)} - {"how"}
        unknown = set(self.how) - names
        if unknown:
            raise ValueError(f"conventions: `how` names unknown fields {sorted(unknown)}")
        object.__setattr__(self, "how", {k: Known(v) for k, v in self.how.items()})
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                said = "true or false" if choices == (True, False) else f"one of {', '.join(map(repr, choices))}"
                raise ValueError(f"conventions.{name} = {getattr(self, name)!r}: must be {said}")
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise ValueError(f"conventions.taps = {list(self.taps)}: must be distinct, ascending and >= 0")
        if self.num_target_layers is not None and self.taps[-1] > self.num_target_layers:
            raise ValueError(
                f"conventions.taps = {list(self.taps)}: the target has {self.num_target_layers} layers, so taps run "
                f"from 0 to {self.num_target_layers}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("conventions: norm_before_fc and fc_norm exclude each other; a draft has one of them")
        if self.qk_norm and self.attention == "mla":
            raise ValueError("conventions: qk_norm does not exist for attention = 'mla'")
        for name, low in (("rms_norm_eps", 0.0), ("rope_theta", 0.0), ("max_position", 0), ("logit_scale", 0.0)):
            if not getattr(self, name) > low or not math.isfinite(getattr(self, name)):
                raise ValueError(f"conventions.{name} = {getattr(self, name)}: must be finite and greater than {low}")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"conventions.partial_rotary_factor = {self.partial_rotary_factor}: must be in (0, 1]")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ValueError(f"conventions.sliding_window = {self.sliding_window}: must be positive or absent")

    def known(self, name: str) -> Known:
        """How field `name` is known."""
        return self.how.get(name, Known.DEFAULT)

    def with_(self, how: Known = Known.DECLARED, **changes: Any) -> Conventions:
        """A copy with `changes`, each known as `how`. The substitution that a hypothesis is made of."""
        return dataclasses.replace(self, how={**self.how, **dict.fromkeys(changes, how)}, **changes)

    def differences(self, other: Conventions) -> dict[str, tuple[Any, Any]]:
        """Fields that differ, as `{name: (mine, theirs)}`."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)}
        return {name: (a, b) for name, (a, b) in pairs.items() if name != "how" and a != b}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: `{field: value, ..., "how": {field: "declared", ...}}`."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "how"}
        out["taps"] = list(self.taps)
        out["rope_scaling"] = dict(self.rope_scaling)
        out["how"] = {k: v.value for k, v in sorted(self.how.items())}
        return out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Conventions:
        """The inverse of `to_dict`. Raises ValueError for a field that this version does not know."""
        names = {f.name for f in dataclasses.fields(cls)}
        unknown = set(values) - names
        if unknown:
            raise ValueError(f"conventions written by a newer Eyas: unknown fields {sorted(unknown)}; update Eyas")
        given: dict[str, Any] = {k: tuple(v) if k == "taps" else v for k, v in values.items()}
        return cls(**given)


# Fields with a fixed set of values, read off their types: `{name: values}`.
_CHOICES: dict[str, tuple[Any, ...]] = {
    name: (True, False) if kind is bool else get_args(kind)
    for name, kind in get_type_hints(Conventions).items()
    if kind is bool or getattr(kind, "__origin__", None) is Literal
}
