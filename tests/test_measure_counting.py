"""Rounds of one answer from what each engine says of it, and what is predicted counted alike.

pytest -q tests/test_measure_counting.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eyas.decode.acceptance import Acceptance
from eyas.measure.counting import (
    FITTING,
    GROUPS,
    OF,
    SERVER,
    WHOLE,
    Rounds,
    all_rounds,
    fitting,
    in_all,
    rounds_of,
)  # fmt: skip
from eyas.serve.client import Reply
from fake_engines import K, groups, rounds, sglang_counts, timings, tokens, vllm_counts

IDS, LIMIT = [1, 2, 5], 40
ENGINES = ("vllm", "sglang", "llamacpp", "openvino")


def said(engine: str, accepted: Sequence[int], n: int) -> dict[str, Any]:
    """What the engine says of an answer of n tokens."""
    if engine == "vllm":
        return vllm_counts(accepted)
    if engine == "sglang":
        return sglang_counts(accepted, n) if accepted else {}
    if engine == "llamacpp":
        return timings(n, accepted)
    return {"predicted_n": n, "draft_n": K * len(accepted), "draft_n_accepted": sum(accepted), "rounds": len(accepted)}


def reply(parts: Sequence[Sequence[int]], counts: dict[str, Any]) -> Reply:
    chunks = [(0.1 * i, len(part)) for i, part in enumerate(parts)]
    return Reply([token for part in parts for token in part], chunks, counts, "length", 1.0)


def replied(engine: str, ids: Sequence[int] = IDS, limit: int = LIMIT) -> tuple[Reply, list[int]]:
    accepted = rounds(ids, limit, engine)
    return reply(groups(ids, limit, accepted), said(engine, accepted, limit)), accepted


# ---------------------------------------------------------------- what is said


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("limit", [2, 3, 17, LIMIT])
def test_each_engine_s_counts_give_its_rounds(engine: str, limit: int):
    for first in range(7):
        one, accepted = replied(engine, [first], limit)
        (found,) = all_rounds(engine, [one]) if sum(accepted) or engine != "llamacpp" else [None]
        if found is None:
            continue
        assert (found.rounds, found.accepted) == (len(accepted), sum(accepted)), "the last, cut one too"
        assert (found.rule, found.source, found.guessed) == (OF[engine], SERVER, False)
        if engine in ("vllm", "sglang"):
            assert found.each == tuple(accepted) and found.steps == K
            assert in_all([found], K)["unconditional"] == pytest.approx(
                Acceptance.of(accepted, K).unconditional, abs=1e-4
            )


def test_the_answer_seen_of_vllm_whose_events_were_merged():
    """48 tokens in 34 events, [4] being three rounds of which none accepted: the counts know, the events do not."""
    sizes = [1, 1, 1, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 2, 1, 2, 2, 2, 3, 1, 1, 3, 1, 1, 2, 1, 3, 1, 1, 1, 1, 1, 1, 1]
    each = [0] * 9 + [1, 0, 0, 0, 0, 1, 0, 1, 1, 1, 2, 0, 0, 2, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0]
    parts = [[7] * n for n in sizes]
    told = rounds_of("vllm", reply(parts, vllm_counts(each)))
    assert told is not None and (told.rounds, told.accepted, told.each) == (35, 12, tuple(each))
    summary = rounds_of("vllm", reply(parts, vllm_counts(each, level="summary")))
    assert summary is not None and (summary.rounds, summary.each) == (35, ()), "events are no rounds here"
    guessed = rounds_of("vllm", reply(parts, {}))
    assert guessed is not None and guessed.guessed and guessed.source == GROUPS
    assert (guessed.rounds, guessed.accepted) == (33, 14), "fewer rounds, and more accepted, than there were"
    all_ = in_all([guessed], K)
    assert all_["at_most"] and all_["tau"] > in_all([told], K)["tau"] and not in_all([told], K)["at_most"]


@given(st.lists(st.integers(0, K), min_size=1, max_size=30), st.data())
def test_groups_give_a_bound_however_events_are_merged(accepted: list[int], data: st.DataObject):
    limit = 1 + sum(n + 1 for n in accepted)
    parts = groups(IDS, limit, accepted)
    merged: list[list[int]] = []
    for place, part in enumerate(parts):
        if place > 1 and data.draw(st.booleans()):
            merged[-1] = merged[-1] + part
        else:
            merged.append(part)
    found = rounds_of("sglang", reply(merged, {}))
    assert found is not None and found.guessed
    assert found.rounds <= len(accepted) and found.accepted >= sum(accepted)
    assert (found.rounds == len(accepted)) == (merged == parts)
    many = in_all([found], K)
    assert (many["unconditional"] == []) == (max(found.each) > K), "more than k at once was several rounds"


@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_of_one_token_has_no_round(engine: str):
    """SGLang, llama.cpp: nothing is said of it; it must not make the others' counts unknown."""
    one = reply([[5]], said(engine, [], 1))
    other, accepted = replied(engine)
    found = all_rounds(engine, [one, other])
    assert found[0] is not None and (found[0].rounds, found[0].accepted) == (0, 0)
    both = in_all([r for r in found if r is not None], K)
    assert both["rounds"] == len(accepted) and both["rule"] == OF[engine]
    assert in_all([found[0]], K)["tau"] is None


