"""Tiny drafts in every dialect and in every broken form, for the real loaders and for the profiles that predict them.

    folder = VARIANTS["fused"](tmp_path / "fused")

All belong to one target (`build_target`): 8 layers, hidden 64, 320 ids, of which the drafts know 64. Weights are
random; what a variant is about is in its first line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

H, M, V, D = 64, 128, 320, 64  # hidden, MLP, target vocabulary, draft vocabulary: multiples of 64, as engines pad
HEADS, KV_HEADS, HEAD = 2, 1, 32  # a head of 32: the smallest that engines' attention on a CPU knows
TARGET_LAYERS = 8  # so the default taps are 2, 4, 5

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
VARIANTS: dict[str, Callable[[Path], Path]] = {}


def variant(function: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Enter a function into VARIANTS under its name."""
    assert function.__doc__, f"{function.__name__} needs a line that says what it is"
    VARIANTS[function.__name__] = function
    return function


def write_all(folder: Path) -> dict[str, Path]:
    """Every variant below one folder: name -> directory."""
    return {name: write(folder / name) for name, write in VARIANTS.items()}


def build_target(folder: Path, seed: int = 0) -> Path:
    """The target of all variants: the tests' tiny tokenizer with a random Llama of this module's sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from conftest import build_tiny_target

    build_tiny_target(folder, vocab=V)
    config = LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=M, num_hidden_layers=TARGET_LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD, max_position_embeddings=256, rms_norm_eps=1e-5,
        tie_word_embeddings=False, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def build_latent_target(folder: Path, seed: int = 0) -> Path:
    """A target with latent attention, of the sizes that vLLM's kernel for CPUs knows; every block is dense."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from conftest import build_tiny_target

    build_tiny_target(folder, vocab=V)
    config = DeepseekV3Config(
        vocab_size=V, hidden_size=H, intermediate_size=M, num_hidden_layers=TARGET_LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, q_lora_rank=48, kv_lora_rank=512, qk_nope_head_dim=24, qk_rope_head_dim=64,
        v_head_dim=40, first_k_dense_replace=TARGET_LAYERS, max_position_embeddings=256, rms_norm_eps=1e-5,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        DeepseekV3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"topk_method": "noaux_tc"}))  # vLLM asks for it
    return folder


# ------------------------------------------------------------------------------------------------ the parts


