"""One specimen over the text of a canary: its surprise with gradients, and rounds as a server walks them.

The tensors of a specimen may be parameters in training, or be made of them: a neighbour that reads two projections
under each other's names trains both.   pytest tests/test_canary.py
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..decode.acceptance import Acceptance
from ..decode.replay import rounds
from ..doctor.maps import inverted
from ..doctor.material import Material
from ..doctor.specimen import NOWHERE, Specimen
from ..draft.expected import expected_tensors
from ..draft.model import Draft
from ..draft.rope import draft_frequencies
from ..draft.unroll import Packing, Unroll

FC = "fc.weight"


class Fused(torch.nn.Module):
    """In place of an `fc` that is not trained: the states come fused already. It has the weight for its dtype alone."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def live(specimen: Specimen, fused: bool = False) -> Draft:
    """The module that runs it, around the very tensors: gradients reach what they were made of. fused: without `fc`."""
    with torch.device("meta"):
        draft = Draft(specimen.shape, specimen.conventions)
    draft._inv_freq, draft._rope_factor = draft_frequencies(specimen.shape, specimen.conventions)
    for name in expected_tensors(specimen.shape, specimen.conventions):
        path, _, leaf = name.rpartition(".")
        if fused and name == FC:
            draft.fc = Fused(specimen.tensors[FC])  # type: ignore[assignment]
            continue
        module = draft.get_submodule(path)
        del module._parameters[leaf]
        setattr(module, leaf, specimen.tensors[name])
    assert specimen.embedding is not None
    draft.embed_tokens = torch.nn.Embedding.from_pretrained(specimen.embedding, freeze=True)
    return draft


class Rows:
    """The text, ready for many specimens. `rows` int64 [R]: where a round may begin."""

    def __init__(self, material: Material, k: int) -> None:
        self.material, self.k = material, k
        self.packing = Packing(material.offsets)
        self.rows = (material.run >= 2).nonzero().squeeze(1)
        self._fused: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def surprise(
        self, specimen: Specimen, steps: int, since: int = 0, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 [steps - since, R] logits' negative log-likelihood of the right token, step by step on recorded
        tokens; inf where the map cannot say it, nan where the text has no such token."""
        taken = self.rows if rows is None else self.rows[rows]
        draft, aux = self._ready(specimen)
        ids = self.material.ids
        wanted = inverted(specimen)
        unroll = Unroll(draft, self.packing, taken)
        h = unroll.start(unroll.embed(self.following(specimen)), aux)
        out = []
        for step in range(steps):
            if step >= since:
                at = (taken + 2 + step).clamp(max=len(ids) - 1)
                label = wanted[ids[at]]
                nats = F.cross_entropy(draft.logits(h), label.clamp(min=0), reduction="none")
                nats = nats.masked_fill(label == NOWHERE, float("inf"))
                out.append(nats.masked_fill(self.material.run[taken] < step + 2, float("nan")))
            if step + 1 < steps:
                fed = ids[(taken + 2 + step).clamp(max=len(ids) - 1)]
                h = unroll.step(unroll.embed(fed), draft.feedback(h))
        return torch.stack(out)

    @torch.inference_mode()
    def accepted(self, specimen: Specimen) -> torch.Tensor:
        """int64 [N]: how many of k drafts, made on its own choices, the text accepts from each row."""
        out = torch.zeros_like(self.material.ids)
        if specimen.lacking:
            return out
        draft, aux = self._ready(specimen)
        rows, ids = self.rows, self.material.ids
        unroll = Unroll(draft, self.packing, rows)
        h = unroll.start(unroll.embed(self.following(specimen)), aux)
        for step in range(self.k):
            drafted = specimen.ids[draft.logits(h).argmax(-1)]
            right = (self.material.run[rows] >= step + 2) & (drafted == ids[(rows + 2 + step).clamp(max=len(ids) - 1)])
            kept = right.nonzero().squeeze(1)
            if not len(kept):
                break
            rows = rows[kept]
            out[rows] += 1
            unroll.keep(kept)
            if step + 1 < self.k:
                h = unroll.step(unroll.embed(drafted[kept]), draft.feedback(h[kept]))
        return out

    def counted(self, accepted: torch.Tensor) -> list[Acceptance]:
        """Rounds of each prompt, as a server that counts every round in full walks them."""
        at, n = rounds(accepted, self.material.run, self.k)
        cells = self.packing.document[at] * (self.k + 1) + n
        counts = torch.bincount(cells, minlength=self.material.documents * (self.k + 1)).view(-1, self.k + 1)
        return [Acceptance(tuple(row)) for row in counts.tolist()]

    def acceptance(self, specimen: Specimen) -> Acceptance:
        """Of all prompts together."""
        return Acceptance.merged(self.counted(self.accepted(specimen)), self.k)

    def _ready(self, specimen: Specimen) -> tuple[Draft, torch.Tensor]:
        """(module, what it reads). An `fc` that is not trained is applied once for each choice of states."""
        weight, c = specimen.tensors[FC], specimen.conventions
        if weight.requires_grad or c.norm_before_fc or c.fc_norm or c.fc_bias:
            return live(specimen), self.aux(specimen)
        key = (specimen.slices, specimen.state_shift, id(weight))
        if key not in self._fused:  # the weight is kept with it, so that its id stays its own
            self._fused[key] = (self.aux(specimen) @ weight.T, weight)
        return live(specimen, fused=True), self._fused[key][0]

    def following(self, specimen: Specimen) -> torch.Tensor:
        """The token that each row is fed at step 0: token i + token_shift. int64 [N]"""
        ids, shift = self.material.ids, specimen.conventions.token_shift
        return ids if shift == 0 else torch.cat([ids[shift:], ids[-1:].expand(shift)])

    def aux(self, specimen: Specimen) -> torch.Tensor:
        """What `fc` reads: [N, T*H] float32."""
        material, at = self.material, None
        if specimen.state_shift:
            first = material.offsets[:-1][self.packing.document]
            last = material.offsets[1:][self.packing.document] - 1
            at = (torch.arange(len(material.ids)) + specimen.state_shift).clamp(first, last)
        parts = [material.states[t] if at is None else material.states[t][at] for t in specimen.slices]
        return torch.cat(parts, -1)
