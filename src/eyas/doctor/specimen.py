"""A draft as something to experiment on: tensors and conventions as values, any of which can be replaced.

    specimen = declared(reading, embedding=table)
    specimen.with_(conventions={"norm_output": True}).module()

Nothing here writes: tensors are shared between specimens, a substitution makes new ones. A draft that lacks tensors is
a specimen, too; it cannot be run (`lacking`) until a substitution supplies them.   pytest tests/test_doctor_specimen.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..conventions import Conventions
from ..draft.dialects import Reading
from ..draft.expected import expected_tensors
from ..draft.model import ACTIVATIONS, Draft
from ..draft.rope import draft_frequencies
from ..draft.shape import DraftShape
from ..errors import BadInput

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
NOWHERE = -1


@dataclass(frozen=True)
class Specimen:
    """One way to run a draft."""

    shape: DraftShape
    conventions: Conventions
    tensors: Mapping[str, torch.Tensor]
    """By canonical name, as stored; also those that nothing reads, and misshapen ones."""
    ids: torch.Tensor
    """int64 [D]: the target id of each draft id, NOWHERE where it has none."""
    embedding: torch.Tensor | None
    """[V, H]; None where it is not at hand."""
    slices: tuple[int, ...]
    """The tap whose state feeds each slice of `fc`, in the order of the slices."""
    state_shift: int = 0
    """Row i reads the states of token i + state_shift."""
    label_shift: int = 0
    """Row i is meant to predict the token i + 2 + label_shift."""
    changed: Mapping[str, str] = field(default_factory=dict)
    """What was substituted: group -> label. {} as declared."""

    @property
    def lacking(self) -> tuple[str, ...]:
        """What must be supplied before it can run, as sentences' ends: names and shapes."""
        out = []
        for name, size in expected_tensors(self.shape, self.conventions).items():
            held = self.tensors.get(name)
            if held is None:
                out.append(f"{name} {list(size)}")
            elif tuple(held.shape) != size:
                out.append(f"{name} {list(size)} (it is {list(held.shape)})")
            elif not held.dtype.is_floating_point:
                out.append(f"{name} as floating point (it is {held.dtype})")
        if self.conventions.hidden_act not in ACTIVATIONS:
            out.append(f"an activation that Eyas knows ({', '.join(sorted(ACTIVATIONS))})")
        if self.shape.mla is not None and self.shape.mla.output_gate:
            out.append("latent attention without an output gate (g_proj), which Eyas does not run")
        if problem := _rope_problem(self.conventions, self.shape):
            out.append(f"whole parameters of RoPE ({problem})")
        if self.embedding is None:
            out.append("the target's embedding")
        elif self.embedding.shape[1] != self.shape.hidden_size:
            out.append(f"an embedding {self.shape.hidden_size} wide (it is {self.embedding.shape[1]})")
        return tuple(out)

    def with_(
        self,
        group: str = "",
        label: str = "",
        *,
        conventions: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        **fields: Any,
    ) -> Specimen:
        """A copy with fields of `Conventions`, tensors or fields of its own replaced; noted under `group`."""
        if conventions:
            fields["conventions"] = self.conventions.with_(**conventions)
        if tensors:
            fields["tensors"] = {**self.tensors, **tensors}
        if group:
            fields["changed"] = {**self.changed, group: label}
        return dataclasses.replace(self, **fields)

    @property
    def body(self) -> tuple[Any, ...]:
        """What decides its hidden states and logits: equal for specimens that differ in ids and labels only."""
        c = self.conventions
        told = tuple(
            (f.name, _hashable(getattr(c, f.name)))
            for f in dataclasses.fields(c)
            if f.name not in ("how", "d2t", "taps", "num_target_layers", "mask_shift", "teacher", "final_state")
        )
        used = expected_tensors(self.shape, c)
        return (told, self.shape, tuple(id(self.tensors.get(name)) for name in used), id(self.embedding), self.slices,
                self.state_shift)  # fmt: skip

    def module(self, cast: Cast) -> Draft:
        """The draft that runs it, in the dtype of `cast`. Raises BadInput where something is lacking."""
        if self.lacking:
            raise BadInput(
                f"it cannot be run without {', '.join(self.lacking)}; restore them, or take another checkpoint"
            )
        with torch.device("meta"):
            draft = Draft(self.shape, self.conventions)
        draft._inv_freq, draft._rope_factor = draft_frequencies(self.shape, self.conventions)
        state = {name: cast(self.tensors[name]) for name in draft.state_dict()}
        draft.load_state_dict(state, assign=True)
        assert self.embedding is not None
        draft.embed_tokens = torch.nn.Embedding.from_pretrained(self.embedding, freeze=True)
        return draft.eval().requires_grad_(False).to(cast.device)


