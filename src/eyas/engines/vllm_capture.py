"""vLLM: which of the target's states a draft is fed, and what its launch needs; the same for all its draft classes.

Sources: v1/worker/gpu_model_runner.py:5251-5285, 4288-4301, model_executor/models/interfaces.py:1578, 1712.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..conventions import default_taps
from .reading import Seen, Stops

IDS = "eagle_aux_hidden_state_layer_ids"
EXPORT = "export the draft with Eyas, which writes it"


def captured(seen: Seen, ids: Any) -> tuple[int, ...] | None:
    """Ids as they stand, each once; else (2, n//2, n-3) (gpu_model_runner.py:5251, interfaces.py:1578, 1712)."""
    if ids is None:
        return default_taps(seen.layers) if seen.layers is not None and seen.layers >= 7 else None
    if not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise Stops("configuration", "TypeError", f"{IDS} = {ids!r} is no list of layers", EXPORT)
    return tuple(sorted(set(ids)))


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
