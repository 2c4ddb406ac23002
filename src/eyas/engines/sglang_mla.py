"""SGLang: how `Eagle3DeepseekV2ForCausalLM`, the draft with latent attention (MLA), is read (kimi_k25_eagle3.py).

pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from .fused import MLP, latent_layer, restacked, under
from .hf_config import HfConfig
from .mla import mla_sizes
from .reading import GARBAGE, ONES, Dropped, EngineReading, Into, Place, Seen, Slot, Stops, fill
from .sglang_capture import IDS, PADDED, aux_fields, captured, check_context, launch

ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
FUSED = "fused_qkv_a_proj_with_mqa"


def read(seen: Seen, empty: EngineReading) -> EngineReading:
    """Fill `empty` (engine, version and class). Raises Stops where it would not start."""
    raw = seen.folder.config
    config, aux = HfConfig.of(raw), aux_fields(raw)
    check_context(seen, config)
    # This class also counts ids at the top level, which the capture code does not read.
    aux["count"] = len(config.nested("eagle_config").get(IDS) or raw.get(IDS) or (0, 0, 0))
    if config.get("num_hidden_layers") != 1:
        raise Stops("configuration", "ValueError", "num_hidden_layers must be 1", "train one layer")
    hidden, vocab = config.whole("hidden_size"), config.whole("vocab_size")
    target_hidden = config.get("target_hidden_size") or hidden
    tied, size = bool(config.get("tie_word_embeddings")), config.get("draft_vocab_size")
    shared = target_hidden == hidden
    sizes = mla_sizes(config)
    if sizes is None:
        raise Stops("configuration", "ValueError", "q_lora_rank is missing or null", "")
    slots = {
        "model.embed_tokens.weight": Slot((vocab, hidden), blank="the target's embedding" if shared else GARBAGE),
        "model.fc.weight": Slot((hidden, target_hidden * aux["count"])),
    }
    if aux["fc_norm"]:
        slots |= {f"model.fc_norm.{i}.weight": Slot((target_hidden,), blank=ONES) for i in range(aux["count"])}
    slots |= under("model.midlayer.", latent_layer(config, sizes, FUSED))
    slots["model.norm.weight"] = Slot((hidden,), blank=ONES)
    if config.get("bias", False):
        slots["model.fc.bias"] = Slot((hidden,))
    if not tied:
        slots["lm_head.weight"] = Slot((size or vocab, hidden), blank=GARBAGE if size else "the target's head")
    maps = [name for name in seen.folder.tensors if name == "d2t" or name.endswith(".d2t")]
    if maps:
        slots["hot_token_id"] = Slot(seen.folder.tensors[maps[-1]].shape)
    halves = {which for name in seen.folder.tensors for key, which in (("q_a_proj", "q"), ("kv_a_proj", "kv"))
              if f"self_attn.{key}" in name}  # fmt: skip
    parameters, dropped = fill(seen, slots, lambda name: _place(name, slots, halves), "AssertionError", pads=PADDED)
    taps, surprises, failure = captured(seen, aux, target_hidden, hidden)
    values: dict[str, Any] = {
        **config.common(),
        "taps": taps,
        "num_target_layers": seen.layers,
        "attention": "mla",
        "d2t": "offset" if maps else "none",
        "fc_norm": aux["fc_norm"],
        "norm_output": bool(config.get("norm_output", False)),
        "fc_bias": bool(config.get("bias", False)),
        "embedding": "target" if shared else "own",
        "head": "target" if not size else "target_rows" if tied else "own",
    }
    needs = (
        *launch(seen),
        "CUDA: this class calls it when it takes the target's embedding",
    )
    return dataclasses.replace(
        empty, failure=failure, parameters=parameters, dropped=dropped, values=values, needs=needs, surprises=surprises
    )


def _place(stored: str, slots: dict[str, Slot], halves: set[str]) -> Place:
    if stored == "d2t" or stored.endswith(".d2t"):
        return Into("hot_token_id")
    if stored == "t2d" or stored.endswith(".t2d"):
        return Dropped("t2d is not used")
    name = re.sub(r"^layers\.0\.", "midlayer.", stored)
    name = name if name.startswith("lm_head.") else f"model.{name}"
    fused, which = restacked(name, MLP)
    if which and fused in slots:
        return Into(fused, which)
    for own, which in (("q_a_proj", "q"), ("kv_a_proj_with_mqa", "kv")):
        if own in name and "fused" not in name:
            fused = name.replace(own, FUSED)
            if halves == {"q", "kv"} and fused in slots:
                return Into(fused, which)
            return Dropped("its other half is missing, so neither is loaded")
    if name in slots:
        return Into(name)
    return Dropped("no parameter has this name; a warning says so")
