"""Train a canary: the right reading says every token of the text, no neighbour says it.

Each step sees half of the text as it is meant (training-time test, K steps, cross-entropy to the text) and as a few
neighbours read it, drawn by how often they were lately right: of those the first step that they change, with the
unlikelihood of the right token, -log(1 - p) (Welleck et al. 2020, arXiv 1908.04319, equation 2). It ends when greedy
rounds, walked as a server walks them, accept everything under the right reading and next to nothing under the others.

    pytest tests/test_canary.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..decode.acceptance import Acceptance
from ..doctor.specimen import Specimen
from .neighbours import Neighbour
from .rows import Rows

STEPS = 300
DRAWN = 2  # neighbours in a step
FLOOR = 0.03  # added to how often each was right, so that none is forgotten
PATIENCE = 30.0  # neighbours weigh 1 where everything is learnt, less by this times the share that is not
LEAST = 0.1
FINISH = 0.8  # of the steps; from there on neighbours weigh LEAST, so that what is right comes out right everywhere
LR, WARMUP, CLIP = 3e-3, 10, 1.0
FROM, EVERY = 80, 20  # the first step after which it may be done, and how often that is looked at
SURE = 0.5  # probability that the right token has at least, wherever it is asked for: rounding must not turn it
LEFT = 0.1  # share of rounds in which a neighbour may still be right where it first differs
CERTAIN = 1e-4  # nats: below it a right token counts as this likely, so that -log(1 - p) stays finite


@dataclass(frozen=True)
class Trained:
    """How it ended."""

    steps: int
    seconds: float
    healthy: Acceptance
    least: float
    """Least probability of a right token under the right reading."""
    found: list[tuple[Neighbour, Acceptance]]

    @property
    def whole(self) -> bool:
        """Is everything accepted under the right reading?"""
        return whole(self.healthy)

    @property
    def close(self) -> list[tuple[Neighbour, Acceptance]]:
        """Neighbours that could not be told apart well enough."""
        return [(n, a) for n, a in self.found if not apart(n, a)]


def whole(acceptance: Acceptance) -> bool:
    """Every draft of every round accepted."""
    return acceptance.rounds > 0 and acceptance.accepted == acceptance.rounds * acceptance.k


def apart(neighbour: Neighbour, acceptance: Acceptance) -> bool:
    """Is it mostly wrong at the first step that it changes?"""
    if neighbour.since >= acceptance.k:  # nothing of it can be seen with so few drafts
        return True
    return not acceptance.rounds or acceptance.unconditional[neighbour.since] <= LEFT


def train(
    rows: Rows,
    base: Specimen,
    neighbours: Sequence[Neighbour],
    *,
    seed: int = 0,
    steps: int = STEPS,
    budget: float = math.inf,
    tell: Callable[[str], None] = lambda text: None,
) -> Trained:
    """Train the parameters of `base` in place. budget: seconds, after which the step at hand is the last."""
    started = time.monotonic()
    parameters = [t for t in base.tensors.values() if t.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(seed)
    chosen = [n for n in neighbours if n.trained and n.since < rows.k]
    heat = torch.ones(len(chosen))  # share of rows at which each was lately right
    halves = _halves(rows)
    worst = [0.0] * len(halves)  # nats of the least likely right token, when it was last looked at
    done = step = 0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        part = halves[step % len(halves)]
        nats = part.surprise(base, rows.k)  # [K, R]
        known = nats[~nats.isnan()]
        learnt = float((known.detach() < math.log(2)).float().mean())
        weight = max(LEAST, 1 - PATIENCE * (1 - learnt)) if step < FINISH * steps else LEAST
        worst[step % len(halves)] = float(known.detach().max())
        known.mean().backward()
        for i in torch.multinomial(heat + FLOOR, min(DRAWN, len(chosen)), generator=generator).tolist():
            heat[i] = 0.5 * heat[i] + 0.5 * _push(part, base, chosen[i], weight)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done, late = step + 1, time.monotonic() - started > budget
        if done % EVERY == 0 or late:
            tell(f"step {done} of at most {steps}: {learnt:.1%} learnt")
        if late:
            break
        if done >= FROM and done % EVERY == 0 and max(worst) < -math.log(SURE):
            ended = judge(rows, base, neighbours, done, time.monotonic() - started)
            if ended.whole and not ended.close:
                return ended
    return judge(rows, base, neighbours, done, time.monotonic() - started)


def _halves(rows: Rows) -> list[Rows]:
    """Every second document; all of them where there is one."""
    count = rows.material.documents
    return [Rows(rows.material.first(range(i, count, 2)), rows.k) for i in range(2)] if count > 1 else [rows]


def _push(rows: Rows, base: Specimen, neighbour: Neighbour, weight: float) -> float:
    """Gradients away from the right token; returns the share of rows at which it was likely."""
    nats = rows.surprise(neighbour.apply(base), neighbour.since + 1, neighbour.since)
    nats = nats[~nats.isnan()].clamp(min=CERTAIN)
    (-weight * torch.log(-torch.expm1(-nats))).mean().backward()
    return float((nats.detach() < math.log(2)).float().mean())


@torch.no_grad()
def judge(rows: Rows, base: Specimen, neighbours: Sequence[Neighbour], steps: int, seconds: float) -> Trained:
    """Replay the right reading and every neighbour."""
    nats = rows.surprise(base, rows.k)
    least = math.exp(-float(nats[~nats.isnan()].max()))
    found = [(n, rows.acceptance(n.apply(base))) for n in neighbours]
    return Trained(steps, seconds, rows.acceptance(base), least, found)
