"""What a server's counters say of other people, and what they do not.   pytest -q tests/test_measure_traffic.py"""

from __future__ import annotations

from typing import Any

import pytest

from eyas.engines.served import from_prometheus
from eyas.errors import BadInput
from eyas.measure import traffic
from eyas.measure.asking import How, Question, Run, ask_all
from eyas.measure.counting import Rounds, rounds_of
from eyas.measure.server import numbers
from eyas.measure.server import run as measured
from eyas.measure.traffic import Snapshot, others, settled, snapshot
from fake_engines import Engine, Raw, rounds, vllm_counters

QUESTIONS = [Question("s", i, (i + 1, 2)) for i in range(4)]
HOW = How(16, timeout=5.0)
COUNTING = ("vllm", "sglang", "llamacpp")


def asked(server: Engine, between: Any = None, **more: Any) -> dict[str, Any]:
    """Other traffic around our questions; `between` is called after them, before the second snapshot."""
    before = snapshot(server.url)
    run = ask_all(server.url, QUESTIONS, HOW, **more)
    if between is not None:
        between()
    return others(before, snapshot(server.url), [run], mine(server, run))


def mine(server: Engine, run: Run) -> list[Rounds]:
    found = [rounds_of(server.engine, a.reply) for a in run.answered if a.reply is not None]
    return [r for r in found if r is not None]


@pytest.mark.parametrize("engine", COUNTING)
def test_our_own_requests_are_not_other_people_s(engine: str):
    with Engine(engine) as server:
        server.count("m", 1000, rounds([9], 1000, engine))  # counters run since the server was started
        said = asked(server)
    assert (said["seen"], said["tokens"], said["why"]) == (False, 0, "")
    assert said["rounds"] == 0


@pytest.mark.parametrize("engine", COUNTING)
def test_other_people_s_requests_are_seen_and_counted(engine: str):
    others_rounds = rounds([3], 50, engine)
    with Engine(engine) as server:
        said = asked(server, lambda: server.count("m", 50, others_rounds))
    assert (said["seen"], said["tokens"], said["rounds"]) == (True, 50, len(others_rounds))


def test_a_token_that_a_stop_took_back_is_nobody_s():
    with Engine("vllm") as server:
        assert asked(server, lambda: server.count("m", traffic.SLACK, []))["seen"] is False
        assert asked(server, lambda: server.count("m", traffic.SLACK + 1, []))["seen"] is True


def test_tokens_that_llama_cpp_did_not_send_are_ours():
    with Engine("llamacpp") as server:
        before = snapshot(server.url)
        run = ask_all(server.url, QUESTIONS, HOW)
        for answer in run.answered:
            assert answer.reply is not None
            del answer.reply.tokens[3:9]
            answer.reply.lost = 6
        assert others(before, snapshot(server.url), [run], [])["seen"] is False


@pytest.mark.parametrize("engine", COUNTING)
def test_a_server_restarted_in_between_is_told(engine: str):
    with Engine(engine) as server:
        server.count("m", 5000, rounds([9], 2000, engine))

        def restart() -> None:
            server.made.clear(), server.done.clear()
            server.count("m", 10, [1, 0])

        said = asked(server, restart)
    assert said["seen"] is None and "restarted" in said["why"]


def test_without_metrics_nothing_is_known():
    with Engine("vllm", metrics=False) as server:
        said = asked(server)
    assert said["seen"] is None and "404" in said["why"] and said["tokens"] is None
    with Engine("openvino") as server:
        assert asked(server)["seen"] is None


def test_metrics_that_went_away_with_the_server():
    with Engine("vllm") as server:
        before = snapshot(server.url)
        run = ask_all(server.url, QUESTIONS, HOW)
    said = others(before, snapshot(server.url), [run], [])
    assert said["seen"] is None and "is a server running there?" in said["why"]


