"""A step of a repair, as data: which operation, with which arguments, and why.

Step("absolute-to-offset", why="EY-D2T-ABSOLUTE").to_dict()     pytest tests/test_repair_plan.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import BadInput


@dataclass(frozen=True)
class Step:
    """One operation of `operations.OPERATIONS`. Raises BadInput where the arguments are no JSON values."""

    operation: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    """The id of the finding that it is against; "" for one that undoes another."""
    sure: bool = True
    """Do the bytes, or a confirmed measurement, say that it is right? If not, keep it only when it measures better."""

    def __post_init__(self) -> None:
        try:
            json.dumps(self.arguments, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"step {self.operation}: its arguments are no JSON values ({error}); correct the plan"
            ) from error

    def __str__(self) -> str:
        said = ", ".join(f"{name} = {_short(value)}" for name, value in self.arguments.items())
        return f"{self.operation} ({said})" if said else self.operation

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "operation": self.operation, "arguments": dict(self.arguments), "why": self.why, "sure": self.sure,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, values: Any) -> Step:
        """The inverse of `to_dict`; `why` and `sure` may be absent. Raises BadInput saying what is wrong."""
        if not isinstance(values, Mapping) or not isinstance(values.get("operation"), str):
            raise BadInput(
                f"a step is an object with `operation` and `arguments`, found {_short(values)}; correct the plan"
            )
        unknown = set(values) - {"operation", "arguments", "why", "sure"}
        arguments = values.get("arguments", {})
        if unknown or not isinstance(arguments, Mapping):
            wrong = f"unknown fields {sorted(unknown)}" if unknown else f"arguments = {_short(arguments)}"
            raise BadInput(f"step {values['operation']}: {wrong}; expected `operation`, `arguments`, `why`, `sure`")
        return cls(values["operation"], dict(arguments), str(values.get("why", "")), bool(values.get("sure", True)))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
