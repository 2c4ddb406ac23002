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
from ..draft.model import Attention, Draft
from ..draft.shape import DraftShape
from ..errors import Mismatch
from ..features.reader import FeatureSet
from ..target.facts import TargetFacts
from ..target.weights import Ends
from ..vocab import VocabMap
from .linear import PAIRS, SHARPNESS, fit_guess, fold_norm, write_guess
from .settings import TrainSettings

INIT_STD = 0.02
ROWS = 16384  # of a table in float32 at once


def new_draft(settings: TrainSettings, facts: TargetFacts, features: FeatureSet, vocab_map: VocabMap) -> Draft:
    """A Llama-like draft with the target's sizes, RoPE and epsilon where the settings name no others; no weights yet.

    Raises Mismatch when the features' states do not have the target's width.
    """
    if features.meta.hidden_size != facts.hidden_size or features.meta.vocab_size != facts.vocab_size:
        raise Mismatch(
            f"{features.dir}: states of width {features.meta.hidden_size} and vocabulary {features.meta.vocab_size}, "
            f"but the target has {facts.hidden_size} and {facts.vocab_size}; use the target they were made with"
        )
    # transformers adds the key `rope_type` to an older config's `type`; one of them is enough. mscale is DeepSeek's,
    # for latent attention; of other attention no two readers make the same of it.
    left_out = ("type", "mscale", "mscale_all_dim")
    rope = {k: v for k, v in facts.rope_parameters.items() if not isinstance(v, dict) and k not in left_out}
    shape = draft_shape(settings, facts, vocab_map.size, len(features.conventions.taps))
    own = shape.hidden_size != facts.hidden_size
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
        "qk_norm": settings.qk_norm,
        "embedding": "own" if own else "target",
        "embedding_scale": 1.0 if own else facts.embedding_scale,
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
        hidden_size=settings.hidden_size or facts.hidden_size,
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
    space = state_space(draft, ends)
    rows, scale = ends.head[vocab_map.ids].float(), _norm_weight(ends)
    if space is not None:
        # The draft's states are the target's final ones, norm and all, seen in `space`: they keep their length.
        rows, scale = rows @ space.T, torch.full((len(space),), _length(features, space, seed))
    draft.lm_head.weight.copy_(rows)
    draft.norm.weight.copy_(scale)
    if settings.start == "regression":
        if draft.conventions.qk_norm:
            _sharpen(draft)
        # Nothing disturbs the guess: the MLP and further layers add nothing yet.
        draft.midlayer.mlp.down_proj.weight.zero_()
        for name, parameter in draft.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        guess = fit_guess(draft, features, scale, seed, settings.start_rows, space)
        write_guess(draft, guess)
        if draft.conventions.norm_output:
            fold_norm(draft, guess, features, scale, seed, space)


def embedding_for(draft: Draft, ends: Ends) -> torch.Tensor:
    """The table a new draft reads [V, H]: the target's, or where widths differ its best projection, scaled as it is."""
    if draft.conventions.embedding == "target":
        return ends.embedding
    directions = principal(ends.embedding, draft.shape.hidden_size)
    scale = ends.facts.embedding_scale
    return torch.cat([rows.float() @ directions.T * scale for rows in ends.embedding.split(ROWS)])


def state_space(draft: Draft, ends: Ends) -> torch.Tensor | None:
    """Where the draft is of another width: orthonormal directions of the target's final state [H, Ht] that its head
    distinguishes most; None where widths agree."""
    if draft.shape.hidden_size == draft.shape.target_hidden_size:
        return None
    return principal(ends.head, draft.shape.hidden_size)


def principal(table: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` directions in which the rows of `table` [V, Ht] are largest, as rows [width, Ht], orthonormal.

    Where there are fewer than `width`, all coordinates as they are, and rows of zeros.
    """
    size = table.shape[1]
    if width >= size:
        return torch.eye(width, size)
    moment = torch.zeros(size, size, dtype=torch.float64)
    for rows in table.split(ROWS):  # never the whole table in float32
        part = rows.float()
        moment += (part.T @ part).double()
    return torch.linalg.eigh(moment).eigenvectors[:, -width:].T.flip(0).float()


def _length(features: FeatureSet, space: torch.Tensor, seed: int) -> float:
    """Root mean square of final states in `space`, over one document."""
    first = int(torch.randint(features.num_docs, (1,), generator=torch.Generator().manual_seed(seed)))
    states = features.document(first)["final"].float() @ space.T
    length = float(states.square().mean().sqrt())
    return length if 0 < length < float("inf") else 1.0


def _sharpen(draft: Draft) -> None:
    """Norms on q and k take the length from the heads that look at their own row (linear.py): these give it back.

    Such a head's q and k have PAIRS equal numbers, which the norms make sqrt(d / PAIRS): a score of sqrt(d).
    """
    attention = draft.midlayer.self_attn
    assert isinstance(attention, Attention), "latent attention is not trained"
    for norm in (attention.q_norm, attention.k_norm):
        assert norm is not None, "qk_norm"
        norm.weight.fill_((SHARPNESS * PAIRS / attention.head_dim**0.5) ** 0.5)


def _norm_weight(ends: Ends) -> torch.Tensor:
    """The target's final norm as a plain factor [H]."""
    if ends.final_norm is None:
        return torch.ones(ends.facts.hidden_size)
    weight = ends.final_norm.float()
    return weight + 1 if ends.facts.norm_offset else weight
