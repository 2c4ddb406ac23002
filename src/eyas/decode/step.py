"""Speculative decoding as the contract has it (design.md, section 3): draft a chain, verify, accept.

    batch = Batch(target, prompts, ChainDrafter(draft, vocab_map))
    accepted, tokens = batch.step(k=4)

`Batch.step` is one round. The target runs once over its own last token and the k drafts; the rule accepts the first so
many; the accepted rows, and only they, stay in both KV caches: the draft's with keys of step 0, made of the target's
states. Several sequences run side by side, each at its own pace: a row that one sequence rejects and another accepts
stays behind as a hole that attention does not see (`Slots`).   Exercise it:  pytest tests/test_decode_step.py

Shapes: B sequences, S rows of a block, k drafts, T*H the taps side by side, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from eyas.decode.rules import Greedy, Proposal, Rule
from eyas.draft.model import Draft, KVCache
from eyas.errors import BadInput, EyasError

if TYPE_CHECKING:
    from eyas.target.model import Target
    from eyas.vocab import VocabMap


class Slots:
    """Which slots of the KV caches hold text: `real` bool [B, n]. Both models keep the same slots.

    Slot 0 is real in every sequence, so no row is ever left without a key to look at.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.real = torch.zeros(batch, 0, dtype=torch.bool, device=device)

    @property
    def lengths(self) -> torch.Tensor:
        """Rows of text in each sequence, int64 [B]: also the position of the next row."""
        return self.real.sum(1)

    def mask(self, new: int) -> torch.Tensor | None:
        """What `new` further rows may look at, bool [B, n + new]; None where there is no hole."""
        if bool(self.real.all()):
            return None
        return torch.cat([self.real, self.real.new_ones(len(self.real), new)], 1)

    def add(self, counts: torch.Tensor, size: int) -> int:
        """Append a block of `size` rows, of which the first `counts` [B] are text; returns how many of its slots stay.

        Slots at the end that no sequence needs are not added: a single sequence never has a hole.
        """
        size = min(size, int(counts.max()))
        columns = torch.arange(size, device=counts.device)
        self.real = torch.cat([self.real, columns < counts[:, None]], 1)
        return size

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """Go on with sequences `rows` [B'], their holes closed; returns the old slot of each new one [B', n']."""
        order = self.real[rows].to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        counts = self.lengths[rows]
        order = order[:, : int(counts.max())]
        self.real = torch.arange(order.shape[1], device=order.device) < counts[:, None]
        return order


