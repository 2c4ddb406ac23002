"""What a target would say after many final states, without ever holding their logits over the whole vocabulary.

    best, logsumexp = BlockedHead(weight, bias, facts).greedy(states)          pytest tests/test_features_extract.py

Block of the vocabulary by block: on a CPU weights and logits of a block stay in a core's cache, which is as fast as one
large product and takes a tenth of its memory; a stored head becomes float32 a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from eyas.target.facts import TargetFacts

HEAD_BLOCK, HEAD_BLOCK_OF_ACCELERATORS = 1024, 32768  # vocabulary rows of one product
LOGIT_BYTES = 64 << 20  # of the float32 logits of one product; more brings no speed and costs memory


class BlockedHead:
    """The head of a target: weight [V, H], bias [V] or None; scale and soft-cap by `facts`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, facts: TargetFacts):
        self.weight, self.bias, self.facts = weight, bias, facts

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Finished logits, whole: [m, H] -> [m, V]."""
        return self.facts.finish_logits(torch.cat([self._raw(states, start) for start in self._blocks()], -1))

    def greedy(
        self, states: torch.Tensor, with_logsumexp: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Argmax over the vocabulary, the lowest id on a tie, and the logsumexp: [m, H] -> int64 [m], float32 [m].

        Scale and soft-cap are monotone and change no choice. The logsumexp is that of the finished logits, summed up
        block by block with the largest logit so far taken out.
        """
        rows = max(1, LOGIT_BYTES // (4 * self._blocks().step))
        parts = [self._greedy(part, with_logsumexp) for part in states.split(rows)]
        best = torch.cat([best for best, _ in parts])
        return best, torch.cat([total for _, total in parts if total is not None]) if with_logsumexp else None

    def _greedy(self, states: torch.Tensor, with_logsumexp: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
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
        wide = HEAD_BLOCK if self.weight.device.type == "cpu" else HEAD_BLOCK_OF_ACCELERATORS
        return range(0, self.weight.shape[0], wide)

    def _raw(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """Raw logits of one block of the vocabulary, in the dtype of the states: [m, H] -> [m, block]."""
        block = slice(start, start + self._blocks().step)
        bias = None if self.bias is None else self.bias[block].to(states.dtype)
        return torch.nn.functional.linear(states, self.weight[block].to(states.dtype), bias)


def greedy_of(
    head: Callable[[torch.Tensor], torch.Tensor], final: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of any `head` that turns [r, H] into finished logits [r, V]: [R, H] -> int64 [R], float32 [R].

    It runs on chunks of rows, so that memory does not grow with R.
    """
    best, logsumexp = [], []
    for chunk in final.split(max(1, LOGIT_BYTES // (4 * vocab_size))):
        logits = head(chunk).float()  # [r, V]
        value, index = logits.max(-1)
        logsumexp.append(value + logits.sub_(value[:, None]).exp_().sum(-1).log())
        best.append(index)
    if not best:
        return torch.empty(0, dtype=torch.int64), torch.empty(0)
    return torch.cat(best), torch.cat(logsumexp)
