"""OpenVINO GenAI: how optimum-intel's converter reads a draft directory.

The first layer must be spelled `midlayer.`: any other name leaves it random, in a converted model that looks sound.
Which layers are tapped stands in the converted model alone, not in the config.   pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .hf_config import HfConfig
from .reading import RANDOM, Dropped, EngineReading, Into, Place, Seen, Slot, Stops, attempt, fill

ENGINE, VERSION = "openvino", "2026.4.1"
ACCEPTED = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
EXPORT = "export the draft with Eyas, which writes it"
TAPS = 3


def read(seen: Seen) -> EngineReading:
    """The directory as this version converts it."""
    return attempt(ENGINE, VERSION, _read, seen)


def _read(seen: Seen) -> EngineReading:
    raw = seen.folder.config
    named = raw.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in ACCEPTED or raw.get("model_type") != "llama":
        what = f"architectures = {named!r}, model_type = {raw.get('model_type')!r}: no EAGLE-3 draft to it"
        raise Stops("conversion", "ValueError", what, EXPORT)
    config = HfConfig.of(raw)
    if config.get("num_hidden_layers") != 1:
        raise Stops("conversion", "", "exactly one layer is read", "choose another engine, or train one layer")
    hidden = config.whole("hidden_size")
    slots = _slots(config, raw.get("target_hidden_size") or hidden)
    parameters, dropped = fill(seen, slots, lambda name: _place(name, slots), "RuntimeError")
    # Its default counts outputs of layers, one further than everybody's: taps 3, n//2 + 1, n - 2.
    layers = seen.layers
    values: dict[str, Any] = {
        **config.common(),
        "taps": (3, layers // 2 + 1, layers - 2) if layers and layers >= 10 else None,
        "num_target_layers": layers,
        "d2t": "offset" if "d2t" in parameters else "none",
        "embedding": "target",
        "head": "own",
    }
    needs = ("hidden_layers_list in rt_info of the converted draft: taps less one, by spaces (`1 14 26`)",)
    return EngineReading(ENGINE, VERSION, named[0], None, parameters, dropped, values, needs)


def mended(read_: EngineReading, taps: tuple[int, ...]) -> EngineReading:
    """The reading once `hidden_layers_list` has been written for `taps` into the converted model."""
    import dataclasses

    return dataclasses.replace(read_, values={**read_.values, "taps": taps})


def _slots(config: HfConfig, target_hidden: int) -> dict[str, Slot]:
    hidden, inter, vocab = (config.whole(n) for n in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv, dim = config.heads
    q, key = heads * dim, kv * dim
    wide = {"q_proj": q, "k_proj": key, "v_proj": key}
    out = {
        "fc.weight": Slot((hidden, TAPS * target_hidden), blank=RANDOM),
        **{f"midlayer.self_attn.{n}.weight": Slot((rows, 2 * hidden), blank=RANDOM) for n, rows in wide.items()},
        "midlayer.self_attn.o_proj.weight": Slot((hidden, q), blank=RANDOM),
        "midlayer.mlp.gate_proj.weight": Slot((inter, hidden), blank=RANDOM),
        "midlayer.mlp.up_proj.weight": Slot((inter, hidden), blank=RANDOM),
        "midlayer.mlp.down_proj.weight": Slot((hidden, inter), blank=RANDOM),
    }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        out[f"{name}.weight"] = Slot((hidden,), blank="ones, as created")
    size = config.get("draft_vocab_size") or vocab
    return {**out, "lm_head.weight": Slot((size, hidden), blank=RANDOM), "d2t": Slot((size,), blank="zeros")}


def _place(stored: str, slots: Mapping[str, Slot]) -> Place:
    if stored in slots:
        return Into(stored)
    why = {"t2d": "t2d is not used", "embed_tokens.weight": "the target's embedding is used"}
    return Dropped(why.get(stored, "no parameter has this name; only a table in the log says so"))
