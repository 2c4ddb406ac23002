"""Small random drafts, and look-alikes of what other projects write, for the tests of draft/.

from drafts import make_draft, write_flat, write_latent
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.conventions import Conventions, Known
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape, MlaShape
from eyas.vocab import VocabMap

SIZES = {
    "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "vocab_size": 300, "draft_vocab_size": 120, "num_taps": 3, "num_layers": 1,
}  # fmt: skip


LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def make_draft(seed: int = 0, sizes: dict[str, int] | None = None, **conventions: Any) -> tuple[Draft, VocabMap]:
    """A random draft (every tensor random, norms too) for a target of 8 layers, with a map of every D-th-ish id.

    sizes: of the draft, those of latent attention among them (all of these, or none).
    """
    mla = {k: v for k, v in (sizes or {}).items() if k in LATENT_SIZES}
    plain = {**SIZES, **{k: v for k, v in (sizes or {}).items() if k not in LATENT_SIZES}}
    part = MlaShape(**mla) if mla else None
    if part is not None:
        plain |= {"num_kv_heads": plain["num_heads"], "head_dim": part.qk_head_dim}
        conventions.setdefault("attention", "mla")
    shape = DraftShape(**plain, mla=part)
    values = {"taps": (2, 4, 5), "num_target_layers": 8, "max_position": 256, **conventions}
    if shape.draft_vocab_size == shape.vocab_size:
        values.setdefault("d2t", "none")
    how = dict.fromkeys(values, Known.DECLARED)
    generator = torch.Generator().manual_seed(seed)
    draft = Draft(shape, Conventions(**values, how=how))
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if "norm" in name else 0.2))
            if "norm" in name and not draft.conventions.rms_norm_offset:
                parameter += 1
    if shape.draft_vocab_size == shape.vocab_size:
        return draft.eval(), VocabMap.identity(shape.vocab_size)
    ids = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    return draft.eval(), VocabMap.from_absolute(ids, shape.vocab_size)


def with_embedding(draft: Draft, seed: int = 9) -> torch.Tensor:
    """Give the draft a random embedding table [V, H] as its target's, and return it."""
    shape = draft.shape
    table = torch.randn(shape.vocab_size, shape.hidden_size, generator=torch.Generator().manual_seed(seed))
    draft.set_embedding(table)
    return table


