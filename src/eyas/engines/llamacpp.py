"""llama.cpp: how its converter and its loader read a draft directory (through a GGUF that has the target's tokenizer).

Nothing is silent about tensors here: an unknown name stops the conversion, a missing one the start. Only fields of the
config that are not read pass without a word.   pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..conventions import default_taps
from .hf_config import HfConfig
from .reading import Dropped, EngineReading, Into, Place, Refused, Seen, Slot, Stops, attempt, fill

ENGINE, VERSION = "llamacpp", "b11434"
ARCHITECTURE = "eagle3"
ACCEPTED = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
IDS = "eagle_aux_hidden_state_layer_ids"
EXPORT = "export the draft with Eyas, which writes it"
TAPS = 3
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
               "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def read(seen: Seen) -> EngineReading:
    """The directory as this version converts and loads it."""
    return attempt(ENGINE, VERSION, _read, seen)


def _read(seen: Seen) -> EngineReading:
    raw = dict(seen.folder.config)
    named = raw.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in ACCEPTED:
        raise Stops("conversion", "NotImplementedError", f"architectures = {named!r} is no draft to it", EXPORT)
    own = raw
    if isinstance(raw.get("transformer_layer_config"), dict):
        raw = {**raw, **raw["transformer_layer_config"]}
    config = HfConfig.of(raw)
    if "draft_vocab_size" not in raw or config.get("num_hidden_layers") != 1:
        what = "a draft is known by draft_vocab_size and num_hidden_layers = 1; this one is converted as a Llama model"
        raise Stops("conversion", "ValueError", what, "choose another engine" if "draft_vocab_size" in raw else EXPORT)
    hidden = config.whole("hidden_size")
    target_hidden = own.get("target_hidden_size") or hidden
    before_fc = bool(own.get("norm_before_fc"))
    ids = own.get(IDS)
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise Stops("conversion", "TypeError", f"{IDS} = {ids!r} is no list of layers", EXPORT)
    if ids and len(ids) != TAPS:
        raise Stops("weights", "", f"{len(ids)} taps are named; exactly three are read", "choose another engine")
    slots = _slots(config, target_hidden, before_fc, seen)
    parameters, dropped = fill(seen, slots, lambda name: _place(name, slots), "RuntimeError")
    missing = [name for name, p in parameters.items() if p.filled != "whole" and not p.instead.startswith("the target")]
    if missing:
        raise Stops("weights", "RuntimeError", f"{', '.join(missing)} missing", "restore the missing tensors")
    if "d2t" in parameters:
        _check_map(seen, config.whole("vocab_size"))
    taps = tuple(ids) if ids else default_taps(seen.layers) if seen.layers and seen.layers >= 7 else None
    head = bool(parameters["lm_head.weight"].keys)
    values: dict[str, Any] = {
        **config.common(),
        "taps": taps,
        "num_target_layers": seen.layers,
        "d2t": "offset" if "d2t" in parameters else "none",
        "norm_before_residual": bool(own.get("norm_before_residual", False)),
        "norm_before_fc": before_fc,
        "embedding": "own" if parameters["embed_tokens.weight"].keys else "target",
        "head": "own" if head else "target",
    }
    needs = ("--spec-type draft-eagle3",)
    return EngineReading(ENGINE, VERSION, ARCHITECTURE, None, parameters, dropped, values, needs)


def _slots(config: HfConfig, target_hidden: int, before_fc: bool, seen: Seen) -> dict[str, Slot]:
    hidden, inter, vocab = (config.whole(n) for n in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv, dim = config.heads
    q, key = heads * dim, kv * dim
    shapes = ((q, 2 * hidden), (key, 2 * hidden), (key, 2 * hidden), (hidden, q), (inter, hidden), (inter, hidden),
              (hidden, inter))  # fmt: skip
    size = config.get("draft_vocab_size") or vocab
    out = {
        "embed_tokens.weight": Slot((vocab, hidden), blank="the target's embedding"),
        "fc.weight": Slot((hidden, TAPS * target_hidden)),
        **{f"midlayer.{name}.weight": Slot(shape) for name, shape in zip(PROJECTIONS, shapes, strict=True)},
        **{
            f"midlayer.{name}.weight": Slot((hidden,))
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "norm.weight": Slot((hidden,)),
        "lm_head.weight": Slot((size, hidden), blank="the target's head"),
    }
    if before_fc:
        out["input_norm.weight"] = Slot((TAPS * target_hidden,))
    if "d2t" in seen.folder.tensors:
        out["d2t"] = Slot(seen.folder.tensors["d2t"].shape)
    return out


def _place(stored: str, slots: Mapping[str, Slot]) -> Place:
    if stored == "t2d":
        return Dropped("t2d is not used")
    name = stored
    for prefix in ("layers.0.", "model.layers.0."):
        if name.startswith(prefix):
            name = "midlayer." + name.removeprefix(prefix)
    if name in ("model.embed_tokens.weight", "model.norm.weight"):
        name = name.removeprefix("model.")
    if name in slots and stored != f"model.{name}.":
        return Into(name)
    if "rotary_emb.inv_freq" in stored:
        return Dropped("RoPE tables follow from the config")
    return Refused("ValueError", f"the converter has no place for {stored}")


def _check_map(seen: Seen, vocab: int) -> None:
    import numpy as np

    stored = seen.folder.tensors["d2t"].array().reshape(-1)
    if stored.dtype.kind not in "iu":
        return
    ids = stored.astype(np.int64) + np.arange(len(stored))
    total = seen.facts.vocab_size if seen.facts else vocab
    if len(ids) and (ids.min() < 0 or ids.max() >= total):
        raise Stops("conversion", "ValueError", f"d2t names target ids out of range 0 to {total - 1}", "repair d2t")
    if len(np.unique(ids)) != len(ids):
        raise Stops("conversion", "ValueError", "d2t names target ids twice", "repair d2t")
