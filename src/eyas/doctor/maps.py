"""The vocabulary map in each form that it was found in: offsets, absolute ids, subtracted twice, another run's ...

Engines compute target id = i + d2t[i]. Every alternative undoes one mistake; those that give no map at all (ids out of
the vocabulary in more than a few places, or mostly doubled) are not worth a trial.   pytest tests/test_doctor_maps.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..machine import choose_precision
from .specimen import NOWHERE, Specimen, fitted, marks

LEAST = 0.5  # share of draft ids that must lead to a target id of their own


def alternatives(specimen: Specimen, others: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """(label, target ids int64 [D], what it would mean)."""
    shape = specimen.shape
    size, vocab = shape.draft_vocab_size, shape.vocab_size
    places = torch.arange(size)
    d2t = specimen.tensors.get("d2t")
    candidates: list[tuple[str, torch.Tensor, str]] = []
    if d2t is not None and d2t.dim() == 1 and d2t.dtype is not torch.bool:
        stored = d2t[:size].long()
        here = places[: len(stored)]
        candidates += [
            ("offsets", here + stored, "target id = i + d2t[i]"),
            ("sorted offsets", (here + stored).sort().values, "the ids are right and in another order than the head's"),
            ("absolute", stored, "d2t holds target ids instead of offsets"),
            ("subtracted twice", 2 * here + stored, "arange was subtracted from offsets that were right"),
            ("added twice", stored - here, "arange was added to absolute ids"),
            ("sorted absolute", stored.sort().values, "d2t holds target ids out of order"),
        ]
        if len(d2t) == vocab:  # the other table under this name: target id -> draft id, or marks
            candidates.append(("marks", d2t.bool().nonzero().squeeze(1), "d2t holds t2d"))
    if (marked := marks(specimen.tensors, shape)) is not None:
        candidates.append(("t2d", marked, "the ids that t2d marks, in order"))
    candidates.append(("identity", places, "no map: draft ids are target ids"))
    candidates += [(name, ids.long(), "the map of a reference") for name, ids in others.items()]
    seen: list[torch.Tensor] = []
    for label, ids, about in candidates:
        ids = fitted(ids, size, vocab)
        if usable(ids) and not any(torch.equal(ids, other) for other in seen):
            seen.append(ids)
            yield label, ids, about


def usable(ids: torch.Tensor) -> bool:
    """Do most draft ids lead to a target id of their own?"""
    somewhere = ids[ids != NOWHERE]
    return len(somewhere.unique()) >= LEAST * len(ids)


@dataclass(frozen=True)
class Aligned:
    """A map aligned with the text: where no form of the stored one makes sense, another run's map often nearly does."""

    ids: torch.Tensor  # int64 [D]
    moved: int
    """Tokens seen in the text whose draft id is another than the stored one."""
    asked: int
    """Tokens seen in the text that the stored map has."""
    gain: Any = None
    """evidence.Gain on text that it was not made of."""
    whole: bool = True
    """False where only the tokens seen have a place."""


REACH = 1024  # draft ids by which two maps of one vocabulary may be out of step
STIFF = 0.3  # nats that it costs to fall out of step by one more


def align(tokens: torch.Tensor, light: torch.Tensor, specimen: Specimen) -> Aligned:
    """Where does each token stand in the head, if not where the map says? The likeliest path of steps along the map.

    tokens: int64 [Y] ascending; light [Y, D]: by how much the draft's log-probabilities are raised where the target
    chooses that token, summed over its positions. Two maps of one vocabulary are both ascending, so another run's is
    the stored one with shifts that change a little from token to token: dynamic programming over the shift (Viterbi),
    with a price of STIFF for each change by one.
    """
    size = specimen.shape.draft_vocab_size
    stored = inverted(specimen)[tokens]
    known = stored != NOWHERE
    tokens, light, stored = tokens[known], light[known].nan_to_num(), stored[known]
    order = stored.argsort()
    tokens, light, stored = tokens[order], light[order], stored[order]
    if not len(tokens):
        return Aligned(specimen.ids, 0, 0)
    shifts = torch.arange(-REACH, REACH + 1)
    price = STIFF * torch.arange(len(shifts), dtype=light.dtype)
    best = torch.full((len(shifts),), float("-inf"))
    best[REACH] = 0.0  # in step before the first token
    came = torch.zeros(len(tokens), len(shifts), dtype=torch.int64)
    for t in range(len(tokens)):
        up, from_up = (best + price).cummax(0)
        down, from_down = (best - price).flip(0).cummax(0)
        up, down, from_down = up - price, down.flip(0) + price, len(shifts) - 1 - from_down.flip(0)
        came[t] = torch.where(up >= down, from_up, from_down)
        places = stored[t] + shifts
        inside = (places >= 0) & (places < size)
        here = torch.where(inside, light[t][places.clamp(0, size - 1)], float("-inf"))
        best = torch.maximum(up, down) + here
    path = torch.empty(len(tokens), dtype=torch.int64)
    at = int(best.argmax())
    for t in range(len(tokens) - 1, -1, -1):
        path[t] = at
        at = int(came[t][at])
    shift = shifts[path]
    # Between the tokens that were seen the map keeps the step of the one before.
    places = torch.arange(size)
    before = (torch.searchsorted(stored, places, right=True) - 1).clamp(min=0)
    moved = places + shift[before]
    inside = (moved >= 0) & (moved < size)
    ids = torch.full((size,), NOWHERE)
    ids[moved[inside]] = specimen.ids[inside]
    ids[stored + shift] = tokens
    return Aligned(ids, int((shift != 0).sum()), len(tokens))


