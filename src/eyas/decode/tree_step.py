"""One round with a tree of drafts: grow, verify all of it in one forward, keep the accepted path.

    batch = TreeBatch(target, [prompt], TreeDrafter(draft, vocab_map, topk=4, nodes=16))
    accepted, tokens = batch.step(k=4)

The same round as `Batch.step`, but the target's new rows are a tree: a node looks at the text and at its ancestors, its
RoPE position is its depth. Of the new keys those of the accepted path are moved together and the others dropped.
    Exercise it:  pytest tests/test_decode_tree.py

Shapes: N nodes, n rows of text, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from eyas.decode.rules import Rule
from eyas.decode.step import Batch
from eyas.decode.tree import Tree, TreeDrafter, walk
from eyas.errors import BadInput

if TYPE_CHECKING:
    from eyas.target.model import Target

MASKED = ("sdpa", "eager")
"""Attention implementations of transformers that take a mask of any shape."""


class TreeBatch(Batch):
    """One sequence being decoded with a tree. After `step`, `tree` and `logits` [N + 1, V] are those of its round.

    Raises BadInput for several prompts, and for a target whose attention takes no tree.
    """

    tree: Tree
    logits: torch.Tensor

    def __init__(
        self, target: Target, prompts: Sequence[Sequence[int]], drafter: TreeDrafter, rule: Rule | None = None
    ) -> None:
        if len(prompts) != 1:
            raise BadInput(
                f"a tree is drafted for one prompt at a time, not for {len(prompts)} side by side; draft a chain, "
                "or lower --batch to 1"
            )
        refuse_unmaskable(target)
        super().__init__(target, prompts, drafter, rule)
        self.grower = drafter

    @torch.no_grad()
    def step(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One round with a tree of depth k. Returns accepted [1] and tokens [1, accepted + 1], all of them new text."""
        self.tree = self.grower.propose(k, self.slots)
        text, block = int(self.slots.lengths), torch.cat([self.last, self.tree.ids])[None]  # [1, N + 1]
        positions = text + self.tree.depths  # [N + 1]
        taps, final = self._forward(block, positions[None], self._mask(positions))
        self.logits = self.target.head(final[0])
        path, said = walk(self.rule, self.logits, self.tree)
        rows, tokens = torch.tensor(path, device=block.device), torch.tensor([said], device=block.device)
        for layer in self.cache.layers:
            for kept in (layer.keys, layer.values):  # [1, heads, n + N + 1, d]
                kept[:, :, text : text + len(path)] = kept[:, :, (text + rows).to(kept.device)]
        if len(path) < block.shape[1]:
            self.cache.crop(len(path) - block.shape[1])
        self.last = tokens[:, -1]
        counts = torch.tensor([len(path)], device=block.device)
        self._keep(None if taps is None else taps[:, rows], tokens, counts)
        return counts - 1, tokens

    def _mask(self, positions: torch.Tensor) -> Any:
        """What the target's new rows may look at, as transformers wants it: 0 or -inf, [1, 1, N + 1, n + N + 1].

        A dict by kind of layer where the target mixes kinds. A sliding window counts positions, which in a tree are not
        slots.
        """
        text, config = int(self.slots.lengths), self.target.decoder.config
        new = len(positions)
        seen = torch.cat([self.tree.visible.new_ones(new, text), self.tree.visible], 1)
        everywhere = torch.cat([torch.arange(text, device=positions.device), positions])  # of the keys

        def added(visible: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(visible.shape, dtype=self.target.model.dtype, device=visible.device)
            return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[None, None]

        window = getattr(config, "sliding_window", None)
        if window is None:
            kinds = set(getattr(config, "layer_types", None) or ())
            return {kind: added(seen) for kind in kinds} if len(kinds) > 1 else added(seen)
        near = added(seen & (everywhere > positions[:, None] - window))
        if getattr(config, "layer_types", None) is None:
            return near  # Mistral: all layers have the window
        return {"full_attention": added(seen), "sliding_attention": near}


def refuse_unmaskable(target: Target) -> None:
    """Raise BadInput for a target that cannot be shown a tree: its attention takes no mask, or cuts text in chunks."""
    config = target.decoder.config
    how = getattr(config, "_attn_implementation", None)
    if how not in MASKED:
        raise BadInput(
            f"{target.dir}: its attention runs as {how!r}, which takes no tree; only {' and '.join(MASKED)} do. "
            f"Draft a chain"
        )
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise BadInput(f"{target.dir}: layers of chunked attention do not take a tree here; draft a chain")
