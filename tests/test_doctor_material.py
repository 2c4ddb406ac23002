"""Which rows are judged, what they are judged by, and how long the text is the target's own: against loops over tokens.

pytest -q tests/test_doctor_material.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doctoring import make_patient
from eyas.decode.replay import rounds, walk_rounds
from eyas.doctor.material import Material
from eyas.draft.directory import PROBE
from eyas.draft.probe import ProbeAnswers, ProbeInputs, write_probe
from eyas.errors import BadInput
from eyas.features.layout import NOT_READ
from eyas.features.reader import FeatureSet
from test_features_layout import write_set

TOKEN = st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from([NOT_READ, 0, 1, 2]))  # supervised, id, choice
TEXTS = st.lists(st.lists(TOKEN, min_size=1, max_size=9), min_size=1, max_size=5)


def material(documents: list[list[tuple[bool, int, int]]]) -> Material:
    tokens = [token for document in documents for token in document]
    mask, ids, choice = (torch.tensor([t[i] for t in tokens]) for i in range(3))
    offsets = torch.tensor([0, *map(len, documents)]).cumsum(0)
    return Material(ids, offsets, mask, choice, {0: torch.arange(len(tokens)).float()[:, None]}, "")


@given(TEXTS, st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_judged_rows_have_their_tokens_supervised_in_one_document(documents, steps):
    expected = [
        all(i + j < len(document) and document[i + j][0] for j in range(1, 2 + steps))
        for document in documents
        for i in range(len(document))
    ]
    made = material(documents)
    assert made.judged(steps).tolist() == expected
    assert made.positions == int(made.judged(1).sum())


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_a_run_ends_where_the_target_would_have_said_something_else(documents):
    expected = []
    for document in documents:
        for i in range(len(document)):
            n = 0
            while i + 1 + n < len(document):
                supervised, token, _ = document[i + 1 + n]
                chosen = document[i + n][2]
                if not supervised or chosen not in (token, NOT_READ):
                    break
                n += 1
            expected.append(n)
    assert material(documents).run.tolist() == expected


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_the_label_is_the_choice_and_the_token_where_nobody_was_asked(documents):
    made = material(documents)
    at = torch.arange(1, len(made.ids))
    for ahead in (0, 1, 2):
        rows = at[at + ahead < len(made.ids)]
        for row, label in zip(rows.tolist(), made.label(rows, ahead).tolist(), strict=True):
            chosen = int(made.choice[row + ahead - 1])
            assert label == (int(made.ids[row + ahead]) if chosen == NOT_READ else chosen)
    asked = [
        (int(made.choice[i - 1]), int(made.ids[i]))
        for i in range(1, len(made.ids))
        if made.mask[i] and made.choice[i - 1] != NOT_READ
    ]
    share = sum(a == b for a, b in asked) / len(asked) if asked else math.nan
    assert made.share_own == pytest.approx(share, nan_ok=True)


@given(TEXTS, st.integers(1, 3), st.integers(0, 1 << 20))
@settings(max_examples=100, deadline=None)
def test_rounds_are_walked_as_a_server_walks_them(documents, steps, seed):
    run = material(documents).run
    accepted = torch.randint(0, steps + 1, run.shape, generator=torch.Generator().manual_seed(seed))
    expected = []
    row = 0
    while row < len(run):
        if run[row] < 2:
            row += 1
            continue
        end = row + int(run[row])  # the turn's last token
        while end - row >= steps + 1:
            n = int(accepted[row])
            expected.append((row, n))
            row += n + 1
        row = end  # no turn begins in another one's rest
    begun, taken = rounds(accepted, run, steps)
    assert sorted(zip(begun.tolist(), taken.tolist(), strict=True)) == expected
    assert walk_rounds(accepted, run, steps).tolist() == [[n for _, n in expected].count(n) for n in range(steps + 1)]


def test_some_documents_alone():
    whole = make_patient(text={"documents": 5, "length": 12}).material
    part = whole.first([1, 4])
    rows = torch.cat([torch.arange(12, 24), torch.arange(48, 60)])
    assert part.offsets.tolist() == [0, 12, 24] and part.documents == 2
    assert set(part.states) == set(whole.states)
    for mine, theirs in (
        (part.ids, whole.ids), (part.mask, whole.mask), (part.choice, whole.choice), (part.states[3], whole.states[3]),
        (part.run, whole.run), (part.judged(2), whole.judged(2)),
    ):  # fmt: skip
        assert torch.equal(mine, theirs[rows])


# ---------------------------------------------------------------- where it comes from


def test_features_become_material(tmp_path: Path):
    docs, _ = write_set(tmp_path)
    made = Material.of_features(FeatureSet.open(tmp_path))
    assert made.offsets.diff().tolist() == [5, 9, 3, 7, 11] and made.final_tap == 6
    assert made.ids.dtype == made.choice.dtype == torch.int64 and made.mask.dtype == torch.bool
    for name, mine in (("ids", made.ids), ("mask", made.mask), ("top1", made.choice)):
        assert mine.tolist() == [int(x) for d in docs for x in d[name]]
    assert list(made.states) == [1, 2, 4]
    taps = torch.cat([d["taps"] for d in docs])
    assert torch.equal(torch.cat([made.states[t] for t in (1, 2, 4)], -1), taps)
    few = Material.of_features(FeatureSet.open(tmp_path), most=14)
    assert few.offsets.diff().tolist() == [5, 11]  # spread over the folder: its first and its last document


@dataclass
class Probed:
    folder: Path
    inputs: ProbeInputs


@pytest.fixture
def probed(tmp_path: Path) -> Probed:
    ids = torch.tensor([7, 3, 7, 9, 4, 3, 5, 5])
    needed = ids.unique()
    inputs = ProbeInputs(ids, torch.tensor([0, 5, 8]), torch.randn(8, 12), needed, torch.randn(len(needed), 4))
    answers = ProbeAnswers(torch.tensor([0]), torch.zeros(5, 1, dtype=torch.int32), torch.zeros(5, 1))
    (tmp_path / PROBE).parent.mkdir()
    write_probe(tmp_path, inputs, answers)
    return Probed(tmp_path, inputs)


def test_a_probe_becomes_material(probed: Probed):
    made = Material.of_probe(probed.folder, (2, 4, 5))
    assert torch.equal(made.ids, probed.inputs.ids) and made.offsets.tolist() == [0, 5, 8]
    assert torch.equal(torch.cat([made.states[t] for t in (2, 4, 5)], -1), probed.inputs.taps)
    assert made.judged(1).tolist() == [True, True, True, False, False, True, False, False]
    assert made.label(torch.tensor([0, 1]), 2).tolist() == [7, 9]
    assert made.embedding is not None and made.embedding[0].tolist() == [3, 4, 5, 7, 9]
    assert torch.equal(made.embedding[1], probed.inputs.embedding_rows)
    assert math.isnan(made.share_own)  # nobody asked the target
    assert made.run.tolist() == [0] * 8, "a draft may say what has no embedding here"
    with pytest.raises(BadInput, match="another number of taps than 5"):
        Material.of_probe(probed.folder, (1, 2, 3, 4, 5))
