"""A finding with all that a remedy for it may need: the draft, its target, a reference.   see remedies.py"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..draft.expected import Inventory, Shapes, expected_tensors
from ..target.facts import TargetFacts
from .overlay import Overlay
from .step import Step


@dataclass(frozen=True)
class Situation:
    """What `steps_for` was asked."""

    finding: Mapping[str, Any]
    overlay: Overlay
    target: Path | None = None
    reference: Path | None = None

    def step(self, operation: str, sure: bool = True, **arguments: Any) -> Step:
        """A step against this finding."""
        return Step(operation, arguments, str(self.finding.get("id", "")), sure)

    @property
    def confirmed(self) -> bool:
        """Was it measured?"""
        return self.finding.get("status") == "confirmed"

    @property
    def best(self) -> Any:
        """What fits the weights best: a value, or the label of a hypothesis."""
        return self.finding.get("best")

    @property
    def convention(self) -> str:
        """The convention, or the tensor, that it is about."""
        return str(self.finding.get("convention") or "")

    @property
    def facts(self) -> TargetFacts | None:
        """Of the target."""
        return self.overlay.facts

    @property
    def wanted(self) -> Shapes:
        """Canonical tensors that the draft must hold; {} where it cannot be interpreted."""
        reading = self.overlay.reading
        return expected_tensors(reading.shape, reading.conventions) if reading else {}

    @property
    def inventory(self) -> Inventory:
        """What is missing, unknown, misshapen."""
        reading = self.overlay.reading
        return Inventory.of(reading) if reading else Inventory({}, [], {})

    def long(self, short: str) -> str | None:
        """ "down_proj" -> "midlayer.mlp.down_proj.weight": what a hypothesis, or a check, shortens."""
        for name in (*self.wanted, *self.overlay.raw.tensors):
            if short in (name, shortened(name)):
                return name
        return None

    def from_reference(self, *names: str) -> list[Step]:
        """Those tensors of the reference, where there is one."""
        if self.reference is None or not names or not self.reference.is_dir():
            return []
        return [self.step("tensor-from-reference", names=list(names), reference=str(self.reference))]

    def map_from_reference(self, read_as: str | None = None) -> list[Step]:
        """The reference's map, where there is one."""
        if self.reference is None:
            return []
        more: dict[str, Any] = {"read_as": read_as} if read_as else {}
        return [self.step("map-from-reference", reference=str(self.reference), **more)]


def shortened(name: str) -> str:
    """As hypotheses name a tensor (doctor/hypotheses_of_tensors.py)."""
    name = name.removeprefix("midlayer.").removeprefix("self_attn.").removeprefix("mlp.")
    return name.removesuffix(".weight")
