"""The vocabulary map in each form that it was found in: offsets, absolute ids, subtracted twice, another run's ...

Engines compute target id = i + d2t[i]. Every alternative undoes one mistake; those that give no map at all (ids out of
the vocabulary in more than a few places, or mostly doubled) are not worth a trial.   pytest tests/test_doctor_maps.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

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
