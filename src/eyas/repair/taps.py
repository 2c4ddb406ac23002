"""Operations on the taps: which layers' states feed `fc`, and in which order its slices take them.

Engines look in different places and count differently: the top level names taps, `eagle_config` the outputs of layers
(draft/dialects/numbering.py), so both are written.   pytest tests/test_repair_operations.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..draft.dialects.keys import has_latent_attention
from ..draft.dialects.numbering import sglang_ids
from ..errors import BadInput
from . import places
from .overlay import Overlay
from .refs import computed
from .step import Step

IDS, NESTED, COUNT = "eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states"
FC = "fc.weight"


def write_taps(overlay: Overlay, taps: list[int]) -> Overlay:
    """Name the taps in every place where the draft's dialect and the engines look.

    taps: for each slice of fc, in the order of the slices. Where they do not ascend, fc is permuted so that they do.
    """
    _check(overlay, taps)
    order = sorted(range(len(taps)), key=lambda i: taps[i])
    ascending = [taps[i] for i in order]
    out = overlay
    if order != list(range(len(taps))):
        out = permute_fc_slices(overlay, order)
    said = _said(out)
    out = out.with_config(spelled(out, ascending)).declare(taps=ascending)
    if out.reading is not None and list(out.reading.conventions.taps) != ascending:
        read = list(out.reading.conventions.taps)
        raise BadInput(f"{overlay.path}: written, the taps {ascending} would be read as {read}; export it instead")
    return out.tell(f"found layer ids {said}", f"writes taps {ascending}: {_said(out)}")


def spelled(overlay: Overlay, taps: Sequence[int]) -> dict[str, Any]:
    """config.json with the taps where each reader of its dialect looks."""
    config = places.write(overlay.config, IDS, list(taps))
    if overlay.spelling == "speculators":
        return config
    facts, nested = overlay.facts, dict(config.get(NESTED) or {})
    latent = has_latent_attention(overlay.tensors)
    family = facts.model_type if facts else str(config.get("model_type")) if latent else "llama"
    c = overlay.reading.conventions if overlay.reading else None
    layers = facts.num_layers if facts else c.num_target_layers if c else None
    ids = sglang_ids(tuple(taps), family, layers)
    if ids is None:  # tap 0 is no layer's output: SGLang cannot be told of it, and a wrong list is worse than none
        nested.pop(IDS, None)
    else:
        nested = {"use_aux_hidden_state": True, **nested, IDS: ids}
    config[IDS] = list(taps)
    config[NESTED] = nested
    if COUNT in config or len(taps) != 3:
        config[COUNT] = len(taps)
    return config


def _said(overlay: Overlay) -> str:
    nested = overlay.config.get(NESTED)
    inner = nested.get(IDS) if isinstance(nested, dict) else None
    return f"{overlay.config.get(IDS, 'none')} at the top level, {inner or 'none'} in {NESTED}"


def _check(overlay: Overlay, taps: list[int]) -> None:
    layers = overlay.facts.num_layers if overlay.facts else None
    if not taps or len(set(taps)) < len(taps) or min(taps) < 0 or (layers is not None and max(taps) > layers):
        has = f" of a target with {layers} layers" if layers is not None else ""
        raise BadInput(f"write-taps: {taps} are no taps{has}: distinct numbers from 0, one for each slice of fc")
    count = slices(overlay)
    if count is not None and count != len(taps):
        raise BadInput(f"write-taps: {taps} are {len(taps)}, but fc.weight of {overlay.path} is {count} taps wide")


def slices(overlay: Overlay) -> int | None:
    """How many taps fc takes, by its width; None where that is not known."""
    held = overlay.stored(FC)
    shape = overlay.tensors[held].shape if held is not None else ()
    wide = overlay.raw.number("target_hidden_size") or overlay.raw.number("hidden_size")
    return shape[1] // wide if len(shape) == 2 and wide and shape[1] % wide == 0 else None


def permute_fc_slices(overlay: Overlay, order: list[int], norms: bool = True) -> Overlay:
    """New slice j of fc is the old slice order[j]; the norms before fc go with it, unless `norms` is false."""
    count = slices(overlay)
    if count is None or sorted(order) != list(range(count)) or order == list(range(count)):
        raise BadInput(
            f"permute-fc-slices: order = {order} moves nothing, or is no order of the {count or 'unknown'} slices "
            f"of fc.weight in {overlay.path}; give another order, or leave the step out"
        )
    changed = {FC: _columns(overlay, FC, order)}
    if norms and overlay.stored("input_norm.weight") is not None:
        changed["input_norm.weight"] = _columns(overlay, "input_norm.weight", order)
    if norms and overlay.stored("fc_norm.0.weight") is not None:
        held = [overlay.ref(f"fc_norm.{i}.weight") for i in range(count)]
        changed |= {f"fc_norm.{j}.weight": held[i] for j, i in enumerate(order)}
    out = overlay.with_tensors({overlay.spelled(name): ref for name, ref in changed.items()})
    return out.tell(f"{', '.join(changed)}: the {count} slices in the order {order}")


def order_back(before: Overlay, after: Overlay, order: list[int], norms: bool = True) -> list[Step]:
    """Exact: columns only move."""
    inverse = [order.index(i) for i in range(len(order))]
    return [Step("permute-fc-slices", {"order": inverse, "norms": norms})]


def taps_back(before: Overlay, after: Overlay, taps: list[int]) -> list[Step]:
    """Exact; the config goes back by itself."""
    order = sorted(range(len(taps)), key=lambda i: taps[i])
    return [] if order == list(range(len(taps))) else order_back(before, after, order)


def _columns(overlay: Overlay, name: str, order: Sequence[int]) -> Any:
    ref = overlay.ref(name)
    width = ref.shape[-1] // len(order)

    def array() -> Any:
        parts = ref.array().reshape(*ref.shape[:-1], len(order), width)
        return parts[..., list(order), :].reshape(ref.shape)

    return computed(ref.name, ref.shape, ref.dtype, ref.file, array)