def foreign_tensors(draft: Draft, vocab_map: VocabMap, scheme: str = "midlayer") -> dict[str, torch.Tensor]:
    """Tensors under a naming scheme: midlayer | layers0 | prefixed | prefixed_midlayer | fused | legacy_norms."""
    tensors = {k: v.clone() for k, v in draft.owned_state_dict().items()} | {"d2t": vocab_map.d2t, "t2d": vocab_map.t2d}
    if scheme == "fused":
        for name in [n for n in tensors if n.endswith("self_attn.q_proj.weight")]:
            parts = [tensors.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
            tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        for name in [n for n in tensors if n.endswith("mlp.gate_proj.weight")]:
            parts = [tensors.pop(name.replace("gate_proj", x)) for x in ("gate_proj", "up_proj")]
            tensors[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)

    def rename(name: str) -> str:
        if scheme in ("layers0", "prefixed"):
            name = name.replace("midlayer.", "layers.0.")
        if scheme == "legacy_norms":
            for i, old in enumerate(("low", "mid", "high")):
                name = name.replace(f"fc_norm.{i}.", f"aux_norm_{old}.")
        return f"model.{name}" if scheme.startswith("prefixed") and not name.startswith("lm_head") else name

    return {rename(name): tensor for name, tensor in tensors.items()}


def flat_config(draft: Draft, **changes: Any) -> dict[str, Any]:
    """The kind of config.json that SafeAILab and SpecForge write: a Llama config and draft_vocab_size, no layer ids."""
    s, c = draft.shape, draft.conventions
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size, "num_hidden_layers": s.num_layers, "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads, "head_dim": s.head_dim, "vocab_size": s.vocab_size,
        "draft_vocab_size": s.draft_vocab_size, "rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_position, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}


def write_flat(
    folder: Path,
    draft: Draft,
    vocab_map: VocabMap,
    scheme: str = "midlayer",
    container: str = "safetensors",
    **changes: Any,
) -> Path:
    """A flat foreign directory. `...` removes a key. container: safetensors | sharded | bin | training_state."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = foreign_tensors(draft, vocab_map, scheme)
    (folder / "config.json").write_text(json.dumps(flat_config(draft, **changes)))
    if container == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif container == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif container == "training_state":
        torch.save({"step": 3, "draft_state_dict": tensors, "optimizer": {"lr": 0.1}}, folder / "training_state.pt")
    else:
        names = sorted(tensors)
        shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for file, held in shards.items():
            save_file({n: tensors[n] for n in held}, folder / file)
        index = {"weight_map": {n: file for file, held in shards.items() for n in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_speculators(folder: Path, draft: Draft, vocab_map: VocabMap, **changes: Any) -> Path:
    """A directory as the speculators library writes it: nested layer config, `layers.0.` keys, flags always there."""
    folder.mkdir(parents=True, exist_ok=True)
    s, c = draft.shape, draft.conventions
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
        "draft_vocab_size": s.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(c.taps), "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc, "norm_output": c.norm_output, "fc_norm": c.fc_norm,
        "target_hidden_size": None, "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "llama", "hidden_size": s.hidden_size, "intermediate_size": s.intermediate_size,
            "num_hidden_layers": 1, "num_attention_heads": s.num_heads, "num_key_value_heads": s.num_kv_heads,
            "head_dim": s.head_dim, "vocab_size": s.vocab_size, "rms_norm_eps": c.rms_norm_eps, "hidden_act": "silu",
            "max_position_embeddings": c.max_position,
            "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
            "layer_types": ["sliding_attention"], "sliding_window": 64, "use_sliding_window": True,
        },
    }  # fmt: skip
    config = {k: v for k, v in {**config, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(foreign_tensors(draft, vocab_map, "layers0"), folder / "model.safetensors")
    return folder


MLA = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


def latent_tensors(
    draft: Draft, vocab_map: VocabMap, gate: bool = False, **sizes: int | None
) -> dict[str, torch.Tensor]:
    """Tensors of a draft of the same sizes with latent attention (MLA), `midlayer.` keys."""
    s, m, h = draft.shape, {**MLA, **sizes}, draft.shape.hidden_size
    qk, rank = m["qk_nope_head_dim"] + m["qk_rope_head_dim"], m["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (s.num_heads * qk, 2 * h)}
    if rank is not None:
        shapes = {"q_a_proj": (rank, 2 * h), "q_a_layernorm": (rank,), "q_b_proj": (s.num_heads * qk, rank)}
    shapes |= {
        "kv_a_proj_with_mqa": (m["kv_lora_rank"] + m["qk_rope_head_dim"], 2 * h),
        "kv_a_layernorm": (m["kv_lora_rank"],),
        "kv_b_proj": (s.num_heads * (m["qk_nope_head_dim"] + m["v_head_dim"]), m["kv_lora_rank"]),
        "o_proj": (h, s.num_heads * m["v_head_dim"]),
    }
    if gate:
        shapes["g_proj"] = (s.num_heads * m["v_head_dim"], 2 * h)
    generator = torch.Generator().manual_seed(11)
    kept = {k: v for k, v in foreign_tensors(draft, vocab_map).items() if "self_attn" not in k}
    return kept | {
        f"midlayer.self_attn.{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }


def write_latent(folder: Path, gate: bool = False, rename: Any = None, **changes: Any) -> Path:
    """A draft with latent attention, as TorchSpec and Model Optimizer write it. `rename`: old name -> new one."""
    draft, vocab_map = make_draft()
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: changes[name] for name in MLA if name in changes}
    tensors = latent_tensors(draft, vocab_map, gate, **sizes)
    save_file({(rename or str)(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    named = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "head_dim": ...}
    config = flat_config(draft, **{**named, **MLA, "num_key_value_heads": draft.shape.num_heads, **changes})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