@pytest.mark.parametrize(
    "text",
    ["", "# only comments\n", "<html>hello</html>", "vllm:generated_total 3\n", "\x00\xff", "up 1\n" * 1000,
     'vllm:generation_tokens_total{engine="0"} NaN\n'],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
def test_renamed_counters_and_other_pages(text: str):
    run = Run(1, engine="vllm", model="m")
    said = others(Snapshot(text), Snapshot(text), [run], [])
    assert said["seen"] is None and "its metrics have none of vllm:generation_tokens_total" in said["why"]


def test_renamed_counters_of_rounds_leave_the_tokens():
    """Tokens alone tell whether somebody else was there; without them the rounds do."""
    with Engine("vllm") as server:
        run = ask_all(server.url, QUESTIONS, HOW)
        text = server.exposition()
    tokens_only = text.replace("spec_decode_num_drafts", "spec_rounds")
    said = others(Snapshot("\n"), Snapshot(tokens_only), [run], mine(server, run))
    assert (said["seen"], said["tokens"], said["rounds"]) == (False, 0, None)


def test_two_models_on_one_server_are_told_apart():
    with Engine("sglang", models=["a", "b"]) as server:
        said = asked(server, lambda: server.count("b", 70, [1] * 35), model="a")
        assert (said["seen"], said["tokens"]) == (False, 0)
        said = asked(server, lambda: server.count("a", 70, [1] * 35), model="a")
        assert (said["seen"], said["tokens"]) == (True, 70)


def test_two_names_of_one_model_are_one():
    """vLLM's --served-model-name a b: both are answered, and counted under the first."""
    with Engine("vllm", models=["a", "b"]) as server:
        said = asked(server, model="b")
        assert (said["seen"], said["tokens"]) == (False, 0)
        assert 'model_name="a"' in server.exposition() and 'model_name="b"' not in server.exposition()


def test_a_router_that_adds_models_up_shows_other_traffic():
    """Without our model's label all of it counts: too much is seen, never too little."""
    with Engine("sglang", models=["a", "b"]) as server:
        before = snapshot(server.url)
        run = ask_all(server.url, QUESTIONS, HOW, model="a")
        server.count("b", 70, [1] * 35)
        after = snapshot(server.url)
    bare = [Snapshot(s.text.replace('model_name="a"', "").replace('model_name="b"', "")) for s in (before, after)]
    said = others(*bare, [run], [])
    assert (said["seen"], said["tokens"]) == (True, 70)


def test_broken_answers_make_it_unknown():
    """What an answer that broke off had cost is nobody's."""
    with Engine("vllm", fail=lambda n: (lambda r: r.reply(500)) if n == 1 else None) as server:
        said = asked(server)
    assert said["seen"] is None and said["why"] == "some answers broke off"


def test_counters_that_lag_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    with Engine("vllm") as server:
        before = snapshot(server.url)
        run = ask_all(server.url, QUESTIONS, HOW)
        now = server.exposition()
        pages = iter([before.text, before.text, now])
        monkeypatch.setattr(traffic, "snapshot", lambda url, timeout=0.0: Snapshot(next(pages, now)))
        assert settled(server.url, before, [run]).text == now
        monkeypatch.setattr(traffic, "LATE", 0.2)
        monkeypatch.setattr(traffic, "snapshot", lambda url, timeout=0.0: before)
        assert settled(server.url, before, [run]) == before, "not for ever"


@pytest.mark.parametrize("written", ["{}", "{}/", "{}/v1", "{}/metrics", "bare"])
def test_addresses_as_people_write_them(written: str):
    with Engine("vllm") as server:
        url = server.url.removeprefix("http://") if written == "bare" else written.format(server.url)
        assert "vllm:generation_tokens_total" in snapshot(url).text
    assert snapshot("http://[").missing


def test_a_page_of_metrics_that_hangs(monkeypatch: pytest.MonkeyPatch):
    with Raw(lambda request: request.stream([1.0])) as server:
        assert "no answer" in snapshot(server.url, 0.2).missing


# ---------------------------------------------------------------- acceptance from counters


@pytest.mark.parametrize("engine", COUNTING)
def test_counters_say_the_same_as_the_requests(engine: str):
    """Where a server says nothing for each request and nobody else was there."""
    with Engine(engine) as told, Engine(engine, counts=False) as silent:
        silent.count("m", 900, rounds([9], 900, engine))
        by_request, by_counters = (numbers(measured(s.url, QUESTIONS, HOW), None, 4)["acceptance"]
                                   for s in (told, silent))  # fmt: skip
    assert by_counters["source"] == "the server's counters" and "for this request" in by_request["source"]
    cut = 0
    if engine == "sglang":  # it counts tokens, so what was cut off is not among them
        cut = sum(1 + sum(n + 1 for n in rounds(q.ids, 16)) - 16 for q in QUESTIONS)
        assert cut > 0
    assert by_counters["rounds"] == by_request["rounds"]
    assert by_counters["accepted"] == by_request["accepted"] - cut
    if engine == "vllm":
        assert by_counters["unconditional"] == by_request["unconditional"]
        assert by_counters["tau"] == by_request["tau"]


def test_counters_of_another_model_are_not_mixed_in():
    with Engine("sglang", models=["a", "b"], counts=False) as server:
        original = server.exposition

        def busy() -> str:
            server.count("b", 70, [1] * 35)
            return original()

        server.exposition = busy  # type: ignore[method-assign]
        said = numbers(measured(server.url, QUESTIONS, HOW, model="a"), None, 4)
    assert said["other_traffic"]["seen"] is False
    assert said["acceptance"]["source"] == "the server's counters"
    assert said["acceptance"]["rounds"] == sum(len(rounds(q.ids, 16)) for q in QUESTIONS)


def test_rates_of_another_model_are_not_mixed_in():
    """A page of two models, as a router shows it."""
    mine_, theirs = [2, 0, 1, 4], [0] * 50
    pages = [vllm_counters(each, f'engine="0",model_name="{name}"') for name, each in (("a", mine_), ("b", theirs))]
    text = "\n".join([*pages[0], *pages[1], ""])
    said = from_prometheus(text, model="a")
    assert (said.rounds, said.accepted, said.unconditional) == (4, 7, (0.75, 0.5, 0.25, 0.25))
    both = from_prometheus(text)
    assert both.rounds == 54 and any("a, b" in note for note in both.notes)
    assert from_prometheus(text, model="elsewhere").rounds == 54, "no label of it: all there is"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_with_other_traffic_only_groups_are_left_and_give_a_bound(engine: str):
    with Engine(engine, counts=False) as server:
        original = server.exposition

        def busy() -> str:
            server.count("m", 70, [1] * 35)
            return original()

        server.exposition = busy  # type: ignore[method-assign]
        said = numbers(measured(server.url, QUESTIONS, HOW), None, 4)
    assert said["other_traffic"]["seen"] is True
    accepted = said["acceptance"]
    assert accepted["at_most"] and "may be less" in accepted["counting"] and accepted["strict"] is None


def test_llama_cpp_that_says_nothing_with_other_traffic_is_not_guessed():
    with Engine("llamacpp", counts=False) as server:
        server.fail = lambda n: server.count("m", 70, [1] * 35)  # type: ignore[func-returns-value,assignment,return-value]
        assert numbers(measured(server.url, QUESTIONS, HOW), None, 4)["acceptance"] is None


def test_addresses_that_are_none_are_said():
    with pytest.raises(BadInput, match="no http address"):
        measured("http://h:99999", QUESTIONS, HOW)
