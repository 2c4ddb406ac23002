"""A target of which only the config is at hand: its sizes, and how many parameters there are and work for a token.

    plan_target("kimi-k2.5")        # shapes that are kept here
    plan_target("Qwen/Qwen3-8B")    # from the hub, config.json alone is fetched
    plan_target(None, {"hidden_size": "4096", "num_hidden_layers": "32", ...})

Parameters are counted on transformers' own module of the family, without memory (meta device), so nothing is assumed
about it but the names of its experts.   Exercise it:  pytest tests/test_plan.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..errors import BadInput, EyasError
from ..target.facts import TargetFacts, read_facts, read_json
from ..target.source import DEFAULT, resolve_target
from ..target.weights import read_header, tensor_files
from ..untrusted import parse_yaml

NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk")
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


@dataclass(frozen=True)
class PlannedTarget:
    """A target as a plan needs it. Parameters are those of the language model; a vision tower is not run."""

    name: str
    facts: TargetFacts
    parameters: int
    active: int
    """Parameters that multiply one token: without embedding, head, and the experts that are not chosen."""
    experts: int
    """Parameters of all routed experts; 0 in a dense model."""
    stored_bytes: float
    """Of the weights as they are stored."""
    stored_how: str
    folder: Path | None
    """Where its weights are; None where only the config is known."""
    notes: tuple[str, ...] = field(default=())

    @property
    def key_width(self) -> int:
        """Width of one key: with latent attention of both its slices."""
        raw = self.facts.raw
        if raw.get("kv_lora_rank"):
            return int(raw["qk_nope_head_dim"]) + int(raw["qk_rope_head_dim"])
        return self.facts.head_dim

    @property
    def value_width(self) -> int:
        """Width of one value."""
        raw = self.facts.raw
        return int(raw["v_head_dim"]) if raw.get("kv_lora_rank") else self.facts.head_dim


def shape_names() -> list[str]:
    """Targets whose configs are kept here."""
    return sorted(p.name for p in resources.files("eyas.plan").joinpath("shapes").iterdir() if p.is_dir())


def planned_config(spec: str | None, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """config.json of a kept shape, a folder, a file, a GGUF file or a hub id, with `changes` to its language model.

    Without a spec, but with changes, a Llama of these sizes. Raises BadInput where there is none.
    """
    made_up = spec is None and changes
    config: dict[str, Any] = {"model_type": "llama"} if made_up else read_json(_config_file(spec))
    inner: dict[str, Any] = next((config[key] for key in NESTED if isinstance(config.get(key), dict)), config)
    for name, text in (changes or {}).items():
        try:
            inner[name] = parse_yaml(text)
        except yaml.YAMLError as error:
            raise BadInput(f"--size {name}={text}: {text!r} is no YAML value; give a number or a word") from error
    missing = [name for name in NEEDED if made_up and name not in inner]
    if missing:  # the family's defaults would fill the gaps without a word
        raise BadInput(f"a target made of sizes needs {', '.join(missing)}, too; give each as --size NAME=VALUE")
    return config


def plan_target(spec: str | None, changes: Mapping[str, str] | None = None) -> PlannedTarget:
    """A target's facts and counts. changes: keys of config.json, by text, that replace or make up the config.

    Raises BadInput for a config that says too little, naming what is missing.
    """
    file = None if spec is None and changes else _config_file(spec)
    config = planned_config(spec, changes)
    folder = file.parent if file and not changes else None
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(config))
        read = folder or Path(made)
        facts = read_facts(read)
        total, experts, ends, notes = _count(read, facts)
    chosen = _first(facts.raw, PER_TOKEN) / max(1, _first(facts.raw, EXPERTS)) if experts else 0.0
    with_weights = folder if folder and _has_weights(folder) else None
    quantised = config.get("quantization_config") or facts.raw.get("quantization_config")
    stored, how = _stored(with_weights, facts, total, experts, ends, quantised)
    return PlannedTarget(
        name=spec or DEFAULT if file else "made-up", facts=facts, parameters=total,
        active=round(total - ends - experts + experts * chosen), experts=experts,
        stored_bytes=stored, stored_how=how, folder=with_weights, notes=tuple(notes),
    )  # fmt: skip


def _config_file(spec: str | None) -> Path:
    if spec in shape_names():
        return Path(str(resources.files("eyas.plan").joinpath("shapes", str(spec), "config.json")))
    path = Path(str(spec)).expanduser()
    if spec is not None and path.is_file() and path.suffix == ".json":
        return path
    if spec is None or spec == DEFAULT or path.exists():
        return resolve_target(spec) / "config.json"
    from huggingface_hub import hf_hub_download

    name, _, revision = str(spec).partition("@")
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision or None))
    except Exception as error:  # not there, gated, no network: each has a type of its own
        raise BadInput(
            f"{spec!r} is no folder, no config.json and none of {', '.join(shape_names())}, and the hub gives no "
            f"config.json of it ({str(error).splitlines()[0]}); give its sizes with --size NAME=VALUE"
        ) from error


def _count(folder: Path, facts: TargetFacts) -> tuple[int, int, int, list[str]]:
    """(parameters, of routed experts, of embedding and head, notes)."""
    import torch

    ends = facts.vocab_size * facts.hidden_size * (1 if facts.tied else 2)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
        with torch.device("meta"):
            named = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    except Exception as error:  # a family unknown to this version, or one that needs its own code
        f = facts
        block = f.hidden_size * (2 * f.num_heads + 2 * f.num_kv_heads) * f.head_dim + 3 * f.hidden_size * (
            f.intermediate_size
        )
        why = str(error).splitlines()[0][:100]
        return f.num_layers * block + ends, 0, ends, [f"parameters are counted as a Llama's: {why}"]
    routed = sum(p.numel() for name, p in named.items() if ".experts." in name)
    return sum(p.numel() for p in named.values()), routed, ends, []


def _stored(
    folder: Path | None, facts: TargetFacts, total: int, experts: int, ends: int, quantised: Any
) -> tuple[float, str]:
    """Bytes of the weights and how they are known."""
    if folder is not None:
        try:
            files = dict.fromkeys(tensor_files(folder).values())
            return float(sum(file.stat().st_size for file in files)), "its files"
        except (EyasError, OSError):
            pass
    plain = {"float32": 4, "float64": 8}.get(facts.dtype, 2)
    if not isinstance(quantised, Mapping):
        return float(total * plain), f"{plain} bytes a parameter ({facts.dtype})"
    bits, group = _bits(quantised)
    packed = experts or total - ends  # quantisers of mixtures leave all but the routed experts alone
    scales = 16 / group if group else 0
    return packed * (bits + scales) / 8 + (total - packed) * plain, (
        f"{'routed experts' if experts else 'blocks'} in {bits + scales:g} bits, the rest in {8 * plain}"
    )


def _bits(quantised: Mapping[str, Any]) -> tuple[float, int]:
    """(bits of a quantised weight, weights that share a scale of 16 bits; 0: too many to count)."""
    for group in (quantised.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if weights.get("num_bits"):
            return float(weights["num_bits"]), int(weights.get("group_size") or 0)
    bits = quantised.get("bits") or (8 if "fp8" in str(quantised.get("quant_method")) else 4)
    return float(bits), int(quantised.get("group_size") or 0)


def _has_weights(folder: Path) -> bool:
    try:
        for file in dict.fromkeys(tensor_files(folder).values()):
            if file.suffix == ".safetensors":
                read_header(file)
    except (EyasError, OSError):
        return False
    return True


def _first(raw: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((int(raw[name]) for name in names if raw.get(name)), 0)
