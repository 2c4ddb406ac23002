"""What can be folded into the weights, so that engines which do not know a convention run the draft all the same.

    cannot_fold("norm_output")  ->  why not, and the way out; None for what `fold` does

pytest tests/test_repair_operations.py
"""

from __future__ import annotations

import math
from typing import Any

from ..errors import BadInput
from . import ends, places, tensors
from .overlay import Overlay
from .step import Step

WAY_OUT = "choose an engine that reads it, or fine-tune shortly under the engine's convention (eyas train --init-from)"
CANNOT = {
    "norm_before_residual": "the residual stream starts from a normed state: the division by its RMS is in no weight",
    "norm_output": "the state that is fed back is divided by its own RMS, which is another number in each row",
    "norm_before_head": "the division by the RMS before the head changes from row to row",
    "norm_before_fc": "its weights could go into the columns of fc, the division by the RMS of the states could not",
    "fc_norm": "its weights could go into the columns of fc, the division by the RMS of each slice could not",
    "hidden_act": "another activation is another function, which no matrix makes up for",
    "rope_theta": "RoPE turns q and k by angles that depend on the position: no constant matrix is the difference",
    "rope_type": "the angles of a scaled RoPE depend on the position: no constant matrix is the difference",
    "rope_step": "engines advance the position with each drafted token: the draft was trained on other angles",
    "sliding_window": "what attention may see is no weight",
    "qk_norm": "the division by the RMS of each head of q and k changes from row to row",
    "embedding": "SGLang puts the target's embedding whatever is stored; only a square matrix between them could help",
    "state_shift": "states of another token were recorded with the training data",
    "label_shift": "the head was trained to say another token than the next one",
    "taps": "fc was trained on these layers' states: an engine that captures others feeds it something else",
}
"""Convention -> why the weights cannot take it in."""
FOLDED = ("rms_norm_offset", "layer_input", "logit_scale", "embedding_scale")


def cannot_fold(convention: str) -> str | None:
    """Why a convention cannot be folded into the weights, and the way out; None for those that can, or are unknown."""
    why = CANNOT.get(convention)
    return None if why is None else f"{why}; {WAY_OUT}"


def fold(overlay: Overlay, convention: str) -> Overlay:
    """Fold what the draft declares of a convention into its tensors, and declare the contract's value.

    rms_norm_offset (1 is added to the norms), layer_input (the halves of q, k and v), logit_scale (into the head,
    powers of two), embedding_scale (into a stored embedding). Raises BadInput for whatever is not exact.
    """
    if convention not in FOLDED:
        why = cannot_fold(convention) or f"known are {', '.join(FOLDED)}"
        raise BadInput(f"fold: {convention}: {why}")
    reading = overlay.reading
    if reading is None:
        raise BadInput(f"{overlay.path} cannot be read as a draft ({overlay.refusal}); mend that first")
    value = getattr(reading.conventions, convention)
    standard: Any = type(reading.conventions)(taps=reading.conventions.taps)
    if value == getattr(standard, convention):
        raise BadInput(
            f"fold: {overlay.path} has {convention} = {value!r}, as engines read it: there is nothing to fold; "
            "leave the step out"
        )
    if convention == "rms_norm_offset":
        out = tensors.add_to_norms(overlay, 1.0)
    elif convention == "layer_input":
        out = tensors.swap_halves(overlay)
    elif convention == "logit_scale":
        if math.frexp(value)[0] != 0.5:
            raise BadInput(
                f"fold: logit_scale = {value}: only powers of two leave the head's numbers as they are; choose an "
                "engine that reads the scale"
            )
        out = ends.scale(overlay, ends.HEAD, float(value))
        out = out.with_config(places.write(out.config, "logit_scale", 1.0))
    else:
        if overlay.stored(ends.EMBEDDING) is None:
            raise BadInput(
                f"fold: {convention} = {value}: the embedding is the target's, which no draft may scale; choose an "
                "engine that reads the scale"
            )
        out = ends.scale(overlay, ends.EMBEDDING, float(value))
    return out.declare(**{convention: getattr(standard, convention)})


def fold_back(before: Overlay, after: Overlay, convention: str) -> list[Step] | None:
    """That of the operation on the tensors; what is declared goes back by itself."""
    value = getattr(before.reading.conventions, convention) if before.reading else None
    if convention == "rms_norm_offset":
        return tensors.norms_back(before, after, 1.0)
    if convention == "layer_input":
        return [Step("swap-halves")]
    name = ends.HEAD if convention == "logit_scale" else ends.EMBEDDING
    back: list[Step] | None = ends.scale_back(before, after, name, float(value or 1))
    return back
