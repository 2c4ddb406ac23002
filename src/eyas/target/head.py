"""A target's head over many rows, block of the vocabulary by block, so that the logits never leave the cache."""

from __future__ import annotations

from typing import Any

import torch

from eyas.target.facts import TargetFacts

HEAD_BLOCK = 1024  # vocabulary rows of one product: block and logits together stay in a core's cache


class BlockedHead:
    """The head of `model`, a causal LM of transformers; scale and soft-cap by `facts`."""

    def __init__(self, model: Any, facts: TargetFacts):
        head = model.get_output_embeddings()
        self.facts = facts
        self.weight: torch.Tensor = head.weight
        self.bias: torch.Tensor | None = getattr(head, "bias", None)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Finished logits, whole: [m, H] -> [m, V]."""
        return self.facts.finish_logits(torch.cat([self._raw(states, start) for start in self._blocks()], -1))

    def greedy(self, states: torch.Tensor, with_logsumexp: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Argmax over the vocabulary, the lowest id on a tie, and the logsumexp if wanted: [m, H] -> [m], [m].

        Scale and soft-cap are monotone and change no choice. The logsumexp is that of the finished logits, summed up
        block by block with the largest logit so far taken out.
        """
        best: torch.Tensor | None = None
        where: torch.Tensor | None = None
        total: torch.Tensor | None = None  # sum of exp(logit - largest so far)
        largest: torch.Tensor | None = None
        for start in self._blocks():
            logits = self._raw(states, start)
            value, index = logits.max(-1)
            index += start
            if best is None or where is None:
                best, where = value, index
            else:
                where = torch.where(value > best, index, where)
                best = torch.maximum(best, value)
            if with_logsumexp:
                before, largest = largest, self.facts.finish_logits(best).float()
                part = self.facts.finish_logits(logits).float().sub_(largest[:, None]).exp_().sum(-1)
                total = part if total is None or before is None else total * (before - largest).exp_() + part
        assert where is not None
        return where, None if total is None or largest is None else largest + total.log()

    def _blocks(self) -> range:
        return range(0, self.weight.shape[0], HEAD_BLOCK)

    def _raw(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """Raw logits of one block of the vocabulary: [m, H] -> [m, HEAD_BLOCK]."""
        bias = None if self.bias is None else self.bias[start : start + HEAD_BLOCK]
        return torch.nn.functional.linear(states, self.weight[start : start + HEAD_BLOCK], bias)
