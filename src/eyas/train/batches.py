"""Which documents are packed together, and when: a pure function of lengths, seed and epoch.

Documents of like length share a batch, so that attention, which is laid out per document, wastes little; batches come
in random order. Nothing here depends on how far a run has come, so a resumed run sees the same batches.
    Exercise it:  pytest tests/test_train_batches.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..draft.unroll import Packing
from ..features.reader import FeatureSet
from .objective import Batch, run_lengths, weights_of_runs

WINDOW = 256  # documents sorted by length together: enough to match lengths, few enough to keep the order random


def plan_epoch(lengths: np.ndarray, tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of document numbers, each of at most `tokens` tokens unless one document alone is longer.

    lengths int64 [docs]. Every document appears exactly once.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    batches: list[list[int]] = []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        batches += _cut(window[np.argsort(lengths[window], kind="stable")].tolist(), lengths, tokens)
    rng.shuffle(batches)
    return batches


def plan_steps(lengths: np.ndarray, tokens: int, micro_tokens: int, seed: int) -> Iterator[list[list[int]]]:
    """Optimizer steps without end: each a list of micro-batches of together at most `tokens` tokens (or one batch)."""
    for epoch in itertools.count():
        step: list[list[int]] = []
        size = 0
        for batch in plan_epoch(lengths, min(micro_tokens, tokens), seed, epoch):
            here = int(lengths[batch].sum())
            if step and size + here > tokens:
                yield step
                step, size = [], 0
            step.append(batch)
            size += here
        if step:
            yield step


def steps_in(lengths: np.ndarray, tokens: int, micro_tokens: int, seed: int, epochs: float) -> int:
    """Optimizer steps in `epochs` passes over the documents, at least 1."""
    total, steps = epochs * int(lengths.sum()), 0
    seen = 0
    for step in plan_steps(lengths, tokens, micro_tokens, seed):
        if seen >= total:
            break
        seen += sum(int(lengths[batch].sum()) for batch in step)
        steps += 1
    return max(1, steps)


def share_step(step: list[list[int]], lengths: np.ndarray, micro_tokens: int, rank: int, world: int) -> list[list[int]]:
    """The micro-batches of one of `world` processes; all have equally many, of which some may be empty.

    A step holds the same documents however many share it. The longest are dealt first, each to whom has least.
    """
    if world == 1:
        return step
    docs = sorted((doc for batch in step for doc in batch), key=lambda doc: (-int(lengths[doc]), doc))
    shares: list[list[int]] = [[] for _ in range(world)]
    held = [0] * world
    for doc in docs:
        least = min(range(world), key=held.__getitem__)
        shares[least].append(doc)
        held[least] += int(lengths[doc])
    cut = [_cut(share[::-1], lengths, micro_tokens) for share in shares]
    most = max(map(len, cut))
    return cut[rank] + [[] for _ in range(most - len(cut[rank]))]


def _cut(docs: Sequence[int], lengths: np.ndarray, tokens: int) -> list[list[int]]:
    """Batches in the given order, each of at most `tokens` tokens unless one document alone is longer."""
    batches: list[list[int]] = []
    size = 0
    for doc in docs:
        if not batches or size + int(lengths[doc]) > tokens:
            batches.append([])
            size = 0
        batches[-1].append(doc)
        size += int(lengths[doc])
    return batches


def supervised_rows(features: FeatureSet, docs: Sequence[int], steps: int) -> torch.Tensor:
    """sum_i w(i,k) over documents for k < steps, float64 [steps], from their masks alone."""
    masks = [features.document(doc)["mask"] for doc in docs]
    if not masks:
        return torch.zeros(steps, dtype=torch.float64)
    offsets = torch.tensor([0, *map(len, masks)]).cumsum(0)
    runs = run_lengths(torch.cat(masks), offsets)
    runs[offsets[:-1]] = 0  # no row comes before a document's first token
    return weights_of_runs(runs, steps)


def make_batch(
    features: FeatureSet, docs: Sequence[int], device: torch.device | str = "cpu", multiple: int = 1
) -> Batch:
    """Pack documents into one Batch on `device`; states stay in the dtype in which they are stored.

    Its length is padded to a multiple of `multiple` with a document of which nothing is supervised.
    """
    parts = [features.document(doc) for doc in docs]
    lengths = [len(part["ids"]) for part in parts]
    if padding := -sum(lengths) % multiple:
        parts.append({name: x.new_zeros(padding, *x.shape[1:]) for name, x in parts[0].items()})
        lengths.append(padding)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    on_cuda = torch.device(device).type == "cuda"

    def pack(name: str) -> torch.Tensor:
        packed = torch.cat([part[name] for part in parts])  # [N, ...], a copy: the parts are maps of files
        # Only a copy from pinned memory runs beside the computation.
        return packed.pin_memory().to(device, non_blocking=True) if on_cuda else packed.to(device)

    return Batch(
        ids=pack("ids").long(),
        mask=pack("mask"),
        aux=pack("taps"),
        final=pack("final"),
        logsumexp=pack("logsumexp"),
        top1=pack("top1").long(),
        packing=Packing(offsets.to(device), multiple),
    )
