"""A finding: one fault, or one oddity that is none, with what was seen, what it does, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad, worst first."""

    ERROR = "error"  # served like this, acceptance breaks or the engine does not start
    WARNING = "warning"  # it breaks in some engine, or under some condition
    INFO = "info"  # worth knowing
    OK = "ok"  # looks odd and is right


ORDER = {severity: place for place, severity in enumerate(Severity)}


@dataclass(frozen=True)
class Finding:
    """`id` is stable and documented (docs/catalogue); sentences stand without the others."""

    id: str
    severity: Severity
    evidence: str
    """What was seen, with the values."""
    consequence: str = ""
    """What happens when this draft is served."""
    remedy: str = ""
    sources: tuple[str, ...] = ()
    """Reports, or engine files and lines, that say so."""
    convention: str | None = None
    """The convention or tensor that it is about, where its id does not say so."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "severity": self.severity.value, "sources": list(self.sources), "status": "static"}
