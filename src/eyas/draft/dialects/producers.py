"""Who wrote a flat checkpoint, where its config tells, and what that project's silences mean: one row each.

Most flat drafts differ in nothing but a label. A row says more only where the same field, or its absence, means another
thing to the code that trained the draft. Sources, with file and line: docs/facts/, one page a project.

    pytest tests/test_producers.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...conventions import Known
from .common import Silence

Config = Mapping[str, Any]
IDS = "eagle_aux_hidden_state_layer_ids"
ENGINES_READ = Silence()
UNSURE = Silence(norm_output_how=Known.GUESSED)


@dataclass(frozen=True)
class Producer:
    """`wrote(config)`: does the config bear its marks."""

    name: str
    wrote: Callable[[Config], bool]
    silence: Silence = UNSURE
    outputs: bool = False
    """The ids in its eagle_config number the outputs of layers, for certain: tap = id + 1."""
    remarks: tuple[tuple[Callable[[Config], bool], str], ...] = field(default=())
    """What a user of its drafts should know: (where it applies, the remark)."""


def _architecture(config: Config) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _nested(config: Config) -> Config:
    value = config.get("eagle_config")
    return value if isinstance(value, Mapping) else {}


def _rope_kind(config: Config) -> Any:
    table = config.get("rope_scaling")
    return (table.get("rope_type") or table.get("type")) if isinstance(table, Mapping) else None


def _pruned(config: Config) -> bool:
    size, vocab = config.get("draft_vocab_size"), config.get("vocab_size")
    return isinstance(size, int) and isinstance(vocab, int) and size < vocab


PRODUCERS = (
    Producer(
        "Model Optimizer",
        lambda c: "next_layer_regular" in _nested(c),
        ENGINES_READ,
        outputs=True,
        remarks=(
            (
                lambda _: True,
                "Model Optimizer 0.41 and later norms the fused state with input_layernorm and then with hidden_norm "
                "while it trains; engines apply hidden_norm alone",
            ),
            (
                lambda c: _rope_kind(c) == "yarn" and _architecture(c).startswith("Llama"),
                "Model Optimizer trains Llama-like drafts with plain RoPE and writes this YaRN at export; where "
                "acceptance is low within the trained length, try the draft without it",
            ),
        ),
    ),
    Producer(
        "TorchSpec",
        lambda c: "_torchspec_version" in c,
        ENGINES_READ,
        remarks=(
            (
                _pruned,
                "TorchSpec 0.1.0's --prune-vocab takes the head's rows at the offsets of d2t instead of at the ids, so "
                "most rows of such a head belong to other tokens",
            ),
        ),
    ),
    # Its config is the target's, with num_hidden_layers left as it was.
    Producer("NeMo Automodel", lambda c: _architecture(c) == "LlamaEagle3DraftModel", Silence(one_layer=True)),
    Producer(
        "AngelSlim",
        lambda c: _architecture(c) == "Eagle3LlamaForCausalLM" and "target_model_type" in c,
        Silence(rope_theta=10000.0),
    ),
    Producer(
        "SafeAILab/EAGLE",
        lambda c: _architecture(c) == "LlamaForCausalLM" and "draft_vocab_size" in c,
        Silence(rope_theta=10000.0, one_layer=True),
    ),
    # Fields that only engines ask for: whoever writes them means what engines read.
    Producer("written for engines", lambda c: "num_aux_hidden_states" in c and IDS in c, ENGINES_READ),
    Producer(
        "SpecForge or alike",
        lambda c: _architecture(c) == "LlamaForCausalLMEagle3",
        UNSURE,
        remarks=(
            (
                lambda c: c.get("norm_output") is False,
                "norm_output = false: to SpecForge before September 2026 this left out the norm before the head",
            ),
        ),
    ),
)
UNKNOWN = Producer("an unknown producer", lambda _: True)


def recognise(config: Config) -> Producer:
    """The first whose marks the config bears."""
    return next((p for p in PRODUCERS if p.wrote(config)), UNKNOWN)
