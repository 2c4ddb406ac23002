"""OpenVINO GenAI: how optimum-intel's converter reads a draft directory.

The first layer must be spelled `midlayer.`: any other name leaves it random, in a converted model that looks sound.
Which layers are tapped stands in the converted model alone, not in the config.   pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .hf_config import HfConfig
from .reading import (
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

ENGINE, VERSION = "openvino", "2026.4.1"
ACCEPTED = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
OTHER = "choose another engine"
EXPORT = "export the draft with Eyas, which writes it"
TAPS = 3


def read(seen: Seen) -> EngineReading:
    """The directory as this version converts it."""
    return attempt(ENGINE, VERSION, _read, seen)


def _read(seen: Seen) -> EngineReading:
    raw = seen.folder.config
    if not raw.get("model_type") or str(raw["model_type"]).startswith("kimi"):
        raise Stops(
            "conversion", "ValueError", f"model_type = {raw.get('model_type')!r} is none to transformers", EXPORT
        )
    named = raw.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in ACCEPTED:
        raise Stops("conversion", "RuntimeError", f"architectures = {named!r}: no EAGLE-3 draft to it", EXPORT)
    config = HfConfig.of(raw)
    if "draft_vocab_size" not in raw:
        raise Stops("conversion", "AttributeError", "config.json has no draft_vocab_size", EXPORT)
    if type(raw["draft_vocab_size"]) is not int:
        raise Stops("conversion", "TypeError", f"draft_vocab_size = {raw['draft_vocab_size']!r} is no number", EXPORT)
    hidden = config.whole("hidden_size")
    target_hidden = raw.get("target_hidden_size", hidden)
    if target_hidden is None:
        raise Stops("conversion", "TypeError", "target_hidden_size is null and is multiplied", EXPORT)
    slots = _slots(config, target_hidden, raw["draft_vocab_size"])
    try:
        parameters, dropped = fill(seen, slots, lambda name: _place(name, slots), "RuntimeError")
    except Stops as stop:  # shapes are compared while it converts
        raise Stops("conversion", stop.failure.error, stop.failure.what, stop.failure.way_out) from stop
    if target_hidden != hidden:
        raise Stops("conversion", "RuntimeError", "a draft of another width than its target cannot be traced", OTHER)
    # Its default counts outputs of layers, one further than everybody's: taps 3, n//2 + 1, n - 2.
    layers = seen.layers
    values: dict[str, Any] = {
        **config.common(),
        "taps": (3, layers // 2 + 1, layers - 2) if layers and layers >= 10 else None,
        "num_target_layers": layers,
        "d2t": "offset",
        "embedding": "target",
        "head": "own",
    }
    needs = ("hidden_layers_list in rt_info of the converted draft: taps less one, by spaces (`1 14 26`)",)
    more = config.get("num_hidden_layers") != 1
    surprises = ("only the first layer is run, whatever num_hidden_layers says",) if more else ()
    return EngineReading(ENGINE, VERSION, named[0], None, parameters, dropped, values, needs, surprises)


def mended(read_: EngineReading, taps: tuple[int, ...]) -> EngineReading:
    """The reading once `hidden_layers_list` has been written for `taps` into the converted model."""
    import dataclasses

    return dataclasses.replace(read_, values={**read_.values, "taps": taps})


def _slots(config: HfConfig, target_hidden: int, size: int) -> dict[str, Slot]:
    hidden, inter, vocab = (config.whole(n) for n in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv, dim = config.heads
    q, key = heads * dim, kv * dim
    shapes = {
        "self_attn.q_proj": (q, 2 * hidden), "self_attn.k_proj": (key, 2 * hidden),
        "self_attn.v_proj": (key, 2 * hidden), "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden), "mlp.down_proj": (hidden, inter),
    }  # fmt: skip
    out = {f"model.midlayer.{name}.weight": Slot(shape, blank=RANDOM) for name, shape in shapes.items()}
    if config.get("attention_bias"):  # of the four only this one is made
        out["model.midlayer.self_attn.o_proj.bias"] = Slot((hidden,), blank=ZEROS)
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        out[f"model.{name}.weight"] = Slot((hidden,), blank=ONES)
    return {
        **out,
        "model.embed_tokens.weight": Slot((vocab, hidden), blank="the target's embedding"),
        "model.fc.weight": Slot((hidden, TAPS * target_hidden), blank=RANDOM),
        "model.lm_head.weight": Slot((size, hidden), blank=RANDOM),
        "model.d2t": Slot((size,)),
    }


def _place(stored: str, slots: Mapping[str, Slot]) -> Place:
    name = "model." + stored.removeprefix("model.")
    if name in slots and stored != "model.d2t":
        return Into(name)
    return Dropped(
        "t2d is not used" if stored == "t2d" else "no parameter has this name; only a table in the log says so"
    )
