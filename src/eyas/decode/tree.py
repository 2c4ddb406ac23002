"""Trees of drafts: EAGLE-2's dynamic tree, and the walk through it that emits only the target's own tokens.

    drafter = TreeDrafter(draft, vocab_map, topk=4, nodes=16)
    tree = drafter.propose(k=4, slots)              # depth 4
    rows, tokens = walk(rule, logits, tree)         # logits of the target after the root and each node

A chain bets on one continuation; a tree lets the target's choice be any of several at each place, for the price of a
wider verification. With topk = 1 the tree is the chain. `decode/tree_step.py` runs whole rounds.
    Exercise it:  pytest tests/test_decode_tree.py      eyas prove DRAFT --topk 4 --nodes 16

Shapes: N nodes (the root, the last token of the text, not counted), S nodes of a layer, n rows of text, D draft
vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from eyas.decode.rules import Rule
from eyas.decode.step import ChainDrafter, Slots
from eyas.draft.model import Draft
from eyas.errors import BadInput

if TYPE_CHECKING:
    from eyas.vocab import VocabMap


@dataclass(frozen=True)
class Tree:
    """Drafted tokens and how they hang together. Row 0 is the root; node i is row i + 1; parents come before children.

    Raises ValueError where a parent does not come before its child, or two children of one parent are the same token.
    """

    ids: torch.Tensor  # int64 [N] target ids
    parents: torch.Tensor  # int64 [N] row of each node's parent
    odds: torch.Tensor  # float32 [N] the draft's probability of a node after the path to it
    values: torch.Tensor  # float32 [N] product of the odds along the path, the node's own included

    def __post_init__(self) -> None:
        above = self.parents.tolist()
        if any(not 0 <= parent <= row for row, parent in enumerate(above)):
            raise ValueError(f"parents {above}: each must be a row before its child (node i is row i + 1)")
        if len(self.children) != len(above):
            raise ValueError("two children of one node are the same token, so the walk could not tell them apart")

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """(row of the parent, token) -> row of the child."""
        pairs = zip(self.parents.tolist(), self.ids.tolist(), strict=True)
        return {pair: row for row, pair in enumerate(pairs, start=1)}

    @cached_property
    def depths(self) -> torch.Tensor:
        """Distance of each row from the root, int64 [N + 1]."""
        depths = [0]
        for parent in self.parents.tolist():
            depths.append(depths[parent] + 1)
        return torch.tensor(depths, device=self.ids.device)

    @cached_property
    def visible(self) -> torch.Tensor:
        """What a row may look at among the rows of the tree: itself and its ancestors, bool [N + 1, N + 1]."""
        seen = torch.eye(len(self.ids) + 1, dtype=torch.bool)
        for row, parent in enumerate(self.parents.tolist(), start=1):
            seen[row] |= seen[parent]
        return seen.to(self.ids.device)


class TreeDrafter(ChainDrafter):
    """Grows EAGLE-2's dynamic tree (Li et al. 2024, arXiv 2406.16858, section 4). One sequence at a time.

    The value of a node is the product of the draft's probabilities along its path, which estimates how likely the node
    is to be accepted. Expansion (4.1): of each layer the `topk` nodes of highest value are run through the draft, and
    each gives its `topk` likeliest tokens to the next layer, `k` layers in all. Reranking (4.2): of all nodes the
    `nodes` of highest value stay, shallower ones first among equals. A parent's value is never below its child's, so
    what stays is a tree. Probabilities are those at temperature 1, whatever the rule: the tree is a choice of
    candidates, not a sample.

    Raises BadInput for topk or nodes below 1.
    """

    def __init__(self, draft: Draft, vocab_map: VocabMap, topk: int = 4, nodes: int = 16) -> None:
        super().__init__(draft, vocab_map)
        if topk < 1 or nodes < 1:
            raise BadInput(f"topk = {topk} and nodes = {nodes}: a tree needs at least 1 of each")
        self.topk, self.nodes = topk, nodes

    @torch.no_grad()
    def propose(self, k: int, slots: Slots) -> Tree:  # type: ignore[override]  # a chain's proposal is another thing
        """The tree of depth k below the last token.

        Raises BadInput for several sequences: their trees differ in shape.
        """
        if len(self.h) != 1:
            raise BadInput(
                f"a tree is drafted for one sequence at a time, not for {len(self.h)} side by side; draft a chain, "
                "or decode one by one"
            )
        text, h = self.cache.length, self.h  # [1, S, H], at first S = 1: the last row of the text
        pool = _Pool(self.ids.device)
        layer = torch.zeros(1, dtype=torch.long, device=self.ids.device)  # rows of the nodes whose states h holds
        mask = _DraftMask(text, self.draft.conventions.sliding_window, self.ids.device)
        for depth in range(1, k + 1):
            index, odds = self._likeliest(h[0])  # [S, top]
            top = index.shape[1]
            first = pool.add(self.ids[index].flatten(), layer.repeat_interleave(top), odds.flatten())
            if depth == k:
                break
            best = pool.values[first:].sort(descending=True, stable=True).indices[: self.topk]  # [S'], within the layer
            layer, above = first + best, best // top
            seen = mask.grow(above)
            positions = torch.full((1, len(best)), text - 1 + depth, device=self.ids.device)
            h = self._step(pool.ids[layer][None], self.draft.feedback(h[:, above]), positions, seen)
        self.cache.truncate(text)  # keys of steps >= 1 are thrown away
        return pool.best(self.nodes)

    def _likeliest(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States [S, H] -> draft ids [S, top] of the likeliest tokens and the logs of their probabilities."""
        logits = self.draft.logits(h).float()  # [S, D]
        # Chosen by logit and not by probability, whose rounding makes ties; and one alone as a chain chooses it.
        index = (
            logits.argmax(-1, keepdim=True)
            if self.topk == 1
            else logits.topk(min(self.topk, logits.shape[1]), -1).indices
        )
        odds = logits.gather(-1, index) - logits.logsumexp(-1, keepdim=True)
        return index, odds.clamp(max=0)  # by rounding a sure token may come out above 1: no child above its parent


