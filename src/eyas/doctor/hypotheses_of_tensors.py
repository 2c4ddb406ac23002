"""Hypotheses about single tensors: under each other's names, the other way round, or in another layout.

`families` are tried by `hypotheses.hypotheses`.   pytest tests/test_doctor_hypotheses.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..draft.expected import expected_tensors
from ..draft.shape import DraftShape
from .hypothesis import Context, Hypothesis, convention
from .specimen import EMBEDDING, Specimen

FIRST = "midlayer."
NORMS = (FIRST + "input_layernorm.weight", FIRST + "hidden_norm.weight", FIRST + "post_attention_layernorm.weight",
         "norm.weight")  # fmt: skip
Q, K, V = (f"{FIRST}self_attn.{x}_proj.weight" for x in "qkv")
GATE, UP = (f"{FIRST}mlp.{x}_proj.weight" for x in ("gate", "up"))


def _norms(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """Norm weights under each other's names."""
    held = [n for n in NORMS if n in base.tensors and tuple(base.tensors[n].shape) == (base.shape.hidden_size,)]
    for a, b in itertools.combinations(held, 2):
        yield _swap(base, "norm_names", a, b, "two norms under each other's names")


def _swap(base: Specimen, group: str, a: str, b: str, about: str) -> Hypothesis:
    label = f"{_short(a)} <-> {_short(b)}"

    def apply(s: Specimen) -> Specimen:
        return s.with_(group, label, tensors={a: s.tensors[b], b: s.tensors[a]})

    return Hypothesis(group, label, label, apply, about=about)


def _layer(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """Order of the two halves, projections under each other's names, transposed matrices, rotated halves."""
    c, shape = base.conventions, base.shape
    other = "state_embedding" if c.layer_input == "embedding_state" else "embedding_state"
    yield convention("layer_input", other, "q, k and v read the two halves the other way round")
    wanted = expected_tensors(shape, c)
    for a, b in ((K, V), (Q, K), (Q, V), (GATE, UP)):
        if a in base.tensors and b in base.tensors and wanted.get(a) == wanted.get(b):
            group = "gate_up" if a == GATE else "qkv"
            yield _swap(base, group, a, b, "projections under each other's names, or fused in another order")
    for name, size in wanted.items():
        held = base.tensors.get(name)
        if held is None or held.dim() != 2:
            continue
        turned = tuple(held.shape) == size[::-1]
        if turned and (tuple(held.shape) != size or size[0] == size[1]):
            yield Hypothesis(
                "transposed", _short(name), _short(name),
                _with_tensor("transposed", _short(name), name, lambda t: t.T.contiguous()),
                about="a matrix stored the other way round",
            )  # fmt: skip
    if shape.mla is not None:
        yield _other_pairs(shape)
    elif all(n in base.tensors and tuple(base.tensors[n].shape) == wanted.get(n) for n in (Q, K)):
        for label, turn in (("interleaved", _interleaved), ("halves", _halved)):
            yield Hypothesis("rope_layout", label, label, _rotary(label, turn, shape.head_dim),
                             about="q and k rows in the other layout of rotary pairs")  # fmt: skip


def _other_pairs(shape: DraftShape) -> Hypothesis:
    """Latent attention: the rotated slices are laid out in the other way."""
    assert shape.mla is not None
    turned = dataclasses.replace(shape.mla, rope_interleave=not shape.mla.rope_interleave)
    label, other = "neighbours" if turned.rope_interleave else "halves", dataclasses.replace(shape, mla=turned)
    return Hypothesis("rope_layout", label, label, lambda s: s.with_("rope_layout", label, shape=other),
                      about="the other layout of rotary pairs")  # fmt: skip


def _with_tensor(group: str, label: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda s: s.with_(group, label, tensors={name: change(s.tensors.get(name, NONE))})


def _always(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: tensor


NONE = torch.empty(0)


def _rotary(label: str, turn: Callable[[torch.Tensor, int], torch.Tensor], head_dim: int) -> Any:
    return lambda s: s.with_("rope_layout", label, tensors={n: turn(s.tensors[n], head_dim) for n in (Q, K)})


def _interleaved(weight: torch.Tensor, d: int) -> torch.Tensor:
    """Rows stored as pairs (x0, y0, x1, y1, ...) brought into halves, which is what the module rotates."""
    return weight.unflatten(0, (-1, d // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _halved(weight: torch.Tensor, d: int) -> torch.Tensor:
    """The inverse: rows that were turned from halves into pairs once too often."""
    return weight.unflatten(0, (-1, 2, d // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _names(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """A tensor that is missing may lie there under another name: every one that nothing reads and that fits."""
    wanted = expected_tensors(base.shape, base.conventions)
    missing = {n: size for n, size in wanted.items() if n not in base.tensors}
    spare = [n for n in base.tensors if n not in wanted and n not in ("d2t", "t2d", EMBEDDING)]
    matches = [
        (name, other, tuple(base.tensors[other].shape) != size)
        for name, size in missing.items()
        for other in spare
        if tuple(base.tensors[other].shape) in (size, size[::-1])
    ]
    for name, other, turned in matches[:32]:
        label = f"{name} = {other}"

        def apply(
            s: Specimen, name: str = name, other: str = other, turned: bool = turned, label: str = label
        ) -> Specimen:
            tensor = s.tensors[other]
            return s.with_(
                f"name of {_short(name)}", label, tensors={name: tensor.T.contiguous() if turned else tensor}
            )

        yield Hypothesis(f"name of {_short(name)}", label, other, apply, about="a tensor under another name")


def _reference(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """Single tensors of a reference checkpoint in place of this one's."""
    for name, tensor in context.tensors.items():
        if base.tensors.get(name) is not tensor:
            group, label = f"tensor {_short(name)}", "the reference's"
            yield Hypothesis(group, label, label, _with_tensor(group, label, name, _always(tensor)),
                             about="the reference holds another tensor here")  # fmt: skip


def _short(name: str) -> str:
    return name.removeprefix(FIRST).removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight")


FAMILIES = (_norms, _layer, _names, _reference)
