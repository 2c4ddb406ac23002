"""Sampling leaves the target's distribution as it is; greedy accepts what the target says.

    pytest -q tests/test_decode_rules.py

Seeds are fixed, so the statistical tests always give the same answer; their bound is four standard deviations.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.decode.answers import decode
from eyas.decode.rules import Greedy, Proposal, Rule, Sampling
from eyas.decode.step import Slots
from eyas.errors import BadInput
from eyas.target.model import Target


def surprise(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """(chi-square - degrees of freedom) / its standard deviation, of tokens [N] against probabilities [V].

    Tokens expected fewer than five times are counted as one.
    """
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    hoped = expected.double() * len(tokens)
    rare = hoped < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    hoped = torch.cat([hoped[~rare], hoped[rare].sum()[None]])
    counts, hoped = counts[hoped > 0], hoped[hoped > 0]
    free = len(hoped) - 1
    return float((((counts - hoped) ** 2 / hoped).sum() - free) / (2 * free) ** 0.5)


def test_greedy_accepts_up_to_the_first_disagreement():
    logits = torch.nn.functional.one_hot(torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6]]), 8).float()
    drafts = torch.tensor([[4, 5], [4, 1], [1, 5]])
    accepted, tokens = Greedy().accept(logits, Proposal(drafts))
    assert accepted.tolist() == [2, 1, 0]
    assert [tokens[b, : n + 1].tolist() for b, n in enumerate(accepted.tolist())] == [[4, 5, 6], [4, 5], [4]]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_text_is_distributed_as_the_targets(temperature: float):
    """Contexts do not matter here: position j has one p_j and one q_j, so the tokens of a row are independent."""
    many, k, inside = 40_000, 3, torch.tensor([0, 2, 3, 7, 11])  # the draft's five of twelve ids
    torch.manual_seed(0)
    wanted, guessed = torch.randn(k + 1, 12), torch.randn(k, 5)
    rule = Sampling(temperature, seed=1)
    ids, odds = [], []
    for j in range(k):
        index, q = rule.draw(guessed[j].expand(many, -1))
        ids.append(inside[index])
        odds.append(torch.zeros(many, 12).index_copy_(1, inside, q))
    proposal = Proposal(torch.stack(ids, 1), torch.stack(odds, 1))
    accepted, tokens = rule.accept(wanted.expand(many, -1, -1), proposal)

    p = (wanted / temperature).softmax(-1)
    assert accepted.bincount(minlength=k + 1).min() > 100, "every place is exercised, the bonus token too"
    for j in range(k + 1):
        reached = accepted >= j
        assert abs(surprise(tokens[reached, j], p[j])) < 4
    # What a rule without the correction would give is told apart by the same test.
    wrong = torch.where(accepted > 0, tokens[:, 0], torch.multinomial(p[0], many, replacement=True))
    assert surprise(wrong, p[0]) > 20
    # The expected share of accepted drafts is the overlap of the two distributions.
    q = torch.zeros(12).index_copy_(0, inside, (guessed[0] / temperature).softmax(-1))
    overlap = float(torch.minimum(p[0], q).sum())
    assert float((accepted > 0).float().mean()) == pytest.approx(overlap, abs=4 * 0.5 / many**0.5)


def test_a_draft_that_knows_the_target_is_always_accepted():
    rule = Sampling(1.0, seed=0)
    logits = torch.randn(500, 3, 9, generator=torch.Generator().manual_seed(0))
    drawn = [rule.draw(logits[:, j]) for j in range(2)]
    proposal = Proposal(torch.stack([d[0] for d in drawn], 1), torch.stack([d[1] for d in drawn], 1))
    accepted, tokens = rule.accept(logits, proposal)
    assert accepted.tolist() == [2] * 500
    assert torch.equal(tokens[:, :2], proposal.ids)


def test_nothing_drafted_is_plain_sampling():
    rule = Sampling(0.8, seed=0)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5))
    accepted, tokens = rule.accept(logits.expand(20_000, 1, -1), Proposal(torch.empty(20_000, 0, dtype=torch.long)))
    assert tokens.shape == (20_000, 1)
    assert not accepted.any()
    assert abs(surprise(tokens[:, 0], (logits / 0.8).softmax(-1))) < 4


def test_temperature_zero_is_refused():
    with pytest.raises(BadInput, match="0 means greedy"):
        Sampling(0.0)


@pytest.mark.parametrize("speculative", [False, True])
def test_sampled_answers_are_distributed_as_the_targets(tiny_target: Path, speculative: bool):
    """End to end: marginals of the first three tokens, computed exactly over the likeliest continuations.

    At temperature 0.15 this target's choice is spread over a handful of tokens, so the whole tree of three tokens fits.
    """
    temperature, many, prompt = 0.15, 3000, [5, 17, 40, 8, 99, 3]
    target = Target.load(tiny_target)
    texts, weights, marginals = [list(prompt)], torch.ones(1), []
    for _ in range(3):
        _, final = target.states(torch.tensor(texts), taps=[0])
        p = (target.head(final[:, -1]) / temperature).softmax(-1)  # [texts, V]
        marginals.append(weights @ p)
        row, token = ((p * weights[:, None]) > 1e-6).nonzero(as_tuple=True)
        texts = [[*texts[r], t] for r, t in zip(row.tolist(), token.tolist(), strict=True)]
        weights = weights[row] * p[row, token]
    assert weights.sum() > 0.999
    assert 20 < len(texts) < 20_000

    drafter = Hotter(target, prompt) if speculative else None
    rule = Sampling(temperature, seed=3)
    done = decode(target, [prompt] * many, drafter, k=2 if speculative else 0, rule=rule, max_new_tokens=3)
    tokens = torch.tensor([a.tokens for a in done.answers])
    for place, expected in enumerate(marginals):
        assert abs(surprise(tokens[:, place], expected)) < 4
    if speculative:
        first = torch.tensor([a.accepted[0] for a in done.answers])
        assert first.bincount(minlength=3).min() > 100, "rejections and bonus tokens both happened often"


class Hotter:
    """Drafts with the target itself, at twice its temperature: often right, often wrong. Keeps texts, not states."""

    taps = (0,)

    def __init__(self, target: Target, prompt: list[int]) -> None:
        self.target, self.prompt = target, prompt

    def start(self, rule: Rule) -> None:
        self.rule = rule
        self.texts: list[list[int]] = []

    def commit(self, taps: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, slots: Slots) -> None:
        new = [row[:n] for row, n in zip(tokens.tolist(), counts.tolist(), strict=True)]
        old = self.texts or [self.prompt[:1]] * len(new)
        self.texts = [a + b for a, b in zip(old, new, strict=True)]

    def select(self, rows: torch.Tensor, order: torch.Tensor) -> None:
        self.texts = [self.texts[i] for i in rows.tolist()]

    def propose(self, k: int, slots: Slots) -> Proposal:
        drawn, texts = [], self.texts
        for _ in range(k):
            ends = torch.tensor([len(t) - 1 for t in texts])
            padded = torch.tensor([t + [0] * (int(ends.max()) + 1 - len(t)) for t in texts])
            _, final = self.target.states(padded, taps=[0])
            drawn.append(self.rule.draw(self.target.head(final[torch.arange(len(texts)), ends]) / 2))
            texts = [[*t, i] for t, i in zip(texts, drawn[-1][0].tolist(), strict=True)]
        return Proposal(torch.stack([ids for ids, _ in drawn], 1), torch.stack([q for _, q in drawn], 1))
