"""Predicted accept length: chains on the draft's own tokens, and rounds walked as a server walks them.

pytest -q tests/test_decode_replay.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.decode.acceptance import Acceptance
from eyas.decode.replay import accepted_per_row, walk_rounds
from eyas.draft.unroll import Packing
from test_draft_model import make, naive
from test_train_objective import batch_of

IDS = torch.arange(0, 40, 2)  # target ids of the 20 draft ids: odd ids and those from 40 on cannot be drafted


def asked(b, draft, k):
    return accepted_per_row(draft, b.ids, b.aux, b.run, b.packing, IDS, k)


@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True, "norm_output": True}, {"norm_before_residual": True}])
def test_chains_against_a_loop_over_rows(flags):
    """One row at a time on the naive float64 model, on a text that partly is what the draft itself says."""
    draft, k = make(flags), 3
    model = naive(draft)
    b = batch_of([12, 3, 9], [0, 0, *([1] * 10), 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1])
    for start, end, row, said in ((0, 12, 1, 3), (0, 12, 5, 2), (15, 24, 15, 1)):
        tokens = [int(b.ids[row + 1])]  # the text after x_{row+1}: `said` tokens of the draft's own, then another one
        for step in range(said):
            h = model.unroll(b.ids[start:end].tolist(), b.aux[start:end], row - start, tokens)[step]
            tokens.append(int(IDS[int(model.logits(h).argmax())]))
        b.ids[row + 2 : row + 3 + said] = torch.tensor([*tokens[1:], 49])
    got = asked(b, draft, k)
    expected = torch.zeros_like(got)
    for row in (b.run >= 2).nonzero().flatten().tolist():
        start, end = next((s, e) for s, e in ((0, 12), (12, 15), (15, 24)) if s <= row < e)
        tokens = [int(b.ids[row + 1])]
        for step in range(k):
            outputs = model.unroll(b.ids[start:end].tolist(), b.aux[start:end], row - start, tokens)
            drafted = int(IDS[int(model.logits(outputs[step]).argmax())])
            if int(b.run[row]) < step + 2 or drafted != int(b.ids[row + 2 + step]):
                break
            expected[row] += 1
            tokens.append(drafted)
    assert got.tolist() == expected.tolist()
    assert expected[[1, 5, 15]].tolist() == [3, 2, 1]


def constant(b, draft, token):
    """Make `draft` say draft id `token` whatever it reads."""
    with torch.no_grad():
        for p in (draft.midlayer.self_attn.o_proj.weight, draft.midlayer.mlp.down_proj.weight, draft.lm_head.weight):
            p.zero_()
        draft.norm.weight.fill_(1)
        b.aux[:] = b.aux[0]
        draft.lm_head.weight[token] = draft.fuse(b.aux[0])
    return draft


def test_a_draft_that_always_says_the_recorded_text_reaches_k_plus_one():
    k = 4
    b = batch_of([3, 20, 9], [0, 1, 1, 0, 0, 0, *([1] * 17), 0, 0, *([1] * 7)])
    draft = constant(b, make(), token=3)
    b.ids[:] = IDS[3]
    histogram = walk_rounds(asked(b, draft, k), b.run, k)
    assert Acceptance(tuple(histogram.tolist())).tau == k + 1
    # Turn of 17 from row 2: run 17, 12, 7, 2; turn of 7: run 7, 2; the turn of 2 fills no round.
    assert histogram.tolist() == [0, 0, 0, 0, 4]
    b.ids[10] = IDS[3] + 1  # one token, outside the draft vocabulary, breaks the chains that reach it
    at = 3  # the second document starts here: row 5 is the one before its answer
    lengths = asked(b, draft, k)
    assert lengths[at + 2 : at + 8].tolist() == [3, 2, 1, 0, 4, 4]
    assert walk_rounds(lengths, b.run, k).tolist() == [0, 0, 0, 1, 3]


def test_nothing_supervised_asks_nothing():
    b = batch_of([5], [0, 0, 0, 0, 1])
    assert asked(b, make(), 3).tolist() == [0] * 5
    assert walk_rounds(torch.zeros(5, dtype=torch.int64), b.run, 3).tolist() == [0, 0, 0, 0]


def test_rounds_of_a_turn_worked_by_hand():
    """Nine tokens x_1 .. x_9 are supervised, K = 2. Row 0 accepts 2 -> row 3 accepts 0 -> row 4 accepts 1 -> row 6,
    which three tokens follow, accepts 0 -> row 7 has too few left."""
    run = torch.tensor([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    accepted = torch.tensor([2, 9, 9, 0, 1, 9, 0, 9, 9, 9])  # nines: rows where no round begins
    assert walk_rounds(accepted, run, 2).tolist() == [2, 1, 1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_rounds_against_a_loop_over_turns(documents, steps, data):
    mask = [int(x) for document in documents for x in document]
    b = batch_of([len(d) for d in documents], mask)
    accepted = data.draw(st.lists(st.integers(0, steps), min_size=len(mask), max_size=len(mask)))
    expected, start = [0] * (steps + 1), 0
    for document in documents:
        j = 0
        while j < len(document):
            if not document[j]:
                j += 1
                continue
            end = next((e for e in range(j, len(document)) if not document[e]), len(document))  # turn [j, end)
            row = j - 1 if j else j  # the row before it; a document's first token has none before it
            while end - (row + 1) >= steps + 1:
                expected[accepted[start + row]] += 1
                row += accepted[start + row] + 1
            j = end
        start += len(document)
    assert walk_rounds(torch.tensor(accepted), b.run, steps).tolist() == expected


def test_a_row_whose_chain_broke_does_not_disturb_the_others():
    """Rows are dropped when they fail; those that go on must be as if they had been alone."""
    draft = make()
    b = batch_of([12], [0, *[1] * 11])
    together = asked(b, draft, 3)
    for row in range(9):
        alone = torch.zeros_like(b.run)
        alone[row] = b.run[row]
        one = accepted_per_row(draft, b.ids, b.aux, alone, Packing(torch.tensor([0, 12])), IDS, 3)
        assert int(one[row]) == int(together[row])
