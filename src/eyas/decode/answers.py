"""Whole answers: rounds until every prompt has its answer, and what the rounds accepted.

    decode(target, prompts, ChainDrafter(draft, vocab_map), k=4)      # speculative
    decode(target, prompts, TreeDrafter(draft, vocab_map), k=4)       # the same with trees, prompt after prompt
    decode(target, prompts)                                           # plain: the same rounds, nothing drafted

Exercise it:  pytest tests/test_decode_step.py
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eyas.decode.acceptance import Acceptance
from eyas.decode.rules import Rule
from eyas.decode.step import Batch, Drafter
from eyas.decode.tree import TreeDrafter
from eyas.decode.tree_step import TreeBatch
from eyas.errors import BadInput

if TYPE_CHECKING:
    from eyas.target.model import Target


@dataclass
class Answer:
    """What was decoded for one prompt."""

    tokens: list[int]
    """The answer, prefill's token first, end-of-answer token included."""
    accepted: list[int] = field(default_factory=list)
    """Accepted drafts of each round, in full: also of the last, of which some tokens may be cut off."""
    ends: list[int] = field(default_factory=list)
    """Length of the answer after each round, had nothing been cut off."""
    finish: str = "length"
    """stop: the target ended it; length: max_new_tokens did."""
    drafted: list[list[int]] = field(default_factory=list, compare=False)
    """Of a chain: the tokens that each round drafted, k of them, accepted or not. How an answer came about does not
    make it another one."""

    def acceptance(self, k: int, upto: int | None = None) -> Acceptance:
        """Rounds whose k drafts all fall within the first `upto` (default: all) tokens of the answer.

        So the last, cut-off rounds are left out, and whether a round counts does not depend on how much of it was
        accepted. `decode.replay` counts by the same rule.
        """
        limit = len(self.tokens) if upto is None else min(upto, len(self.tokens))
        starts = [1, *self.ends]
        return Acceptance.of([a for a, start in zip(self.accepted, starts, strict=False) if start + k <= limit], k)

    def whole_acceptance(self, k: int) -> Acceptance:
        """All rounds in full, as vLLM and SGLang count them: what was accepted and then cut off counts as accepted."""
        return Acceptance.of(self.accepted, k)

    def _append(self, tokens: list[int], limit: int, eos_ids: Collection[int]) -> bool:
        """Add a round's tokens; True when that was the last round."""
        self.tokens.extend(tokens)
        self.ends.append(len(self.tokens))
        return self._cut(len(self.tokens) - len(tokens), limit, eos_ids)

    def _cut(self, start: int, limit: int, eos_ids: Collection[int]) -> bool:
        stop = next((i for i in range(start, min(len(self.tokens), limit)) if self.tokens[i] in eos_ids), None)
        if stop is not None:
            self.finish = "stop"
        elif len(self.tokens) < limit:
            return False
        del self.tokens[limit if stop is None else stop + 1 :]
        return True


@dataclass
class Decoded:
    """Answers in the order of their prompts, and what they took."""

    answers: list[Answer]
    rounds: int = 0
    """Forwards of the target after prefill, each over the whole batch."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Wall seconds of all rounds: what tokens per second are made of."""


def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None = None,
    *,
    k: int = 0,
    rule: Rule | None = None,
    max_new_tokens: int = 64,
    eos_ids: Collection[int] = (),
) -> Decoded:
    """Decode all prompts side by side (with trees one by one), speculatively with a drafter and k >= 1, else plainly.

    Every answer ends after `max_new_tokens` or with a token of `eos_ids` (empty: nothing ends it). Greedy without a
    `rule`. Raises BadInput for an empty prompt.
    """
    if k > 0 and drafter is None:
        raise BadInput(f"k = {k} drafts a round need a draft")
    if isinstance(drafter, TreeDrafter) and len(prompts) > 1:
        how: dict[str, Any] = {"k": k, "rule": rule, "max_new_tokens": max_new_tokens, "eos_ids": eos_ids}
        return _together([decode(target, [prompt], drafter, **how) for prompt in prompts])
    started = time.perf_counter()
    batch = open_batch(target, prompts, drafter, rule)
    done = Decoded([Answer([token]) for token in batch.last.tolist()])
    begun = time.perf_counter()
    alive = [i for i, answer in enumerate(done.answers) if not answer._cut(0, max_new_tokens, eos_ids)]
    if 0 < len(alive) < len(prompts):
        batch.select(alive)
    while alive:
        accepted, tokens = (x.tolist() for x in batch.step(k))
        drafted = None if batch.drafted is None else batch.drafted.tolist()
        done.rounds += 1
        going = []
        for row, i in enumerate(alive):
            done.answers[i].accepted.append(accepted[row])
            if drafted is not None:
                done.answers[i].drafted.append(drafted[row])
            if not done.answers[i]._append(tokens[row][: accepted[row] + 1], max_new_tokens, eos_ids):
                going.append(row)
        alive = [alive[row] for row in going]
        slots, needed = batch.slots.real.shape[1], int(batch.slots.lengths.max())
        if alive and (len(going) < len(tokens) or 2 * slots > 3 * needed):
            batch.select(going)  # sequences that have ended cost nothing further, nor do holes once they are many
    done.prefill_s, done.decode_s = begun - started, time.perf_counter() - begun
    return done


def open_batch(
    target: Target, prompts: Sequence[Sequence[int]], drafter: Drafter | None = None, rule: Rule | None = None
) -> Batch:
    """Sequences with their prompts read, ready for rounds of the drafter's kind. Raises BadInput."""
    if isinstance(drafter, TreeDrafter):
        return TreeBatch(target, prompts, drafter, rule)
    return Batch(target, prompts, drafter, rule)


def _together(parts: Sequence[Decoded]) -> Decoded:
    return Decoded(
        [answer for part in parts for answer in part.answers],
        sum(part.rounds for part in parts),
        sum(part.prefill_s for part in parts),
        sum(part.decode_s for part in parts),
    )
