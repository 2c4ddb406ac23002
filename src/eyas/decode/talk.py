"""One answer, round by round as it is decoded, with what each round looked at.

    for done in rounds(target, ids, drafter, k=4): print(done.tokens, done.own, done.look)

The rounds are those of `decode`; beside the tokens they bring who made them, and the numbers by which a round can be
explained (`Look`).   Exercise it:  pytest tests/test_talk.py      eyas chat DRAFT --say "hello" --explain

Shapes: k drafts of a chain or N nodes of a tree, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from eyas.decode.answers import Answer, open_batch
from eyas.decode.rules import Greedy, Proposal, Rule, Sampling
from eyas.decode.step import ChainDrafter
from eyas.decode.tree_step import TreeBatch

if TYPE_CHECKING:
    from eyas.target.model import Target


@dataclass(frozen=True)
class Guess:
    """One drafted token. Rows as in `decode.tree.Tree`: 0 is the last token of the text; a chain is a tree, too."""

    row: int
    parent: int
    token: int
    draft_odds: float
    """What the draft gave it, after its parent."""
    target_odds: float
    """What the target gave it there."""
    likeliest: int
    """The token that the target gave most, there."""
    likeliest_odds: float
    accepted: bool


@dataclass(frozen=True)
class Look:
    """What a round looked at. Odds are those at `temperature`; at 1 where greedy (0), and of a tree's drafts always."""

    last: int
    """The token that the round started from."""
    guesses: tuple[Guess, ...]
    token: int
    """The target's own, with which the round ended."""
    token_odds: float
    token_known: bool
    """Is it in the draft vocabulary? If not, no draft could have named it."""
    temperature: float
    tree: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Round:
    """Tokens that came together, cut off where the answer ends. The first of an answer is prefill's: one token."""

    tokens: tuple[int, ...]
    own: tuple[bool | None, ...]
    """Of each token: True, the target said it; False, it was drafted and accepted; None, nobody knows."""
    accepted: int = 0
    """Accepted drafts, also those cut off."""
    drafted: int = 0
    """Drafted tokens that were verified; 0 where that is not known."""
    finish: str = ""
    """Of the last round: stop or length, as in `Answer`."""
    look: Look | None = None


class Watched:
    """A rule that remembers what it was asked since `drawn` and `verified` were last cleared."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.drawn: list[tuple[torch.Tensor, torch.Tensor]] = []  # (logits [B, n], chosen index [B])
        self.verified: torch.Tensor | None = None  # [B, k+1, V]

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        return self.rule.temperature if isinstance(self.rule, Sampling) else 0.0

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        index, odds = self.rule.draw(logits)
        self.drawn.append((logits, index))
        return index, odds

    def accept(self, logits: torch.Tensor, proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor]:
        self.verified = logits
        return self.rule.accept(logits, proposal)


def rounds(
    target: Target,
    ids: Sequence[int],
    drafter: ChainDrafter,
    *,
    k: int = 4,
    rule: Rule | None = None,
    max_new_tokens: int = 256,
    eos_ids: Collection[int] = (),
) -> Iterator[Round]:
    """The answer to one prompt, a round at a time: the same tokens and counts as `decode`. Raises BadInput."""
    rule = Watched(rule or Greedy())
    batch = open_batch(target, [ids], drafter, rule)
    answer = Answer([int(batch.last)])
    over = answer._cut(0, max_new_tokens, eos_ids)
    yield Round(tuple(answer.tokens), (True,), finish=answer.finish if over else "")
    while not over:
        start, last = len(answer.tokens), answer.tokens[-1]
        rule.drawn.clear()
        counts, block = batch.step(k)
        accepted, tokens = int(counts), block[0].tolist()
        tokens = tokens[: accepted + 1]
        looked = _at_tree if isinstance(batch, TreeBatch) else _at_chain
        look = looked(batch, rule, drafter, last, tokens)
        over = answer._append(tokens, max_new_tokens, eos_ids)
        shown = tuple(answer.tokens[start:])
        own = tuple(i == accepted for i in range(len(shown)))
        yield Round(shown, own, accepted, len(look.guesses), answer.finish if over else "", look)


def _at_chain(batch: Any, rule: Watched, drafter: ChainDrafter, last: int, tokens: list[int]) -> Look:
    assert rule.verified is not None
    q = torch.cat([logits for logits, _ in rule.drawn]).float()  # [k, D]
    index = torch.cat([index for _, index in rule.drawn])  # [k]
    q = (q / (rule.temperature or 1)).softmax(-1).gather(1, index[:, None])[:, 0]
    k = len(index)
    return _look(rule, drafter, rule.verified[0], list(range(k)), drafter.ids[index], q, list(range(len(tokens))),
                 last, tokens[-1], tree=False)  # fmt: skip


def _at_tree(batch: Any, rule: Watched, drafter: ChainDrafter, last: int, tokens: list[int]) -> Look:
    tree, rows = batch.tree, [0]
    for token in tokens[:-1]:
        rows.append(tree.children[rows[-1], token])
    return _look(rule, drafter, batch.logits, tree.parents.tolist(), tree.ids, tree.odds, rows,
                 last, tokens[-1], tree=True)  # fmt: skip


def _look(
    rule: Watched, drafter: ChainDrafter, logits: torch.Tensor, parents: list[int], ids: torch.Tensor, q: torch.Tensor,
    path: list[int], last: int, token: int, tree: bool,
) -> Look:  # fmt: skip
    """logits [N + 1, V] after each row, ids and q [N] of the drafts; `path`: the rows that were accepted, 0 first."""
    p = (logits.float() / (rule.temperature or 1)).softmax(-1)  # [N + 1, V]
    above = torch.tensor(parents, dtype=torch.long, device=p.device)
    best_odds, best = (x[above].tolist() for x in p.max(-1))
    given = p[above, ids.to(p.device)].tolist()
    tokens, odds = ids.tolist(), q.tolist()
    guesses = tuple(
        Guess(i + 1, parents[i], tokens[i], odds[i], given[i], best[i], best_odds[i], i + 1 in path)
        for i in range(len(tokens))
    )
    known = bool((drafter.ids == token).any())
    return Look(last, guesses, token, float(p[path[-1], token]), known, rule.temperature, tree)
