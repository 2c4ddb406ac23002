"""A text that the draft wrote itself: on it the draft as declared is nearly unsurprised, with no training at all.

    patient = make_patient()                     # a random draft, its map, embedding, and text with states at taps 0..8
    Bench(patient.material).surprise([patient.specimen])          from doctoring import make_patient

What the target chooses after each token is the draft's own argmax at step 0, and most recorded states are made so that
`fc` of them is what the draft feeds back, so later steps are known, too: row i at step 1 is row i+1 at step 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from drafts import make_draft, with_embedding
from eyas.doctor.hypotheses import Context, Hypothesis, hypotheses
from eyas.doctor.material import Material
from eyas.doctor.specimen import Specimen
from eyas.draft.model import Draft
from eyas.vocab import VocabMap

LAYERS = 8  # of the target: taps 0 .. 8 are recorded
DOCUMENTS, LENGTH, PROMPT = 24, 40, 4
CARRIED = 0.7  # share of the states that the draft can know in advance
ODD = 0.1  # share of tokens that the target chooses against the draft
SHARP = 6.0  # factor on the head: random weights are too undecided


@dataclass(frozen=True)
class Patient:
    """A healthy draft and its text."""

    draft: Draft
    vocab_map: VocabMap
    embedding: torch.Tensor  # [V, H]
    material: Material

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """As a checkpoint holds them, by canonical name."""
        owned = {name: t.detach() for name, t in self.draft.owned_state_dict().items()}
        return owned | {"d2t": self.vocab_map.d2t, "t2d": self.vocab_map.t2d}

    @property
    def specimen(self) -> Specimen:
        """As declared."""
        c = self.draft.conventions
        return Specimen(self.draft.shape, c, self.tensors, self.vocab_map.ids, self.embedding, c.taps)

    @property
    def context(self) -> Context:
        """Nothing but the recorded taps."""
        return Context(taps=frozenset(self.material.states))


def make_patient(
    seed: int = 0,
    *,
    embedding: torch.Tensor | None = None,
    sizes: dict[str, int] | None = None,
    ids: torch.Tensor | None = None,
    text: dict[str, Any] | None = None,
    **conventions: Any,
) -> Patient:
    """A sharp random draft with its text. ids: its map where that matters; text: arguments of `written_by`."""
    draft, vocab_map = make_draft(seed, sizes, **conventions)
    if ids is not None:
        vocab_map = VocabMap.from_absolute(ids, draft.shape.vocab_size)
    with torch.no_grad():
        draft.lm_head.weight *= SHARP
    table = with_embedding(draft) if embedding is None else embedding
    draft.set_embedding(table)
    draft.requires_grad_(False)
    return Patient(draft, vocab_map, table, written_by(draft, vocab_map, seed=seed + 100, **(text or {})))


@torch.inference_mode()
def written_by(
    draft: Draft,
    vocab_map: VocabMap,
    documents: int = DOCUMENTS,
    length: int = LENGTH,
    prompt: int = PROMPT,
    carried: float = CARRIED,
    odd: float = ODD,
    seed: int = 0,
) -> Material:
    """Text of a target that chooses what `draft` says (but for a share `odd` of the tokens, which are random).

    States are random; a share `carried` of them is such that the draft feeds the same itself (not under norms before
    fc, which forget a scale). The first `prompt` tokens of each document are random and not supervised.
    """
    generator = torch.Generator().manual_seed(seed)
    c, width = draft.conventions, draft.shape.target_hidden_size
    states = torch.randn(documents, length, LAYERS + 1, width, generator=generator)
    ids = torch.randint(draft.shape.vocab_size, (documents, length), generator=generator)
    choice = torch.empty_like(ids)
    choice[:, 0] = ids[:, 1]
    other = vocab_map.ids[torch.randint(vocab_map.size, (documents, length), generator=generator)]
    against = torch.rand(documents, length, generator=generator) < odd
    carry = torch.rand(documents, length, generator=generator) < carried
    plain = not (c.norm_before_fc or c.fc_norm)
    back, taps = torch.linalg.pinv(draft.fc.weight), list(c.taps)
    cache = draft.new_cache()
    for i in range(length - 1):
        g = draft.fuse(states[:, i, taps].flatten(1))  # [B, H]
        h = draft.step(draft.embed(ids[:, i + 1 : i + 2]), g[:, None], torch.tensor([i]), cache)[:, 0]
        said = vocab_map.ids[draft.logits(h).argmax(-1)]
        choice[:, i + 1] = torch.where(against[:, i + 1], other[:, i + 1], said)
        if i + 2 < length and i + 2 >= prompt:
            ids[:, i + 2] = choice[:, i + 1]
        if plain:
            own = states[:, i + 1, taps].flatten(1)
            moved = own + (draft.feedback(h) - draft.fuse(own)) @ back.T
            states[:, i + 1, taps] = torch.where(carry[:, i + 1, None], moved, own).unflatten(1, (len(taps), -1))
    mask = (torch.arange(length) >= prompt).expand(documents, length)
    return Material(
        ids=ids.flatten().clone(),
        offsets=torch.arange(0, documents * length + 1, length),
        mask=mask.flatten().clone(),
        choice=choice.flatten().clone(),
        states={tap: states[:, :, tap].flatten(0, 1).clone() for tap in range(LAYERS + 1)},
        source="written by the draft",
        final_tap=LAYERS,
    )


def all_of(base: Specimen, context: Context) -> dict[tuple[str, str], Hypothesis]:
    """Hypotheses by group and label."""
    return {(h.group, h.label): h for h in hypotheses(base, context)}


def without(specimen: Specimen, *names: str) -> Specimen:
    """The same with tensors lost."""
    return replace(specimen, tensors={name: t for name, t in specimen.tensors.items() if name not in names})
