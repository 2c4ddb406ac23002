"""TargetFacts: what config.json says about a target, in one vocabulary for all model families.

    read_facts("path/to/target").hidden_size

Nested configs (`text_config`, as in Gemma 3 or Llama 4) are resolved; defaults that a family leaves out of its
config.json come from transformers' own config class.   Exercise it:  pytest tests/test_target_facts.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.conventions import default_taps
from eyas.errors import BadInput
from eyas.untrusted import content, parse_json

if TYPE_CHECKING:
    import torch

# Families whose config.json says everything itself once these keys are there; the others are completed by transformers.
PLAIN = {"llama", "mistral", "qwen2", "qwen3"}
PLAIN_NEEDS = ("head_dim", "tie_word_embeddings", "rms_norm_eps", "max_position_embeddings", "num_key_value_heads")

MOST_LAYERS = 10_000

# What each name is called elsewhere, in the order in which it is looked for.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "rms_norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon"),
    "max_position": ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
}  # fmt: skip


@dataclass(frozen=True)
class TargetFacts:
    """Sizes and numerical conventions of a target. Raises BadInput where a size is impossible."""

    hidden_size: int
    vocab_size: int
    """Rows of the embedding, which may exceed the tokenizer's vocabulary."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_parameters: Mapping[str, Any]
    """As transformers >= 5 spells it: rope_type, rope_theta, factor, ...; one such dict per layer type in Gemma 3."""
    max_position: int
    """Longest sequence the config names; 0 where it names none."""
    tied: bool
    """The head is the embedding."""
    model_type: str
    logit_scale: float = 1.0
    """Factor on the head's output (Cohere multiplies by logit_scale, Granite divides by logits_scaling)."""
    logit_softcap: float | None = None
    """Logits become `c * tanh(logits / c)` (Gemma 2)."""
    embedding_scale: float = 1.0
    """Factor on the embedding rows before the first block (sqrt(H) in Gemma, embedding_multiplier in Granite)."""
    norm_offset: bool = False
    """RMSNorm weights are stored as `w - 1` (Gemma 1 to 3, Qwen3-Next)."""
    layer_norm: bool = False
    """The final norm also subtracts the mean (Cohere, GPT-2): its eps is spelled layer_norm_*."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end an answer: of generation_config.json, config.json and the tokenizer's eos_token, in that order."""
    dtype: str = "float32"
    """Dtype in which the weights are stored, as the config names it."""
    scale_block: tuple[int, int] | None = field(default=None, compare=False)
    """Rows and columns that share a scale where weights are stored in FP8 blocks (quantization_config)."""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The (text) config itself."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise BadInput(f"target config: {name} = {value!r} is not a positive whole number; repair config.json")

    @property
    def default_taps(self) -> tuple[int, int, int]:
        """Taps `(2, n//2, n-3)`. Raises BadInput where n is too small for them."""
        try:
            return default_taps(self.num_layers)
        except ValueError as error:
            raise BadInput(str(error)) from error

    def check_taps(self, taps: tuple[int, ...] | list[int]) -> tuple[int, ...]:
        """The taps as a tuple. Raises BadInput unless distinct, ascending and within 0 .. num_layers."""
        out = tuple(int(t) for t in taps)
        if not out or list(out) != sorted(set(out)) or out[0] < 0 or out[-1] > self.num_layers:
            raise BadInput(
                f"taps {list(out)} are not distinct ascending numbers from 0 to {self.num_layers}: tap j is the "
                f"residual stream after j of the target's {self.num_layers} blocks (tap 0: the embedding output); "
                "give such numbers"
            )
        return out

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """From the head's plain product to the target's logits: scale, then soft-cap. Any shape, same dtype."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = (logits / self.logit_softcap).tanh() * self.logit_softcap
        return logits

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without `raw` and `scale_block`, which say how weights are stored."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("raw", "scale_block")}
        return {**out, "rope_parameters": dict(self.rope_parameters), "eos_ids": list(self.eos_ids)}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises BadInput naming the file when it is missing or something else."""
    try:
        value = parse_json(content(path))
    except FileNotFoundError as error:
        raise BadInput(
            f"{path} is missing; a target is a Hugging Face model folder with config.json; name such a folder"
        ) from error
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not readable JSON ({error}); download or convert the model again") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def read_facts(folder: str | Path) -> TargetFacts:
    """Facts of the model in `folder`. Raises BadInput naming the file and the field that is missing or impossible."""
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    try:
        return _read_facts(folder, raw)
    except BadInput as error:
        if str(folder) in str(error):
            raise
        raise BadInput(f"{folder / 'config.json'}: {error}") from error
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        # A value of another kind than every config has there: a list for a number, text for a table.
        raise BadInput(f"{folder / 'config.json'} is not the config of a language model ({error!r})") from error


