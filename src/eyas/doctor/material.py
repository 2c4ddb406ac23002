"""What trials are run on: recorded text of the target with its hidden states, packed.

    Material.of_features(FeatureSet.open("runs/demo/features"))      Material.of_probe("path/to/draft")

Only what a trial reads: token ids, which rows are the target's own text, its choices, states by tap.
    pytest tests/test_doctor_material.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from ..draft.unroll import Packing
from ..errors import BadInput
from ..features.layout import NOT_READ
from ..features.reader import FeatureSet


@dataclass(frozen=True)
class Material:
    """N tokens of B documents, one behind the other."""

    ids: torch.Tensor  # int64 [N]
    offsets: torch.Tensor  # int64 [B+1]
    mask: torch.Tensor  # bool [N]: the target's own text
    choice: torch.Tensor  # int64 [N]: what the target chooses after token i, -1 where nobody asked it
    states: Mapping[int, torch.Tensor]  # tap -> [N, H] as recorded
    source: str
    embedding: tuple[torch.Tensor, torch.Tensor] | None = None
    """Where the embedding is not at hand: (ids int64 [U] ascending, rows [U, H]) of the tokens in the text."""
    final_tap: int | None = None
    """Blocks of the target, where it is known."""
    kinds: tuple[str, ...] = ()
    """The kind of text that each document is; () where nobody said."""

    @cached_property
    def packing(self) -> Packing:
        """Where documents lie."""
        return Packing(self.offsets)

    @cached_property
    def run(self) -> torch.Tensor:
        """int64 [N]: how many tokens after row i are, without a gap, text that the target would have chosen itself.

        Only there does a chain of drafts mean what it means in a server; sampled or foreign text breaks it. Nowhere
        where only the embedding of the text is at hand: a chain reads what the draft said.
        """
        if self.embedding is not None:
            return torch.zeros_like(self.ids)
        chosen = torch.cat([self.choice[:1] * 0 + NOT_READ, self.choice[:-1]])  # what the target chose as token i
        own = self.mask & ((chosen == self.ids) | (chosen == NOT_READ))
        own[self.offsets[:-1]] = False
        # Distance to the next token that is not its own, from the end.
        places = torch.arange(len(own))
        broken = torch.where(own, len(own), places)
        next_broken = broken.flip(0).cummin(0).values.flip(0)
        end = self.offsets[1:][self.packing.document]  # a document's end breaks a run, too
        after = torch.cat([next_broken[1:], next_broken.new_full((1,), len(own))])
        return (torch.minimum(after, end) - places - 1).clamp(min=0)

    @property
    def documents(self) -> int:
        """B"""
        return len(self.offsets) - 1

    @cached_property
    def positions(self) -> int:
        """Rows at which a draft can be judged: the token before and the one predicted are the target's own text."""
        return int(self.judged(1).sum())

    @cached_property
    def share_own(self) -> float:
        """Share of the supervised tokens that the target would have chosen itself."""
        chosen = torch.cat([self.choice[:1] * 0 + NOT_READ, self.choice[:-1]])
        asked = self.mask & (chosen != NOT_READ)
        return float((chosen == self.ids)[asked].float().mean()) if bool(asked.any()) else float("nan")

    def judged(self, steps: int) -> torch.Tensor:
        """bool [N]: rows i whose tokens i+1 ... i+1+steps are supervised and lie in the document."""
        ahead = self.mask.clone()
        end = self.offsets[1:][self.packing.document]
        places = torch.arange(len(ahead))
        good = places + 1 + steps < end
        for k in range(1, 2 + steps):
            good &= torch.cat([ahead[k:], ahead.new_zeros(len(ahead))])[: len(ahead)]
        return good

    def label(self, rows: torch.Tensor, ahead: int) -> torch.Tensor:
        """The target's choice for token rows + ahead; the recorded token where it was not asked. int64 [R]"""
        at = (rows + ahead).clamp(0, len(self.ids) - 1)
        chosen = self.choice[(at - 1).clamp(min=0)]
        return torch.where(chosen == NOT_READ, self.ids[at], chosen)

    def first(self, documents: Sequence[int]) -> Material:
        """These documents alone."""
        spans = [(int(self.offsets[d]), int(self.offsets[d + 1])) for d in documents]
        rows = torch.cat([torch.arange(a, b) for a, b in spans])
        offsets = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0)
        states = {tap: x[rows] for tap, x in self.states.items()}
        kinds = tuple(self.kinds[d] for d in documents) if self.kinds else ()
        return replace(
            self, ids=self.ids[rows], offsets=offsets, mask=self.mask[rows], choice=self.choice[rows], states=states,
            kinds=kinds,
        )  # fmt: skip

    # ---------------------------------------------------------------- where it comes from

    @classmethod
    def of_features(cls, features: FeatureSet, most: int = 1 << 14) -> Material:
        """Whole documents of a feature folder, spread evenly over it, up to about `most` tokens."""
        count = features.num_docs
        mean = max(1, features.num_tokens // count)
        picked = torch.linspace(0, count - 1, max(1, min(count, most // mean))).round().long().unique().tolist()
        parts = [features.document(d) for d in picked]
        taps = torch.cat([p["taps"] for p in parts])
        width = features.meta.hidden_size
        return cls(
            ids=torch.cat([p["ids"] for p in parts]).long(),
            offsets=torch.tensor([0, *(len(p["ids"]) for p in parts)]).cumsum(0),
            mask=torch.cat([p["mask"] for p in parts]).bool(),
            choice=torch.cat([p["top1"] for p in parts]).long(),
            states={t: taps[:, i * width : (i + 1) * width] for i, t in enumerate(features.meta.taps)},
            source=str(features.dir),
            final_tap=features.conventions.num_target_layers,
        )

    @classmethod
    def of_probe(cls, folder: str | Path, taps: Sequence[int]) -> Material:
        """The probe inside a draft that Eyas exported: a few hundred tokens, and the embedding rows that they need."""
        from ..draft.probe import read_probe

        inputs, _ = read_probe(folder)
        width = inputs.taps.shape[1] // len(taps)
        if width * len(taps) != inputs.taps.shape[1]:
            raise BadInput(
                f"{folder}: its probe holds states of another number of taps than {len(taps)}; export the draft "
                "again, or give --features"
            )
        return cls(
            ids=inputs.ids,
            offsets=inputs.offsets,
            mask=torch.ones(len(inputs.ids), dtype=torch.bool),
            choice=torch.full((len(inputs.ids),), NOT_READ),
            states={t: inputs.taps[:, i * width : (i + 1) * width] for i, t in enumerate(taps)},
            source=f"{Path(folder)}/eyas/probe.safetensors",
            embedding=(inputs.embedding_ids, inputs.embedding_rows),
        )