def tensors(taps: int = 3, layers: int = 1, draft_vocab: int = D, width: int = H, seed: int = 1) -> Tensors:
    """A whole draft under the flat dialect's names; its target is H wide."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    def norm() -> torch.Tensor:
        return 1 + torch.randn(width, generator=generator) * 0.1

    found = {"fc.weight": random(width, taps * H)}
    for layer in range(layers):
        name, seen = ("midlayer", 2 * width) if layer == 0 else (f"layers.{layer}", width)
        found |= {
            f"{name}.self_attn.q_proj.weight": random(HEADS * HEAD, seen),
            f"{name}.self_attn.k_proj.weight": random(KV_HEADS * HEAD, seen),
            f"{name}.self_attn.v_proj.weight": random(KV_HEADS * HEAD, seen),
            f"{name}.self_attn.o_proj.weight": random(width, HEADS * HEAD),
            f"{name}.mlp.gate_proj.weight": random(M, width),
            f"{name}.mlp.up_proj.weight": random(M, width),
            f"{name}.mlp.down_proj.weight": random(width, M),
            f"{name}.hidden_norm.weight": norm(),
            f"{name}.input_layernorm.weight": norm(),
            f"{name}.post_attention_layernorm.weight": norm(),
        }
    found |= {"norm.weight": norm(), "lm_head.weight": random(draft_vocab, width)}
    if draft_vocab < V:
        ids = torch.randperm(V, generator=generator)[:draft_vocab].sort().values
        found["d2t"] = ids - torch.arange(draft_vocab)
        found["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return found


def config(**changes: Any) -> Config:
    """A flat config.json; `...` removes a field."""
    fields: Config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": M,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
        "vocab_size": V, "draft_vocab_size": D, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "max_position_embeddings": 256, "tie_word_embeddings": False, "dtype": "float32", "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {name: value for name, value in {**fields, **changes}.items() if value is not ...}


def write(folder: Path, weights: Mapping[str, torch.Tensor], fields: Mapping[str, Any]) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def renamed(weights: Mapping[str, torch.Tensor], old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in weights.items()}


def prefixed(weights: Mapping[str, torch.Tensor], keep: tuple[str, ...]) -> Tensors:
    return {name if name.startswith(keep) else f"model.{name}": tensor for name, tensor in weights.items()}


def without(weights: Mapping[str, torch.Tensor], *parts: str) -> Tensors:
    return {name: tensor for name, tensor in weights.items() if not any(part in name for part in parts)}


def fused(weights: Tensors, layer: str, q_k_v: bool = True, gate_up: bool = True) -> Tensors:
    found = dict(weights)
    for into, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
        if q_k_v if into.endswith("qkv_proj") else gate_up:
            block = into.split(".")[0]
            pieces = [found.pop(f"{layer}.{block}.{part}_proj.weight") for part in parts]
            found[f"{layer}.{into}.weight"] = torch.cat(pieces)
    return found


def tap_norms(names: tuple[str, ...] = ("fc_norm.0", "fc_norm.1", "fc_norm.2")) -> Tensors:
    return {f"{name}.weight": torch.full((H,), 1.1 + 0.1 * i) for i, name in enumerate(names)}


def input_norm(taps: int = 3) -> Tensors:
    return {"input_norm.weight": torch.full((taps * H,), 1.2)}


# ------------------------------------------------------------------------------------------------ ways to spell it


@variant
def flat(folder: Path) -> Path:
    """`midlayer.` keys and a flat config, as SafeAILab and SpecForge write; no layer ids."""
    return write(folder, tensors(), config())


@variant
def layers_0(folder: Path) -> Path:
    """`layers.0.` keys, as speculators writes them, with a flat config."""
    return write(folder, renamed(tensors(), "midlayer.", "layers.0."), config())


@variant
def model_prefix(folder: Path) -> Path:
    """`model.layers.0.` keys, and `model.` before all but the head and the maps."""
    return write(folder, prefixed(renamed(tensors(), "midlayer.", "layers.0."), ("lm_head", "d2t", "t2d")), config())


@variant
def model_prefix_midlayer(folder: Path) -> Path:
    """`model.midlayer.` keys, and `model.` before all but the head and the maps."""
    return write(folder, prefixed(tensors(), ("lm_head", "d2t", "t2d")), config())


@variant
def model_prefix_everywhere(folder: Path) -> Path:
    """`model.` before every key, head and maps included."""
    return write(folder, prefixed(renamed(tensors(), "midlayer.", "layers.0."), ()), config())


@variant
def fused_all(folder: Path) -> Path:
    """qkv_proj and gate_up_proj already fused, under `midlayer.`."""
    return write(folder, fused(tensors(), "midlayer"), config())


@variant
def fused_layers_0(folder: Path) -> Path:
    """qkv_proj and gate_up_proj already fused, under `layers.0.`."""
    return write(folder, fused(renamed(tensors(), "midlayer.", "layers.0."), "layers.0"), config())


@variant
def fused_gate_up(folder: Path) -> Path:
    """gate_up_proj fused, q, k and v apart."""
    return write(folder, fused(tensors(), "midlayer", q_k_v=False), config())


@variant
def speculators(folder: Path) -> Path:
    """A nested config without top-level model_type, as speculators writes it, every flag there."""
    return write(folder, renamed(tensors(), "midlayer.", "layers.0."), speculators_config())


@variant
def speculators_silent(folder: Path) -> Path:
    """A nested config that leaves out norm_before_residual and all other flags."""
    flags = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "eagle_aux_hidden_state_layer_ids")
    fields = {name: value for name, value in speculators_config().items() if name not in flags}
    return write(folder, renamed(tensors(), "midlayer.", "layers.0."), fields)


@variant
def speculators_3_1(folder: Path) -> Path:
    """A nested config with every EAGLE-3.1 option on, its norms in the file."""
    weights = renamed(tensors(), "midlayer.", "layers.0.") | tap_norms() | input_norm()
    flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "fc_norm": True}
    return write(folder, weights, speculators_config(**flags))


def speculators_config(**changes: Any) -> Config:
    layer = config(architectures=..., draft_vocab_size=..., dtype=..., torch_dtype=..., tie_word_embeddings=...)
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": D, "target_hidden_size": None, "norm_before_residual": False, "norm_before_fc": False,
        "norm_output": False, "fc_norm": False, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "tie_word_embeddings": False, "dtype": "float32", "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        **changes,
    }  # fmt: skip


@variant
def pytorch_bin(folder: Path) -> Path:
    """pytorch_model.bin instead of safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config()))
    torch.save(tensors(), folder / "pytorch_model.bin")
    return folder


