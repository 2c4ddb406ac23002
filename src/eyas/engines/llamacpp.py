"""llama.cpp: how its converter and its loader read a draft directory (through a GGUF that has the target's tokenizer).

Nothing is silent about tensors here: an unknown name stops the conversion, a missing one the start. Only fields of the
config that are not read pass without a word.   pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..conventions import default_taps
from .hf_config import HfConfig
from .reading import Dropped, EngineReading, Into, Place, Refused, Seen, Slot, Stops, attempt, fill

ENGINE, VERSION = "llamacpp", "b11434"
ARCHITECTURE = "eagle3"
ACCEPTED = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "LlamaForCausalLM",
)
IDS = "eagle_aux_hidden_state_layer_ids"
EXPORT = "export the draft with Eyas, which writes it"
OTHER = "choose another engine, or export the draft with Eyas"
TAPS = 3
LAYER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
REST = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "input_norm": "enc.output_norm",
}
OPTIONAL = ("token_embd.weight", "output.weight")  # the target's stand in for them


def read(seen: Seen) -> EngineReading:
    """The directory as this version converts and loads it."""
    return attempt(ENGINE, VERSION, _read, seen)


def _read(seen: Seen) -> EngineReading:
    own = seen.folder.config
    named = own.get("architectures")
    if not isinstance(named, list) or not named:
        raise Stops("conversion", "ValueError", f"architectures = {named!r}; no model is detected", EXPORT)
    if named[0] == "Qwen3ForCausalLM":
        raise Stops("conversion", "ValueError", "architectures says Qwen3ForCausalLM, a whole language model", EXPORT)
    if named[0] not in ACCEPTED:
        raise Stops("conversion", "RuntimeError", f"architectures = {named!r} is not supported", OTHER)
    raw = {**own, **own["transformer_layer_config"]} if isinstance(own.get("transformer_layer_config"), dict) else own
    config = HfConfig.of(raw)
    if "draft_vocab_size" not in raw or config.get("num_hidden_layers") != 1:
        what = (
            "without draft_vocab_size and num_hidden_layers = 1 it is converted as a whole Llama model, not as a draft"
        )
        raise Stops("conversion", "ValueError", what, OTHER if "draft_vocab_size" in raw else EXPORT)
    hidden, vocab = config.whole("hidden_size"), config.whole("vocab_size")
    before_fc = bool(own.get("norm_before_fc"))
    slots = _slots(config, own.get("target_hidden_size") or hidden, before_fc, seen)
    places = {stored: _place(stored, slots) for stored in seen.folder.tensors}
    for where in places.values():  # the whole file is converted before anything is loaded
        if isinstance(where, Refused) and where.stage == "conversion":
            raise Stops("conversion", where.error, where.why, OTHER)
    if "d2t" in slots:
        _check_map(seen, vocab)
    ids = own.get(IDS)
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise Stops("conversion", "TypeError", f"{IDS} = {ids!r} is no list of layers", EXPORT)
    if ids and len(ids) != TAPS:
        raise Stops("weights", "RuntimeError", f"{len(ids)} taps are named; exactly three are read", OTHER)
    parameters, dropped = fill(seen, slots, places.__getitem__, "RuntimeError")
    parameters = {name: p for name, p in parameters.items() if p.keys or name not in OPTIONAL}
    missing = [name for name, p in parameters.items() if p.filled != "whole"]
    head = "output.weight" in parameters
    if not head and "d2t" in slots:
        missing.append("output.weight, which its d2t needs,")
    if head and "d2t" not in slots and seen.folder.tensors["lm_head.weight"].shape[0] != vocab:
        missing.append("d2t, which its head needs,")
    if missing:
        raise Stops("weights", "RuntimeError", f"{', '.join(missing)} missing", "restore the missing tensors")
    order = tuple(ids) if ids else default_taps(seen.layers) if seen.layers and seen.layers >= 7 else None
    values: dict[str, Any] = {
        **config.common(),
        "partial_rotary_factor": 1.0,  # it writes the whole head as what is rotated (conversion/llama.py:171)
        "taps": tuple(sorted(order)) if order else None,
        "num_target_layers": seen.layers,
        "d2t": "offset" if "d2t" in slots else "none",
        "norm_before_residual": bool(own.get("norm_before_residual", False)),
        "norm_before_fc": before_fc,
        "embedding": "own" if "token_embd.weight" in parameters else "target",
        "head": "own" if head else "target",
    }
    mixed = (
        ("layers are put together in the order in which they are named",)
        if order and list(order) != sorted(order)
        else ()
    )
    return EngineReading(
        ENGINE, VERSION, ARCHITECTURE, None, parameters, dropped, values, ("--spec-type draft-eagle3",), mixed
    )


def _slots(config: HfConfig, target_hidden: int, before_fc: bool, seen: Seen) -> dict[str, Slot]:
    """Tensors of the GGUF, by its names."""
    hidden, inter, vocab = (config.whole(n) for n in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv, dim = config.heads
    rows = {"attn_q": heads * dim, "attn_k": kv * dim, "attn_v": kv * dim, "ffn_gate": inter, "ffn_up": inter}
    columns = {"attn_q": 2 * hidden, "attn_k": 2 * hidden, "attn_v": 2 * hidden, "attn_output": heads * dim,
               "ffn_down": inter}  # fmt: skip
    out = {
        f"blk.0.{name}.weight": Slot((hidden,))
        if "norm" in name
        else Slot((rows.get(name, hidden), columns.get(name, hidden)))
        for name in LAYER.values()
    }
    d2t = seen.folder.tensors.get("d2t")
    size = d2t.shape[0] if d2t is not None and d2t.shape else config.get("draft_vocab_size") or vocab
    out |= {
        "token_embd.weight": Slot((vocab, hidden)),
        "fc.weight": Slot((hidden, TAPS * target_hidden)),
        "output_norm.weight": Slot((hidden,)),
        "output.weight": Slot((size, hidden)),
    }
    if before_fc:
        out["enc.output_norm.weight"] = Slot((TAPS * target_hidden,))
    return out if d2t is None else {**out, "d2t": Slot(d2t.shape)}


def _place(stored: str, slots: Mapping[str, Slot]) -> Place:
    if stored == "t2d":
        return Dropped("t2d is not used")
    if "rotary_emb.inv_freq" in stored:
        return Dropped("RoPE tables follow from the config")
    if stored == "d2t":
        return Into("d2t")
    name = re.sub(r"^(model\.layers\.0\.|layers\.0\.|midlayer\.)", "blk.0.", stored)
    if name.startswith("model.midlayer."):
        return Refused("AssertionError", f"{stored} belongs to no numbered layer", "conversion")
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    known = f"blk.0.{LAYER[stem[6:]]}" if stem[6:] in LAYER and stem.startswith("blk.0.") else REST.get(stem)
    if known is None and stem == "blk.0.mlp.gate_up_proj":
        return Refused("RuntimeError", f"{stored} is fused: ffn_gate is missing then")
    if known is None:
        return Refused("ValueError", f"the converter can map no tensor {stored}", "conversion")
    if f"{known}.{kind}" in slots:
        return Into(f"{known}.{kind}")
    return Refused("RuntimeError", f"{stored} is converted, but the loader expects no such tensor")


def _check_map(seen: Seen, vocab: int) -> None:
    import numpy as np

    stored = seen.folder.tensors["d2t"].array().reshape(-1)
    if stored.dtype.kind not in "iu":
        return
    ids = stored.astype(np.int64) + np.arange(len(stored))
    total = seen.facts.vocab_size if seen.facts else vocab
    if len(ids) and (ids.min() < 0 or ids.max() >= total):
        raise Stops("conversion", "ValueError", f"d2t names target ids out of range 0 to {total - 1}", "repair d2t")
    if not np.all(np.diff(np.sort(ids)) > 0):
        raise Stops("conversion", "ValueError", "d2t names target ids twice", "repair d2t")
