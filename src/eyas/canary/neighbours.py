"""The readings next to the right one: what a canary must fail under, each as a substitution on a specimen.

Most are the doctor's hypotheses, which occur in the field. Added are those that a launch makes rather than a
checkpoint: norms that stay at ones, the target's final state in place of `fc` (SGLang's `--speculative-algorithm
EAGLE`), tokens not shifted, earlier keys lost. A symmetry is none: embeddings on another scale under a norm, a constant
RoPE offset.

    for neighbour in neighbours(specimen, context, final): neighbour.apply(specimen)        pytest tests/test_canary.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..doctor.hypotheses import hypotheses
from ..doctor.hypothesis import Context
from ..doctor.specimen import HEAD, NOWHERE, Specimen
from .text import FINAL

TAPS, ORDER, EAGLE = "taps", "slice_order", "eagle"
GROUPS = {
    TAPS: "taps {}",
    ORDER: "fc slices in the order {}",
    "norm_before_residual": "norm_before_residual {}",
    "norm_output": "norm_output {}",
    "norm_before_head": "norm before the head {}",
    "norm_before_fc": "norm before fc {}",
    "rms_norm_offset": "norm weights read as w - 1",
    "rope_theta": "rope_theta {}",
    "rope_type": "RoPE scaling {}",
    "rope_step": "RoPE position of later steps not advanced",
    "head": "head {}",
    "state_shift": "states shifted by {} token",
    "norm_names": "norms swapped: {}",
    "layer_input": "embedding and state halves swapped",
    "qkv": "{}",
    "gate_up": "{}",
    "rope_layout": "rotary layout {}",
}
"""Of the doctor's hypotheses those that are a way to read the same files otherwise: group -> name."""
LATER = {"norm_output", "rope_step"}
"""What changes nothing before the second drafted token."""
UNSERVED = {"state_shift": "+1"}
"""A server does not have the next token's state: not a way that one can go wrong."""
NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")


@dataclass(frozen=True)
class Neighbour:
    """One wrong reading."""

    name: str
    group: str
    apply: Callable[[Specimen], Specimen]
    about: str = ""
    since: int = 0
    """The first step of a round that it changes."""
    trained: bool = True
    """False where no training is needed: its tokens or its head have nothing to do with the right ones."""


def neighbours(base: Specimen, context: Context) -> Iterator[Neighbour]:
    """All that can be replayed. context: the target's facts, embedding and head; the taps that are recorded."""
    yield from _maps(base)
    for h in hypotheses(base, context):
        if h.group in GROUPS and UNSERVED.get(h.group) != h.label:
            yield Neighbour(
                GROUPS[h.group].format(h.label), h.group, h.apply, h.about, since=1 if h.group in LATER else 0
            )
    for norm in NORMS:
        yield Neighbour(f"{norm.removeprefix('midlayer.')} left at ones", "norm lost", _ones(f"{norm}.weight"),
                        "its tensor was not loaded")  # fmt: skip
    yield Neighbour("tokens not shifted", "token_shift", lambda s: s.with_(conventions={"token_shift": 0}),
                    "row i is fed token i instead of i + 1")  # fmt: skip
    yield Neighbour("earlier keys lost", "history", lambda s: s.with_(conventions={"sliding_window": 1}),
                    "attention sees the row itself alone: keys of prefill or of earlier rounds are gone")  # fmt: skip
    if base.shape.hidden_size == base.shape.target_hidden_size:
        yield Neighbour("final state instead of fc", EAGLE, _eagle(context), "EAGLE instead of EAGLE3 at launch",
                        trained=False)  # fmt: skip
        yield Neighbour("final state, the draft's own head", EAGLE, _eagle(replace(context, head=None)),
                        "EAGLE instead of EAGLE3 at launch")  # fmt: skip


def _maps(base: Specimen) -> Iterator[Neighbour]:
    places, size, vocab = torch.arange(len(base.ids)), base.shape.draft_vocab_size, base.shape.vocab_size
    for name, ids, about in (
        ("d2t ignored", places, "draft ids are taken for target ids"),
        ("d2t read as target ids", base.ids - places, "it holds offsets"),
        ("d2t added twice", 2 * base.ids - places, "offsets written as ids"),
        ("d2t of the next row", base.ids.roll(1), "map and head are out of step by one"),
    ):
        inside = torch.where((ids >= 0) & (ids < vocab), ids, NOWHERE)
        assert len(inside) == size
        yield Neighbour(name, "d2t", lambda s, ids=inside: s.with_(ids=ids), about, trained=False)  # type: ignore[misc]


def _ones(name: str) -> Callable[[Specimen], Specimen]:
    return lambda s: s.with_(tensors={name: torch.ones(s.tensors[name].shape)})


def _eagle(context: Context) -> Callable[[Specimen], Specimen]:
    """`fc` is passed by, and the head may be the target's whole."""

    def apply(s: Specimen) -> Specimen:
        tensors = {"fc.weight": torch.eye(s.shape.hidden_size)}
        layers = s.conventions.num_target_layers or max(s.slices)
        shape, fields = replace(s.shape, num_taps=1), dict[str, Any]()
        if context.head is not None and context.head.shape[1] == s.shape.hidden_size:
            tensors[HEAD] = context.head.float()
            shape = replace(shape, draft_vocab_size=len(context.head))
            fields["ids"] = torch.arange(len(context.head))
        return replace(
            s, shape=shape, tensors={**s.tensors, **tensors}, slices=(FINAL,),
            conventions=s.conventions.with_(taps=(layers,)), **fields,
        )  # fmt: skip

    return apply
