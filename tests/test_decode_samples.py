"""Kept rounds are those that were decoded: drafts, what was accepted of them, the target's own token, cut-off ends.

pytest -q tests/test_decode_samples.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.decode.answers import decode
from eyas.decode.cases import Case
from eyas.decode.samples import sample
from eyas.decode.talk import rounds
from eyas.decode.tree import make_drafter
from eyas.target.model import Target
from fitting import fitted_draft, greedy_texts

PROMPTS = [[5, 17, 40, 8, 99, 3], [7, 9]]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target)


@pytest.fixture(scope="module")
def draft(target: Target):
    return fitted_draft(target, PROMPTS[:1], greedy_texts(target, PROMPTS[:1]))


def case_of(target: Target, drafter, place: int = 0, length: int = 21) -> Case:
    answer = decode(target, PROMPTS, drafter, k=3, max_new_tokens=length).answers[place]
    return Case("s", place, PROMPTS[place], speculative=answer)


@pytest.mark.parametrize("place", [0, 1])
def test_rounds_are_those_that_were_decoded(target: Target, draft, place: int):
    drafter = make_drafter(*draft, 3)
    case = case_of(target, drafter, place)
    kept = sample(target.tokenizer, drafter, case)
    looked = list(rounds(target, case.ids, drafter, k=3, max_new_tokens=21))[1:]
    assert [[guess.token for guess in r.look.guesses] for r in looked] == case.speculative.drafted
    assert any(r["accepted"] for r in kept["rounds"]) if place == 0 else True
    for r, seen in zip(kept["rounds"], looked, strict=True):
        assert len(r["drafted"]) == 3
        assert r["drafted"][: len(r["accepted"])] == r["accepted"]
        assert (len(r["accepted"]) + (r["own"] is not None)) == len(seen.tokens)
        if r["own"] is not None:
            assert r["known"] == seen.look.token_known


def test_texts_are_those_of_the_answer(target: Target, draft):
    drafter = make_drafter(*draft, 3)
    case = case_of(target, drafter)
    kept = sample(target.tokenizer, drafter, case)
    whole = kept["first"] + "".join("".join(r["said"]) for r in kept["rounds"])
    assert whole == target.tokenizer.decode(case.speculative.tokens), "characters of several tokens are whole"
    assert kept["prompt"] == target.tokenizer.decode(case.ids)


def test_an_answer_that_ends_within_a_round(target: Target, draft):
    drafter = make_drafter(*draft, 3)
    ends = case_of(target, drafter).speculative.ends
    inside = next(b - 1 for a, b in zip([1, *ends], ends, strict=False) if b - a > 1)
    kept = sample(target.tokenizer, drafter, case_of(target, drafter, length=inside))
    last = kept["rounds"][-1]
    assert last["own"] is None and last["known"] is None
    assert last["accepted"]


def test_of_a_tree_the_accepted_path_is_kept(target: Target, draft):
    drafter = make_drafter(*draft, 3, topk=2, nodes=5)
    kept = sample(target.tokenizer, drafter, case_of(target, drafter))
    assert all(r["drafted"] is None for r in kept["rounds"])
    assert any(r["accepted"] for r in kept["rounds"])
