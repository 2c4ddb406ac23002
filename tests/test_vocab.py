"""VocabMap keeps its invariants, and refuses what is not offsets in words that help.   pytest -q tests/test_vocab.py"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import BadInput, EyasError
from eyas.vocab import VocabMap


@st.composite
def id_sets(draw: st.DrawFn) -> tuple[list[int], int]:
    """Ascending distinct target ids, and a target size."""
    size = draw(st.integers(1, 200))
    ids = draw(st.sets(st.integers(0, size - 1), min_size=1))
    return sorted(ids), size


@settings(max_examples=60, deadline=None)
@given(id_sets())
def test_every_constructor_gives_the_same_map(case: tuple[list[int], int]):
    ids, size = case
    made = VocabMap.from_absolute(ids, size)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[ids] = True
    counts = torch.zeros(size, dtype=torch.int64)
    counts[ids] = 3
    others = [
        VocabMap.from_offsets([t - i for i, t in enumerate(ids)], size, sure=True),
        VocabMap.from_t2d(mask),
        VocabMap.from_counts(counts, len(ids)),
    ]
    assert {m.digest() for m in others} == {made.digest()}
    assert made.ids.tolist() == ids == [i + int(o) for i, o in enumerate(made.d2t)]
    assert made.t2d.nonzero().flatten().tolist() == ids
    assert int(made.t2d.sum()) == made.size == len(ids)


@settings(max_examples=40, deadline=None)
@given(id_sets())
def test_to_draft_and_to_target_are_inverse(case: tuple[list[int], int]):
    ids, size = case
    made = VocabMap.from_absolute(ids, size)
    every = torch.arange(-2, size + 2).reshape(1, -1)
    draft = made.to_draft(every)
    assert draft.shape == every.shape
    assert draft.dtype == torch.int64
    expected = [ids.index(t) if t in ids else -1 for t in range(-2, size + 2)]
    assert draft.flatten().tolist() == expected
    assert made.to_target(draft[draft >= 0]).tolist() == ids


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.data())
def test_from_counts_takes_the_most_frequent_and_always_ids(counts: list[int], data: st.DataObject):
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    made = VocabMap.from_counts(torch.tensor(counts), size, always)
    inside = set(made.ids.tolist())
    assert len(inside) == size
    assert always <= inside
    free = inside - always
    worst = min(((counts[i], -i) for i in free), default=None)
    left = max(((counts[i], -i) for i in range(len(counts)) if i not in inside), default=None)
    assert worst is None or left is None or worst > left  # more frequent first, of equals the lower id
    assert made.recut(len(counts)).size == len(counts)
    assert always <= set(made.recut(size).ids.tolist())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.data())
def test_ties_go_to_the_lowest_ids(counts: list[int], data: st.DataObject):
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=min(3, size)))
    ranked = sorted(range(len(counts)), key=lambda i: (i not in always, -counts[i], i))
    assert VocabMap.from_counts(torch.tensor(counts), size, always).ids.tolist() == sorted(ranked[:size])


def test_zeros_at_the_start_are_valid_offsets():
    """A d2t whose first 20 entries are zero was once taken for a broken file. It is right: those ids coincide."""
    target, size = 32000, 1500
    ids = torch.cat([torch.arange(900), torch.arange(900, 900 + 787 * 2)[787 - 100 :][: size - 900]])
    ids[1000:] = torch.arange(1787, 1787 + 500)
    made = VocabMap.from_offsets(ids - torch.arange(size), target)
    assert made.d2t[:20].tolist() == [0] * 20
    assert int(made.d2t[1000]) == 787
    assert int(made.to_target(torch.tensor(1000))) == 1787
    assert made.to_target(torch.arange(20)).tolist() == list(range(20))


def test_absolute_ids_passed_as_offsets_are_called_by_their_name():
    out_of_range = [0, 1, 3, 4, 7, 9, 12, 15]
    with pytest.raises(BadInput, match=r"absolute target ids, not offsets.*draft id 7 would be target id 7 \+ 15 = 22"):
        VocabMap.from_offsets(out_of_range, 16)
    # Read as offsets these stay within the target, so no range check can find them; that none repeats gives them away.
    low = torch.arange(0, 40) + (torch.arange(40) > 20)
    with pytest.raises(BadInput, match=r"look like absolute target ids.*from_absolute"):
        VocabMap.from_offsets(low, 49152)
    assert VocabMap.from_offsets(low, 49152, sure=True).ids[:3].tolist() == [0, 2, 4]
    with pytest.raises(BadInput, match="absolute"):
        VocabMap.from_offsets(torch.arange(32000), 128256)  # identity written as ids: id i would become 2i


@pytest.mark.parametrize(
    ("offsets", "size", "words"),
    [
        ([0, -1], 9, "draft ids 0 and 1 would be the same target id"),
        ([4, 0], 9, "out of order"),
        ([0, 9], 9, "draft id 1 would be target id 10, but the target's ids run from 0 to 8"),
        ([-1], 9, "would be target id -1"),
        ([], 9, "0 ids does not fit"),
        ([0, 0, 0], 2, "3 ids does not fit a target vocabulary of 2"),
        ([0.5], 9, "whole numbers"),
    ],
)
def test_what_is_no_map_is_refused(offsets: list[int], size: int, words: str):
    with pytest.raises(BadInput, match=words):
        VocabMap.from_offsets(offsets, size)


def test_bad_sizes_ids_and_counts_are_refused():
    counts = torch.tensor([5, 0, 2])
    for size, always, words in [
        (0, [], "expected 1 to 3"),
        (4, [], "expected 1 to 3"),
        (1, [0, 2], "2 ids must always"),
    ]:
        with pytest.raises(BadInput, match=words):
            VocabMap.from_counts(counts, size, always)
    with pytest.raises(BadInput, match=r"ids \[7\] cannot be in the map"):
        VocabMap.from_counts(counts, 2, [7])
    with pytest.raises(BadInput, match="never negative"):
        VocabMap.from_counts(torch.tensor([1, -1]), 1)
    with pytest.raises(BadInput, match="counts of 2 ids, but the target has 3"):
        VocabMap.identity(3).coverage(torch.tensor([1, 1]))
    with pytest.raises(BadInput, match="all zero"):
        VocabMap.identity(3).coverage(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(BadInput, match="keeps no counts"):
        VocabMap.identity(3).recut(2)
    with pytest.raises(IndexError):
        VocabMap.identity(3).to_target(torch.tensor([-1]))


def test_coverage_is_the_share_of_tokens():
    made = VocabMap.from_absolute([0, 2], 4)
    assert made.coverage(torch.tensor([1, 5, 2, 0])) == 3 / 8


def test_saved_and_loaded_it_is_the_same_map(tmp_path: Path):
    made = VocabMap.from_counts(torch.tensor([4, 0, 9, 1, 1]), 3, always=[3])
    made.save(tmp_path / "vocab.safetensors")
    for path in (tmp_path, tmp_path / "vocab.safetensors"):
        back = VocabMap.load(path)
        assert back.digest() == made.digest()
        assert back.counts is not None
        assert back.counts.tolist() == [4, 0, 9, 1, 1]
        assert back.always == (3,)
    assert VocabMap.load(tmp_path).recut(4).ids.tolist() == [0, 2, 3, 4]


def test_a_damaged_or_contradictory_file_is_refused(tmp_path: Path):
    from safetensors.torch import save_file

    path = tmp_path / "vocab.safetensors"
    mask = torch.tensor([True, False, True, True])
    save_file({"d2t": torch.tensor([0, 1, 1]), "t2d": mask}, path)
    assert VocabMap.load(path).ids.tolist() == [0, 2, 3]
    save_file({"d2t": torch.tensor([0, 0, 0]), "t2d": mask}, path)
    with pytest.raises(BadInput, match="contradict"):
        VocabMap.load(path)
    save_file({"d2t": torch.tensor([0, 2, 3]), "t2d": mask}, path)
    with pytest.raises(BadInput, match="absolute target ids, not offsets"):
        VocabMap.load(path)
    save_file({"d2t": torch.tensor([0, 1, 1])}, path)
    with pytest.raises(BadInput, match="t2d missing"):
        VocabMap.load(path)
    path.write_bytes(b"\0" * 40)
    with pytest.raises(EyasError, match="cannot be read as safetensors"):
        VocabMap.load(path)
    path.unlink()
    with pytest.raises(BadInput, match="is missing"):
        VocabMap.load(path)
