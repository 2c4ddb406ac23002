"""One server measured whole: its numbers, and whether its text is the one without the draft.

pytest -q tests/test_measure_server.py
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.decode.acceptance import Acceptance
from eyas.decode.answers import Answer, decode
from eyas.errors import BadInput, EyasError
from eyas.measure.asking import INTERRUPTED, Answered, How, Question, Run
from eyas.measure.engine import compared
from eyas.measure.lossless import compare
from eyas.measure.running import with_url
from eyas.measure.server import Passes, numbers, run
from eyas.serve.client import Reply
from eyas.serve.events import Failed
from eyas.target.model import Target
from fake_engines import CUT, Engine, K, rounds, tokens

QUESTIONS = [Question(name, i, (i + 1, 2, 3)) for name in ("one", "two") for i in range(3)]
HOW = How(20, timeout=5.0)
ENGINES = ("vllm", "sglang", "llamacpp", "openvino")


def taken(url: str, questions: list[Question] = QUESTIONS, how: How = HOW, **more: Any) -> dict[str, Any]:
    return numbers(run(url, questions, how, **more), None, K)


def accepted(engine: str, name: str | None = None) -> list[list[int]]:
    return [rounds(q.ids, 20, engine) for q in QUESTIONS if name in (None, q.set)]


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_of_a_healthy_server(engine: str):
    with Engine(engine) as server:
        said = taken(server.url, levels=(1, 3))
    each = [n for answer in accepted(engine) for n in answer]
    all_ = said["acceptance"]
    assert (all_["rounds"], all_["accepted"]) == (len(each), sum(each)), "of the first pass alone"
    assert all_["tau"] == pytest.approx(1 + sum(each) / len(each), abs=1e-4)
    assert all_["rule"] == ("whole" if engine in ("vllm", "sglang") else "fitting") and not all_["at_most"]
    for name in ("one", "two"):
        mine = [n for answer in accepted(engine, name) for n in answer]
        assert said["sets"][name] | {"rounds": len(mine), "accepted": sum(mine), "answers": 3} == said["sets"][name]
    assert [a["tokens"] for a in said["answers"]] == [tokens(q.ids, 20) for q in QUESTIONS]
    assert [a["rounds"] for a in said["answers"]] == [len(answer) for answer in accepted(engine)]
    assert [s["concurrency"] for s in said["speed"]] == [1, 3]
    assert all(s["with_draft"]["tokens"] == 120 and s["without_draft"] is None for s in said["speed"])
    assert said["errors"] == [] and said["interrupted"] is False and said["k"] == K
    assert said["other_traffic"]["seen"] is (None if engine == "openvino" else False)
    json.dumps(said, allow_nan=False)


def test_the_engine_s_own_words_stand_beside_ours():
    """SGLang's spec_accept_length is tokens / rounds, prefill's among them: another number."""
    with Engine("sglang") as server:
        said = taken(server.url)["acceptance"]
    assert said["own"]["spec_accept_length"] == pytest.approx(6 * 20 / said["rounds"], abs=1e-4) != said["tau"]
    with Engine("vllm") as server:
        said = taken(server.url)["acceptance"]
    assert said["own"]["mean_acceptance_length"] == said["tau"], "vLLM's is"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_strict_number_is_that_of_the_reference_decoder(engine: str):
    """Rounds whose drafts all fall within the answer, by the very code that `eyas prove` counts with."""
    with Engine(engine) as server:
        said = taken(server.url)["acceptance"]
    parts = []
    for q, each in zip(QUESTIONS, accepted(engine), strict=True):
        ends, length = [], 1
        for n in each:
            length += n + 1
            ends.append(length)
        parts.append(Answer(tokens(q.ids, 20), each, ends).acceptance(K))
    expected = Acceptance.merged(parts, K)
    assert said["strict"] == expected.to_dict()
    assert 0 < expected.rounds < said["rounds"], "some rounds reach past the end"


def test_by_hand():
    """Eleven tokens, three rounds that accept 4, 0 and 4: they begin after 1, 6 and 7; the last reaches 1 too far."""
    one = Answered(Question("s", 0, (1,)), Reply(
        list(range(11)), [(0.1, 1), (0.2, 5), (0.3, 1), (0.4, 4)],
        {"num_spec_steps": 3, "num_accepted_draft_tokens": 8, "num_spec_tokens": 4}, "length", 0.5,
    ))  # fmt: skip
    passes = Passes("http://h")
    passes.runs.append(_run([one]))
    said = numbers(passes, None, 4)["acceptance"]
    assert (said["tau"], said["strict"]["rounds"], said["strict"]["accepted"]) == (3.6667, 3, 8)
    one.reply.tokens.pop()  # type: ignore[union-attr]
    one.reply.chunks[-1] = (0.4, 3)  # type: ignore[union-attr]
    said = numbers(passes, None, 4)["acceptance"]
    assert (said["tau"], said["strict"]["rounds"], said["strict"]["accepted"]) == (3.6667, 2, 4)


def _run(answered: list[Answered], engine: str = "vllm") -> Run:
    return Run(1, answered, 1.0, engine=engine, model="m")


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_of_one_token_leave_the_others_theirs(engine: str):
    """An answer that ends at once, beside longer ones."""
    with Engine(engine) as server:
        passes = run(server.url, QUESTIONS[:2], HOW)
        short = run(server.url, QUESTIONS[2:3], How(1))
    passes.runs[0].answered += short.runs[0].answered
    said = numbers(passes, None, K)
    each = [n for answer in accepted(engine)[:2] for n in answer]
    assert (said["acceptance"]["rounds"], said["acceptance"]["accepted"]) == (len(each), sum(each))
    assert said["answers"][2]["rounds"] == 0


def test_speed_up_is_that_of_the_same_concurrency():
    with Engine("vllm", slow=0.002) as drafted, Engine("vllm", draft=False, counts=False, slow=0.002) as plain:
        two = [run(s.url, QUESTIONS, HOW, levels=levels) for s, levels in ((drafted, (1, 2)), (plain, (1,)))]
    first, second = numbers(two[0], two[1], K)["speed"]
    rate = [first[side]["tokens_per_s"] for side in ("with_draft", "without_draft")]
    assert first["speedup"] == pytest.approx(rate[0] / rate[1], rel=0.01) and first["speedup"] > 1.1
    assert second["speedup"] is None and second["without_draft"] is None


# ---------------------------------------------------------------- when things go wrong


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_that_dies_leaves_what_it_answered(engine: str):
    with Engine(engine, fail=lambda n: (lambda r: r.stream([b"data: {", CUT])) if n >= 4 else None) as server:
        said = taken(server.url, levels=(1, 8))
    each = [n for answer in accepted(engine)[:4] for n in answer]
    assert (said["acceptance"]["rounds"], said["acceptance"]["accepted"]) == (len(each), sum(each))
    assert len(said["answers"]) == 5 and said["answers"][4]["error"] and said["answers"][4]["tokens"] == []
    assert said["sets"]["two"]["answers"] == 1
    assert len(said["speed"]) == 1, "no further pass"
    assert said["speed"][0]["with_draft"] is None
    assert len(said["errors"]) == 1


def test_a_server_that_only_fails():
    with Engine("vllm", fail=lambda n: lambda r: r.reply(500, {"error": {"message": "CUDA out of memory"}})) as server:
        said = taken(server.url)
    assert said["acceptance"] is None and "CUDA out of memory" in said["errors"][0]
    assert said["sets"]["one"]["tau"] is None
    json.dumps(said)


def test_nobody_there():
    with Engine("vllm") as server:
        url = server.url
    with pytest.raises(Failed, match="nobody answers"):
        run(url, QUESTIONS, HOW)


def test_ctrl_c_keeps_what_came():
    heard: list[int] = []

    def interrupt() -> None:
        heard.append(1)
        if len(heard) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with Engine("vllm", slow=0.004) as server:
        passes = run(server.url, QUESTIONS, HOW, levels=(1, 2), on_answer=interrupt)
    said = numbers(passes, None, K)
    assert passes.interrupted and said["interrupted"] and said["errors"] == [INTERRUPTED]
    assert len(said["answers"]) == 3 and said["acceptance"]["rounds"] == sum(map(len, accepted("vllm")[:3]))


def test_with_url_both_servers_and_either_missing():
    with Engine("vllm") as drafted, Engine("sglang", draft=False, counts=False) as plain:
        both = with_url(drafted.url, plain.url, QUESTIONS, HOW)
        assert both["lossless"]["lossless"] is True and both["lossless"]["compared"] == 6 and both["errors"] == []
        alone = with_url(drafted.url, None, QUESTIONS, HOW)
        assert alone["lossless"] == {"lossless": None, "why": "no answers without the draft"}
        gone = "http://127.0.0.1:9"
        half = with_url(drafted.url, gone, QUESTIONS, HOW)
        assert half["acceptance"] == both["acceptance"] and f"--baseline-url {gone}" in half["errors"][0]
        with pytest.raises(EyasError):
            with_url(gone, plain.url, QUESTIONS, HOW)


def test_with_url_a_server_that_does_not_say_what_it_is():
    with Engine("llamacpp") as server:
        page = server._page
        server._page = lambda r: r.reply(404) if r.path == "/v1/models" else page(r)  # type: ignore[method-assign]
        with pytest.raises(BadInput, match="--engine"):
            with_url(server.url, None, QUESTIONS, HOW)
        assert with_url(server.url, None, QUESTIONS, HOW, engine="llamacpp")["engine"] == "llamacpp"


# ---------------------------------------------------------------- the same text?


def answered(answers: list[list[int]], lost: int = 0) -> list[Answered]:
    return [
        Answered(Question("s", i, (5, 6, 7 + i)), Reply(a, [(0.1, len(a))], lost=lost)) for i, a in enumerate(answers)
    ]


def test_equal_different_longer_and_missing():
    plain = answered([[1, 2, 3], [4, 5, 6], [7, 8], [9]])
    drafted = [*answered([[1, 2, 3], [4, 5, 7], [7, 8, 9]]), Answered(Question("s", 3, (5,)), error="no")]
    said = compare(drafted, plain, "the server without")
    assert (said["lossless"], said["compared"], said["identical"]) == (False, 3, 1)
    first, second = said["differences"]
    assert (first["prompt"], first["position"], first["plain"]["token"], first["speculative"]["token"]) == (1, 2, 6, 7)
    assert (second["prompt"], second["position"], second["plain"]["token"]) == (2, 2, None), "it ended there"
    assert compare([], plain, "x")["lossless"] is None and compare(drafted, [], "x")["lossless"] is None
    assert compare(plain, plain, "x")["lossless"] is True


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target, dtype=torch.float32)


def test_a_near_tie_is_forgiven_and_a_real_difference_is_not(target: Target, tiny_target: Path):
    question = Question("s", 0, (1, 40, 50, 60))
    text = decode(target, [list(question.ids)], max_new_tokens=12).answers[0].tokens
    _, final = target.states(torch.tensor([[*question.ids, *text[:5]]]), taps=[0])
    order = target.head(final[0, -1]).float().argsort(descending=True)
    plain = [Answered(question, Reply(text, [(0.1, 12)]))]

    def other(token: int) -> dict[str, Any]:
        drafted = [Answered(question, Reply([*text[:5], token, *text[6:]], [(0.1, 12)]))]
        return compare(drafted, plain, "x", tiny_target)

    assert order[0] == text[5]
    said = other(int(order[1]))
    assert said["lossless"] is False and said["near_ties"] == []
    (found,) = said["differences"]
    logits = target.head(final[0, -1]).float()
    assert found["position"] == 5 and found["gap"] == pytest.approx(
        float(logits[order[0]] - logits[order[1]]), abs=1e-4
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.decode.lossless.NEAR_TIE", found["gap"] + 1e-3)
        tie = other(int(order[1]))
        assert tie["lossless"] is True and len(tie["near_ties"]) == 1 and tie["identical"] == 0
        assert other(int(order[-1]))["lossless"] is False


def test_answers_of_which_tokens_were_not_sent():
    same, other = answered([[1, 2, 3]], lost=2), answered([[1, 2, 4]], lost=2)
    assert compare(same, same, "x")["lossless"] is True
    said = compare(same, other, "x")
    assert said["lossless"] is None and said["unclear"] == 1 and "does not send every token" in said["why"]
    assert said["differences"] == []


def test_a_target_that_cannot_be_loaded_costs_only_the_logits(tmp_path: Path):
    passes = [Passes("http://h"), Passes("http://h")]
    for one, text in zip(passes, ([1, 2], [1, 3]), strict=True):
        one.runs.append(_run(answered([text])))
    errors: list[str] = []
    said = compared(*passes, "x", tmp_path, HOW, errors)
    assert said["lossless"] is False and said["differences"][0]["gap"] is None and len(errors) == 1
    assert compared(*passes, "x", None, How(8, temperature=0.5), errors)["why"].startswith("sampled")
