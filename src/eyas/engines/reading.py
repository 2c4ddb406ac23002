"""What an engine makes of a draft directory: the fate of every tensor and the conventions that it would run under.

A profile gives an engine's parameters and where a stored name goes (`Into`, `Dropped`, `Refused`); `fill` is the part
that all loaders share. The words are those of the loaders' own reports, so that tests can compare the two exactly.

    pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..conventions import Conventions
from ..draft.files import DraftFolder
from ..target.facts import TargetFacts

Stage = Literal["configuration", "weights", "first request", "conversion"]
GARBAGE = "uninitialised memory"
ONES = "ones, as created"
ZEROS = "zeros, as created"
RANDOM = "random numbers, as created"
UNUSED = "nothing: it is never used"


@dataclass(frozen=True)
class Slot:
    """A parameter of the engine's module, before anything is loaded."""

    shape: tuple[int, ...]
    parts: Mapping[str, int] = field(default_factory=dict)
    """Of a fused projection: part -> its rows, in their order."""
    blank: str = GARBAGE
    """What it holds where no tensor fills it."""


@dataclass(frozen=True)
class Into:
    """A stored tensor goes into a parameter, or into one part of it."""

    slot: str
    part: str = ""


@dataclass(frozen=True)
class Dropped:
    """A stored tensor changes nothing."""

    why: str


@dataclass(frozen=True)
class Refused:
    """The engine stops at a stored tensor."""

    error: str
    why: str
    stage: Stage = "weights"


Place = Into | Dropped | Refused


@dataclass(frozen=True)
class Failure:
    """The engine does not get as far as serving."""

    stage: Stage
    error: str
    """Type of the exception that is raised there."""
    what: str
    way_out: str = ""


@dataclass(frozen=True)
class Parameter:
    """A parameter after loading."""

    shape: tuple[int, ...]
    keys: tuple[str, ...]
    """Stored names that fill it, in the order of the file."""
    filled: Literal["whole", "partly", "not"]
    instead: str = ""
    """What stands where nothing was loaded; "" where it was filled whole."""


@dataclass(frozen=True)
class EngineReading:
    """A directory as one version of an engine reads it."""

    engine: str
    version: str
    architecture: str = ""
    """The engine's class, or "" where it finds none."""
    failure: Failure | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> why it changes nothing."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Conventions` as the engine holds them; `taps` is None where it would take the default of a target that
    is not known here."""
    needs: tuple[str, ...] = ()
    """Launch flags and limits without which it does not run, or not as read."""
    surprises: tuple[str, ...] = ()
    """What it does that no convention expresses."""

    @property
    def name(self) -> str:
        """ "sglang 0.5.23" """
        return f"{self.engine} {self.version}"

    @property
    def starts(self) -> bool:
        """Does it get as far as serving?"""
        return self.failure is None

    @property
    def conventions(self) -> Conventions | None:
        """As values, where they are whole; None for an engine that does not start or whose taps are not known."""
        if self.failure is not None or self.values.get("taps") is None:
            return None
        return Conventions(**self.values)

    def unfilled(self) -> dict[str, Parameter]:
        """Parameters in use that keep something else than the file's numbers."""
        return {name: p for name, p in self.parameters.items() if p.instead and p.instead != UNUSED}


@dataclass(frozen=True)
class Seen:
    """All that an engine looks at when it opens a draft."""

    folder: DraftFolder
    facts: TargetFacts | None = None
    """Of the target; None where it is not known: Llama-like is assumed then."""
    launch: Mapping[str, Any] = field(default_factory=dict)
    """Flags of the launch (`launch.options`); {} where it is the right one, with nothing said."""

    def context(self, flag: str) -> int | None:
        """Longest sequence that is served: what `flag` says, else the target's own; None where neither is known."""
        said = self.launch.get(flag)
        return said if type(said) is int else self.facts.max_position if self.facts else None

    @property
    def family(self) -> str:
        """model_type of the target."""
        return self.facts.model_type if self.facts else "llama"

    @property
    def layers(self) -> int | None:
        """Blocks of the target."""
        if self.facts is not None:
            return self.facts.num_layers
        kept = ((self.folder.eyas or {}).get("target") or {}).get("facts") or {}
        layers = kept.get("num_layers") if isinstance(kept, Mapping) else None
        return layers if type(layers) is int else None


class Stops(Exception):
    """Raised inside a profile where the engine would stop; ends as the `failure` of its reading."""

    def __init__(self, stage: Stage, error: str, what: str, way_out: str = "") -> None:
        super().__init__(what)
        self.failure = Failure(stage, error, what, way_out)


def attempt(engine: str, version: str, read: Callable[[Seen], EngineReading], seen: Seen) -> EngineReading:
    """`read`, with whatever stops it as the failure of its reading.

    A profile computes with the config's values as the engine does, so nonsense fails here with the engine's own kinds
    of error (a product with a string, say).
    """
    try:
        return read(seen)
    except Stops as stop:
        return EngineReading(engine, version, failure=stop.failure)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        what = f"config.json holds a value that cannot be computed with ({error})"
        failure = Failure("configuration", type(error).__name__, what, "write a number there")
        return EngineReading(engine, version, failure=failure)


def fill(
    seen: Seen,
    slots: Mapping[str, Slot],
    place: Callable[[str], Place],
    mismatch: str,
    cuts: bool = False,
    pads: Collection[str] = (),
) -> tuple[dict[str, Parameter], dict[str, str]]:
    """Put every stored tensor where `place` says, as a loader does: (parameters, dropped names with the reason).

    `mismatch`: the exception that the engine raises for a tensor of another shape. `cuts`: it takes the rows that it
    wants from the beginning of a part of a fused projection, so that one with too many passes. `pads`: parts to which
    it adds rows of zeros where there are too few. Raises Stops where it refuses.
    """
    keys: dict[str, list[str]] = {name: [] for name in slots}
    parts: dict[str, set[str]] = {name: set() for name in slots}
    dropped: dict[str, str] = {}
    for stored, ref in seen.folder.tensors.items():
        where = place(stored)
        if isinstance(where, Refused):
            raise Stops(where.stage, where.error, where.why, f"remove {stored}, or rename it to what the engine reads")
        if isinstance(where, Dropped):
            dropped[stored] = where.why
            continue
        slot = slots[where.slot]
        rows = slot.parts[where.part] if where.part else slot.shape[0]
        wanted = (rows, *slot.shape[1:])
        part_of = bool(where.part) and ref.shape[1:] == wanted[1:]
        passes = part_of and (cuts if ref.shape[0] > rows else where.part in pads)
        if ref.shape != wanted and not passes:
            raise Stops(
                "weights",
                "RuntimeError" if part_of and cuts else mismatch,
                f"{stored} is {list(ref.shape)}, {where.slot} takes {list(wanted)}",
                "make config and tensors agree",
            )
        keys[where.slot].append(stored)
        parts[where.slot] |= {where.part} if where.part else set(slot.parts) or {""}
    parameters = {}
    for name, slot in slots.items():
        whole = parts[name] == (set(slot.parts) or {""})
        filled: Literal["whole", "partly", "not"] = "whole" if whole else "partly" if parts[name] else "not"
        missing = [part for part in slot.parts if part not in parts[name]]
        instead = "" if whole else slot.blank if not parts[name] else f"{slot.blank} for {', '.join(missing)}"
        parameters[name] = Parameter(slot.shape, tuple(keys[name]), filled, instead)
    return parameters, dropped
