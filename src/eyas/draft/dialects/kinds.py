"""What a folder of weights is, where it is no EAGLE-3 draft that Eyas runs: named, so that nobody looks for a fault.

Told by tensor names and shapes and by the config's own words; the first kind that fits is the answer.

    pytest tests/test_kinds.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import BadInput
from ..files import DraftFolder
from .keys import canonical_name

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Kind:
    """`fits(config, shapes)`: shapes by canonical name, fused projections left fused."""

    what: str
    fits: Callable[[Mapping[str, Any], Shapes], bool]
    remedy: str = "Eyas runs EAGLE-3 drafts"


def _named(pattern: str) -> Callable[[Mapping[str, Any], Shapes], bool]:
    compiled = re.compile(pattern)
    return lambda _, shapes: any(compiled.search(name) for name in shapes)


def _says(config: Mapping[str, Any], *words: str) -> bool:
    """Is one of `words` in the config's own name for itself?"""
    named = [config.get("speculators_model_type"), config.get("model_type"), *_list(config.get("architectures"))]
    return any(word in str(name).lower() for name in named if name is not None for word in words)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_eagle3(shapes: Shapes) -> bool:
    """Norm on the state and a first layer: no other kind has them."""
    return "midlayer.hidden_norm.weight" in shapes


def _is_eagle1(_: Mapping[str, Any], shapes: Shapes) -> bool:
    fc = shapes.get("fc.weight", ())
    attends = any(name.startswith("midlayer.self_attn.") for name in shapes)
    return not _is_eagle3(shapes) and attends and len(fc) == 2 and fc[1] == 2 * fc[0]


def _is_whole_model(_: Mapping[str, Any], shapes: Shapes) -> bool:
    layers = {m[1] for name in shapes if (m := re.match(r"layers\.(\d+)\.", name))}
    return not _is_eagle3(shapes) and "fc.weight" not in shapes and len(layers) >= 3


KINDS = (
    Kind("a LoRA adapter", _named(r"\.lora_[AB]\."), "merge it into its draft first"),
    Kind(
        "a quantised checkpoint",
        _named(r"\.(weight_scale|weight_scale_2|weight_scale_inv|input_scale|qweight|qzeros|weight_packed)$"),
        "give the unquantised draft",
    ),
    Kind("a set of Medusa heads", lambda c, s: "medusa_num_heads" in c or _named(r"(^|\.)medusa_heads?\.")(c, s)),
    Kind("a DFlash draft", lambda c, s: _says(c, "dflash") or "dflash_config" in c),
    Kind("a DSpark draft", lambda c, s: _says(c, "dspark")),
    Kind(
        "a P-EAGLE draft",
        lambda c, s: _says(c, "peagle", "p-eagle", "p_eagle") or c.get("parallel_drafting") is True,
    ),
    Kind("an MTP module", lambda c, s: _says(c, "mtp", "nextn") or _named(r"(^|\.)(eh_proj|enorm|hnorm)\.")(c, s)),
    Kind("an EAGLE-1/2 draft (fc reads 2H, no hidden_norm)", _is_eagle1),
    Kind("a whole language model", _is_whole_model, "give the draft; a target goes to --target"),
)


def refuse_other_kinds(folder: DraftFolder) -> None:
    """Raises BadInput naming what the folder holds, where that is no EAGLE-3 draft that Eyas runs."""
    shapes = {canonical_name(name): ref.shape for name, ref in folder.tensors.items()}
    for kind in KINDS:
        if kind.fits(folder.config, shapes):
            raise BadInput(f"{folder.path} is {kind.what}; {kind.remedy}")
    if "fc.weight" not in shapes and not _is_eagle3(shapes):
        names = ", ".join(list(folder.tensors)[:4])
        raise BadInput(
            f"{folder.path} is not an EAGLE-3 draft: neither fc.weight nor hidden_norm among its tensors ({names}, "
            "...); name the directory of such a draft"
        )