class Cast:
    """Tensors in one dtype on one device, each converted once."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is self.dtype and tensor.device == self.device:
            return tensor
        if id(tensor) not in self._made:  # the original is kept, so that its id stays its own
            self._made[id(tensor)] = (tensor, tensor.to(device=self.device, dtype=self.dtype))
        return self._made[id(tensor)][1]


def declared(reading: Reading, embedding: torch.Tensor | None = None, head: torch.Tensor | None = None) -> Specimen:
    """The draft as its directory declares it.

    embedding, head: the target's [V, H], where they are known. Whatever is missing or wrong stays so; the map is taken
    as it stands, entries that lead nowhere are NOWHERE. Raises BadInput where a tensor cannot be read.
    """
    shape, c = reading.shape, reading.conventions
    tensors = {name: source.load() for name, source in reading.canonical.sources.items()}
    own = tensors.get(EMBEDDING)
    table, whose = embedding, "target"
    if own is not None and tuple(own.shape) == (shape.vocab_size, shape.hidden_size):
        same = embedding is not None and own.shape == embedding.shape and torch.equal(own, embedding.to(own.dtype))
        if not same:
            table, whose = own, "own"
    changes: dict[str, Any] = {"embedding": whose}
    if HEAD not in tensors and shape.draft_vocab_size == shape.vocab_size and head is not None:
        tensors[HEAD] = head
        changes["head"] = "target"
    ids = stored_ids(tensors, shape)
    return Specimen(shape, c.with_(**changes), tensors, ids, table, c.taps)


def stored_ids(tensors: Mapping[str, torch.Tensor], shape: DraftShape) -> torch.Tensor:
    """The map as engines apply it: i + d2t[i], or the draft id itself where there is no d2t. int64 [D]"""
    size = shape.draft_vocab_size
    places = torch.arange(size)
    d2t = tensors.get("d2t")
    if d2t is None or d2t.dim() != 1 or d2t.dtype is torch.bool:
        if size < shape.vocab_size and (t2d := marks(tensors, shape)) is not None:
            return fitted(t2d, size, shape.vocab_size)
        return places
    return fitted(places[: len(d2t)] + d2t[:size].long(), size, shape.vocab_size)


def marks(tensors: Mapping[str, torch.Tensor], shape: DraftShape) -> torch.Tensor | None:
    """The ids that t2d marks, ascending; None where there is no usable t2d."""
    t2d = tensors.get("t2d")
    if t2d is None or tuple(t2d.shape) != (shape.vocab_size,):
        return None
    return t2d.bool().nonzero().squeeze(1)


def fitted(ids: torch.Tensor, size: int, vocab: int) -> torch.Tensor:
    """`size` ids: cut or filled with NOWHERE, like those outside the vocabulary."""
    ids = ids[:size]
    ids = torch.cat([ids, ids.new_full((size - len(ids),), NOWHERE)])
    return torch.where((ids >= 0) & (ids < vocab), ids, NOWHERE)


def _rope_problem(c: Conventions, shape: DraftShape) -> str:
    """Why no angles can be computed, "" where they can."""
    if c.rope_type == "default":
        return ""
    try:
        draft_frequencies(shape, c)
    except Exception as error:  # a kind or a parameter that transformers or torch refuses, each in its own way
        return str(error.args[0] if error.args else error)
    return ""


def _hashable(value: Any) -> Any:
    return tuple(sorted((k, str(v)) for k, v in value.items())) if isinstance(value, Mapping) else value