def align_freely(tokens: torch.Tensor, light: torch.Tensor, specimen: Specimen) -> Aligned:
    """Like `align` where the stored map says nothing: only that a map ascends. Between tokens seen, nothing is known.

    The likeliest ascending places: best[t, d] = light[t, d] + max over d' < d of best[t-1, d'].
    """
    size = specimen.shape.draft_vocab_size
    if not len(tokens) or len(tokens) > size:
        return Aligned(specimen.ids, 0, 0)
    light = light.nan_to_num()
    before = light.new_zeros(size)  # best over the places before each one
    came = torch.zeros(light.shape, dtype=torch.int32)
    for t in range(len(tokens)):
        here = light[t] + before
        here[:t] = float("-inf")  # t tokens need t places
        top, at = here.cummax(0)
        came[t] = at
        before = torch.cat([top.new_full((1,), float("-inf")), top[:-1]])
    path = torch.empty(len(tokens), dtype=torch.int64)
    end = size - 1
    for t in range(len(tokens) - 1, -1, -1):
        path[t] = came[t][end]
        end = int(path[t]) - 1
    ids = torch.full((size,), NOWHERE)
    ids[path] = tokens
    return Aligned(ids, int((specimen.ids[path] != tokens).sum()), len(tokens), whole=False)


SAMPLE, CLEAR = 64, 0.9  # rows of a head that are looked up first; cosine from which a row is the target's own
LOOKED_UP = 512  # rows at a time
EQUAL, MOST_EQUAL = 0.999, 1024  # cosine of rows that are the same, in bfloat16; how many are put in order


def of_head(head: torch.Tensor, target: torch.Tensor, stored: torch.Tensor | None) -> torch.Tensor | None:
    """The map that a head itself tells, where it began as the target's rows and training moved them little.

    head: [D, H], target: [V, H], stored: int64 [D] -> int64 [D] ids, NOWHERE for rows that are nobody's. None where a
    sample of the rows is not the target's, or is what `stored` says already. Rows that are equal in the target (tokens
    that nobody trained) are told apart by nothing but that a map ascends.
    """
    if head.dim() != 2 or head.shape[1] != target.shape[1] or not head.dtype.is_floating_point:
        return None
    dtype = getattr(torch, choose_precision("auto", str(head.device)))
    theirs = torch.nn.functional.normalize(target.float(), dim=1).to(dtype)

    def nearest(rows: torch.Tensor) -> torch.Tensor:
        mine = torch.nn.functional.normalize(head[rows].float(), dim=1).to(theirs.dtype)
        top, ids = (mine @ theirs.T).max(1)
        return torch.where(top.float() >= CLEAR, ids, NOWHERE)

    places = torch.linspace(0, len(head) - 1, min(len(head), SAMPLE)).round().long()
    sample = nearest(places)
    if float((sample != NOWHERE).float().mean()) < CLEAR:
        return None
    if stored is not None and torch.equal(sample, stored[places]):
        return None
    ids = torch.cat([nearest(rows) for rows in torch.arange(len(head)).split(LOOKED_UP)])
    for _ in range(MOST_EQUAL):
        falling = ((ids.diff() <= 0) & (ids[1:] != NOWHERE)).nonzero()
        if not len(falling):
            break
        i = int(falling[0]) + 1
        same = (theirs @ theirs[ids[i]] >= EQUAL).nonzero().squeeze(1)
        same = same[same > ids[i - 1]]
        if not len(same):
            break
        ids[i] = same[0]
    return ids


def inverted(specimen: Specimen) -> torch.Tensor:
    """int64 [V]: draft id of a target id, NOWHERE where it has none; the first of several."""
    inverse = torch.full((specimen.shape.vocab_size,), NOWHERE)
    somewhere = (specimen.ids != NOWHERE).nonzero().squeeze(1).flip(0)
    inverse[specimen.ids[somewhere]] = somewhere
    return inverse
