"""A layer as SGLang and vLLM both build it: q, k and v in one parameter, gate and up in another.

llama_layer(config, 0); restacked("layers.0.mlp.up_proj.weight", LLAMA) == ("layers.0.mlp.gate_up_proj.weight", "up")
"""

from __future__ import annotations

from collections.abc import Mapping

from .hf_config import HfConfig
from .reading import ONES, UNUSED, Slot

Stacks = Mapping[str, tuple[str, str]]
"""Stored projection -> (parameter, part)."""
MLP: Stacks = {".gate_proj": (".gate_up_proj", "gate"), ".up_proj": (".gate_up_proj", "up")}
LLAMA: Stacks = {
    ".q_proj": (".qkv_proj", "q"), ".k_proj": (".qkv_proj", "k"), ".v_proj": (".qkv_proj", "v"), **MLP,
}  # fmt: skip


def restacked(name: str, stacks: Stacks) -> tuple[str, str]:
    """(parameter, part) of a stored name; part "" where it is no part of a fused one."""
    for own, (fused, part) in stacks.items():
        if own in name:
            return name.replace(own, fused), part
    return name, ""


def llama_layer(config: HfConfig, layer: int, unused: str) -> dict[str, Slot]:
    """Weights of a Llama layer without its prefix; the first one reads twice the width.

    unused: the norm on the stream that this engine's further layers have and do not use.
    """
    hidden = config.whole("hidden_size")
    heads, kv, dim = config.heads
    qkv = {"q": heads * dim, "k": kv * dim, "v": kv * dim}
    out = {
        "self_attn.qkv_proj.weight": Slot((sum(qkv.values()), hidden * (2 if layer == 0 else 1)), qkv),
        "self_attn.o_proj.weight": Slot((hidden, heads * dim)),
        **mlp_and_norms(config),
    }
    return out if layer == 0 else {**out, f"{unused}.weight": Slot((hidden,), blank=UNUSED)}


def mlp_and_norms(config: HfConfig) -> dict[str, Slot]:
    """What follows attention in every kind of layer, and the norms around it; without prefix."""
    hidden, inter = config.whole("hidden_size"), config.whole("intermediate_size")
    return {
        "mlp.gate_up_proj.weight": Slot((2 * inter, hidden), {"gate": inter, "up": inter}),
        "mlp.down_proj.weight": Slot((hidden, inter)),
        **{
            f"{name}.weight": Slot((hidden,), blank=ONES)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
    }


def latent_layer(
    config: HfConfig, sizes: Mapping[str, tuple[int, ...]], fused: str, layer: int = 0, unused: str = ""
) -> dict[str, Slot]:
    """Weights of a layer with latent attention, without its prefix; the first one reads twice the width.

    fused: its joint projection of q and kv; unused: as in `llama_layer`.
    """
    down = {"q": sizes["q_a_proj"][0], "kv": sizes["kv_a_proj_with_mqa"][0]}
    hidden = config.whole("hidden_size")
    out = {f"self_attn.{fused}.weight": Slot((sum(down.values()), hidden * (2 if layer == 0 else 1)), down)}
    for name in ("q_b_proj", "kv_b_proj", "o_proj"):
        out[f"self_attn.{name}.weight"] = Slot(sizes[name])
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        out[f"self_attn.{name}.weight"] = Slot(sizes[name], blank=ONES)
    out |= mlp_and_norms(config)
    return out if layer == 0 else {**out, f"{unused}.weight": Slot((hidden,), blank=UNUSED)}


def under(prefix: str, slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """With a prefix before every name."""
    return {prefix + name: slot for name, slot in slots.items()}
