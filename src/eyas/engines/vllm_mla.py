"""vLLM: how `Eagle3DeepseekV2ForCausalLM`, the draft with latent attention (MLA), is read (deepseek_eagle3.py).

pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .fused import MLP, latent_layer, under
from .hf_config import HfConfig
from .mla import mla_sizes
from .reading import ONES, ZEROS, Dropped, EngineReading, Into, Place, Refused, Seen, Slot, Stops, fill
from .vllm_capture import IDS, captured, internal_name, launch

ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
ACCEPTED = (ARCHITECTURE, "Eagle3DeepseekV3ForCausalLM")
STACKED = {
    ".q_a_proj": (".fused_qkv_a_proj", "q"),
    ".kv_a_proj_with_mqa": (".fused_qkv_a_proj", "kv"),
    **MLP,
}


def read(seen: Seen, empty: EngineReading) -> EngineReading:
    """Fill `empty` (engine, version and class). Raises Stops where it would not start."""
    raw = seen.folder.config
    if raw.get("model_type") == "deepseek_v3":
        what = "model_type = 'deepseek_v3' is taken for a multi-token prediction module (config/speculative.py:661)"
        raise Stops("configuration", "ValidationError", what, "write model_type = 'deepseek_v2' or 'kimi_k2'")
    config = HfConfig.of(raw)
    hidden, vocab = config.whole("hidden_size"), config.whole("vocab_size")
    nested, target_hidden = config.nested("eagle_config"), config.get("target_hidden_size", hidden)
    count = raw.get("num_aux_hidden_states") or len(nested.get(IDS) or ()) or 3
    flags = {name: bool(raw.get(name)) for name in ("norm_before_residual", "fc_norm", "norm_output")}
    size = raw.get("draft_vocab_size") or vocab
    sizes = mla_sizes(config)
    if sizes is None:
        raise Stops("configuration", "", "a draft without q_lora_rank was never seen to run", "choose another engine")
    slots = {
        "model.embed_tokens.weight": Slot((vocab, hidden), blank="the target's embedding"),
        "model.fc.weight": Slot((hidden, target_hidden * count)),
    }
    if flags["fc_norm"]:
        slots |= {f"model.fc_norm.{i}.weight": Slot((target_hidden,), blank=ONES) for i in range(count)}
    for layer in range(config.whole("num_hidden_layers")):
        of_layer = latent_layer(config, sizes, "fused_qkv_a_proj", layer, unused="hidden_norm")
        slots |= under(f"model.layers.{layer}.", of_layer)
    slots |= {
        "model.norm.weight": Slot((hidden,), blank=ONES),
        "lm_head.weight": Slot((size, hidden), blank="the first rows of the target's head"),
    }
    if size != vocab:
        slots["draft_id_to_target_id"] = Slot((size,), blank=ZEROS)
    parameters, dropped = fill(seen, slots, lambda name: _place(name, slots), "AssertionError", cuts=True)
    taps, failure = captured(seen, raw.get(IDS) or nested.get(IDS) or None, count)
    head = parameters["lm_head.weight"].filled == "whole"
    values: dict[str, Any] = {
        **config.common(),
        **flags,
        "taps": taps,
        "num_target_layers": seen.layers,
        "attention": "mla",
        "d2t": "offset" if size != vocab else "none",
        "logit_scale": float(raw.get("logit_scale", 1.0)),
        "embedding": "own" if parameters["model.embed_tokens.weight"].keys else "target",
        "head": "own" if head else "target" if size == vocab else "target_rows",
    }
    return dataclasses.replace(
        empty, failure=failure, parameters=parameters, dropped=dropped, values=values, needs=launch(seen, values)
    )


def _place(stored: str, slots: Mapping[str, Slot]) -> Place:
    if "t2d" in stored:
        return Dropped("t2d is not used")
    name, part = internal_name(stored, STACKED)
    if name in slots:
        return Into(name, part)
    if name.endswith(".bias"):
        return Dropped("the module has no such bias; it is dropped in silence")
    return Refused("ValueError", f"there is no module or parameter for {stored}")
