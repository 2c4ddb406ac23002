"""The passes of an extraction: documents in batches through the target, every row into the buffer of a shard.

    eyas extract conversations.jsonl --target smollm2 --out runs/demo/features

Inside a shard documents run sorted by length, in batches padded on the right. The head runs only on the rows whose
teacher is read (layout.teacher_rows), and on the states before they are rounded, so that `top1` is what the target
really chose.   Exercise it:  pytest tests/test_features_extract.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from eyas.features.conversations import Document
from eyas.features.layout import NOT_READ, teacher_rows
from eyas.features.writer import ShardBuffer
from eyas.machine import reuse_large_allocations
from eyas.memory import spending
from eyas.target.head import BlockedHead
from eyas.target.model import Target
from eyas.target.weights import Ends

# Padding of one pass at most, in tokens: what a pass costs beyond its tokens, so that another pass is cheaper. Measured
# on one core (SmolLM2: 30 on each pass); an accelerator waits for the host longer than it computes a few hundred.
PADDING, PADDING_OF_ACCELERATORS = 32, 512
SMALLER = "lower --batch-tokens, then --max-length: a conversation is never cut into two passes"


def batches(lengths: Sequence[int], batch_tokens: int, max_padding: int = PADDING) -> Iterator[list[int]]:
    """Group documents by length: lists of their numbers, longest first, at most `batch_tokens` with padding.

    A group ends earlier where its padding would exceed `max_padding` tokens.
    """
    group: list[int] = []
    padding = longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padding += longest - lengths[i]
        if group and ((len(group) + 1) * longest > batch_tokens or padding > max_padding):
            yield group
            group = []
        if not group:
            padding, longest = 0, lengths[i]
        group.append(i)
    if group:
        yield group


@torch.inference_mode()
def fill_shard(
    target: Target,
    documents: Sequence[Document],
    buffer: ShardBuffer,
    taps: Sequence[int],
    batch_tokens: int,
    advance: Any = lambda n: None,
    places: Sequence[int] | None = None,
) -> None:
    """Run the target over the documents of one shard and store every row; `advance(tokens)` moves a progress bar.

    places: the numbers of those documents that are wanted, by default all.
    """
    reuse_large_allocations()
    places = range(len(documents)) if places is None else places
    max_padding = PADDING if target.device.type == "cpu" else PADDING_OF_ACCELERATORS
    for batch in batches([len(documents[i]) for i in places], batch_tokens, max_padding):
        group = [places[n] for n in batch]
        lengths = [len(documents[i]) for i in group]
        ids = torch.zeros(len(group), lengths[0], dtype=torch.long)  # [B, L], longest first
        for row, i in enumerate(group):
            ids[row, : lengths[row]] = documents[i].ids
        reads = [teacher_rows(documents[i].mask) for i in group]  # bool [L] each
        doing = f"a forward pass over {ids.shape[0]} conversations of up to {ids.shape[1]:,} tokens"
        with spending(doing, SMALLER):
            tapped, final = target.states(ids, lengths, taps)  # [B, L, T*H], [B, L, H]
            picked = [final[row, : len(read)][read.to(final.device)] for row, read in enumerate(reads)]
            best, total = target.choices(torch.cat(picked))  # [R], [R]
        counts = [int(read.sum()) for read in reads]
        for row, (i, read, top1, logsumexp) in enumerate(
            zip(group, reads, best.split(counts), total.split(counts), strict=True)
        ):
            document, n = documents[i], lengths[row]
            buffer.put(
                i,
                ids=document.ids,
                mask=document.mask,
                taps=tapped[row, :n],
                final=final[row, :n],
                top1=torch.full((n,), NOT_READ, dtype=torch.int32).masked_scatter(read, top1),
                logsumexp=torch.zeros(n).masked_scatter(read, logsumexp),
            )
            advance(n)


def teacher_of_ends(ends: Ends, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's choice and logsumexp over all V ids, from its stored head alone: [R, H] -> (int32 [R], float32 [R]).

    In parts of the vocabulary, so that neither a float32 copy of the head (4.7 GB for 163,840 ids 7,168 wide) nor the
    logits over all ids are ever there.
    """
    best, total = BlockedHead(ends.head, ends.head_bias, ends.facts).greedy(final.float())
    assert total is not None
    return best.to(torch.int32).cpu(), total.cpu()


def store(document: Document, taps: torch.Tensor, final: torch.Tensor, ends: Ends, buffer: ShardBuffer, d: int) -> None:
    """Store document d of a shard, of which somebody else computed taps [L, T*H] and normed final states [L, H]."""
    read = teacher_rows(document.mask)
    top1, logsumexp = teacher_of_ends(ends, final[read.to(final.device)])
    n = len(document)
    buffer.put(
        d,
        ids=document.ids,
        mask=document.mask,
        taps=taps,
        final=final,
        top1=torch.full((n,), NOT_READ, dtype=torch.int32).masked_scatter(read, top1),
        logsumexp=torch.zeros(n).masked_scatter(read, logsumexp),
    )