def test_an_answer_of_half_a_character_has_no_round():
    assert rounds_of("llamacpp", Reply([], [], timings(1, None), "length", 1.0, lost=1)) is not None


def test_an_answer_for_which_llama_cpp_drafted_nothing():
    """It says no draft_n then; beside others that have one it is an answer of rounds without drafts."""
    nothing = reply([[5], [6]], timings(2, [0]))
    assert "draft_n" not in nothing.counts
    drafted, accepted = replied("llamacpp")
    found = all_rounds("llamacpp", [nothing, drafted])
    assert [(r.rounds, r.accepted) for r in found if r] == [(1, 0), (len(accepted), sum(accepted))]
    assert all_rounds("llamacpp", [nothing, nothing]) == [None, None], (
        "a server without a draft accepts nothing, not 1.0"
    )


def test_openvino_leaves_the_last_round_out_of_accepted_and_drafted():
    """As it was heard of an answer of which everything is accepted: thirteen rounds of five tokens."""
    counts = {"predicted_n": 66, "draft_n": 48, "draft_n_accepted": 48, "rounds": 13}
    groups = [tokens(IDS, 66)[:1], *(tokens(IDS, 66)[i : i + 5] for i in range(1, 66, 5))]
    found = rounds_of("openvino", reply(groups, counts))
    assert found is not None and (found.rounds, found.accepted, found.each) == (13, 52, (4,) * 13)


@pytest.mark.parametrize("engine", ["llamacpp", "openvino"])
def test_token_by_token_tells_no_rounds(engine: str):
    assert rounds_of(engine, reply([[t] for t in tokens(IDS, 9)], {})) is None


@pytest.mark.parametrize(
    ("engine", "change"),
    [
        ("vllm", {"num_accepted_draft_tokens": 10**6}), ("vllm", {"num_spec_steps": 0}),
        ("vllm", {"num_spec_steps": -3}),
        ("vllm", {"num_spec_steps": "31"}), ("vllm", {"num_spec_steps": 31.0}), ("vllm", {"num_spec_steps": True}),
        ("vllm", {"num_spec_steps": 10**30}), ("vllm", {"num_accepted_draft_tokens": None}),
        ("sglang", {"spec_num_correct_drafts": 10**6}), ("sglang", {"spec_verify_ct": 0}),
        ("sglang", {"spec_num_correct_drafts": "9"}),
    ],
    ids=str,
)  # fmt: skip
def test_counts_that_cannot_be_are_not_believed(engine: str, change: dict[str, Any]):
    one, accepted = replied(engine)
    one.counts |= change
    found = rounds_of(engine, one)
    assert found is not None and found.source == GROUPS and found.rounds == len(accepted)
    one.chunks = [(0.1, LIMIT)]  # all at once: nothing is left to go by
    assert rounds_of(engine, one) is None