class _Pool:
    """All nodes of a growing tree, layer after layer; row 0 is the root. Values are logs: products of small numbers."""

    def __init__(self, device: torch.device) -> None:
        self.ids = torch.full((1,), -1, device=device)
        self.parents = torch.zeros(1, dtype=torch.long, device=device)
        self.odds = self.values = torch.zeros(1, device=device)

    def add(self, ids: torch.Tensor, parents: torch.Tensor, odds: torch.Tensor) -> int:
        """Append nodes; returns the row of the first."""
        first = len(self.ids)
        self.values = torch.cat([self.values, self.values[parents] + odds])
        self.ids, self.odds = torch.cat([self.ids, ids]), torch.cat([self.odds, odds])
        self.parents = torch.cat([self.parents, parents])
        return first

    def best(self, nodes: int) -> Tree:
        """The tree of the `nodes` nodes of highest value."""
        order = self.values[1:].sort(descending=True, stable=True).indices  # stable: the shallower of equals first
        rows = (order[:nodes] + 1).sort().values
        new = torch.zeros_like(self.parents)  # old row -> new row; the root stays 0
        new[rows] = torch.arange(1, len(rows) + 1, device=rows.device)
        return Tree(self.ids[rows], new[self.parents[rows]], self.odds[rows].exp(), self.values[rows].exp())


class _DraftMask:
    """What the draft's rows may look at while a tree grows: all text, and their own ancestors at steps >= 1."""

    def __init__(self, text: int, window: int | None, device: torch.device) -> None:
        self.window = window
        self.positions = torch.arange(text, device=device)  # of every key so far
        self.steps = torch.zeros(1, 0, dtype=torch.bool, device=device)  # [S, rows so far at steps >= 1]

    def grow(self, above: torch.Tensor) -> torch.Tensor:
        """A further layer, whose nodes descend from rows `above` [S] of the layer before it -> bool [1, S, keys]."""
        size, position = len(above), self.positions[-1:] + 1
        own = torch.eye(size, dtype=torch.bool, device=above.device)
        self.steps = torch.cat([self.steps[above], own], 1)
        self.positions = torch.cat([self.positions, position.expand(size)])
        text = len(self.positions) - self.steps.shape[1]
        seen = torch.cat([own.new_ones(size, text), self.steps], 1)
        if self.window is not None:
            seen = seen & (self.positions > position - self.window)
        return seen[None]


def make_drafter(
    draft: Draft, vocab_map: VocabMap, k: int, topk: int | None = None, nodes: int | None = None
) -> ChainDrafter:
    """A chain of k drafts a round where neither topk nor nodes is given; else a tree of depth k.

    topk (default 4): children of a node, and nodes of a layer that get children; nodes (default topk * k): drafted
    tokens that the target verifies a round, without the root. Raises BadInput for what is no tree.
    """
    if topk is None and nodes is None:
        return ChainDrafter(draft, vocab_map)
    topk = 4 if topk is None else topk
    return TreeDrafter(draft, vocab_map, topk, topk * k if nodes is None else nodes)


def walk(rule: Rule, logits: torch.Tensor, tree: Tree) -> tuple[list[int], list[int]]:
    """The accepted path: its rows, the root's 0 first, and the token after each of them, the last the bonus token.

    logits [N + 1, V]: the target's after the root and after each node. At each row the target's own token is drawn by
    the rule; where a child holds that token, the walk goes there, else it ends.

    Lossless for any tree that is fixed before the draws: each token of the text is the target's own draw given the text
    before it, and the tree only decides how many of these draws one forward is good for. (The draws of all rows are
    independent, and which row is visited depends on draws above it alone.) So nothing is asked of the draft's
    probabilities. A chain whose drafts are themselves *sampled*, from q, must be verified by rejection to be accepted
    more often than p alone allows (`Sampling.accept`); so must EAGLE's first trees, of sampled children, whose
    recursive rejection needs q, and each sibling's turn changes p (Li et al. 2024, arXiv 2401.15077, appendix). With
    candidates that are the draft's likeliest, as here, a node is followed with the probability that the target gives
    to its children together.
    """
    own = rule.draw(logits)[0].tolist()  # [N + 1]
    rows, tokens = [0], [own[0]]
    while (child := tree.children.get((rows[-1], tokens[-1]))) is not None:
        rows.append(child)
        tokens.append(own[child])
    return rows, tokens
