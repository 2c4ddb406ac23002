"""SGLang: how `LlamaForCausalLMEagle3` and its loader read a draft directory (`sglang_mla` has the other class).

Unknown names are dropped and missing ones left, both in silence; ids of layers come from `eagle_config` alone and mean
outputs. File and line of each rule: docs/facts/README.md.   pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

from typing import Any

from . import sglang_mla
from .fused import LLAMA, llama_layer, restacked, under
from .hf_config import HfConfig
from .reading import (
    GARBAGE,
    ONES,
    RANDOM,
    ZEROS,
    Dropped,
    EngineReading,
    Into,
    Place,
    Seen,
    Slot,
    Stops,
    attempt,
    fill,
)
from .sglang_capture import EXPORT, PADDED, aux_fields, captured, check_context, launch
from .sglang_rope import rope

ENGINE, VERSION = "sglang", "0.5.23"
ARCHITECTURE = "LlamaForCausalLMEagle3"
RENAMES = (
    ("midlayer", "layers.0"),
    ("aux_norm_low", "fc_norm.0"),
    ("aux_norm_mid", "fc_norm.1"),
    ("aux_norm_high", "fc_norm.2"),
)


def read(seen: Seen) -> EngineReading:
    """The directory as this version reads it."""
    return attempt(ENGINE, VERSION, _read, seen)


def _read(seen: Seen) -> EngineReading:
    raw = seen.folder.config
    if not raw.get("model_type"):
        raise Stops("configuration", "ValueError", "config.json has no model_type at its top level", EXPORT)
    named = raw.get("architectures")
    if not isinstance(named, list) or not named:
        raise Stops("configuration", "TypeError", f"architectures = {named!r}; its first entry is taken", EXPORT)
    found = named[0]
    if found == sglang_mla.ARCHITECTURE:
        return sglang_mla.read(seen, EngineReading(ENGINE, VERSION, found))
    _check_architecture(found, seen)
    config, aux = HfConfig.of(raw), aux_fields(raw)
    check_context(seen, config)
    hidden, vocab = config.whole("hidden_size"), config.whole("vocab_size")
    target_hidden = config.get("target_hidden_size", hidden)
    if target_hidden is None:
        raise Stops(
            "configuration", "TypeError", "target_hidden_size is null and is multiplied", "remove it or write it"
        )
    tied = bool(config.get("tie_word_embeddings"))
    said = None if tied else config.need("draft_vocab_size", EXPORT)
    size = said if said is not None else config.get("draft_vocab_size") or vocab
    shared = target_hidden == hidden
    slots = _slots(config, aux, target_hidden, size, tied, said is None, shared)
    if config.get("hidden_act") != "silu":
        raise Stops("configuration", "ValueError", f"hidden_act = {config.get('hidden_act')!r}; only silu is run", "")
    maps = [name for name in seen.folder.tensors if "d2t" in name]
    if maps:
        slots["hot_token_id"] = Slot(seen.folder.tensors[maps[-1]].shape)
    parameters, dropped = fill(seen, slots, lambda name: _place(name, slots), "AssertionError", cuts=True, pads=PADDED)
    taps, surprises, failure = captured(seen, aux, target_hidden, hidden)
    values: dict[str, Any] = {
        **config.common(),
        **rope(config),
        "taps": taps,
        "num_target_layers": seen.layers,
        "d2t": "offset" if maps else "none",
        "norm_before_fc": aux["norm_before_fc"],
        "fc_norm": aux["fc_norm"],
        "norm_output": bool(config.get("norm_output", False)),
        "fc_bias": bool(config.get("bias", False)),
        "embedding": "target" if shared else "own",
        "head": "target" if said is None and size == vocab else "target_rows" if tied else "own",
    }
    return EngineReading(ENGINE, VERSION, ARCHITECTURE, failure, parameters, dropped, values, launch(seen), surprises)


def _check_architecture(found: Any, seen: Seen) -> None:
    """Another class than the two for drafts: a plain model, or one that nobody knows."""
    if found == ARCHITECTURE:
        return
    if found in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        what = f"architectures says {found}, so it is loaded as a whole language model"
        raise Stops("weights", "AssertionError", what, EXPORT)
    raise Stops("configuration", "ValueError", f"architectures = [{found!r}] is no class that it knows", EXPORT)


def _slots(
    config: HfConfig, aux: Any, target_hidden: int, size: int, tied: bool, borrowed: bool, shared: bool
) -> dict[str, Slot]:
    hidden, vocab = config.whole("hidden_size"), config.whole("vocab_size")
    out = {
        "model.embed_tokens.weight": Slot((vocab, hidden), blank="the target's embedding" if shared else GARBAGE),
        "model.fc.weight": Slot((hidden, target_hidden * aux["count"]), blank=RANDOM),
    }
    if config.get("bias", False):
        out["model.fc.bias"] = Slot((hidden,), blank=RANDOM)
    if aux["norm_before_fc"]:
        out["model.input_norm.weight"] = Slot((target_hidden * aux["count"],), blank=ONES)
    if aux["fc_norm"]:
        out |= {f"model.fc_norm.{i}.weight": Slot((target_hidden,), blank=ONES) for i in range(aux["count"])}
    for layer in range(config.whole("num_hidden_layers")):
        prefix = f"model.layers.{layer}."
        out |= under(prefix, llama_layer(config, layer, unused="input_layernorm"))
        if config.get("attention_bias") or config.get("bias", False):  # of the four only this one is made
            out[prefix + "self_attn.o_proj.bias"] = Slot((hidden,), blank=ZEROS)
    out["model.norm.weight"] = Slot((hidden,), blank=ONES)
    if not tied:
        out["lm_head.weight"] = Slot((size, hidden), blank="the target's head" if borrowed else GARBAGE)
    return out


def _place(stored: str, slots: dict[str, Slot]) -> Place:
    name = stored
    for old, new in RENAMES:
        name = name.replace(old, new)
    if "d2t" in name:
        return Into("hot_token_id")
    if "t2d" in name:
        return Dropped("t2d is not used")
    name, part = restacked(name, LLAMA)
    slot = next((n for n in (name, f"model.{name}") if n in slots), None)
    if slot is None:
        return Dropped("no parameter has this name; it is dropped in silence")
    return Into(slot, part)
