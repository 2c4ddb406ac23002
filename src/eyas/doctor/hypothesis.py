"""What a hypothesis is, and what alternatives are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..target.facts import TargetFacts
from .specimen import Specimen


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """ "The draft was made for `value` of `group`." """

    group: str
    label: str
    value: Any
    """As JSON values, for the report."""
    apply: Callable[[Specimen], Specimen]
    cheap: bool = False
    """It changes ids or labels only, so it shares the forward of what it is applied to."""
    about: str = ""
    """What it would mean, in words."""


@dataclass(frozen=True)
class Context:
    """What alternatives are made of, beside the draft itself."""

    facts: TargetFacts | None = None
    embedding: torch.Tensor | None = None  # the target's [V, H]
    head: torch.Tensor | None = None  # the target's [V, H]
    taps: frozenset[int] = frozenset()
    """Taps whose states are recorded."""
    maps: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further maps by name: int64 [D] target ids (a reference's, a parent's)."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of a reference that differ, by canonical name."""
    engines: Mapping[str, Specimen] = field(default_factory=dict)
    """Engine -> what it would run."""
    suspected: frozenset[str] = frozenset()
    """Conventions about which the files show an error."""
    trained: frozenset[str] = frozenset()
    """Conventions that training itself wrote down, for weights that are still those it wrote."""


def convention(name: str, value: Any, about: str = "") -> Hypothesis:
    shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return Hypothesis(
        name, shown, value, lambda s: s.with_(name, shown, conventions={name: value}), about=about
    )  # fmt: skip