@variant
def sharded(folder: Path) -> Path:
    """Two safetensors files and an index."""
    weights = tensors()
    names = sorted(weights)
    held = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config()))
    for file, inside in held.items():
        save_file({name: weights[name] for name in inside}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, inside in held.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@variant
def architecture_eagle3llama(folder: Path) -> Path:
    """architectures says Eagle3LlamaForCausalLM, vLLM's own name."""
    return write(folder, tensors(), config(architectures=["Eagle3LlamaForCausalLM"]))


@variant
def architecture_llama(folder: Path) -> Path:
    """architectures says LlamaForCausalLM, as plain targets do."""
    return write(folder, tensors(), config(architectures=["LlamaForCausalLM"]))


@variant
def architecture_missing(folder: Path) -> Path:
    """No architectures at all."""
    return write(folder, tensors(), config(architectures=...))


@variant
def model_type_missing(folder: Path) -> Path:
    """A flat config without model_type."""
    return write(folder, tensors(), config(model_type=...))


# ------------------------------------------------------------------------------------------------ options


@variant
def fc_norm(folder: Path) -> Path:
    """A norm for each tap, and the flag."""
    return write(folder, tensors() | tap_norms(), config(fc_norm=True))


@variant
def fc_norm_unflagged(folder: Path) -> Path:
    """A norm for each tap, and no flag."""
    return write(folder, tensors() | tap_norms(), config())


@variant
def fc_norm_flag_only(folder: Path) -> Path:
    """The flag of the taps' norms, and no norms."""
    return write(folder, tensors(), config(fc_norm=True))


@variant
def legacy_norms(folder: Path) -> Path:
    """The taps' norms under their old names, aux_norm_low, _mid, _high, with the new flag."""
    return write(folder, tensors() | tap_norms(("aux_norm_low", "aux_norm_mid", "aux_norm_high")), config(fc_norm=True))


@variant
def legacy_norms_old_flag(folder: Path) -> Path:
    """The taps' norms under their old names, with the old flag use_aux_norm."""
    weights = tensors() | tap_norms(("aux_norm_low", "aux_norm_mid", "aux_norm_high"))
    return write(folder, weights, config(use_aux_norm=True))


@variant
def norm_before_fc(folder: Path) -> Path:
    """One norm over all taps, and the flag at top level."""
    return write(folder, tensors() | input_norm(), config(norm_before_fc=True))


@variant
def norm_before_fc_nested(folder: Path) -> Path:
    """One norm over all taps, and the flag inside eagle_config."""
    return write(folder, tensors() | input_norm(), config(eagle_config={"norm_before_fc": True}))


@variant
def input_norm_unflagged(folder: Path) -> Path:
    """One norm over all taps, and no flag."""
    return write(folder, tensors() | input_norm(), config())


@variant
def norm_output(folder: Path) -> Path:
    """norm_output: the state that is fed back is normed."""
    return write(folder, tensors(), config(norm_output=True))


@variant
def norm_before_residual(folder: Path) -> Path:
    """norm_before_residual: the residual stream starts behind hidden_norm."""
    return write(folder, tensors(), config(norm_before_residual=True))


@variant
def attention_bias(folder: Path) -> Path:
    """Biases on q, k, v and o, and the flag."""
    return write(folder, tensors() | biases(), config(attention_bias=True))


@variant
def attention_bias_unflagged(folder: Path) -> Path:
    """Biases on q, k, v and o, and no flag."""
    return write(folder, tensors() | biases(), config())


def biases() -> Tensors:
    sizes = {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD, "o_proj": H}
    return {f"midlayer.self_attn.{name}.bias": torch.full((size,), 0.1) for name, size in sizes.items()}


@variant
def qwen3(folder: Path) -> Path:
    """The class with norms on the heads of q and k, which are in the file."""
    return write(folder, tensors() | head_norms(), config(**QWEN3))


@variant
def qwen3_two_layers(folder: Path) -> Path:
    """The same with two layers, and q and k normed in the first alone."""
    return write(folder, tensors(layers=2) | head_norms(), config(num_hidden_layers=2, **QWEN3))


@variant
def qwen3_named_by_target(folder: Path) -> Path:
    """The same class, which vLLM makes of the target's own name."""
    fields = config(**{**QWEN3, "architectures": ["Qwen3ForCausalLM"]})
    return write(folder, tensors() | head_norms(), fields)


@variant
def qwen3_of_llama_type(folder: Path) -> Path:
    """The same class with a config of model_type llama."""
    return write(folder, tensors() | head_norms(), config(**{**QWEN3, "model_type": "llama"}))


@variant
def qwen3_biases(folder: Path) -> Path:
    """The same class with biases on q, k, v and o, and all flags that make biases elsewhere."""
    fields = config(**QWEN3, attention_bias=True, mlp_bias=True, bias=True)
    return write(folder, tensors() | head_norms() | biases(), fields)


@variant
def qwen3_four_taps(folder: Path) -> Path:
    """The same class with four ids at the top level alone, which it counts."""
    fields = config(**QWEN3, eagle_aux_hidden_state_layer_ids=[1, 3, 5, 6])
    return write(folder, tensors(taps=4) | head_norms(), fields)


@variant
def speculators_qwen3(folder: Path) -> Path:
    """A nested config whose layer is a qwen3, with its norms on the heads of q and k."""
    return write(folder, renamed(tensors() | head_norms(), "midlayer.", "layers.0."), speculators_qwen3_config())


@variant
def speculators_qwen3_unnormed(folder: Path) -> Path:
    """A nested config whose layer is a qwen3, without norms on the heads of q and k."""
    return write(folder, renamed(tensors(), "midlayer.", "layers.0."), speculators_qwen3_config())


@variant
def speculators_mistral(folder: Path) -> Path:
    """A nested config whose layer is a mistral."""
    return write(folder, renamed(tensors(), "midlayer.", "layers.0."), speculators_qwen3_config("mistral"))


@variant
def head_norms_unasked(folder: Path) -> Path:
    """Norms on the heads of q and k with the class that has none."""
    return write(folder, tensors() | head_norms(), config())


QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}


