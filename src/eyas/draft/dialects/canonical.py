"""The config.json of the canonical directory: one flat config that SGLang, vLLM and llama.cpp all read rightly.

Every field that an engine would otherwise default or guess is written. The sources of the rules (engine, version, file
and line) are in docs/facts/README.md.   pytest tests/test_export.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...conventions import Conventions
from ...target.facts import TargetFacts
from ..shape import DraftShape, MlaShape
from .numbering import sglang_ids

ARCHITECTURE = "LlamaForCausalLMEagle3"
QK_NORMED = "Eagle3Qwen3ForCausalLM"  # vLLM's class with norms on the heads of q and k, which no other engine has
LATENT = "Eagle3DeepseekV2ForCausalLM"  # latent attention (MLA): the class of both SGLang and vLLM
LATENT_TYPE = "kimi_k2"  # vLLM takes deepseek_v3 for an MTP module (docs/facts/latent-attention.md)
# RoPE kinds whose angles do not depend on max_position_embeddings, so that it may follow the target.
LENGTH_FREE_ROPE = ("default", "linear", "llama3")


def max_position(conventions: Conventions, facts: TargetFacts | None) -> int:
    """Longest position to promise: the target's, since SGLang refuses less and vLLM stops drafting past it.

    Kept as trained where the RoPE kind derives its angles from it.
    """
    if facts is None or conventions.rope_type not in LENGTH_FREE_ROPE:
        return conventions.max_position
    return max(conventions.max_position, facts.max_position)


def model_fields(shape: DraftShape, c: Conventions, facts: TargetFacts | None) -> dict[str, Any]:
    """Fields of a Llama config that every spelling has, RoPE in the form of transformers >= 5."""
    rope: dict[str, Any] = {"rope_theta": c.rope_theta, "rope_type": c.rope_type, **c.rope_scaling}
    if c.partial_rotary_factor != 1:
        rope["partial_rotary_factor"] = c.partial_rotary_factor
    fields: dict[str, Any] = {
        "model_type": "qwen3" if c.qk_norm else "llama",  # to vLLM and speculators this says whether q and k are normed
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "hidden_act": c.hidden_act,
        "rms_norm_eps": c.rms_norm_eps,
        "attention_bias": c.attention_bias,
        "mlp_bias": c.mlp_bias,
        "max_position_embeddings": max_position(c, facts),
        "rope_parameters": rope,
    }
    if shape.mla is not None:
        fields |= _latent_fields(shape.mla, c, rope)
        del fields["head_dim"]
    if c.sliding_window is not None:
        fields |= {
            "sliding_window": c.sliding_window,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention"] * shape.num_layers,
        }
    return fields


def _latent_fields(mla: MlaShape, c: Conventions, rope: dict[str, Any]) -> dict[str, Any]:
    """What DeepSeek's and Kimi's configs say beside a Llama's."""
    fields: dict[str, Any] = {"model_type": LATENT_TYPE, **dataclasses.asdict(mla)}
    del fields["output_gate"]  # told by its tensor
    if c.rope_type == "none":
        fields |= {"mla_use_nope": True, "rope_parameters": {**rope, "rope_type": "default"}}
    return fields


def flat_fields(shape: DraftShape, c: Conventions, facts: TargetFacts | None, dtype: str) -> dict[str, Any]:
    """What every flat config of a draft has on top of it, also for readers before transformers 5."""
    fields = model_fields(shape, c, facts)
    fields |= {
        "architectures": [LATENT if shape.mla else QK_NORMED if c.qk_norm else ARCHITECTURE],
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "rope_theta": c.rope_theta,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if c.partial_rotary_factor != 1:
        fields["partial_rotary_factor"] = c.partial_rotary_factor  # SGLang reads it here alone
    if c.rope_type not in ("default", "none"):
        fields["rope_scaling"] = {k: v for k, v in fields["rope_parameters"].items() if k != "rope_theta"}
    return fields


def canonical_config(
    shape: DraftShape, conventions: Conventions, facts: TargetFacts | None, dtype: str
) -> dict[str, Any]:
    """The config.json of a draft whose tensors are stored in `dtype` (bfloat16, float32, ...).

    `facts` None: what only the target knows is left out.
    """
    c, taps = conventions, conventions.taps
    config: dict[str, Any] = {
        **flat_fields(shape, c, facts, dtype),
        "target_hidden_size": shape.target_hidden_size,  # never null: SGLang multiplies it
        "num_aux_hidden_states": shape.num_taps,
        # vLLM and llama.cpp: the top level, as taps. SGLang: eagle_config alone, as outputs of layers.
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "eagle_config": {"use_aux_hidden_state": True},
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "attention_dropout": 0.0,
    }
    ids = sglang_ids(taps, facts.model_type if facts else "llama", facts.num_layers if facts else c.num_target_layers)
    if ids is not None:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    if c.fc_bias:
        config["bias"] = True  # SGLang's switch for fc.bias
    if c.logit_scale != 1:
        config["logit_scale"] = c.logit_scale
    if facts is not None:
        eos = list(facts.eos_ids)
        config["bos_token_id"] = facts.raw.get("bos_token_id")
        config["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
        config["pad_token_id"] = facts.raw.get("pad_token_id")
    return config
