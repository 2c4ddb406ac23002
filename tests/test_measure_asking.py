"""All prompts to one server: how many at once, in which order they come back, and when nobody is asked any more.

pytest -q tests/test_measure_asking.py
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from eyas.errors import BadInput
from eyas.measure.asking import INTERRUPTED, MOST_FAILURES, How, Question, Run, ask_all
from eyas.serve.events import Failed
from fake_engines import CUT, Engine, Raw, Request, tokens

HOW = How(max_tokens=8, timeout=5.0)
Instead = Callable[[Request], None]


def questions(n: int) -> list[Question]:
    return [Question("s", i, (i + 1, 2)) for i in range(n)]


def refuse(status: int) -> Instead:
    return lambda request: request.reply(status, {"error": {"message": "no"}})


def hang(request: Request) -> None:
    request.stream([1.0])


def cut(request: Request) -> None:
    request.stream([b"data: {", CUT])


def on(failing: dict[int, Instead]) -> Callable[[int], Instead | None]:
    return failing.get


@pytest.mark.parametrize("at_once", [1, 3, 50])
def test_no_more_at_once_than_asked_for_and_in_order(at_once: int):
    with Engine("vllm", slow=0.004) as server:
        run = ask_all(server.url, questions(12), HOW, concurrency=at_once)
    assert server.most_at_once == min(at_once, 12) if at_once < 50 else server.most_at_once > 3
    assert [a.question.index for a in run.answered] == list(range(12))
    assert [a.reply.tokens for a in run.replies if a.reply] == [tokens(q.ids, 8) for q in questions(12)]
    assert (run.concurrency, run.engine, run.model, run.stopped, run.errors) == (at_once, "vllm", "m", "", [])
    assert 0 < run.seconds < 5


def test_what_is_asked_of_the_server():
    with Engine("vllm") as server:
        ask_all(server.url, questions(1), How(8, ignore_eos=True, seed=4))
        ask_all(server.url, questions(1), How(8, temperature=0.7, ignore_eos=False, seed=4))
    greedy, hot = server.asked
    assert "seed" not in greedy and greedy["ignore_eos"] is True and greedy["max_tokens"] == 8
    assert hot["seed"] == 4 and "ignore_eos" not in hot and hot["temperature"] == 0.7


def test_every_answer_is_heard_of():
    heard: list[int] = []
    with Engine("vllm", fail=on({1: refuse(400)})) as server:
        ask_all(server.url, questions(5), HOW, on_answer=lambda: heard.append(1))
    assert len(heard) == 5, "the failed one, too"


@pytest.mark.parametrize("status", [400, 500])
def test_single_failures_are_kept_and_the_rest_is_asked(status: int):
    with Engine("vllm", fail=on({1: refuse(status), 2: refuse(status), 4: refuse(status)})) as server:
        run = ask_all(server.url, questions(8), HOW)
    assert len(run.answered) == 8 and len(run.replies) == 5 and not run.stopped
    assert [bool(a.error) for a in run.answered] == [False, True, True, False, True, False, False, False]
    assert len(run.errors) == 1 and str(status) in run.errors[0], "each reason once"


def test_failures_in_a_row_end_it():
    with Engine("vllm", fail=lambda n: refuse(500) if n >= 2 else None) as server:
        run = ask_all(server.url, questions(20), HOW)
    assert server.answered == 2 + MOST_FAILURES and len(run.replies) == 2
    assert f"{MOST_FAILURES} requests in a row failed" in run.stopped and "500" in run.stopped


@pytest.mark.parametrize(("instead", "said"), [(cut, "connection"), (hang, "said nothing for 0.3 s")])
@pytest.mark.parametrize("at_once", [1, 4])
def test_a_server_that_is_gone_or_hangs_is_asked_no_further(instead: Instead, said: str, at_once: int):
    began = time.perf_counter()
    with Engine("vllm", slow=0.002, fail=lambda n: instead if n >= 5 else None) as server:
        run = ask_all(server.url, questions(40), How(8, timeout=0.3), concurrency=at_once)
        assert server.answered <= 5 + at_once
    assert said in run.stopped and run.stopped in run.errors
    assert 5 - at_once < len(run.replies) <= 5
    assert len(run.answered) < 5 + at_once + 1, "what was never asked is left out"
    assert [a.question.index for a in run.answered] == sorted(a.question.index for a in run.answered)
    assert time.perf_counter() - began < 3


def test_a_server_that_dies_in_the_midst():
    server = Engine("vllm")
    heard: list[int] = []

    def die() -> None:
        heard.append(1)
        if len(heard) == 3:
            server.close()

    run = ask_all(server.url, questions(10), HOW, on_answer=die)
    assert len(run.replies) == 3 and "nobody listens" in run.stopped


def test_nobody_there_at_all():
    with Engine("vllm") as server:
        url = server.url
    with pytest.raises(Failed, match="nobody answers"):
        ask_all(url, questions(2), HOW)
    run = Run(1)
    ask_all(url, questions(2), HOW, engine="vllm", model="m", run=run)
    assert "nobody listens" in run.stopped and len(run.answered) == 1


def test_who_it_is_must_be_clear():
    with Engine("vllm", models=["a", "b"]) as server:
        with pytest.raises(BadInput, match="serves a, b"):
            ask_all(server.url, questions(2), HOW)
        run = ask_all(server.url, questions(2), HOW, model="b")
    assert run.model == "b" and [body["model"] for body in server.asked] == ["b", "b"]


@pytest.mark.parametrize("at_once", [1, 3])
def test_an_interrupt_keeps_what_came(at_once: int):
    """A real SIGINT, as Ctrl-C sends it."""
    run = Run(at_once)
    heard: list[int] = []

    def interrupt() -> None:
        heard.append(1)
        if len(heard) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with Engine("vllm", slow=0.005) as server, pytest.raises(KeyboardInterrupt):
        ask_all(server.url, questions(30), HOW, concurrency=at_once, run=run, on_answer=interrupt)
    assert 4 <= len(run.replies) < 4 + 2 * at_once
    assert run.stopped == INTERRUPTED and run.errors == [INTERRUPTED], "connections that we closed are no errors"
    assert run.seconds > 0 and (run.engine, run.model) == ("vllm", "m")


def test_a_fault_of_our_own_is_no_answer(caplog: pytest.LogCaptureFixture):
    def fault() -> None:
        raise ZeroDivisionError

    with Engine("vllm", slow=0.002) as server, pytest.raises(ZeroDivisionError):
        ask_all(server.url, questions(8), HOW, concurrency=8, on_answer=fault)
    gc.collect()
    assert not caplog.records, "asyncio complains of tasks whose exceptions nobody asked for"


def test_other_servers_that_answer_everything_the_same_way():
    """A web server that is none of ours."""

    def page(request: Request) -> None:
        request.reply(200, b"<html>hello</html>", "text/html")

    def respond(request: Request) -> Any:
        return page(request)

    with Raw(respond) as server:
        with pytest.raises(BadInput, match="does not say which engine"):
            ask_all(server.url, questions(2), HOW)
        run = ask_all(server.url, questions(9), HOW, engine="sglang")
    assert "is it sglang" in run.stopped and len(run.answered) == MOST_FAILURES
