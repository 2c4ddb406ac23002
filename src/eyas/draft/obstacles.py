"""What an engine cannot express or would read otherwise in the canonical directory: one rule each, with the ways out.

    [o.text for o in obstacles("sglang", shape, conventions, facts)]

Rules are from docs/facts/README.md (SGLang 0.5.23, vLLM 0.32, llama.cpp b11434).   pytest tests/test_export.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..conventions import Conventions
from ..target.facts import TargetFacts
from .dialects.canonical import LENGTH_FREE_ROPE, max_position, sglang_ids
from .shape import DraftShape

ENGINES = ("sglang", "vllm", "llamacpp")
# SGLang target classes that also capture the last block's output (sglang.md 1.5).
SGLANG_LAST_LAYER = ("gpt_oss", "minimax_m3", "minimax_m3_vl", "gemma3", "gemma3_text", "laguna")


@dataclass(frozen=True)
class Obstacle:
    """Why `engine` would not run this draft as it was trained."""

    engine: str
    what: str
    way_out: str

    @property
    def text(self) -> str:
        """One sentence."""
        return f"{self.engine}: {self.what}; {self.way_out}"


@dataclass(frozen=True)
class Facts:
    """All that a rule may look at."""

    shape: DraftShape
    c: Conventions
    target: TargetFacts | None

    @property
    def model_type(self) -> str:
        """Of the target; Llama-like where it is not known."""
        return self.target.model_type if self.target else "llama"

    @property
    def layers(self) -> int | None:
        """Blocks of the target."""
        return self.target.num_layers if self.target else self.c.num_target_layers


@dataclass(frozen=True)
class Rule:
    """`applies(facts)` -> the obstacle exists for `engines`."""

    engines: tuple[str, ...]
    applies: Callable[[Facts], bool]
    what: str
    way_out: str = "choose another engine, or fine-tune under its convention (eyas train --init-from)"


SG, VL, LC, ALL = ("sglang",), ("vllm",), ("llamacpp",), ENGINES

RULES = (
    Rule(
        SG,
        lambda f: f.c.norm_before_residual,
        "norm_before_residual is never read: the residual stream would start un-normed",
    ),
    Rule(LC, lambda f: f.c.norm_output, "norm_output is not read, so the un-normed state would be fed back"),
    Rule(LC, lambda f: f.c.fc_norm, "fc_norm is not read"),
    Rule(
        LC,
        lambda f: f.shape.num_taps != 3,
        "exactly three taps are read",
        "choose another engine, or train with three taps",
    ),
    Rule(
        LC, lambda f: f.shape.num_layers != 1, "exactly one layer is read", "choose another engine, or train one layer"
    ),
    Rule(
        SG,
        lambda f: f.c.taps[0] == 0,
        "tap 0 (the embedding output) has no layer id",
        "choose another engine or other taps",
    ),
    Rule(
        SG,
        lambda f: f.c.taps[-1] == f.layers and f.model_type not in SGLANG_LAST_LAYER,
        "the last block's output is never captured and the first request fails",
        "choose another engine or other taps",
    ),
    Rule(
        SG,
        lambda f: sglang_ids(f.c.taps, f.model_type) is None,
        "these taps cannot be spelled for this target family (ids that begin with 1 are shifted)",
        "choose other taps",
    ),
    Rule(
        SG,
        lambda f: f.shape.num_taps * f.shape.target_hidden_size == f.shape.hidden_size,
        "fc is skipped when its input is as wide as the draft",
        "choose another engine, or train with more taps",
    ),
    Rule(
        SG,
        lambda f: f.c.embedding == "own" and f.shape.hidden_size == f.shape.target_hidden_size,
        "the draft's own embedding is replaced by the target's",
        "choose another engine, or train on the target's embedding",
    ),
    Rule(("sglang", "llamacpp"), lambda f: f.c.attention_bias, "attention biases are dropped"),
    Rule(("sglang", "llamacpp"), lambda f: f.c.mlp_bias, "MLP biases are dropped"),
    Rule(("vllm", "llamacpp"), lambda f: f.c.fc_bias, "the bias of fc is dropped"),
    Rule(
        ("sglang", "llamacpp"),
        lambda f: f.c.sliding_window is not None and f.c.sliding_window < max_position(f.c, f.target),
        "the draft's sliding window is not applied",
        "choose vllm, or keep served sequences within the window",
    ),
    Rule(("sglang", "llamacpp"), lambda f: f.c.logit_scale != 1, "logit_scale is not read"),
    Rule(ALL, lambda f: f.c.qk_norm, "the Llama draft class has no q/k norms"),
    Rule(ALL, lambda f: f.c.partial_rotary_factor != 1, "partial RoPE in the draft is not known to be read"),
    Rule(ALL, lambda f: f.c.rms_norm_offset, "norm weights stored as w - 1 are read as w"),
    Rule(ALL, lambda f: not f.c.norm_before_head, "the norm before the head cannot be left out"),
    Rule(ALL, lambda f: f.c.layer_input != "embedding_state", "the layer reads [embedding, state] in this order only"),
    Rule(ALL, lambda f: f.c.token_shift != 1, "the shift between ids and states is fixed to 1"),
    Rule(
        ALL,
        lambda f: f.c.rope_offset != 0 and f.c.rope_type != "default",
        "RoPE positions start at the row's own index",
    ),
    Rule(
        ALL,
        lambda f: f.c.embedding_scale != 1,
        "the embedding scale is the engine's own choice for each target family and cannot be written down",
        "check the accept length in the engine against the predicted one",
    ),
    Rule(
        ("sglang", "vllm"),
        lambda f: (
            f.target is not None and f.c.rope_type not in LENGTH_FREE_ROPE and f.c.max_position < f.target.max_position
        ),
        "max_position_embeddings must stay as trained under this RoPE kind, and is shorter than the target's",
        "serve with a context length of at most the draft's",
    ),
)


def obstacles(
    engine: str, shape: DraftShape, conventions: Conventions, facts: TargetFacts | None = None
) -> list[Obstacle]:
    """Everything that keeps `engine` from running the draft as declared; [] where the canonical directory suffices."""
    known = Facts(shape, conventions, facts)
    return [Obstacle(engine, r.what, r.way_out) for r in RULES if engine in r.engines and r.applies(known)]