@pytest.mark.parametrize(
    ("engine", "change"),
    [
        ("openvino", {"rounds": 3}), ("openvino", {"draft_n": 0}), ("openvino", {"draft_n_accepted": LIMIT}),
        ("openvino", {"predicted_n": 0}), ("llamacpp", {"draft_n_accepted": 10**6}),
        ("llamacpp", {"predicted_n": None}),
        ("llamacpp", {"draft_n_accepted": -1}), ("llamacpp", {"draft_n": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_timings_that_contradict_each_other_are_not_believed(engine: str, change: dict[str, Any]):
    one, _ = replied(engine)
    assert rounds_of(engine, one) is not None
    one.counts |= change
    assert rounds_of(engine, one) is None


@pytest.mark.parametrize(
    "change",
    [{"acceptance_histogram": [1, 2, 3, 4, 5]}, {"acceptance_histogram": None}, {"acceptance_histogram": [-1]},
     {"acceptance_histogram": ["1"]}, {"per_step_accepted": [1]}, {"per_step_accepted": None}],
    ids=str,
)  # fmt: skip
def test_details_that_do_not_fit_are_left_out(change: dict[str, Any]):
    one, accepted = replied("vllm")
    one.counts |= change
    found = rounds_of("vllm", one)
    assert found is not None and (found.rounds, found.accepted) == (len(accepted), sum(accepted))
    assert found.each == tuple(accepted), "from the groups, where the server's list is not usable"
    assert in_all([found], K)["unconditional"] == pytest.approx(Acceptance.of(accepted, K).unconditional, abs=1e-4)


def test_names_of_an_older_sglang():
    """Before sgl-project/sglang#23530."""
    one, accepted = replied("sglang")
    old = {"spec_num_correct_drafts": "spec_accept_token_num", "spec_num_proposed_drafts": "spec_draft_token_num",
           "spec_correct_drafts_histogram": "spec_accept_histogram"}  # fmt: skip
    one.counts = {old.get(name, name): value for name, value in one.counts.items()}
    found = rounds_of("sglang", one)
    assert found is not None and (found.rounds, found.accepted, found.steps) == (len(accepted), sum(accepted), K)


def test_sglang_s_own_length_is_another_number():
    one, accepted = replied("sglang")
    tau = in_all([rounds_of("sglang", one)], K)["tau"]  # type: ignore[list-item]
    assert tau == pytest.approx(1 + sum(accepted) / len(accepted), abs=1e-4)
    assert one.counts["spec_accept_length"] == pytest.approx(LIMIT / len(accepted)) != tau


def test_vllm_counts_past_the_end():
    ids = next([i] for i in range(50) if 1 + sum(n + 1 for n in rounds([i], LIMIT)) > LIMIT)
    one, accepted = replied("vllm", ids)
    found = rounds_of("vllm", one)
    assert found is not None and 1 + found.rounds + found.accepted > LIMIT
    guessed = rounds_of("vllm", reply(groups(ids, LIMIT, accepted), {}))
    assert guessed is not None and 1 + guessed.rounds + guessed.accepted == LIMIT


@given(st.sampled_from(ENGINES), st.dictionaries(
    st.sampled_from(["num_spec_steps", "num_accepted_draft_tokens", "num_spec_tokens", "acceptance_histogram",
                     "per_step_accepted", "spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts",
                     "spec_correct_drafts_histogram", "draft_n", "draft_n_accepted", "predicted_n", "rounds"]),
    st.one_of(st.integers(-3, 60), st.none(), st.text(max_size=3), st.floats(), st.booleans(),
              st.lists(st.one_of(st.integers(-2, 9), st.none()), max_size=8)),
))  # fmt: skip
def test_whatever_is_said_the_counts_are_possible_or_none(engine: str, counts: dict[str, Any]):
    found = rounds_of(engine, reply(groups(IDS, LIMIT, rounds(IDS, LIMIT)), counts))
    if found is None:
        return
    assert found.rounds > 0 and found.accepted >= 0
    assert found.steps is None or found.accepted <= found.rounds * found.steps
    assert not found.each or (len(found.each) == found.rounds and sum(found.each) == found.accepted)
    rates = in_all([found], K)["unconditional"]
    assert all(0 <= x <= 1 for x in rates) and rates == sorted(rates, reverse=True)


# ---------------------------------------------------------------- together


def test_rates_are_only_there_where_every_answer_says_them():
    told = Rounds(2, 3, WHOLE, SERVER, histogram=(0, 1, 1, 0, 0))
    assert in_all([told], K)["unconditional"] == [1.0, 0.5, 0.0, 0.0]
    assert in_all([told, Rounds(2, 3, WHOLE, SERVER)], K)["unconditional"] == []
    assert in_all([told], 1)["unconditional"] == [], "more accepted than were drafted"
    mixed = in_all([told, Rounds(1, 0, FITTING, GROUPS)], K)
    assert (mixed["rule"], mixed["source"], mixed["at_most"]) == ("mixed", "mixed", True)
    assert in_all([], K) == {"tau": None, "rounds": 0, "accepted": 0, "unconditional": [], "rule": "", "source": "",
                             "at_most": False}  # fmt: skip


@given(st.lists(st.lists(st.integers(0, K), min_size=1, max_size=20), min_size=1, max_size=5))
def test_all_rounds_weigh_alike(answers: list[list[int]]):
    parts = [Rounds(len(a), sum(a), WHOLE, SERVER, tuple(a)) for a in answers]
    whole = Acceptance.of([n for a in answers for n in a], K)
    found = in_all(parts, K)
    assert (found["rounds"], found["accepted"]) == (whole.rounds, whole.accepted)
    assert found["tau"] == pytest.approx(whole.tau, abs=1e-4)
    assert found["unconditional"] == pytest.approx(whole.unconditional, abs=1e-4)


# ---------------------------------------------------------------- only what fits


@given(st.integers(2, 40), st.integers(1, 6), st.lists(st.integers(0, 6), min_size=40, max_size=40))
@example(12, 4, [4] * 40)
@example(2, 4, [4] * 40)
@example(3, 4, [4] * 40)
def test_fitting_is_what_an_engine_does_that_drafts_no_more_than_fits(limit: int, k: int, would: list[int]):
    """would[b]: drafts that the target would accept of a round after b tokens, were there no end."""
    begun, accepted = [], []
    at = 1
    while at < limit:  # an engine that always drafts k
        begun.append(at)
        accepted.append(min(k, would[at - 1]))
        at += accepted[-1] + 1
    slow, at = [], 1
    while at < limit:  # one that drafts min(k, what is left but for the target's own token)
        slow.append(min(k, limit - at - 1, would[at - 1]))
        at += slow[-1] + 1
    assert at == limit, "never a token too many"
    assert fitting(begun, accepted, limit) == (len(slow), sum(slow))