def _read_facts(folder: Path, raw: dict[str, Any]) -> TargetFacts:
    text = _text_config(raw)
    for name in SPELLINGS["num_layers"]:  # config classes make lists of so many entries
        for config in (raw, text):
            if type(config.get(name)) is int and config[name] > MOST_LAYERS:
                raise BadInput(
                    f"{folder / 'config.json'}: {name} = {config[name]}; at most {MOST_LAYERS} is believed: correct it"
                )
    written = [c["tie_word_embeddings"] for c in (raw, text) if c.get("tie_word_embeddings") is not None]
    model_type = str(text.get("model_type") or raw.get("model_type") or "")
    if model_type not in PLAIN or any(k not in text for k in PLAIN_NEEDS) or not _rope(text):
        text = _completed(folder, raw) or text
    where = folder / "config.json"

    def get(name: str, default: Any = None) -> Any:
        for key in SPELLINGS[name]:
            if text.get(key) is not None:
                return text[key]
        if default is None:
            raise BadInput(f"{where}: none of {', '.join(SPELLINGS[name])} is there; name a causal language model")
        return default

    hidden, heads = get("hidden_size"), get("num_heads")
    rope = _rope(text) or {"rope_type": "default", "rope_theta": 10000.0}
    flat = rope.get("full_attention", rope)
    # What is written counts before a class's default: Kimi K2.5's outer class says true, its checkpoints are untied.
    tied = written[0] if written else text.get("tie_word_embeddings", False)
    dtype = text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return TargetFacts(
        hidden_size=hidden,
        vocab_size=get("vocab_size"),
        num_layers=get("num_layers"),
        num_heads=heads,
        num_kv_heads=get("num_kv_heads", heads),
        head_dim=text.get("head_dim") or hidden // heads,
        intermediate_size=get("intermediate_size", 4 * hidden),
        rms_norm_eps=float(get("rms_norm_eps", 1e-5)),
        rope_theta=float(flat.get("rope_theta", 10000.0)),
        rope_parameters=rope,
        max_position=get("max_position", 0) or 0,
        tied=bool(tied),
        model_type=model_type,
        logit_scale=_logit_scale(model_type, text),
        logit_softcap=_softcap(text),
        embedding_scale=_embedding_scale(model_type, text, hidden),
        norm_offset=model_type.removesuffix("_text") in NORM_OFFSET_FAMILIES,
        layer_norm="rms_norm_eps" not in text and any(k.startswith(("layer_norm", "layernorm")) for k in text),
        eos_ids=_eos_ids(folder, raw, text),
        dtype=str(dtype).removeprefix("torch."),
        scale_block=_scale_block(raw, text),
        raw=text,
    )


