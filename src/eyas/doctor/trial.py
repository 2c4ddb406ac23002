"""Trials: run a specimen over recorded states. How surprised is it by the target's choices, and what would be accepted?

    bench = Bench(material, dtype=torch.float32)
    bench.surprise([a, b])        # nats [S, R, K]: negative log-likelihood of the target's choice, row by row
    bench.acceptance(a, k=4)      # one Acceptance per document: greedy rounds on the draft's own tokens

The surprise is teacher-forced (row i at step k is fed the recorded token i+1+k and its own output), so that two
specimens are compared position by position. It is never more than that of a uniform guess over the vocabulary, log V: a
broken reading can only know nothing. Formula: -log softmax(logits)[draft id of the choice]; log V where the choice has
no draft id.   pytest tests/test_doctor_trial.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..decode.acceptance import Acceptance
from ..decode.replay import accepted_per_row, rounds
from ..draft.unroll import Packing, Unroll
from .maps import inverted
from .material import Material
from .specimen import NOWHERE, Cast, Specimen

CHUNK = 512  # rows whose logits are held at once
STEPS = 3


class Bench:
    """One material, ready for many specimens. `rows` [R] are the rows that are judged at steps 0 .. steps-1."""

    def __init__(
        self, material: Material, dtype: torch.dtype = torch.float32, device: str = "cpu", steps: int = STEPS,
        most_rows: int | None = None,
    ) -> None:  # fmt: skip
        self.material, self.steps = material, steps
        self.cast = Cast(dtype, device)
        rows = material.judged(steps).nonzero().squeeze(1)
        if most_rows is not None and len(rows) > most_rows:
            rows = rows[torch.linspace(0, len(rows) - 1, most_rows).round().long()]
        self.rows = rows  # int64 [R]
        self.document = material.packing.document[rows]  # int64 [R]
        self.packing = Packing(material.offsets.to(device))

    # ---------------------------------------------------------------- surprise

    @torch.inference_mode()
    def surprise(self, specimens: Sequence[Specimen]) -> torch.Tensor:
        """float32 [S, R, K] nats. Specimens with one body share their forward."""
        out = torch.empty(len(specimens), len(self.rows), self.steps)
        groups: dict[tuple[object, ...], list[int]] = {}
        for place, specimen in enumerate(specimens):
            if specimen.lacking or not self.has_states(specimen):
                out[place] = self.nothing(specimen)
            else:
                groups.setdefault(specimen.body, []).append(place)
        for places in groups.values():
            members = [specimens[p] for p in places]
            out[places] = self._surprise(members)
        return out

    def has_states(self, specimen: Specimen) -> bool:
        """Were the states that it reads recorded?"""
        return all(tap in self.material.states for tap in specimen.slices)

    def nothing(self, specimen: Specimen) -> float:
        """Surprise of a uniform guess, in nats."""
        return math.log(specimen.shape.vocab_size)

    def _surprise(self, members: Sequence[Specimen]) -> torch.Tensor:
        first = members[0]
        draft = first.module(self.cast)
        device, rows = self.cast.device, self.rows.to(self.cast.device)
        wanted = [inverted(m).to(device) for m in members]  # target id -> draft id
        out = torch.empty(len(members), len(rows), self.steps)
        unroll = Unroll(draft, self.packing, rows)
        embedded = unroll.embed(self._tokens().to(device))
        h = unroll.start(embedded, self.aux(first))
        for k in range(self.steps):
            labels = [self.material.label(self.rows, 2 + k + m.label_shift).to(device) for m in members]
            for start in range(0, len(rows), CHUNK):
                part = slice(start, start + CHUNK)
                logits = draft.logits(h[part]).float()
                total = logits.logsumexp(-1)
                for s, m in enumerate(members):
                    chosen = wanted[s][labels[s][part]]
                    nats = total - logits.gather(1, chosen.clamp(min=0)[:, None]).squeeze(1)
                    limit = self.nothing(m)
                    nats = torch.where(chosen == NOWHERE, limit, nats).nan_to_num(limit).clamp(max=limit)
                    out[s, part, k] = nats.cpu()
            if k + 1 < self.steps:
                state = draft.feedback(h)
                h = unroll.step(embedded[(rows + k + 1).clamp(max=len(embedded) - 1)], state)
        return out

    @torch.inference_mode()
    def lit(self, specimen: Specimen, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens int64 [Y] that the target chooses after `rows`, ascending; float32 [Y, D]: how much more the draft's
        log-probabilities are there than on average, summed over each token's rows). rows: bool [R]; step 0."""
        draft = specimen.module(self.cast)
        unroll = Unroll(draft, self.packing, self.rows.to(self.cast.device))
        h = unroll.start(unroll.embed(self._tokens().to(self.cast.device)), self.aux(specimen))
        h = h[rows.to(self.cast.device)]
        tokens, place = self.material.label(self.rows, 2)[rows].unique(return_inverse=True)
        total = torch.zeros(len(tokens), specimen.shape.draft_vocab_size, device=self.cast.device)
        for start in range(0, len(h), CHUNK):
            part = slice(start, start + CHUNK)
            total.index_add_(0, place[part].to(total.device), draft.logits(h[part]).float().log_softmax(-1))
        counts = torch.bincount(place, minlength=len(tokens)).to(total.device)
        return tokens, (total - counts[:, None] * (total.sum(0) / len(h))).cpu()

    def _tokens(self) -> torch.Tensor:
        """The token that each row is fed at step 0. int64 [N]"""
        ids = self.material.ids
        return torch.cat([ids[1:], ids[-1:]])

    def aux(self, specimen: Specimen) -> torch.Tensor:
        """[N, T*H] in the dtype of the bench."""
        at = None
        if specimen.state_shift:
            places = torch.arange(len(self.material.ids)) + specimen.state_shift
            first = self.material.offsets[:-1][self.material.packing.document]
            last = self.material.offsets[1:][self.material.packing.document] - 1
            at = places.clamp(first, last)
        parts = [self.material.states[t] if at is None else self.material.states[t][at] for t in specimen.slices]
        return torch.cat(parts, -1).to(self.cast.device, self.cast.dtype)

    # ---------------------------------------------------------------- acceptance

    @torch.inference_mode()
    def acceptance(self, specimen: Specimen, k: int = 4) -> list[Acceptance]:
        """Greedy rounds of k drafts, walked as a server walks them; one Acceptance per document.

        Only text that the target would have chosen itself counts. A specimen that cannot run accepts nothing.
        """
        return self.counted(self.accepted(specimen, k), k)

    def counted(self, accepted: torch.Tensor, k: int) -> list[Acceptance]:
        """Rounds of each document out of `accepted`."""
        at, n = rounds(accepted, self.material.run, k)
        cells = self.material.packing.document[at] * (k + 1) + n
        counts = torch.bincount(cells, minlength=self.material.documents * (k + 1)).view(-1, k + 1)
        return [Acceptance(tuple(row)) for row in counts.tolist()]

    @torch.inference_mode()
    def accepted(self, specimen: Specimen, k: int) -> torch.Tensor:
        """int64 [N]: how many of k drafts the text accepts from each row."""
        material, device = self.material, self.cast.device
        if specimen.lacking or not self.has_states(specimen):
            return torch.zeros_like(material.ids)
        draft = specimen.module(self.cast)
        return accepted_per_row(
            draft, material.ids.to(device), self.aux(specimen), material.run.to(device), self.packing,
            specimen.ids.to(device), k,
        ).cpu()  # fmt: skip
