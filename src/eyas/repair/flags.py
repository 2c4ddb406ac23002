"""Operations on config.json: flags, RoPE, sizes. Written wherever the field stands, so that no two places differ.

Where eyas.json declares the same, it is kept in step.   pytest tests/test_repair_operations.py
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..conventions import Conventions
from ..draft.dialects.canonical import LENGTH_FREE_ROPE
from ..draft.dialects.producers import recognise
from ..draft.files import CONFIG, EYAS_JSON
from ..errors import BadInput
from . import places
from .fold import cannot_fold
from .overlay import Overlay

DRAFT = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "tie_word_embeddings", "logit_scale")
MODEL = ("hidden_act", "rms_norm_eps", "sliding_window", "attention_bias", "mlp_bias")
NORMS = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm."}
SPECFORGE = "SpecForge or alike"
Value = bool | int | float | str | None


def set_flag(overlay: Overlay, name: str, value: Value) -> Overlay:
    """Write one flag of the draft (norms, tie_word_embeddings, ...) or of its layer (hidden_act, ...)."""
    if name not in (*DRAFT, *MODEL):
        why = cannot_fold(name) or f"no config.json says it; known are {', '.join((*DRAFT, *MODEL))}"
        raise BadInput(f"set-flag: {name}: {why}")
    _check(overlay, name, value)
    old = overlay.raw.said(name)
    config = places.write(overlay.config, name, value, model=name in MODEL)
    if name == "hidden_act":
        for place in places.standing(config, "hidden_activation"):
            config = _set(config, place, "hidden_activation", value)
    # To SpecForge norm_output says whether there is a norm before the head, and without it there is one.
    if name == "norm_output" and value is False and recognise(overlay.config).name == SPECFORGE:
        config = places.without(config, name)
    if name == "sliding_window":
        config = _window(config, value)
    out = overlay.with_config(config)
    if name in Conventions.__dataclass_fields__:
        out = out.declare(**{name: value})
    _reads_back(out, name, value)
    return out.tell(f"{name}: {'absent' if old is None else repr(old)} -> {value!r}")


def _check(overlay: Overlay, name: str, value: Value) -> None:
    if name in NORMS:
        there = any(n.startswith(NORMS[name]) for n in overlay.raw.tensors)
        if there != bool(value):
            lacks = f"there are {'such tensors' if there else f'no tensors {NORMS[name]}*'} in {overlay.path}"
            raise BadInput(f"set-flag: {name} = {value!r}: {lacks}; {'take them out' if there else 'restore them'}")
    booleans = (*NORMS, "norm_before_residual", "norm_output", "tie_word_embeddings", "attention_bias", "mlp_bias")
    if name in booleans and not isinstance(value, bool):
        raise BadInput(f"set-flag: {name} = {value!r}; expected true or false")
    if name == "hidden_act":
        from ..draft.model import ACTIVATIONS

        if value in ACTIVATIONS:
            return
        raise BadInput(f"set-flag: hidden_act = {value!r}; Eyas knows {', '.join(sorted(ACTIVATIONS))}")
    if name in ("rms_norm_eps", "logit_scale") and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise BadInput(f"set-flag: {name} = {value!r}; expected a number")


def _reads_back(overlay: Overlay, name: str, value: Any) -> None:
    """Whoever reads the directory now reads the value, where it can be read at all."""
    if overlay.reading is None or name not in Conventions.__dataclass_fields__:
        return
    read = getattr(overlay.reading.conventions, name)
    if read != value:
        raise BadInput(
            f"{overlay.path}: written, {name} = {value!r} would be read as {read!r}: the dialect of "
            f"{overlay.reading.producer or overlay.reading.dialect} does not say it so. Export the draft (eyas export)"
        )


def _window(config: dict[str, Any], value: Value) -> dict[str, Any]:
    """The switches beside a window."""
    if value is None:
        config = places.without(config, "sliding_window")
    for name, on in (("use_sliding_window", value is not None),):
        config = places.write(config, name, on, model=True)
    kinds = places.standing(config, "layer_types")
    kind = "full_attention" if value is None else "sliding_attention"
    for place in kinds:
        held = config
        for key in place:
            held = held[key]
        config = _set(config, place, "layer_types", [kind] * len(held["layer_types"] or [0]))
    if not kinds and value is not None:
        config = places.write(config, "layer_types", [kind], model=True)
    return config


def _set(config: Mapping[str, Any], place: tuple[str, ...], name: str, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(dict(config))
    held = out
    for key in place:
        held = held[key]
    held[name] = value
    return out


def declare(overlay: Overlay, name: str, value: Value) -> Overlay:
    """Declare in eyas.json a convention that no config.json says (rms_norm_offset, layer_input, embedding, ...)."""
    if overlay.eyas is None or name in (*DRAFT, *MODEL) or name not in Conventions.__dataclass_fields__:
        raise BadInput(
            f"declare: {name}: {overlay.path} has no eyas.json, or it is no convention that stands there alone"
        )
    old = (overlay.eyas.get("conventions") or {}).get(name)
    out = overlay.declare(**{name: value})
    if out.reading is None:
        raise BadInput(f"declare: {name} = {value!r}: {out.refusal}")
    return out.tell(f"declares {name}: {old!r} -> {value!r}")


# ---------------------------------------------------------------- RoPE and positions


def set_rope(
    overlay: Overlay, theta: float | None = None, kind: str | None = None, scaling: dict[str, Any] | None = None
) -> Overlay:
    """Write RoPE's base, or its kind with all further numbers, in both spellings (of transformers before and since 5).

    None keeps what is there. Raises BadInput where the directory would still be read otherwise.
    """
    if theta is None and kind is None:
        raise BadInput("set-rope: neither theta nor kind is given; give one")
    if theta is not None and not theta > 0:
        raise BadInput(f"set-rope: theta = {theta}; expected a number above 0")
    config, old = dict(overlay.config), _rope_said(overlay)
    if kind is not None:
        config = _kind(config, kind, scaling or {}, theta)
    if theta is not None:
        config = _theta(config, float(theta))
    out = overlay.with_config(config)
    said: dict[str, Any] = {} if theta is None else {"rope_theta": float(theta)}
    if kind is not None:
        said |= {"rope_type": kind, "rope_scaling": dict(scaling or {})}
    out = out.declare(**said)
    for name, value in said.items():
        _reads_back(out, name, value)
    return out.tell(f"RoPE: {old} -> {_rope_said(out)}")


def _theta(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    tables = [name for name in ("rope_parameters", "rope_scaling") if places.standing(config, name)]
    out = places.write(config, "rope_theta", theta, model=True) if _beside(config) else copy.deepcopy(dict(config))
    for name in tables:
        for place in places.standing(out, name):
            table = places.value(out, place, name)
            if not isinstance(table, Mapping):
                continue
            inner = [k for k, v in table.items() if k.endswith("_attention") and isinstance(v, Mapping)]
            if inner:  # one table for each kind of attention (Gemma)
                new = {k: {**v, "rope_theta": theta} if k in inner else v for k, v in table.items()}
            elif "rope_theta" in table or name == "rope_parameters":
                new = {**table, "rope_theta": theta}
            else:
                continue
            out = _set(out, place, name, new)
    return out


def _beside(config: Mapping[str, Any]) -> bool:
    """Is theta written beside the table, too? A nested config of transformers 5 has it in the table alone."""
    return bool(
        places.standing(config, "rope_theta")
        or not places.standing(config, "rope_parameters")
        or places.home(config, True) == ()
    )


def _kind(config: Mapping[str, Any], kind: str, scaling: Mapping[str, Any], theta: float | None) -> dict[str, Any]:
    table = {"rope_type": kind, **scaling}
    place = (places.standing(config, "rope_parameters") or [places.home(config, True)])[0]
    held = places.value(config, place, "rope_parameters")
    kept = {k: v for k, v in (held or {}).items() if k in ("rope_theta", "partial_rotary_factor")}
    base = theta if theta is not None else kept.get("rope_theta", places.first(config, "rope_theta"))
    out = places.without(config, "rope_scaling")
    if kind != "default":
        out = places.write(out, "rope_scaling", table, model=True)
        kept |= {} if base is None else {"rope_theta": float(base)}
    if kept or held is not None or kind != "default":
        out = places.write(out, "rope_parameters", {**kept, **table}, model=True)
    return out


def _rope_said(overlay: Overlay) -> str:
    case = overlay.raw
    table = case.said("rope_parameters") or case.said("rope_scaling")
    return f"rope_theta = {case.said('rope_theta')}, parameters {table}"


def set_positions(overlay: Overlay, longest: int) -> Overlay:
    """Write max_position_embeddings, where the angles do not depend on it."""
    reading = overlay.reading
    kind = reading.conventions.rope_type if reading else "default"
    if kind not in LENGTH_FREE_ROPE:
        raise BadInput(
            f"{overlay.path}: RoPE of kind {kind!r} derives its angles from max_position_embeddings; export the "
            "draft with its target instead"
        )
    old = overlay.raw.number("max_position_embeddings")
    if longest < 1 or longest == old:
        raise BadInput(f"set-positions: longest = {longest}, and config.json says {old}; nothing to write")
    config = places.write(overlay.config, "max_position_embeddings", longest, model=True)
    # Eyas's own record keeps the range of training.
    return overlay.with_config(config).tell(f"max_position_embeddings: {old} -> {longest:,}")


# ---------------------------------------------------------------- fields as they are: what undoes the others


def write_fields(
    overlay: Overlay, values: dict[str, dict[str, Any]], removed: dict[str, list[str]] | None = None
) -> Overlay:
    """Set and remove fields by JSON pointer. values, removed: file (config.json, eyas.json) -> what to change there."""
    out = overlay
    for file in sorted({*values, *(removed or {})}):
        new, gone = values.get(file, {}), (removed or {}).get(file, [])
        if file == CONFIG:
            out = out.with_config(places.apply(out.config, new, gone))
        elif file == EYAS_JSON and out.eyas is not None:
            out = out.with_eyas(places.apply(out.eyas, new, gone))
        else:
            raise BadInput(f"write-fields: {overlay.path} has no {file}; expected {CONFIG} or {EYAS_JSON}")
        said = [f"{pointer} = {value!r}" for pointer, value in new.items()] + [f"without {pointer}" for pointer in gone]
        out = out.tell(f"{file}: {', '.join(said)}")
    return out
