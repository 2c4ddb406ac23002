"""Batches: every document once an epoch, bounded, the same for everyone who asks again.

pytest -q tests/test_train_batches.py
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.machine import round_up
from eyas.train.batches import make_batch, plan_epoch, plan_steps, steps_in
from training import Material, material

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=600).map(lambda x: np.array(x, dtype=np.int64))


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(1, 200), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_holds_every_document_once_in_bounded_batches(lengths, tokens, seed, epoch):
    batches = plan_epoch(lengths, tokens, seed, epoch)
    assert sorted(doc for batch in batches for doc in batch) == list(range(len(lengths)))
    assert all(batch for batch in batches)
    assert all(lengths[batch].sum() <= tokens or len(batch) == 1 for batch in batches)
    assert plan_epoch(lengths, tokens, seed, epoch) == batches


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.integers(1, 300), st.integers(1, 300))
def test_steps_hold_every_document_once_an_epoch_and_count_as_they_run(lengths, tokens, micro):
    n = steps_in(lengths, tokens, micro, seed=1, epochs=2.0)
    steps = list(islice(plan_steps(lengths, tokens, micro, seed=1), n))
    assert sorted(d for step in steps for batch in step for d in batch) == sorted([*range(len(lengths))] * 2)
    for step in steps:
        size = sum(int(lengths[batch].sum()) for batch in step)
        assert size <= tokens or (len(step) == 1 and len(step[0]) == 1)
        assert all(lengths[batch].sum() <= min(micro, tokens) or len(batch) == 1 for batch in step)
    assert steps == list(islice(plan_steps(lengths, tokens, micro, seed=1), n))
    assert steps_in(lengths, tokens, micro, seed=1, epochs=1e-9) == 1


def test_epochs_and_seeds_differ_and_lengths_are_matched():
    lengths = np.random.default_rng(0).integers(5, 500, size=1000)
    first, second = plan_epoch(lengths, 2000, 0, 0), plan_epoch(lengths, 2000, 0, 1)
    assert first != second
    assert plan_epoch(lengths, 2000, 1, 0) != first
    packed = sum(int(lengths[b].max()) * len(b) for b in first)  # what attention lays out, padding included
    assert packed < 1.1 * lengths.sum()
    sizes = [float(np.mean(lengths[b])) for b in first]
    assert abs(np.corrcoef(sizes, range(len(sizes)))[0, 1]) < 0.3, "short and long come in random order"


@pytest.fixture(scope="module")
def m(tiny_target, tmp_path_factory) -> Material:
    return material(tiny_target, tmp_path_factory)


def test_a_batch_is_its_documents_one_after_the_other(m):
    docs = [4, 1, 7]
    batch = make_batch(m.features, docs)
    parts = [m.features.document(doc) for doc in docs]
    assert batch.packing.offsets.tolist() == np.cumsum([0, *(len(p["ids"]) for p in parts)]).tolist()
    for b, part in enumerate(parts):
        here = slice(*batch.packing.offsets[b : b + 2].tolist())
        for name, tensor in (("ids", batch.ids), ("mask", batch.mask), ("taps", batch.aux), ("final", batch.final),
                             ("logsumexp", batch.logsumexp), ("top1", batch.top1)):  # fmt: skip
            assert torch.equal(tensor[here].to(part[name].dtype), part[name]), name
        assert set(batch.packing.document[here].tolist()) == {b}
        assert batch.packing.position[here].tolist() == list(range(len(part["ids"])))
    assert batch.ids.dtype == batch.top1.dtype == torch.int64
    assert batch.aux.dtype == torch.bfloat16
    padded, n = make_batch(m.features, docs, multiple=64), len(batch.ids)
    assert len(padded.ids) == round_up(n, 64) and padded.packing.multiple == 64
    assert all(torch.equal(getattr(padded, x)[:n], getattr(batch, x)) for x in ("ids", "mask", "aux", "final", "run"))
    assert not padded.run[n:].any()
    batch.ids.zero_()
    assert m.features.document(4)["ids"].any(), "a batch is a copy"
