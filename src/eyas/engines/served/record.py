"""Served: acceptance as a server reports it, in Eyas' definition, with the server's own words beside it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import BadInput

LONGEST_SERIES = 1000
PRINTED = 0.005  # logs print two decimals


@dataclass(frozen=True)
class Event:
    """A line of a log that bears on acceptance, whatever the numbers are."""

    id: str
    line: str
    meaning: str
    severity: str = "warning"
    """A value of the doctor's `Severity`."""


@dataclass(frozen=True)
class Served:
    """What was said, and what it means in Eyas' definition. Raises BadInput for a tau that cannot be."""

    engine: str = "unknown"
    """sglang, vllm, llamacpp or unknown."""
    version: str = ""
    tau: float | None = None
    """1 + accepted / rounds; None where acceptance was not said."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own numbers by its own names."""
    unconditional: tuple[float, ...] = ()
    """Per position: share of all rounds whose drafts were accepted as far as that; () where not said."""
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    steps: int | None = None
    """Tokens drafted one after the other in a round (K)."""
    series: tuple[tuple[float, float], ...] = ()
    """(seconds since the first line, or its index where lines carry no time; tau), in the order of time."""
    notes: tuple[str, ...] = ()
    """What must be known to read the numbers."""
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        if self.tau is not None and not (math.isfinite(self.tau) and self.tau >= 1 - PRINTED):
            raise BadInput(
                f"an accept length of {self.tau:g} cannot be: it counts the target's own token, so it is 1 or more; "
                f"add 1 to a mean number of accepted drafts"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **asdict(self),
            "said": dict(self.said),
            "unconditional": [round(x, 4) for x in self.unconditional],
            "series": [[round(at, 3), round(tau, 4)] for at, tau in self.series],
            "notes": list(self.notes),
            "events": [asdict(event) for event in self.events],
        }


def from_number(tau: float) -> Served:
    """An accept length that somebody read off somewhere. Raises BadInput for one that cannot be."""
    return Served(
        tau=float(tau),
        said={"accept length": tau},
        notes=("The number is taken as 1 + accepted / rounds; SGLang's per-request spec_accept_length, tokens per "
               "round with prefill's token among them, is a little higher.",),
    )  # fmt: skip


def counted(
    base: Served, rounds: float, accepted: float, drafted: float | None = None, reached: Sequence[float] = ()
) -> Served:
    """`base` with what follows from counts; `reached[j]` rounds accepted at least j + 1 drafts, () where not said.

    Raises BadInput for counts that cannot be.
    """
    if not (0 < rounds < math.inf and 0 <= accepted < math.inf):
        raise BadInput(
            f"{accepted:g} accepted tokens in {rounds:g} rounds are no counts of speculative decoding; give "
            "counters of one server, since its start"
        )
    rates = tuple(n / rounds for n in reached)
    return replace(
        base,
        tau=1 + accepted / rounds,
        unconditional=rates if all(0 <= rate <= 1 for rate in rates) else (),
        rounds=round(rounds),
        accepted=round(accepted),
        drafted=None if drafted is None else round(drafted),
    )


def text_of(source: str | os.PathLike[str], what: str) -> str:
    """The content of a file, or a text itself: a string is a file's name if it is one. Raises BadInput."""
    path = as_path(source)
    if path is None:
        return str(source)
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read as {what} ({error.strerror}); check the path and its permissions"
        ) from error


def as_path(source: str | os.PathLike[str]) -> Path | None:
    """The file that is meant, None where the source is the text itself."""
    if not isinstance(source, str):
        return Path(source)
    if not source or len(source) > 4096 or "\n" in source or "\0" in source:
        return None
    try:
        return Path(source) if Path(source).is_file() else None
    except OSError:
        return None


def thinned(series: Sequence[tuple[float, float, float]]) -> tuple[tuple[float, float], ...]:
    """(when, tau, weight) -> at most LONGEST_SERIES points (when, weighted mean tau)."""
    size = -(-len(series) // LONGEST_SERIES) or 1
    out = []
    for start in range(0, len(series), size):
        part = series[start : start + size]
        total = sum(weight for _, _, weight in part) or 1.0
        out.append((part[0][0], sum(tau * weight for _, tau, weight in part) / total))
    return tuple(out)
