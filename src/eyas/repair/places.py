"""Where a field of config.json stands, and writing it wherever somebody looks for it.

    places.write(config, "norm_output", True, home=())      # in every object that says it, else at the top

Drafts say one thing in several places (top level, eagle_config, transformer_layer_config), and readers take the first
that they know: two that differ are the fault which a repair must not make.   pytest tests/test_repair_operations.py
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import BadInput

NESTED = ("eagle_config", "text_config", "transformer_layer_config")
Config = Mapping[str, Any]


def standing(config: Config, name: str) -> list[tuple[str, ...]]:
    """The objects in which a field stands, by their keys: () is the top level."""
    places = [(), *((key,) for key in NESTED if isinstance(config.get(key), Mapping))]
    return [place for place in places if name in _at(config, place)]


def home(config: Config, model: bool) -> tuple[str, ...]:
    """Where a field belongs that stands nowhere yet. model: one of the layer (sizes, RoPE), not one of the draft."""
    if not model:
        return ()
    # speculators nests the layer's config, multimodal configs the text's
    inner = next((key for key in NESTED if "hidden_size" in _at(config, (key,))), None)
    return () if "hidden_size" in config or inner is None else (inner,)


def write(config: Config, name: str, value: Any, model: bool = False) -> dict[str, Any]:
    """The config with a field set in each place where it stands, or in its home."""
    out = copy.deepcopy(dict(config))
    for place in standing(config, name) or [home(config, model)]:
        _at(out, place)[name] = copy.deepcopy(value)
    return out


def without(config: Config, name: str) -> dict[str, Any]:
    """The config without a field, in no place."""
    out = copy.deepcopy(dict(config))
    for place in standing(config, name):
        del _at(out, place)[name]
    return out


def value(config: Config, place: tuple[str, ...], name: str) -> Any:
    """The field in that object, None where it is not there."""
    return _at(config, place).get(name)


def first(config: Config, name: str) -> Any:
    """The first non-null value, in the order of authority; None where it stands nowhere."""
    return next((v for place in standing(config, name) if (v := value(config, place, name)) is not None), None)


def _at(config: Config, place: tuple[str, ...]) -> Any:
    value: Any = config
    for key in place:
        value = value.get(key)
        if not isinstance(value, Mapping):
            return {}
    return value


# ---------------------------------------------------------------- what changed, as values by JSON pointer (RFC 6901)


def between(old: Config, new: Config, above: str = "") -> tuple[dict[str, Any], list[str]]:
    """(values to set, pointers to remove) that make `new` of `old`."""
    values: dict[str, Any] = {}
    removed = [f"{above}/{_escaped(key)}" for key in old if key not in new]
    for key, value in new.items():
        pointer = f"{above}/{_escaped(key)}"
        if key in old and isinstance(value, Mapping) and isinstance(old[key], Mapping):
            inner, gone = between(old[key], value, pointer)
            values |= inner
            removed += gone
        elif key not in old or old[key] != value or type(old[key]) is not type(value):
            values[pointer] = copy.deepcopy(value)
    return values, removed


def apply(config: Config, values: Mapping[str, Any], removed: Sequence[str]) -> dict[str, Any]:
    """The config with values set and removed by pointer. Raises BadInput for a pointer that leads nowhere."""
    out = copy.deepcopy(dict(config))
    for pointer in removed:
        place, key = _found(out, pointer)
        if key not in place:
            raise BadInput(f"{pointer} is to be removed and is not there; leave it out of the plan")
        del place[key]
    for pointer, value in values.items():
        place, key = _found(out, pointer)
        place[key] = copy.deepcopy(value)
    return out


def _found(config: dict[str, Any], pointer: str) -> tuple[dict[str, Any], str]:
    keys = list(_keys(pointer))
    place: Any = config
    for key in keys[:-1]:
        place = place.get(key) if isinstance(place, dict) else None
    if not keys or not isinstance(place, dict):
        raise BadInput(f"{pointer!r} leads to no object; expected a JSON pointer such as /eagle_config/norm_before_fc")
    return place, keys[-1]


def _keys(pointer: str) -> Iterator[str]:
    for key in pointer.split("/")[1:]:
        yield key.replace("~1", "/").replace("~0", "~")


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
