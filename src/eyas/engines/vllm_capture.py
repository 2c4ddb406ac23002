"""vLLM: which of the target's states a draft is fed, and what its launch needs; the same for all its draft classes.

Sources: v1/worker/gpu_model_runner.py:5251-5285, 4288-4301, model_executor/models/interfaces.py:1578, 1712.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..conventions import default_taps
from .fused import Stacks, restacked
from .reading import Failure, Seen, Stops

IDS = "eagle_aux_hidden_state_layer_ids"
EXPORT = "export the draft with Eyas, which writes it"


def captured(seen: Seen, ids: Any, count: int | None) -> tuple[tuple[int, ...] | None, Failure | None]:
    """(ids as they stand, each once, else (2, n//2, n-3); what the first request fails with).

    count: how many fc takes; None where it is skipped. Raises Stops for ids that are no layers.
    """
    if ids is None:
        taps = default_taps(seen.layers) if seen.layers is not None and seen.layers >= 7 else None
    elif isinstance(ids, list) and all(type(i) is int for i in ids):
        taps = tuple(sorted(set(ids)))
    else:
        raise Stops("configuration", "TypeError", f"{IDS} = {ids!r} is no list of layers", EXPORT)
    if taps is None or count is None or len(taps) == count:
        return taps, None
    what = f"{len(taps)} layers are captured ({list(taps)}), fc takes {count}"
    return taps, Failure("first request", "RuntimeError", what, "name the layers, and write num_aux_hidden_states")


def internal_name(stored: str, stacks: Stacks) -> tuple[str, str]:
    """(parameter, part) that a stored name is looked up as (llama_eagle3.py:286-298, 426-444)."""
    name = stored.replace("d2t", "draft_id_to_target_id")
    if name == stored and "lm_head" not in name:
        name = "model." + name
    return restacked(name.replace("midlayer.", "layers.0."), stacks)


def check_method(seen: Seen) -> None:
    """Raises Stops for a launch that does not say the method, nor the draft's path (config/speculative.py:1326)."""
    said = seen.launch.get("speculative-config")
    if isinstance(said, Mapping) and not said.get("method") and "eagle3" not in str(seen.folder.path):
        what = "--speculative-config names no method, so the draft is run as a language model"
        raise Stops("first request", "TypeError", what, 'add "method": "eagle3"')


def launch(seen: Seen, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Flags and limits without which it does not draft."""
    needs = ['"method": "eagle3" in --speculative-config']
    served = seen.context("max-model-len")
    if served is not None and served > values["max_position"]:
        needs.append(f"--max-model-len {values['max_position']} or less: past it no token is drafted, in silence")
    return tuple(needs)
