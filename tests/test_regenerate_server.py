"""Answers from an OpenAI-compatible server that fails in all the ways servers fail.

pytest -q tests/test_regenerate_server.py
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from eyas.answers import CONVERSATIONS, SET_ASIDE
from eyas.artifacts import read_manifest
from eyas.errors import EyasError
from eyas.prompts import Prompt
from eyas.regenerate import regenerate
from eyas.target.server import ServerOptions, retry_after

Answer = Callable[["Fake", dict, int], tuple[int, dict | str, dict]]


class Fake:
    """A server whose answers a test decides: `answer(fake, body, how often this prompt was asked)`."""

    def __init__(self, answer: Answer):
        self.answer = answer
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def reply(self, status: int, body: dict | str, headers: dict) -> None:
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the client gave up waiting: that is what the test is about

            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": "tiny"}]}, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = body["messages"][-1]["content"]
                with fake.lock:
                    fake.asked[text] += 1
                    count = fake.asked[text]
                    fake.bodies.append(body)
                    fake.headers.append(dict(self.headers))
                    fake.at_once += 1
                    fake.most_at_once = max(fake.most_at_once, fake.at_once)
                try:
                    self.reply(*fake.answer(fake, body, count))
                finally:
                    with fake.lock:
                        fake.at_once -= 1

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def options(self, **more) -> ServerOptions:
        defaults = {"concurrency": 8, "timeout_s": 5.0, "attempts": 4, "first_wait_s": 0.01, "longest_wait_s": 0.05}
        return ServerOptions(f"http://127.0.0.1:{self.http.server_port}/v1", **{**defaults, **more})


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Fake]]:
    fakes: list[Fake] = []

    def start(answer: Answer) -> Fake:
        fakes.append(Fake(answer))
        return fakes[-1]

    yield start
    for fake in fakes:
        fake.http.shutdown()
        fake.http.server_close()


def completion(text: str, finish: str = "stop", ids: list[int] | None = None) -> tuple[int, dict, dict]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish, "token_ids": ids}
    return 200, {"choices": [choice], "prompt_token_ids": [1, 2, 3] if ids else None,
                 "usage": {"completion_tokens": 7}}, {}  # fmt: skip


def echo(fake: Fake, body: dict, count: int) -> tuple[int, dict, dict]:
    return completion("You said: " + body["messages"][-1]["content"])


def asked(*texts: str) -> list[Prompt]:
    return [Prompt.single(t, id=t, source="s") for t in texts]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_in_order_with_settings_and_key(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINY_KEY", "s3cret")

    def slow(fake: Fake, body: dict, count: int) -> tuple[int, dict, dict]:
        time.sleep(0.05)  # so that requests overlap on a busy machine, too
        return echo(fake, body, count)

    fake = serve(slow)
    prompts = asked(*(f"p{i}" for i in range(30)))
    server = fake.options(api_key_env="TINY_KEY", concurrency=4)
    counts = regenerate(prompts, None, tmp_path, server=server, temperature=0.7, seed=3, max_new_tokens=9)
    kept = rows(tmp_path / CONVERSATIONS)
    assert [r["id"] for r in kept] == [p.id for p in prompts]
    assert kept[3]["messages"][-1] == {"role": "assistant", "content": "You said: p3"}
    assert kept[3]["prompt_token_ids"] is None and kept[3]["response_token_ids"] is None
    assert counts["supervised_tokens"] == 30 * 7
    body = fake.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 9, 0.7)
    assert len({b["seed"] for b in fake.bodies}) == 30
    assert fake.headers[0]["Authorization"] == "Bearer s3cret"
    assert 1 < fake.most_at_once <= 4


def test_token_ids_are_kept_where_the_server_gives_them(serve, tmp_path: Path):
    fake = serve(lambda fake, body, count: completion("yes", "length", [4, 5, 6]))
    counts = regenerate(asked("a"), None, tmp_path, server=fake.options())
    (row,) = rows(tmp_path / CONVERSATIONS)
    assert (row["prompt_token_ids"], row["response_token_ids"]) == ([1, 2, 3], [4, 5, 6])
    assert (row["finish"], counts["supervised_tokens"]) == ("length", 3)


def test_a_server_that_does_not_know_token_ids_is_asked_without(serve, tmp_path: Path):
    def strict(fake, body, count):
        if "return_token_ids" in body:
            return 400, {"error": "unexpected field return_token_ids"}, {}
        return completion("yes")

    fake = serve(strict)
    regenerate(asked("a", "b", "c"), None, tmp_path, server=fake.options(concurrency=1))
    assert len(rows(tmp_path / CONVERSATIONS)) == 3
    assert sum("return_token_ids" in b for b in fake.bodies) == 1


def test_passing_failures_are_repeated(serve, tmp_path: Path):
    """500, 429, 503, a body that is not JSON, a timeout: each once or twice, then an answer."""

    def flaky(fake, body, count):
        text = body["messages"][-1]["content"]
        if text == "slow" and count == 1:
            time.sleep(0.6)
        if text == "garbled" and count == 1:
            return 200, "<html>", {}
        if text in ("500", "429", "503") and count <= 2:
            return int(text), {"error": "later"}, {}
        return completion("fine")

    fake = serve(flaky)
    counts = regenerate(
        asked("500", "429", "503", "garbled", "slow", "ok"), None, tmp_path, server=fake.options(timeout_s=0.3)
    )
    assert counts["kept"] == 6
    assert fake.asked == {"500": 3, "429": 3, "503": 3, "garbled": 2, "slow": 2, "ok": 1}


def test_retry_after_is_honoured(serve, tmp_path: Path):
    times: list[float] = []

    def busy(fake, body, count):
        times.append(time.monotonic())
        return (429, {"error": "busy"}, {"Retry-After": "0.5"}) if count == 1 else completion("fine")

    regenerate(asked("a"), None, tmp_path, server=serve(busy).options())
    assert times[1] - times[0] >= 0.5, "longer than its own longest wait of 0.05 s"


def test_retry_after_as_a_date():
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    assert retry_after("Fri, 02 Jan 2026 03:04:35 GMT", now) == 30.0
    assert retry_after("Fri, 02 Jan 2026 03:00:00 GMT", now) == 0.0
    assert retry_after("99999", now) == 3600.0
    assert retry_after("soon", now) is None
    assert retry_after(None) is None


def test_failures_for_good_are_set_aside_and_asked_again_next_time(serve, tmp_path: Path):
    broken = {"bad": (400, {"error": "no such role"}, {}), "dead": (500, {"error": "oops"}, {}),
              "long": (400, {"error": "maximum context length is 8"}, {}),
              "filtered": completion("x", "content_filter")}  # fmt: skip

    def answer(fake, body, count):
        return broken.get(body["messages"][-1]["content"]) or completion("fine")

    fake = serve(answer)
    prompts = asked("a", "bad", "b", "dead", "c", "long", "filtered")
    counts = regenerate(prompts, None, tmp_path, server=fake.options())
    aside = {r["id"]: r for r in rows(tmp_path / SET_ASIDE)}
    assert {i: r["reason"] for i, r in aside.items()} == {
        "bad": "error", "dead": "error", "long": "too_long", "filtered": "error"
    }  # fmt: skip
    assert "no such role" in aside["bad"]["detail"]
    assert "asked 4 times" in aside["dead"]["detail"]
    assert counts["kept"] == 3
    assert fake.asked["dead"] == 4
    assert fake.asked["bad"] == 1


def test_a_server_that_is_not_there_stops_the_run_and_what_was_answered_stays(serve, tmp_path: Path):
    dying = {"alive": True}

    def answer(fake, body, count):
        if fake.asked.total() > 12:
            dying["alive"] = False
        return completion("fine") if dying["alive"] else (503, {"error": "gone"}, {})

    fake = serve(answer)
    prompts = asked(*(f"p{i}" for i in range(120)))
    with pytest.raises(EyasError, match="requests in a row failed"):
        regenerate(prompts, None, tmp_path, server=fake.options(attempts=1, concurrency=4))
    answered = 12
    fake.answer = echo
    before = fake.asked.copy()
    counts = regenerate(prompts, None, tmp_path, server=fake.options(attempts=1, concurrency=4))
    assert counts["kept"] == 120
    assert counts["resumed"] == answered
    assert sum(fake.asked[p] > before[p] for p in fake.asked) == 120 - answered, "finished ids are not asked again"


def test_a_wrong_key_or_address_is_said_at_once(serve, tmp_path: Path):
    fake = serve(lambda fake, body, count: (401, {"error": "who are you"}, {}))
    with pytest.raises(EyasError, match=r"401.*Check the key.*\$OPENAI_API_KEY"):
        regenerate(asked("a", "b"), None, tmp_path, server=fake.options())
    gone = ServerOptions("http://127.0.0.1:9/v1", attempts=2, first_wait_s=0.01)
    with pytest.raises(EyasError, match="does not list its models"):
        regenerate(asked("a"), None, tmp_path / "x", server=gone)


def test_several_turns_repetition_and_tools(serve, tmp_path: Path):
    def answer(fake, body, count):
        text = body["messages"][-1]["content"]
        if text == "sing":
            return completion("la " * 60, "length")
        if text == "call":
            call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
            message = {"role": "assistant", "content": None, "tool_calls": call}
            return 200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}, {}
        return completion(f"{len(body['messages'])}: {text}")

    fake = serve(answer)
    user = lambda text: ({"role": "user", "content": text},)  # noqa: E731
    prompts = [
        Prompt("two", (user("one"), user("two"))),
        Prompt("loop", (user("sing"),)),
        Prompt("tool", (user("call"), user("never asked")), [{"type": "function", "function": {"name": "f"}}]),
    ]
    regenerate(prompts, None, tmp_path, server=fake.options())
    two, tool = rows(tmp_path / CONVERSATIONS)
    assert [m["content"] for m in two["messages"]] == ["one", "1: one", "two", "3: two"]
    assert tool["messages"][-1]["tool_calls"][0]["function"]["name"] == "f"
    assert tool["tools"] == prompts[2].tools
    assert [b["tools"] for b in fake.bodies if "tools" in b] == [prompts[2].tools]
    (aside,) = rows(tmp_path / SET_ASIDE)
    assert (aside["id"], aside["reason"]) == ("loop", "repetition")
    assert "never asked" not in fake.asked


def test_template_arguments_reach_the_server_and_the_manifest(serve, tmp_path: Path):
    fake = serve(echo)
    regenerate(asked("a"), None, tmp_path / "with", server=fake.options(), template_kwargs={"enable_thinking": False})
    regenerate(asked("a"), None, tmp_path / "without", server=fake.options())
    assert [body.get("chat_template_kwargs") for body in fake.bodies] == [{"enable_thinking": False}, None]
    assert read_manifest(tmp_path / "with")["config"]["template_kwargs"] == {"enable_thinking": False}
    assert "template_kwargs" not in read_manifest(tmp_path / "without")["config"]