def speculators_qwen3_config(kind: str = "qwen3") -> Config:
    fields = speculators_config()
    return {**fields, "transformer_layer_config": {**fields["transformer_layer_config"], "model_type": kind}}


def head_norms() -> Tensors:
    return {f"midlayer.self_attn.{x}_norm.weight": torch.full((HEAD,), 1.3) for x in "qk"}


@variant
def fc_bias(folder: Path) -> Path:
    """A bias on fc, and the flag `bias`."""
    return write(folder, tensors() | {"fc.bias": torch.full((H,), 0.1)}, config(bias=True))


@variant
def fc_bias_unflagged(folder: Path) -> Path:
    """A bias on fc, and no flag."""
    return write(folder, tensors() | {"fc.bias": torch.full((H,), 0.1)}, config())


@variant
def two_layers(folder: Path) -> Path:
    """Two layers; the second has both hidden_norm and input_layernorm."""
    return write(folder, tensors(layers=2), config(num_hidden_layers=2))


@variant
def two_layers_counted_one(folder: Path) -> Path:
    """Tensors of two layers, and a config that says one."""
    return write(folder, tensors(layers=2), config())


@variant
def own_embedding(folder: Path) -> Path:
    """The draft brings an embedding table of its own."""
    return write(folder, tensors() | {"embed_tokens.weight": torch.full((V, H), 0.3)}, config())


@variant
def own_embedding_prefixed(folder: Path) -> Path:
    """The draft brings an embedding table of its own, as model.embed_tokens."""
    return write(folder, tensors() | {"model.embed_tokens.weight": torch.full((V, H), 0.3)}, config())


@variant
def target_hidden_size(folder: Path) -> Path:
    """target_hidden_size is given, and equal to hidden_size."""
    return write(folder, tensors(), config(target_hidden_size=H))