def _scale_block(raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, int] | None:
    """`weight_block_size` of Hugging Face's fp8, `block_structure` of compressed-tensors; None where neither is."""
    told = raw.get("quantization_config") or text.get("quantization_config") or {}
    groups = (told.get("config_groups") or {}).values() if isinstance(told, dict) else ()
    sizes = [told.get("weight_block_size")] if isinstance(told, dict) else []
    sizes += [(g.get("weights") or {}).get("block_structure") for g in groups if isinstance(g, dict)]
    for size in sizes:
        if isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
            return int(size[0]), int(size[1])
    return None


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: multimodal models nest it."""
    for key in ("text_config", "language_config", "llm_config", "thinker_config"):
        if isinstance(raw.get(key), dict):
            return _text_config(raw[key])
    return raw


def _completed(folder: Path, raw: dict[str, Any]) -> dict[str, Any] | None:
    """The text config with its family's defaults, from transformers; None for a family unknown to it."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if raw.get("model_type") not in CONFIG_MAPPING:
        return None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text = config.get_text_config(decoder=True)
    except Exception as error:  # whatever a config class thinks of to raise, it is about this file
        raise BadInput(
            f"{folder / 'config.json'}: transformers cannot read it ({error}); download the model again, or update "
            "transformers"
        ) from error
    out = dict(text.to_dict())
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        if getattr(text, name, None) is not None:  # attribute_map of families that spell them otherwise (n_embd)
            out.setdefault(name, getattr(text, name))
    out["tie_word_embeddings"] = bool(getattr(config, "tie_word_embeddings", out.get("tie_word_embeddings", False)))
    return out


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters in transformers 5's spelling; older configs have rope_theta and rope_scaling. {} where none."""
    if isinstance(text.get("rope_parameters"), dict):
        return dict(text["rope_parameters"])
    if text.get("rope_theta") is None:
        return {}
    scaling = dict(text.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    return {"rope_type": kind, "rope_theta": text["rope_theta"], **{k: v for k, v in scaling.items() if k != "type"}}


# Sources: the *ForCausalLM.forward of each family in transformers 5.19 (models/<family>/modeling_<family>.py).
NORM_OFFSET_FAMILIES = {
    "gemma", "gemma2", "gemma3", "recurrent_gemma", "vaultgemma", "qwen3_next", "qwen3_5", "qwen3_5_moe",
}  # fmt: skip


def _logit_scale(model_type: str, text: Mapping[str, Any]) -> float:
    if text.get("logits_scaling") is not None:
        value = float(text["logits_scaling"])  # Granite divides, HyperCLOVA X multiplies
        return value if model_type.startswith("hyperclovax") else 1.0 / value
    for key in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        if text.get(key) is not None:
            return float(text[key])
    if text.get("dim_model_base"):  # MiniCPM divides the final state by H / dim_model_base
        return float(text["dim_model_base"]) / float(text["hidden_size"])
    return 1.0


def _softcap(text: Mapping[str, Any]) -> float | None:
    value = text.get("final_logit_softcapping")
    return float(value) if value else None


def _embedding_scale(model_type: str, text: Mapping[str, Any], hidden: int) -> float:
    if "gemma" in model_type:
        return float(hidden) ** 0.5
    for key in ("embedding_multiplier", "scale_emb"):
        if text.get(key) is not None:
            return float(text[key])
    return 1.0


def _eos_ids(folder: Path, raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    """Distinct ids in order of authority; the tokenizer is often the only one to name the end of a turn."""
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    named = [generation.get("eos_token_id"), raw.get("eos_token_id"), text.get("eos_token_id"), _tokenizer_eos(folder)]
    flat = [i for value in named for i in (value if isinstance(value, (list, tuple)) else [value]) if i is not None]
    return tuple(dict.fromkeys(int(i) for i in flat if int(i) >= 0))


def _tokenizer_eos(folder: Path) -> int | None:
    """Id of the tokenizer's eos_token, read from its JSON files without loading it; None if they do not say."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    config = read_json(folder / "tokenizer_config.json")
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    added = [(int(i), a.get("content")) for i, a in (config.get("added_tokens_decoder") or {}).items()]
    if eos and not any(content == eos for _, content in added) and (folder / "tokenizer.json").is_file():
        added = [(a["id"], a["content"]) for a in read_json(folder / "tokenizer.json").get("added_tokens", [])]
    return next((i for i, content in added if content == eos), None)
