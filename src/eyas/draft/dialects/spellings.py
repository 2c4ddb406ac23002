"""How drafts are written: for the engines (one canonical directory), and as the trainers spell them.

    SPELLINGS["speculators"].config(shape, conventions, facts, "bfloat16"); .rename("midlayer.hidden_norm.weight")

A spelling writes only the fields that its readers know. Whatever does not fit is seen when the output is read back.
Sources: docs/facts/README.md.   pytest tests/test_export_spellings.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...conventions import Conventions
from ...target.facts import TargetFacts
from ..shape import DraftShape
from .canonical import canonical_config, flat_fields, model_fields

Config = Callable[[DraftShape, Conventions, TargetFacts | None, str], dict[str, Any]]


@dataclass(frozen=True)
class Spelling:
    """How a destination spells a draft."""

    name: str
    dialect: str
    """The dialect that reads it back."""
    config: Config
    """(shape, conventions, the target's facts, name of the stored dtype) -> config.json"""
    rename: Callable[[str], str] = lambda name: name
    """Canonical name -> stored name."""
    readers: tuple[str, ...] = ()
    """Engines that must read it as it was trained."""
    lacks: tuple[str, ...] = ()
    """Fields of `Conventions` for which its readers know the contract's value only."""
    plain: bool = False
    """Its readers know one layer and three taps only."""


def _flat(shape: DraftShape, c: Conventions, facts: TargetFacts | None, dtype: str) -> dict[str, Any]:
    """What SafeAILab and SpecForge have in common."""
    config = flat_fields(shape, c, facts, dtype)
    if shape.target_hidden_size != shape.hidden_size:
        config["target_hidden_size"] = shape.target_hidden_size
    return config


def specforge(shape: DraftShape, c: Conventions, facts: TargetFacts | None, dtype: str) -> dict[str, Any]:
    """SpecForge 0.2: ids in `eagle_config` name outputs of layers, as its capture and SGLang count them.

    `norm_output` is left out: absent it means to SpecForge what it does for every draft, a norm before the head.
    """
    config = _flat(shape, c, facts, dtype)
    config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [t - 1 for t in c.taps]}
    return config | ({"fc_norm": True} if c.fc_norm else {})


def eagle(shape: DraftShape, c: Conventions, facts: TargetFacts | None, dtype: str) -> dict[str, Any]:
    """SafeAILab/EAGLE: no ids, always the taps (2, n//2, n-3)."""
    return _flat(shape, c, facts, dtype)


def speculators(shape: DraftShape, c: Conventions, facts: TargetFacts | None, dtype: str) -> dict[str, Any]:
    """speculators 0.9: the layer's config nested, flags above it, ids as taps."""
    verifier = {"name_or_path": None, "architectures": list(facts.raw.get("architectures") or []) if facts else []}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "norm_output": c.norm_output,
        "fc_norm": c.fc_norm,
        "embed_requires_grad": c.embedding == "own",
        "target_hidden_size": shape.target_hidden_size if shape.target_hidden_size != shape.hidden_size else None,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": verifier,
        },
        "transformer_layer_config": model_fields(shape, c, facts),
    }


def _numbered(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


TRAINED_PLAIN = ("norm_before_fc", "norm_before_residual", "norm_output", "sliding_window", "qk_norm", "fc_bias",
                 "attention_bias", "mlp_bias", "logit_scale")  # fmt: skip
CANONICAL = Spelling("canonical", "flat", canonical_config)
SPELLINGS = {
    **{
        engine: Spelling(engine, "flat", canonical_config, readers=(engine,))
        for engine in ("sglang", "vllm", "llamacpp", "openvino")
    },
    "speculators": Spelling("speculators", "speculators", speculators, _numbered),
    "specforge": Spelling("specforge", "flat", specforge, lacks=TRAINED_PLAIN, plain=True),
    "eagle": Spelling("eagle", "flat", eagle, lacks=(*TRAINED_PLAIN, "fc_norm"), plain=True),
}
