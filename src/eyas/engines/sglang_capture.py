"""SGLang: which of the target's states a draft is fed, and what its launch needs; the same for all its draft classes.

Sources: speculative/spec_aux_hidden_state.py:185-196, models/llama_eagle3.py:156-196.
"""

from __future__ import annotations

from typing import Any

from ..draft.dialects.numbering import sglang_taps
from .hf_config import HfConfig
from .reading import Failure, Seen, Stops

IDS = "eagle_aux_hidden_state_layer_ids"
# Targets whose classes have `set_eagle3_layers_to_capture`, or inherit Llama's.
HOOKED = {
    "apertus", "bailing_moe", "deepseek_v2", "deepseek_v3", "exaone_moe", "gemma3", "gemma3_text", "gemma4",
    "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm5_next", "gpt_oss", "kimi_k2", "kimi_k25", "llama", "llama4",
    "llama4_text", "longcat_flash", "minimax_m2", "minimax_m3", "minimax_m3_vl", "mistral", "phi3", "qwen2",
    "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl",
}  # fmt: skip
PADDED = ("gate", "up")  # filled up with rows of zeros, in silence (layers/linear.py:853)
PLAIN_EAGLE = (
    "--speculative-algorithm EAGLE instead of EAGLE3: no layer is captured, the target's final state is fed past fc, "
    "its own head chooses, d2t is not used; accept rate 0.00 and no word (eagle_worker_v2.py:370)"
)
EXPORT = "export the draft with Eyas, which writes it"
# Target classes that also capture the last block's output; Llama's and its like never do (llama.py:484).
LAST_LAYER = ("gpt_oss", "minimax_m3", "minimax_m3_vl", "gemma3", "gemma3_text", "laguna")


def aux_fields(raw: Any) -> dict[str, Any]:
    """Fields that are read from `eagle_config`, or from both places (llama_eagle3.py:156-196)."""
    nested = raw.get("eagle_config") if isinstance(raw.get("eagle_config"), dict) else {}
    ids = nested.get(IDS) if nested.get("use_aux_hidden_state", True) else None
    return {
        "used": bool(nested.get("use_aux_hidden_state", True)),
        "ids": ids or None,
        "count": raw.get("num_aux_hidden_states") or len(nested.get(IDS) or ()) or 3,
        "norm_before_fc": bool(nested.get("norm_before_fc") or raw.get("norm_before_fc")),
        "fc_norm": bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
    }


def captured(
    seen: Seen, aux: Any, target_hidden: int, hidden: int
) -> tuple[tuple[int, ...] | None, tuple[str, ...], Failure | None]:
    """(taps, surprises, what the first request fails with). Raises Stops for ids that are no layers."""
    ids, count = aux["ids"], aux["count"]
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise Stops("configuration", "TypeError", f"eagle_config.{IDS} = {ids!r} is no list of layers", EXPORT)
    taps = sglang_taps(ids, seen.family, seen.layers)
    if seen.launch.get("speculative-algorithm") in ("EAGLE", "EAGLE2"):
        return taps, (PLAIN_EAGLE,), None
    if not aux["used"]:
        return taps, ("use_aux_hidden_state is false: the target's final state is fed, and fc is skipped",), None
    failure = None
    if taps is not None and len(taps) != count:
        what = f"{len(taps)} layers are captured ({list(taps)} as taps), fc takes {count}"
        failure = Failure("first request", "RuntimeError", what, "name one layer a slice of fc")
    elif taps is not None and taps[-1] == seen.layers and seen.family not in LAST_LAYER:
        what = f"tap {taps[-1]}, the last block's output, is never captured on a {seen.family} target"
        failure = Failure("first request", "RuntimeError", what, "choose another engine or other taps")
    skipped = target_hidden * count == hidden
    return taps, ("fc is skipped, since its input is as wide as the draft",) if skipped else (), failure


def launch(seen: Seen) -> tuple[str, ...]:
    """What the launch needs beside the right flags."""
    if seen.facts is None or seen.family in HOOKED:
        return ()
    return (f"a target class that captures hidden states; none is known here for model_type {seen.family!r}",)


def check_context(seen: Seen, config: HfConfig) -> None:
    """Raises Stops where the draft's positions end before the target's (model_config.py:1292)."""
    most = config.whole("max_position_embeddings")
    served = seen.context("context-length")
    if served is not None and served > most:
        what = f"the context served, {served}, exceeds max_position_embeddings = {most}"
        way = f"serve with --context-length {most}, or export the draft, which writes the target's where RoPE allows it"
        raise Stops("configuration", "ValueError", what, way)
