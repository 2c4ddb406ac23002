"""Values of a config, looked for in several places, each with where it was found and how it is therefore known.

    fields.number("rms_norm_eps", default=1e-6)  ->  Found(1e-05, Known.DECLARED, "config.json: rms_norm_eps")

A `null` counts as absent; a value of the wrong kind is an error naming file and key.   pytest tests/test_checkpoint.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...conventions import Known
from ...errors import BadInput


@dataclass(frozen=True)
class Found:
    """A value, how it is known, and where it was found ("" for a default)."""

    value: Any
    how: Known
    where: str = ""


@dataclass(frozen=True)
class Fields:
    """`places`: (dotted prefix, object) in the order of authority, e.g. ("", config), ("eagle_config.", nested)."""

    file: Path
    places: Sequence[tuple[str, Mapping[str, Any]]]

    @classmethod
    def of(cls, file: Path, config: Mapping[str, Any], *nested: str) -> Fields:
        """The top level of `config`, then each of its objects named in `nested`."""
        inner = [(f"{key}.", config[key]) for key in nested if isinstance(config.get(key), Mapping)]
        return cls(file, [("", config), *inner])

    def get(
        self, name: str, kinds: tuple[type, ...], what: str, default: Any = None, how: Known = Known.DEFAULT
    ) -> Found:
        """The first non-null value of `name`. Raises BadInput where it is not one of `kinds`."""
        for prefix, place in self.places:
            value = place.get(name)
            if value is None:
                continue
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise BadInput(f"{self.file}: {prefix}{name} = {value!r}, expected {what}")
            return Found(value, Known.DECLARED, f"{prefix}{name}")
        return Found(default, how)

    def flag(self, name: str, default: bool = False, how: Known = Known.DEFAULT) -> Found:
        """true or false."""
        return self.get(name, (bool,), "true or false", default, how)

    def whole(self, name: str, default: int | None = None) -> Found:
        """A whole number of at least 1. Raises BadInput where it is absent and has no default."""
        found = self.get(name, (int,), "a whole number", default)
        if found.value is None:
            raise BadInput(f"{self.file}: {name} is missing; add the draft's own value")
        if not 1 <= found.value < 1 << 40:
            raise BadInput(f"{self.file}: {found.where or name} = {found.value}, expected a whole number of at least 1")
        return found

    def number(self, name: str, default: float, how: Known = Known.DEFAULT) -> Found:
        """A finite number."""
        found = self.get(name, (int, float), "a number", default, how)
        try:
            value = float(found.value)
        except OverflowError:  # JSON has whole numbers of any length
            value = math.inf
        if not math.isfinite(value):
            raise BadInput(f"{self.file}: {found.where} = {value}, expected a finite number")
        return Found(value, found.how, found.where)

    def text(self, name: str, default: str) -> Found:
        """A string."""
        return self.get(name, (str,), "a string", default)

    def ids(self, name: str) -> Found:
        """A list of whole numbers, or None."""
        found = self.get(name, (list,), "a list of whole numbers")
        if found.value is not None and not (found.value and all(type(i) is int for i in found.value)):
            raise BadInput(f"{self.file}: {found.where} = {found.value!r}, expected a list of whole numbers")
        return found

    def table(self, name: str) -> Found:
        """An object; {} where absent."""
        return self.get(name, (dict,), "an object", {})
