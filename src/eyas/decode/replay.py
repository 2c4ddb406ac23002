"""Predicted accept length: honest chain drafting over recorded features, without running the target.

From each row the draft decodes K tokens on its OWN choices (never the recorded ones) and they are compared with the
recorded text, which is the target's own answer. Then rounds are walked as a server walks them: a round at row i that
accepts n tokens is followed by a round at row i + n + 1. Nothing is multiplied out of teacher-forced accuracies.
    Exercise it:  pytest tests/test_decode_replay.py
"""

from __future__ import annotations

import torch

from ..draft.model import Draft
from ..draft.unroll import Packing, Unroll

CHUNK = 512  # rows that are projected onto the draft vocabulary at once: bounds memory


@torch.inference_mode()
def accepted_per_row(
    draft: Draft,
    ids: torch.Tensor,
    aux: torch.Tensor,
    run: torch.Tensor,
    packing: Packing,
    target_ids: torch.Tensor,
    steps: int,
) -> torch.Tensor:
    """How many of `steps` drafted tokens the recorded text accepts from each row; int64 [N], 0 where not asked.

    ids int64 [N], aux [N, T*Ht], run int64 [N] (supervised tokens following row i, `Batch.run`), target_ids int64 [D]
    (target id of a draft id). Row i is asked when x_{i+1} and x_{i+2} are supervised (run >= 2).
    """
    accepted = torch.zeros_like(ids)
    rows = (run >= 2).nonzero().squeeze(1)
    if not len(rows):
        return accepted
    unroll = Unroll(draft, packing, rows)
    following = torch.cat([ids[1:], ids[-1:]])
    h = unroll.start(unroll.embed(following), aux.to(draft.fc.weight.dtype))
    for k in range(steps):
        choice = [draft.logits(part).argmax(-1) for part in h.split(CHUNK)]
        drafted = target_ids[torch.cat(choice)]  # [R] target ids
        right = (run[rows] >= k + 2) & (drafted == ids[(rows + 2 + k).clamp(max=len(ids) - 1)])
        kept = right.nonzero().squeeze(1)  # a broken chain cannot accept any more: drop its row
        if not len(kept):
            break
        rows = rows[kept]
        accepted[rows] += 1
        if k + 1 < steps:
            unroll.keep(kept)
            h = unroll.step(unroll.embed(drafted[kept]), draft.feedback(h[kept]))
    return accepted


def walk_rounds(accepted: torch.Tensor, run: torch.Tensor, steps: int) -> torch.Tensor:
    """Walk every turn round by round; histogram int64 [steps+1] of tokens accepted per round (see `rounds`)."""
    return torch.bincount(rounds(accepted, run, steps)[1], minlength=steps + 1)


def rounds(accepted: torch.Tensor, run: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every round of a server that walks every turn: (row at which it begins, tokens that it accepts), int64 [rounds].

    A turn's first round starts at the row before its first token. Rounds that the end of the turn cuts off (fewer than
    `steps` tokens left to compare) are left out, as when two tools are compared (design.md, section 3).
    """
    accepted, run = accepted.cpu(), run.cpu()  # a loop of small steps
    before = torch.cat([run.new_zeros(1), run[:-1]])
    # Within a turn `run` falls by one a row; a turn starts where it does not follow from the row before.
    at = ((run >= 2) & (before != run + 1)).nonzero().squeeze(1)
    begun, taken = [at[:0]], [at[:0]]
    while len(at):
        at = at[run[at] >= steps + 1]
        n = accepted[at]
        begun.append(at)
        taken.append(n)
        at = at + n + 1  # in the same turn: n <= steps, and at least steps + 1 of its tokens follow
    return torch.cat(begun), torch.cat(taken)