def pick(x: torch.Tensor, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Keys or values [B, heads, n, d] of sequences `rows` [B'] at slots `order` [B', n'] -> [B', heads, n', d]."""
    return x[rows].gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


class Drafter(Protocol):
    """What a batch needs of a draft. `taps`: the residual streams of the target that `commit` gets."""

    taps: tuple[int, ...]

    def start(self, rule: Rule) -> None:
        """Forget everything: a new batch begins, in which `rule` chooses the drafts."""

    def commit(self, taps: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, slots: Slots) -> None:
        """New rows of text: the target's states [B, S, T*H], the token after each row [B, S], and how many rows of each
        sequence are text [B]. `slots` already holds them."""

    def propose(self, k: int, slots: Slots) -> Any:
        """Draft k tokens after the last token of each sequence: a `Proposal`, or for a `TreeBatch` a `Tree`."""

    def select(self, rows: torch.Tensor, order: torch.Tensor) -> None:
        """Go on with sequences `rows` at slots `order`, as in `Slots.select`."""


class _Cache(KVCache):
    """The draft's cache, of which sequences can be dropped."""

    def select(self, rows: torch.Tensor, order: torch.Tensor) -> None:
        self._kv = [kv and (pick(kv[0], rows, order), pick(kv[1], rows, order)) for kv in self._kv]
        self._length = [order.shape[1]] * len(self._length)


class ChainDrafter:
    """Drafts one token after the other, each from the draft's own previous state.

    Raises BadInput for a draft that reads its tokens with another shift: its input is not known when it would draft.
    """

    def __init__(self, draft: Draft, vocab_map: VocabMap) -> None:
        if draft.conventions.token_shift != 1:
            raise BadInput(
                f"this draft reads e(x_(i+{draft.conventions.token_shift})) beside the state of row i; decoding, where "
                f"the newest token has no state yet, needs a token_shift of 1"
            )
        self.draft, self.taps = draft.eval(), draft.conventions.taps
        self.ids = vocab_map.ids.to(draft.fc.weight.device)  # int64 [D]

    def start(self, rule: Rule) -> None:
        """An empty cache; `rule` chooses the drafts."""
        self.rule, self.cache = rule, _Cache(self.draft.shape.num_layers)

    @torch.no_grad()
    def commit(self, taps: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, slots: Slots) -> None:
        """Step 0 of the accepted rows; the output of the last one is where the next chain starts."""
        size = tokens.shape[1]
        first = slots.lengths - counts  # position of the block's first row
        positions = first[:, None] + torch.arange(size, device=tokens.device)
        state = self.draft.fuse(taps.to(self.draft.fc.weight))
        h = self._step(tokens, state, positions, None if bool(slots.real.all()) else slots.real)  # [B, S, H]
        self.h = h[torch.arange(len(h), device=h.device), counts - 1, None]  # [B, 1, H]

    @torch.no_grad()
    def propose(self, k: int, slots: Slots) -> Proposal:
        """k tokens for each sequence [B, k], target ids; the cache is afterwards as it was."""
        kept, h = self.cache.length, self.h
        ids, odds = [], []
        for step in range(1, k + 1):
            index, q = self.rule.draw(self.draft.logits(h[:, 0]))
            ids.append(self.ids[index])
            if q is not None:
                odds.append(q.new_zeros(len(q), self.draft.shape.vocab_size).index_copy_(1, self.ids, q))
            if step < k:  # the row of the last token, i = length - 1, at its step `step`
                positions = (slots.lengths - 1 + step)[:, None]
                h = self._step(ids[-1][:, None], self.draft.feedback(h), positions, slots.mask(step))
        self.cache.truncate(kept)  # keys of steps >= 1 are thrown away
        return Proposal(torch.stack(ids, 1), torch.stack(odds, 1) if odds else None)

    def select(self, rows: torch.Tensor, order: torch.Tensor) -> None:
        """Keep sequences `rows`, their keys at slots `order`."""
        self.cache.select(rows, order)
        self.h = self.h[rows]

    def _step(
        self, tokens: torch.Tensor, state: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        holes = {} if mask is None else {"mask": mask}
        return self.draft.step(self.draft.embed(tokens), state, positions, self.cache, **holes)


class Batch:
    """Sequences being decoded: the target's KV cache, the drafter's, and the last token of each.

    `last` int64 [B] is text already, but neither model has seen it. After construction it is prefill's token.
    """

    def __init__(
        self, target: Target, prompts: Sequence[Sequence[int]], drafter: Drafter | None = None, rule: Rule | None = None
    ) -> None:
        from transformers import DynamicCache

        if not prompts or not all(len(p) for p in prompts):
            raise BadInput("a prompt without tokens cannot be decoded; give at least one token")
        self.target, self.drafter, self.rule = target, drafter, rule or Greedy()
        self.drafted: torch.Tensor | None = None  # what the last round drafted, [B, k]; a tree keeps `tree` instead
        self.slots = Slots(len(prompts), target.device)
        self.cache: Any = DynamicCache()  # without the config: every layer keeps all rows, so that they can be rejected
        if drafter is not None:
            drafter.start(self.rule)
        ids = [torch.tensor(list(p), dtype=torch.long, device=target.device) for p in prompts]
        counts = torch.tensor([len(p) for p in prompts], device=target.device)
        block = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # [B, S]; what follows a prompt becomes a hole
        with torch.no_grad():
            taps, final = self._forward(block)
            row = torch.arange(len(prompts), device=target.device)
            logits = target.head(final[row, counts - 1])  # [B, V]
            following = block.roll(-1, 1)
            self.last = following[row, counts - 1] = self.rule.draw(logits)[0]
            self._keep(taps, following, counts)

    @torch.no_grad()
    def step(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One round: draft k tokens, verify, accept. Returns accepted [B] and tokens [B, k+1].

        The first `accepted + 1` tokens of each row are new text; the rest of the row means nothing.
        """
        if self.drafter is None or k == 0:
            proposal = Proposal(self.last.new_empty(len(self.last), 0))
        else:
            proposal = self.drafter.propose(k, self.slots)
            self.drafted = proposal.ids
        block = torch.cat([self.last[:, None], proposal.ids], 1)  # [B, k+1]: x_P, then what may be x_(P+1) ... x_(P+k)
        taps, final = self._forward(block)
        accepted, tokens = self.rule.accept(self.target.head(final), proposal)
        self.last = tokens.gather(1, accepted[:, None])[:, 0]
        self._keep(taps, tokens, accepted + 1)
        return accepted, tokens

    @torch.no_grad()
    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences alone, and close the holes of their caches."""
        index = torch.tensor(list(rows), device=self.last.device)
        order = self.slots.select(index)
        for layer in self.cache.layers:
            layer.keys, layer.values = pick(layer.keys, index, order), pick(layer.values, index, order)
        if self.drafter is not None:
            self.drafter.select(index, order)
        self.last = self.last[index]

    def _forward(
        self, block: torch.Tensor, positions: torch.Tensor | None = None, mask: Any = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run the target over new rows [B, S], appended to its cache -> taps [B, S, T*H] (None: no drafter), final.

        The rows follow each other, unless `positions` [B, S] and a `mask` as transformers takes it say otherwise.
        """
        wanted = self.drafter.taps if self.drafter is not None else ()
        if positions is None:
            positions = self.slots.lengths[:, None] + torch.arange(block.shape[1], device=block.device)
            real = self.slots.mask(block.shape[1])
            mask = None if real is None else real.long()
        with self.target.recording(wanted) as seen:
            final = self.target.decoder(
                input_ids=block,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
        return (torch.cat([seen[t].to(final.device) for t in wanted], -1) if wanted else None), final

    def _keep(self, taps: torch.Tensor | None, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """The first `counts` [B] rows of the newest block are text; `tokens` [B, S] follow each of its rows."""
        size = tokens.shape[1]
        stay = self.slots.add(counts, size)
        if stay < size:
            self.cache.crop(stay - size)
        if self.drafter is not None and taps is not None:
            self.drafter.commit(taps[:, :stay], tokens[:, :stay], counts, self.slots)


def refuse_uncroppable(target: Target) -> None:
    """Raise EyasError for a target whose layers keep a running state: a rejected token cannot be taken back from it."""
    kinds = set(target.facts.raw.get("layer_types") or ())
    odd = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    if odd:
        raise EyasError(
            f"{target.dir}: layers of type {', '.join(odd)} keep a running state instead of keys, so rejected "
            "tokens cannot be taken back; this reference decoder does not run such a target; measure it in an "
            "engine (eyas measure)"
        )