@variant
def narrower_than_target(folder: Path) -> Path:
    """Half as wide as its target: target_hidden_size says so, and the draft owns an embedding of its own width."""
    weights = tensors(width=H // 2) | {"embed_tokens.weight": torch.full((V, H // 2), 0.3)}
    return write(folder, weights, config(hidden_size=H // 2, target_hidden_size=H))


# ------------------------------------------------------------------------------------------------ taps


@variant
def taps_top_level(folder: Path) -> Path:
    """Three ids that are not the default, at top level."""
    return write(folder, tensors(), config(eagle_aux_hidden_state_layer_ids=[1, 3, 6]))


@variant
def taps_nested(folder: Path) -> Path:
    """Three ids that are not the default, in eagle_config."""
    return write(folder, tensors(), config(eagle_config=nested([1, 3, 6])))


@variant
def taps_both(folder: Path) -> Path:
    """The same taps in both places, each as the engine that reads it counts; what Eyas exports."""
    fields = config(eagle_aux_hidden_state_layer_ids=[1, 3, 6], eagle_config=nested([0, 2, 5]), num_aux_hidden_states=3)
    return write(folder, tensors(), fields)


@variant
def taps_out_of_order(folder: Path) -> Path:
    """Three ids in no order, in both places."""
    fields = config(eagle_aux_hidden_state_layer_ids=[6, 1, 3], eagle_config=nested([6, 1, 3]))
    return write(folder, tensors(), fields)


@variant
def taps_last_layer(folder: Path) -> Path:
    """Ids that reach the output of the last layer, in both places as it is counted there."""
    fields = config(eagle_aux_hidden_state_layer_ids=[2, 4, 8], eagle_config=nested([1, 3, 7]))
    return write(folder, tensors(), fields)


@variant
def four_taps_nested(folder: Path) -> Path:
    """Four taps, their ids in eagle_config."""
    return write(folder, tensors(taps=4), config(eagle_config=nested([1, 3, 5, 6])))


@variant
def four_taps_top_level(folder: Path) -> Path:
    """Four taps, their ids at top level only."""
    return write(folder, tensors(taps=4), config(eagle_aux_hidden_state_layer_ids=[1, 3, 5, 6]))


@variant
def four_taps_counted(folder: Path) -> Path:
    """Four taps, their ids at top level and num_aux_hidden_states."""
    fields = config(eagle_aux_hidden_state_layer_ids=[1, 3, 5, 6], num_aux_hidden_states=4)
    return write(folder, tensors(taps=4), fields)


@variant
def one_tap(folder: Path) -> Path:
    """One tap, its id in both places."""
    fields = config(eagle_aux_hidden_state_layer_ids=[4], eagle_config=nested([4]), num_aux_hidden_states=1)
    return write(folder, tensors(taps=1), fields)


@variant
def no_aux_states(folder: Path) -> Path:
    """use_aux_hidden_state is false: the target's last state alone, fc as wide as it."""
    return write(folder, tensors(taps=1), config(eagle_config={"use_aux_hidden_state": False}))


def nested(ids: list[int]) -> Config:
    return {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}


# ------------------------------------------------------------------------------------------------ vocabulary, head


@variant
def draft_vocab_absent(folder: Path) -> Path:
    """draft_vocab_size is not in the config; head and d2t have 64 rows."""
    return write(folder, tensors(), config(draft_vocab_size=...))


@variant
def draft_vocab_null(folder: Path) -> Path:
    """draft_vocab_size is null; head and d2t have 64 rows."""
    return write(folder, tensors(), config(draft_vocab_size=None))


@variant
def draft_vocab_null_no_head(folder: Path) -> Path:
    """draft_vocab_size is null, and there is neither head nor map: the target's head is meant."""
    return write(folder, without(tensors(draft_vocab=V), "lm_head"), config(draft_vocab_size=None))


@variant
def full_vocab(folder: Path) -> Path:
    """The draft knows every id: draft_vocab_size is V, no map."""
    return write(folder, tensors(draft_vocab=V), config(draft_vocab_size=V))


@variant
def full_vocab_with_map(folder: Path) -> Path:
    """The draft knows every id, and there is a map of zeros and ones all the same."""
    maps = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    return write(folder, tensors(draft_vocab=V) | maps, config(draft_vocab_size=V))


@variant
def no_d2t(folder: Path) -> Path:
    """A reduced vocabulary without d2t and t2d."""
    return write(folder, without(tensors(), "d2t", "t2d"), config())


@variant
def no_t2d(folder: Path) -> Path:
    """A reduced vocabulary with d2t but without t2d."""
    return write(folder, without(tensors(), "t2d"), config())


@variant
def absolute_d2t(folder: Path) -> Path:
    """d2t holds target ids instead of offsets."""
    weights = tensors()
    return write(folder, weights | {"d2t": weights["d2t"] + torch.arange(D)}, config())


@variant
def int32_d2t(folder: Path) -> Path:
    """d2t as int32."""
    weights = tensors()
    return write(folder, weights | {"d2t": weights["d2t"].to(torch.int32)}, config())


@variant
def tied(folder: Path) -> Path:
    """tie_word_embeddings is true although the file has a head, as in a config copied from a tied target."""
    return write(folder, tensors(), config(tie_word_embeddings=True))


@variant
def tie_missing(folder: Path) -> Path:
    """tie_word_embeddings is not in the config."""
    return write(folder, tensors(), config(tie_word_embeddings=...))


# ------------------------------------------------------------------------------------------------ broken


@variant
def no_fc(folder: Path) -> Path:
    """fc is missing."""
    return write(folder, without(tensors(), "fc."), config())


@variant
def no_hidden_norm(folder: Path) -> Path:
    """hidden_norm is missing."""
    return write(folder, without(tensors(), "hidden_norm"), config())


@variant
def no_mlp(folder: Path) -> Path:
    """The whole MLP is missing."""
    return write(folder, without(tensors(), ".mlp."), config())


@variant
def no_lm_head(folder: Path) -> Path:
    """The head is missing, and the vocabulary is reduced."""
    return write(folder, without(tensors(), "lm_head"), config())


@variant
def no_final_norm(folder: Path) -> Path:
    """The norm before the head is missing."""
    weights = tensors()
    del weights["norm.weight"]
    return write(folder, weights, config())


@variant
def only_q(folder: Path) -> Path:
    """q_proj is there, k_proj and v_proj are not."""
    return write(folder, without(tensors(), "k_proj", "v_proj"), config())


@variant
def no_up(folder: Path) -> Path:
    """gate_proj is there, up_proj is not."""
    return write(folder, without(tensors(), "up_proj"), config())


@variant
def misnamed_layer(folder: Path) -> Path:
    """The decoder is called `decoder.0.`, which nobody reads."""
    return write(folder, renamed(tensors(), "midlayer.", "decoder.0."), config())


@variant
def unknown_key(folder: Path) -> Path:
    """One tensor more, under a name that means nothing."""
    return write(folder, tensors() | {"foo.weight": torch.ones(3)}, config())


@variant
def verifier_keys(folder: Path) -> Path:
    """verifier_norm and verifier_lm_head beside the draft, as some trainers keep them."""
    more = {"verifier_norm.weight": torch.ones(H), "verifier_lm_head.weight": torch.ones(D, H)}
    return write(folder, tensors() | more, config())


@variant
def rotary_buffer(folder: Path) -> Path:
    """rotary_emb.inv_freq is in the file, as old checkpoints have it."""
    return write(folder, tensors() | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(HEAD // 2)}, config())


@variant
def wrong_shape(folder: Path) -> Path:
    """fc has the width of two taps."""
    return write(folder, tensors(taps=2), config())


@variant
def wrong_q_shape(folder: Path) -> Path:
    """q_proj has one head too few."""
    weights = tensors()
    name = "midlayer.self_attn.q_proj.weight"
    return write(folder, weights | {name: weights[name][:-HEAD]}, config())


@variant
def tall_q_shape(folder: Path) -> Path:
    """q_proj has one head too many."""
    weights = tensors()
    name = "midlayer.self_attn.q_proj.weight"
    taller = torch.cat([weights[name], weights[name][:HEAD]])
    return write(folder, weights | {name: taller}, config())


@variant
def wide_q_shape(folder: Path) -> Path:
    """q_proj reads the state alone, not embedding and state, as a second layer's does."""
    weights = tensors()
    name = "midlayer.self_attn.q_proj.weight"
    return write(folder, weights | {name: weights[name][:, :H].contiguous()}, config())


@variant
def short_gate(folder: Path) -> Path:
    """gate_proj has 16 rows too few."""
    weights = tensors()
    name = "midlayer.mlp.gate_proj.weight"
    return write(folder, weights | {name: weights[name][:-16]}, config())


@variant
def wrong_head_shape(folder: Path) -> Path:
    """The head has one row fewer than draft_vocab_size."""
    weights = tensors()
    return write(folder, weights | {"lm_head.weight": weights["lm_head.weight"][:-1]}, config())


@variant
def target_hidden_size_null(folder: Path) -> Path:
    """target_hidden_size is null in a flat config."""
    return write(folder, tensors(), config(target_hidden_size=None))


@variant
def second_file(folder: Path) -> Path:
    """Another safetensors file beside the model, which holds a tensor of a known name."""
    write(folder, tensors(), config())
    save_file({"norm.weight": torch.full((H,), 7.0)}, folder / "optimizer.safetensors")
    return folder


# ------------------------------------------------------------------------------------------------ positions


@variant
def short_positions(folder: Path) -> Path:
    """max_position_embeddings is 32, an eighth of the target's."""
    return write(folder, tensors(), config(max_position_embeddings=32))


@variant
def rope_missing(folder: Path) -> Path:
    """No rope field at all."""
    return write(folder, tensors(), config(rope_theta=...))


@variant
def rope_parameters(folder: Path) -> Path:
    """RoPE as rope_parameters only, as new transformers write it."""
    fields = config(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    return write(folder, tensors(), fields)


# ------------------------------------------------------------------------------------------------ MLA

Q_LORA, KV_LORA, NOPE, ROPE, V_HEAD = 32, 32, 32, 16, 32
YARN = {
    "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
"""As Kimi's and DeepSeek's models have it; SGLang on a CPU builds no other RoPE for latent attention."""


def mla_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    attention = {
        "q_a_proj": random(Q_LORA, 2 * H), "q_a_layernorm": 1 + random(Q_LORA),
        "q_b_proj": random(HEADS * (NOPE + ROPE), Q_LORA), "kv_a_proj_with_mqa": random(KV_LORA + ROPE, 2 * H),
        "kv_a_layernorm": 1 + random(KV_LORA), "kv_b_proj": random(HEADS * (NOPE + V_HEAD), KV_LORA),
        "o_proj": random(H, HEADS * V_HEAD),
    }  # fmt: skip
    kept = without(tensors(), "q_proj", "k_proj", "v_proj", "o_proj")
    return kept | {f"midlayer.self_attn.{name}.weight": tensor for name, tensor in attention.items()}


def mla_config(**changes: Any) -> Config:
    sizes = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": Q_LORA,
        "kv_lora_rank": KV_LORA, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V_HEAD,
        "head_dim": ROPE, "num_key_value_heads": HEADS, "first_k_dense_replace": 1, "moe_intermediate_size": M,
        "rope_scaling": YARN,
    }  # fmt: skip
    return config(**(sizes | changes))


@variant
def mla(folder: Path) -> Path:
    """Latent attention, Eagle3DeepseekV2ForCausalLM, as Kimi's drafts have it."""
    return write(folder, mla_tensors(), mla_config())


@variant
def mla_layers_0(folder: Path) -> Path:
    """Latent attention under `layers.0.` keys."""
    return write(folder, renamed(mla_tensors(), "midlayer.", "layers.0."), mla_config())


@variant
def mla_model_prefix(folder: Path) -> Path:
    """Latent attention under `model.` keys."""
    return write(folder, prefixed(mla_tensors(), ("lm_head", "d2t", "t2d")), mla_config())


@variant
def mla_kimi(folder: Path) -> Path:
    """Latent attention with model_type kimi_k2."""
    return write(folder, mla_tensors(), mla_config(model_type="kimi_k2"))


@variant
def mla_deepseek_v3(folder: Path) -> Path:
    """Latent attention with model_type deepseek_v3, which means a draft of another kind to some."""
    return write(folder, mla_tensors(), mla_config(model_type="deepseek_v3"))


@variant
def mla_no_kv_a(folder: Path) -> Path:
    """Latent attention without kv_a_proj_with_mqa."""
    return write(folder, without(mla_tensors(), "kv_a_proj"), mla_config())


@variant
def mla_fc_norm(folder: Path) -> Path:
    """Latent attention with a norm for each tap."""
    return write(folder, mla_tensors() | tap_norms(), mla_config(fc_norm=True))


@variant
def mla_norm_before_fc(folder: Path) -> Path:
    """Latent attention with one norm over all taps."""
    return write(folder, mla_tensors() | input_norm(), mla_config(norm_before_fc=True))


@variant
def mla_taps(folder: Path) -> Path:
    """Latent attention with four ids at top level and in eagle_config."""
    fields = mla_config(eagle_aux_hidden_state_layer_ids=[1, 3, 5, 6], eagle_config=nested([0, 2, 4, 5]))
    weights = mla_tensors() | {"fc.weight": torch.full((H, 4 * H), 0.1)}
    return write(folder, weights, fields)
