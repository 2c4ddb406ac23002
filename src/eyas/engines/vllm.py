"""vLLM: how `Eagle3LlamaForCausalLM`, or `Eagle3Qwen3ForCausalLM`, and its loader read a draft directory of any style.

Unknown names raise, missing ones are left in silence; ids of layers are taps. What a flag's absence means depends on
the style of the config. File and line of each rule: docs/facts/README.md.   pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..draft.dialects.canonical import QK_NORMED
from . import vllm_mla
from .fused import LLAMA, llama_layer, under
from .hf_config import HfConfig
from .reading import (
    ONES,
    ZEROS,
    Dropped,
    EngineReading,
    Into,
    Place,
    Refused,
    Seen,
    Slot,
    Stops,
    attempt,
    fill,
)
from .vllm_capture import EXPORT, IDS, captured, check_method, internal_name, launch

ENGINE, VERSION = "vllm", "0.32.0"
ARCHITECTURE = "Eagle3LlamaForCausalLM"
ACCEPTED = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)
# The class with norms on the heads of q and k, and without biases but those of q, k and v (qwen3_eagle3.py).
NORMED = (QK_NORMED, "Qwen3ForCausalLM")
FROM_SPECULATORS = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output", IDS)


def read(seen: Seen) -> EngineReading:
    """The directory as this version reads it."""
    return attempt(ENGINE, VERSION, _read, seen)


def _read(seen: Seen) -> EngineReading:
    raw = _flattened(seen)
    check_method(seen)
    named = raw.get("architectures", [""])[0]
    if named in vllm_mla.ACCEPTED:
        return vllm_mla.read(seen, EngineReading(ENGINE, VERSION, vllm_mla.ARCHITECTURE))
    normed = named in NORMED
    config = HfConfig.of(raw)
    hidden, vocab = config.whole("hidden_size"), config.whole("vocab_size")
    nested = config.nested("eagle_config")
    ids = raw.get(IDS) or nested.get(IDS) or None
    counted = (raw.get("num_aux_layers") if normed else None) or raw.get("num_aux_hidden_states")
    count = counted or len((ids if normed else nested.get(IDS)) or ()) or 3
    used = bool(nested.get("use_aux_hidden_state", True))
    flags = {name: bool(raw.get(name)) for name in ("norm_before_residual", "fc_norm", "norm_output")}
    flags["norm_before_fc"] = bool(nested.get("norm_before_fc", raw.get("norm_before_fc")))
    target_hidden = raw.get("target_hidden_size", hidden)
    if target_hidden is None and used:
        raise Stops(
            "configuration", "TypeError", "target_hidden_size is null and is multiplied", "remove it, or write it"
        )
    size = raw.get("draft_vocab_size") or vocab
    slots = _slots(config, flags, count if used else 0, target_hidden, size, normed)
    if config.get("hidden_act") != "silu":
        raise Stops("configuration", "ValueError", f"hidden_act = {config.get('hidden_act')!r}; only silu is run", "")
    if size != vocab:
        slots["draft_id_to_target_id"] = Slot((size,), blank=ZEROS)
    parameters, dropped = fill(seen, slots, lambda name: _place(name, slots, flags, used), "AssertionError", cuts=True)
    taps, failure = captured(seen, ids, count if used else None)
    head = parameters["lm_head.weight"].filled == "whole"
    values: dict[str, Any] = {
        **config.common(),
        **flags,
        "taps": taps,
        "num_target_layers": seen.layers,
        "d2t": "offset" if size != vocab else "none",
        "qk_norm": normed,
        # Without the bias of o_proj it is not the one that was trained.
        "attention_bias": bool(config.get("attention_bias")) and not any("o_proj.bias" in name for name in dropped),
        "mlp_bias": bool(config.get("mlp_bias")) and not normed,
        "logit_scale": float(raw.get("logit_scale", 1.0)),
        "sliding_window": _window(raw),
        "embedding": "own" if parameters["model.embed_tokens.weight"].keys else "target",
        "head": "own" if head else "target" if size == vocab else "target_rows",
    }
    surprises = () if used else ("use_aux_hidden_state is false: the target's final state is fed, and fc is skipped",)
    return EngineReading(
        ENGINE, VERSION, QK_NORMED if normed else ARCHITECTURE, failure, parameters, dropped, values,
        launch(seen, values), surprises,
    )  # fmt: skip


def _flattened(seen: Seen) -> Mapping[str, Any]:
    """The config as the draft class gets it (transformers_utils/config.py:315, configs/speculators/algos.py:18)."""
    raw = seen.folder.config
    if raw.get("speculators_config") is not None and not raw.get("model_type"):
        kind = raw.get("speculators_model_type")
        if kind != "eagle3":
            raise Stops(
                "configuration", "ValidationError", f"speculators_model_type = {kind!r}", "give an eagle3 draft"
            )
        layer = raw.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise Stops("configuration", "KeyError", "transformer_layer_config is missing", EXPORT)
        flat = {**layer, **{name: raw[name] for name in FROM_SPECULATORS if raw.get(name) is not None}}
        kinds = {"llama": ARCHITECTURE, "qwen3": QK_NORMED}
        kind = layer.get("model_type", "llama")
        if kind not in kinds:
            raise Stops(
                "configuration", "ValidationError", f"a layer of model_type {kind!r}, no llama or qwen3", EXPORT
            )
        return {
            **flat, "architectures": [kinds[kind]], "norm_before_residual": raw.get("norm_before_residual", True),
        }  # fmt: skip
    if not raw.get("model_type"):
        raise Stops(
            "configuration", "ValidationError", "config.json has no model_type and no speculators_config", EXPORT
        )
    named = raw.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in (*ACCEPTED, *NORMED, *vllm_mla.ACCEPTED):
        raise Stops(
            "configuration", "ValidationError", f"architectures = {named!r} is no EAGLE-3 draft of its own", EXPORT
        )
    return raw


def _slots(
    config: HfConfig, flags: Mapping[str, bool], count: int, target_hidden: int, size: int, normed: bool
) -> dict[str, Slot]:
    hidden, vocab = config.whole("hidden_size"), config.whole("vocab_size")
    bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias")) and not normed
    out = {"model.embed_tokens.weight": Slot((vocab, hidden), blank="the target's embedding")}
    if count:
        out["model.fc.weight"] = Slot((hidden, target_hidden * count))
    if flags["norm_before_fc"]:
        out["model.input_norm.weight"] = Slot((target_hidden * count,), blank=ONES)
    if flags["fc_norm"]:
        out |= {f"model.fc_norm.{i}.weight": Slot((target_hidden,), blank=ONES) for i in range(count)}
    for layer in range(config.whole("num_hidden_layers")):
        prefix, slots = f"model.layers.{layer}.", llama_layer(config, layer, unused="hidden_norm")
        out |= under(prefix, slots)
        qkv, gate_up = slots["self_attn.qkv_proj.weight"], slots["mlp.gate_up_proj.weight"]
        if bias:
            out[prefix + "self_attn.qkv_proj.bias"] = Slot(qkv.shape[:1], qkv.parts)
        if normed:
            out |= {f"{prefix}self_attn.{x}_norm.weight": Slot((config.heads[2],), blank=ONES) for x in "qk"}
        elif bias or config.get("bias"):  # `bias`, SGLang's switch for fc, makes this one here
            out[prefix + "self_attn.o_proj.bias"] = Slot((hidden,))
        if mlp_bias:
            out[prefix + "mlp.gate_up_proj.bias"] = Slot(gate_up.shape[:1], gate_up.parts)
            out[prefix + "mlp.down_proj.bias"] = Slot((hidden,))
    out["model.norm.weight"] = Slot((hidden,), blank=ONES)
    out["lm_head.weight"] = Slot((size, hidden), blank="the first rows of the target's head")
    return out


def _place(stored: str, slots: Mapping[str, Slot], flags: Mapping[str, bool], used: bool) -> Place:
    """llama_eagle3.py:426-465."""
    if "t2d" in stored:
        return Dropped("t2d is not used")
    name, part = internal_name(stored, LLAMA)
    if name in slots:
        return Into(name, part)
    if name.endswith(".bias"):
        return Dropped("the module has no such bias; it is dropped in silence")
    if "input_norm" in name and not flags["norm_before_fc"]:
        return Dropped("norm_before_fc is not set; it is dropped in silence")
    if name.startswith("model.fc.") and not used:
        return Dropped("use_aux_hidden_state is false, so there is no fc")
    if "mask_hidden" in name or "rotary_emb.inv_freq" in name:
        return Dropped("not used")
    return Refused("ValueError", f"there is no module or parameter for {stored}")


def _window(raw: Mapping[str, Any]) -> int | None:
    kinds, size = raw.get("layer_types"), raw.get("sliding_window")
    if raw.get("model_type") == "qwen3" and not raw.get("use_sliding_window"):
        return None
    return size if isinstance(kinds, list) and "sliding_attention" in kinds and type(size) is int else None
