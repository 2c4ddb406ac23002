"""The draft before its first step: sizes and conventions from target and settings, and weights that know something.

A random draft spends its first hundreds of steps on learning what the target already holds. So the head starts as the
target's rows for the draft vocabulary, the last norm as the target's, and `fc` and a few attention heads as the best
linear guess of the final state that the target would predict x_{i+2} from (linear.py). (Numbers are in
docs/experiments.md.)
    Exercise it:  pytest tests/test_train_start.py
"""

from __future__ import annotations

from typing import Any

import torch

from ..conventions import Conventions, Known
from ..draft.model import Draft
from ..draft.shape import DraftShape
from ..errors import Mismatch
from ..features.reader import FeatureSet
from ..target.facts import TargetFacts
from ..target.weights import Ends
from ..vocab import VocabMap
from .linear import fit_guess, fold_norm, write_guess
from .settings import TrainSettings

INIT_STD = 0.02


def new_draft(settings: TrainSettings, facts: TargetFacts, features: FeatureSet, vocab_map: VocabMap) -> Draft:
    """A Llama-like draft with the target's sizes, RoPE and epsilon, declared in full; weights are not set yet.

    Raises Mismatch when the features' states do not have the target's width.
    """
    if features.meta.hidden_size != facts.hidden_size or features.meta.vocab_size != facts.vocab_size:
        raise Mismatch(
            f"{features.dir}: states of width {features.meta.hidden_size} and vocabulary {features.meta.vocab_size}, "
            f"but the target has {facts.hidden_size} and {facts.vocab_size}; use the target they were made with"
        )
    # transformers adds the key `rope_type` to an older config's `type`; one of them is enough.
    rope = {k: v for k, v in facts.rope_parameters.items() if not isinstance(v, dict) and k != "type"}
    shape = draft_shape(settings, facts, vocab_map.size, len(features.conventions.taps))
    values: dict[str, Any] = {
        "taps": features.conventions.taps,
        "num_target_layers": facts.num_layers,
        "d2t": "offset" if vocab_map.size < vocab_map.target_size else "none",
        "norm_before_fc": settings.norm_before_fc,
        "fc_norm": settings.fc_norm,
        "norm_before_residual": settings.norm_before_residual,
        "norm_output": settings.norm_output,
        "rms_norm_eps": facts.rms_norm_eps,
        "rope_theta": float(rope.pop("rope_theta", facts.rope_theta)),
        "rope_type": str(rope.pop("rope_type", "default")),
        "partial_rotary_factor": float(rope.pop("partial_rotary_factor", None) or 1.0),
        "rope_scaling": rope,
        "max_position": facts.max_position or Conventions.max_position,
        "embedding_scale": facts.embedding_scale,
        "teacher": "whole_vocabulary",
    }
    names = [name for name in Conventions.__dataclass_fields__ if name != "how"]
    return Draft(shape, Conventions(**values, how=dict.fromkeys(names, Known.DECLARED)))


def draft_shape(settings: TrainSettings, facts: TargetFacts, draft_vocab_size: int, num_taps: int = 3) -> DraftShape:
    """Sizes of a new draft for that target.

    A target with latent attention (DeepSeek, Kimi) has no heads in the ordinary sense: what its config calls `head_dim`
    may be the rotated slice alone. The draft gets as many heads, each as wide as one of the target's values.
    """
    heads, kv_heads, width = facts.num_heads, facts.num_kv_heads, facts.head_dim
    if facts.raw.get("kv_lora_rank") and facts.raw.get("v_head_dim"):
        kv_heads, width = heads, int(facts.raw["v_head_dim"])
    return DraftShape(
        hidden_size=facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        intermediate_size=settings.intermediate_size or facts.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_taps=num_taps,
        num_layers=settings.num_layers,
    )


@torch.no_grad()
def initialise(
    draft: Draft, settings: TrainSettings, ends: Ends, features: FeatureSet, vocab_map: VocabMap, seed: int
) -> None:
    """Set every weight of a new draft, deterministically from `seed`; see the module's text."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.ndim == 2 and parameter.requires_grad:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD)
    if settings.start == "random":
        return
    draft.lm_head.weight.copy_(ends.head[vocab_map.ids].float())
    scale = _norm_weight(ends)
    draft.norm.weight.copy_(scale)
    if settings.start == "regression":
        guess = fit_guess(draft, features, scale, seed, settings.start_rows)
        write_guess(draft, guess)
        if draft.conventions.norm_output:
            fold_norm(draft, guess, features, scale, seed)


def _norm_weight(ends: Ends) -> torch.Tensor:
    """The target's final norm as a plain factor [H]."""
    if ends.final_norm is None:
        return torch.ones(ends.facts.hidden_size)
    weight = ends.final_norm.float()
    return weight + 1 if ends.facts.norm_offset else weight
