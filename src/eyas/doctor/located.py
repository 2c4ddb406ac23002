"""What a measurement of a real server says of the place: rows over the same prompts, and the first one that falls.

    Located({"declared": 1.49, "as_read": 1.49, "served": 1.31}, "served")        eyas doctor DRAFT --measured FILE

A replay on other prompts cannot tell 1.31 from 1.49; over the same prompts, in float32, they are equal or something is
wrong.   pytest tests/test_doctor_located.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .finding import Finding, Severity

OFF, SAME = "EY-SERVED-OFF-READING", "EY-SERVED-AS-READ"
STATES = "EY-SERVED-STATES"


@dataclass(frozen=True)
class Located:
    """Rows `declared`, `as_read`, `reference`, `served` -> tau, those that are known."""

    engine: str
    rows: Mapping[str, float] = field(default_factory=dict)
    falls: str | None = None
    """The first row that falls, "" where none does, None where nobody looked."""
    says: str = ""
    capture: Mapping[str, Any] = field(default_factory=dict)
    """What was captured of the states that the engine feeds the draft; {} where nobody looked."""

    @property
    def off(self) -> bool:
        """Is served what the engine does not read there?"""
        return self.falls == "served" or self.capture.get("right") is False

    @property
    def settled(self) -> bool:
        """Were both sides there to compare?"""
        return self.falls is not None and {"as_read", "served"} <= set(self.rows)


def findings(located: Located) -> list[Finding]:
    """About the server: does it run what it reads, and is the draft fed the right states?"""
    out = []
    if located.settled:
        read, served = located.rows["as_read"], located.rows["served"]
        said = (
            f"over the same prompts τ is {served:.3f} served, {read:.3f} replayed as {located.engine} reads the draft"
        )
        if located.falls == "served":
            out.append(Finding(
                OFF, Severity.ERROR, said, "What it runs is not what these files and flags say: another method in the "
                "launch, positions that end before the requests, another target or precision, or the engine itself",
                "Compare the launch with `eyas serve DRAFT --target T --engine E --print`; vLLM's states: eyas measure "
                "--capture; and let `eyas canary` judge the engine without this draft",
            ))  # fmt: skip
        else:
            gain = "What is to be gained lies in the files, as it reads them, or in the training"
            out.append(Finding(SAME, Severity.OK, said, "Engine and launch run what the files say", gain))
    if located.capture.get("right") is False:
        out.append(Finding(
            STATES, Severity.ERROR, f"{located.engine}: {located.capture.get('says')}",
            "The draft reads other states than it was trained on; the accept length hardly shows a layer more or less",
            "Mend the taps in the config that it serves, or its --speculative-config", convention="taps",
        ))  # fmt: skip
    return out
