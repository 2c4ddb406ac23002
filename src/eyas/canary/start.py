"""A canary before its first step: sizes, conventions and vocabulary that every engine takes, weights that tell apart.

Sizes: the target's width, key heads and head width (so that engines share their KV pages), one query head each, a small
MLP. Conventions: those of the EAGLE-3 contract that SGLang, vLLM, llama.cpp and OpenVINO all run; its RoPE base is
neither the engines' default nor the target's, so that a base that got lost shows.

Weights: every norm has its own gains, of both signs, so that none can be left out or mistaken for another. `fc` whitens
the states that the canary will read, so that rows of the text become nearly orthogonal. On top of that it has *alarms*:
for each wrong choice of taps a direction that is silent on the right states and loud on those. States one layer on
resemble the right ones (cosines of .84 to .98), and training alone needs very long to tell them apart.

    pytest tests/test_canary.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..conventions import Conventions, Known
from ..doctor.material import Material
from ..doctor.specimen import Specimen
from ..draft.expected import expected_tensors
from ..draft.shape import DraftShape
from ..errors import BadInput
from ..target.facts import TargetFacts
from ..vocab import VocabMap

MULTIPLE = 64  # of the draft vocabulary
MLP = 128
THETAS = (1000.0, 30_000.0)
RIDGE = 0.03  # of a channel's variance: below it a direction is noise
FC = "fc.weight"
GAIN = 3.0  # of what `fc` gives: so that it matters whether the residual stream starts from it or from its norm
ALARM = 3.0  # how loud, in units of what the right states give
ALARM_RIDGE = 1e-3  # of a row's squared length


def conventions(facts: TargetFacts, taps: Sequence[int], max_position: int) -> Conventions:
    """Declared in full; what all four engines run."""
    theta = next(t for t in THETAS if not t / 3 < facts.rope_theta < t * 3)
    values: dict[str, Any] = {
        "taps": tuple(taps), "num_target_layers": facts.num_layers, "d2t": "offset", "rope_theta": theta,
        "rms_norm_eps": facts.rms_norm_eps, "max_position": max_position,
        "embedding_scale": facts.embedding_scale,
    }  # fmt: skip
    names = [name for name in Conventions.__dataclass_fields__ if name != "how"]
    return Conventions(**values, how=dict.fromkeys(names, Known.DECLARED))


def vocabulary(answers: torch.Tensor, size: int, seed: int) -> VocabMap:
    """The tokens of the answers, and as many decoys again at least; a multiple of MULTIPLE ids.

    No token of an answer keeps its number: the lowest ids are left out, so that no offset of one is zero, and gaps lie
    between them. Raises BadInput where the target's vocabulary leaves no room for that.
    """
    said = answers.unique()
    wanted = -(-2 * len(said) // MULTIPLE) * MULTIPLE
    while wanted > MULTIPLE and wanted > 3 * size // 4:
        wanted -= MULTIPLE
    if not len(said) < wanted < size:
        raise BadInput(
            f"the answers hold {len(said)} of {size} tokens, too many for a map that leaves some out; give fewer "
            "prompts (--count)"
        )
    free = torch.ones(size, dtype=torch.bool)
    free[said] = False
    free[: int(said[0]) + 1 if int(said[0]) < 8 else 1] = False  # a gap below everything
    if int(said[0]) == 0:
        free[1:2] = False
    spare = free.nonzero().squeeze(1)
    need = wanted - len(said)
    if len(spare) < need:
        raise BadInput(
            f"a target vocabulary of {size} ids leaves no room for {need} decoys; give fewer prompts (--count)"
        )
    picked = spare[torch.randperm(len(spare), generator=torch.Generator().manual_seed(seed))[:need]]
    return VocabMap.from_absolute(torch.cat([said, picked]).sort().values, size)


def shape_of(facts: TargetFacts, taps: Sequence[int], draft_vocab: int) -> DraftShape:
    """As small as an engine that shares KV pages with the target takes it."""
    return DraftShape(
        hidden_size=facts.hidden_size, target_hidden_size=facts.hidden_size, intermediate_size=MLP,
        num_heads=facts.num_kv_heads, num_kv_heads=facts.num_kv_heads, head_dim=facts.head_dim,
        vocab_size=facts.vocab_size, draft_vocab_size=draft_vocab, num_taps=len(taps),
    )  # fmt: skip


def new_specimen(
    facts: TargetFacts, taps: Sequence[int], vocab_map: VocabMap, embedding: torch.Tensor, seed: int
) -> Specimen:
    """Parameters that are to be trained, as a specimen: its tensors are leaves with gradients; `fc` is random yet."""
    shape = shape_of(facts, taps, vocab_map.size)
    c = conventions(facts, taps, facts.max_position or Conventions.max_position)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in expected_tensors(shape, c).items():
        if len(size) == 1:
            gain = torch.exp(0.5 * torch.randn(size, generator=generator))
            sign = torch.where(torch.rand(size, generator=generator) < 0.5, -1.0, 1.0)
            tensors[name] = gain * sign
        else:
            tensors[name] = torch.randn(size, generator=generator) * size[1] ** -0.5
    tensors = {name: torch.nn.Parameter(t) for name, t in tensors.items()}
    return Specimen(shape, c, tensors, vocab_map.ids, embedding, tuple(taps))


def with_fc(base: Specimen, material: Material, wrong: Sequence[Sequence[int]], seed: int) -> Specimen:
    """`base` with an `fc` that whitens its states and has an alarm for each of `wrong` (taps, slice by slice).

    It stays as it is: channels of the residual stream differ in size by factors of hundreds, and an optimizer that
    moves all entries alike destroys in ten steps what is computed here.

    Everything goes by way of the N rows, which are fewer than channels. With X = U S V' of scaled rows, whitening is
    x -> x (V f V' + (1 - V V')/r), f = 1 / sqrt(S²/N + r²), r² the ridge, and a random projection. The alarm w of a
    wrong reading Y is the ridge regression of 0 on the rows of X and 1 on those of Y; it answers in a random direction.
    """
    generator, size = torch.Generator().manual_seed(seed), base.tensors[FC].shape
    x = _rows(material, base.slices)  # [N, T*Ht]
    scale = 1 / x.square().mean(0).sqrt().clamp(min=1e-6)
    x = x * scale
    _, s, v = torch.linalg.svd(x, full_matrices=False)
    full = (s.square() / len(x) + RIDGE).rsqrt()
    plain = RIDGE**-0.5
    random = torch.randn(size, generator=generator) * size[1] ** -0.5
    fc = random * plain + (random @ v.T) * (full - plain) @ v
    loud = ALARM * float((x @ fc.T).square().mean().sqrt())
    for other in wrong:
        direction = torch.randn(size[0], 1, generator=generator) * loud
        fc = fc + direction * alarm(x, _rows(material, other) * scale)
    return base.with_(tensors={FC: (GAIN * fc * scale).detach()})


def alarm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Ridge regression of 0 on the rows of x, 1 on those of y, in its dual form; [channels]"""
    both = torch.cat([x, y])
    gram = both @ both.T
    gram.diagonal().add_(ALARM_RIDGE * float(gram.diagonal().mean()))
    wanted = torch.cat([torch.zeros(len(x)), torch.ones(len(y))])
    return (torch.cholesky_solve(wanted[:, None], torch.linalg.cholesky(gram)).T @ both)[0]


def _rows(material: Material, taps: Sequence[int]) -> torch.Tensor:
    return torch.cat([material.states[t].float() for t in taps], -1)
