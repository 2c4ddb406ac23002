"""What a generator is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.target.record import Recording


@dataclass(frozen=True)
class Request:
    key: Any
    """Comes back with the answer."""
    ids: Sequence[int]
    """The rendered prompt."""
    seed: int = 0
    """Of this answer's random numbers; unused where the temperature is 0."""


@dataclass(frozen=True)
class Generated:
    key: Any
    ids: list[int]
    """The answer, its end-of-turn token included where there is one."""
    finish: str
    """`stop`: ended its turn. `length`: cut off. `loop`: cut off because it repeats itself endlessly."""
    recording: Recording | None = field(default=None, compare=False, repr=False)
    """The states of prompt and answer, where the generator has a recorder and the answer is no loop."""
