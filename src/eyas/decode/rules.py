"""How tokens are chosen, and which drafts are accepted: greedy, or sampling without changing the target's distribution.

Both models choose by the same rule. Acceptance is lossless either way: greedy text is the target's own greedy text,
sampled text is distributed as the target's own samples.   Exercise it:  pytest tests/test_decode_rules.py

Shapes: B sequences, k drafts, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.errors import BadInput


@dataclass(frozen=True)
class Proposal:
    """Drafted target ids [B, k] and, for sampling, the distributions they were drawn from [B, k, V], which are zero
    outside the draft vocabulary. The nodes of a chain follow each other; a tree is `decode.tree.Tree`."""

    ids: torch.Tensor
    probabilities: torch.Tensor | None = None


class Rule(Protocol):
    """How tokens are chosen, by the draft and by the target."""

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [B, n] -> chosen index [B], and the probabilities [B, n] if they matter to `accept`."""

    def accept(self, logits: torch.Tensor, proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor]:
        """Target logits [B, k+1, V] of the last token and the drafts -> accepted [B], tokens [B, k+1].

        The first `accepted + 1` tokens of a row are text, the last of them the target's own; the rest means nothing.
        """


class Greedy:
    """The likeliest token, always: a draft is accepted where it is what the target would have said."""

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logits.argmax(-1), None

    def accept(self, logits: torch.Tensor, proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor]:
        choice = logits.argmax(-1)  # [B, k+1]
        agreed = (proposal.ids == choice[:, :-1]).long()
        return agreed.cumprod(1).sum(1), choice


class Sampling:
    """Rejection sampling: the text is distributed as the target's own samples (Leviathan et al. 2023, algorithm 1).

    A draft d is accepted with probability min(1, p(d) / q(d)); where it is not, the token comes from max(p - q, 0),
    renormalised. q is zero outside the draft vocabulary, so what the draft cannot say keeps all of its p there.
    Both models sample at `temperature`. Which random number meets which token depends on the batch.
    """

    def __init__(self, temperature: float, seed: int = 0, device: torch.device | str = "cpu") -> None:
        if not temperature > 0:
            raise BadInput(f"temperature = {temperature}: sampling needs one above 0; 0 means greedy")
        self.temperature = temperature
        self.random = torch.Generator(device).manual_seed(seed)

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        q = (logits.float() / self.temperature).softmax(-1)
        return self._sample(q), q

    def accept(self, logits: torch.Tensor, proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor]:
        p = (logits.float() / self.temperature).softmax(-1)  # [B, k+1, V]
        batch, k = proposal.ids.shape
        if k == 0 or proposal.probabilities is None:
            return torch.zeros(batch, dtype=torch.long, device=p.device), self._sample(p[:, 0])[:, None]
        q = torch.cat([proposal.probabilities, torch.zeros_like(p[:, :1])], 1)  # nothing is drafted after the last
        ids = proposal.ids[..., None]
        dice = torch.rand(batch, k, generator=self.random, device=p.device)
        agreed = dice * q[:, :-1].gather(-1, ids)[..., 0] < p[:, :-1].gather(-1, ids)[..., 0]
        accepted = agreed.long().cumprod(1).sum(1)  # [B]
        row = torch.arange(batch, device=p.device)
        own = p[row, accepted]  # [B, V]
        rest = (own - q[row, accepted]).clamp(min=0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, own)  # p == q up to rounding: nothing was rejected
        tokens = torch.cat([proposal.ids, proposal.ids[:, :1]], 1)
        tokens[row, accepted] = self._sample(rest)
        return accepted, tokens

    def _sample(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(weights, 1, generator=self.random)[:, 0]
