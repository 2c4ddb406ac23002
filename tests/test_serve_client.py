"""The client against servers that answer as the real ones do, and as servers do that fail.

pytest -q tests/test_serve_client.py
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eyas.engines.servers as servers
from eyas.errors import BadInput
from eyas.serve.client import Client, Reply
from eyas.serve.dialects import DIALECTS
from eyas.serve.events import Failed
from fake_engines import (
    CUT,
    DONE,
    PATHS,
    STREAMS,
    Engine,
    Raw,
    Request,
    event,
    groups,
    llamacpp,
    rounds,
    sglang,
    sglang_counts,
    text,
    timings,
    tokens,
    vllm,
    vllm_counts,
)  # fmt: skip

IDS, LIMIT = [1, 2, 5], 24
ENGINES = tuple(DIALECTS)


def ask(url: str, engine: str | None = None, *, timeout: float = 5.0, model: str | None = None, **how: Any) -> Reply:
    async def asked() -> Reply:
        async with Client(url, engine=engine, model=model, timeout=timeout) as client:
            return await client.ask(how.pop("ids", IDS), max_tokens=how.pop("max_tokens", LIMIT), **how)

    return asyncio.run(asked())


def know(url: str, **how: Any) -> tuple[str, str | None]:
    async def known() -> tuple[str, str | None]:
        async with Client(url, timeout=how.pop("timeout", 5.0), **how) as client:
            return (await client.know()).engine, client.model

    return asyncio.run(known())


def answering(*parts: bytes | float | str, chunked: bool = True) -> Callable[[Request], None]:
    return lambda request: request.stream(parts, chunked)


def failing(respond: Callable[[Request], None], engine: str = "vllm", **how: Any) -> Failed:
    with Raw(respond) as server, pytest.raises(Failed) as failed:
        ask(server.url, engine, model="m", **how)
    return failed.value


def answer(engine: str) -> list[bytes]:
    accepted = rounds(IDS, LIMIT, engine)
    return STREAMS[engine](groups(IDS, LIMIT, accepted), accepted, ids=IDS)


# ---------------------------------------------------------------- each engine's stream


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_text_counts_and_groups_of_each_engine(engine: str):
    accepted = rounds(IDS, LIMIT, engine)
    with Engine(engine) as server:
        reply = ask(server.url)
    assert reply.tokens == tokens(IDS, LIMIT)
    assert (reply.finish, reply.lost, reply.count) == ("length", 0, LIMIT)
    whole = [len(part) for part in groups(IDS, LIMIT, accepted)]
    assert [n for _, n in reply.chunks] == ([1] * LIMIT if engine == "llamacpp" else whole)
    times = [at for at, _ in reply.chunks]
    assert times == sorted(times) and times[0] > 0 and times[-1] <= reply.seconds
    expected: dict[str, Any] = {
        "vllm": vllm_counts(accepted), "sglang": sglang_counts(accepted, LIMIT),
        "llamacpp": timings(LIMIT, accepted, len(IDS)), "openvino": {"rounds": len(accepted)},
    }[engine]  # fmt: skip
    assert expected.items() <= reply.counts.items()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_asked(engine: str):
    with Engine(engine) as server:
        ask(server.url, temperature=0.5, seed=3, ignore_eos=True)
        ask(server.url)
    hot, cold = server.asked
    assert {r.path for r in server.requests if r.method == "POST"} == {PATHS[engine]}
    inner = "sampling_params" if engine == "sglang" else None
    how, plain = (body[inner] if inner else body for body in (hot, cold))
    assert (hot.get("prompt") or hot.get("input_ids")) == IDS, "ids, never a text"
    assert how["temperature"] == 0.5 and plain["temperature"] == 0 and how["ignore_eos"] is True
    assert not plain.get("ignore_eos")
    seed = "sampling_seed" if engine == "sglang" else "seed"
    assert how[seed] == 3 and seed not in plain
    if engine == "vllm":
        assert hot["model"] == "m" and hot["return_token_ids"] is True and hot["max_tokens"] == LIMIT
    if engine in ("llamacpp", "openvino"):
        assert cold["top_k"] == 1 and "top_k" not in hot and hot["cache_prompt"] is False


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_events_that_arrive_split_or_together_are_the_same(engine: str, size: int):
    """Also within a character of several bytes, and of characters that Unicode takes for the end of a line."""
    said = b"".join(answer(engine))
    assert "\u2028".encode() in said and "\x85".encode() in said
    pieces = [said[i : i + size] for i in range(0, len(said), size)]
    with Raw(answering(*pieces, chunked=size > 1 and engine != "openvino")) as server:
        reply = ask(server.url, engine, model="m")
    assert reply.tokens == tokens(IDS, LIMIT)
    assert len(reply.chunks) == (LIMIT if engine == "llamacpp" else len(rounds(IDS, LIMIT, engine)) + 1)


@pytest.mark.parametrize("incremental", [False, True], ids=["so far", "what is new"])
def test_sglang_says_all_or_what_is_new(incremental: bool):
    """A group that repeats the answer so far is new where its own count of tokens says so."""
    parts = [[5], [5, 6], [5, 5, 6], [7], [5]]
    with Raw(answering(*sglang(parts, [1, 2, 0, 0], incremental=incremental))) as server:
        reply = ask(server.url, "sglang")
    assert reply.tokens == [5, 5, 6, 5, 5, 6, 7, 5]
    assert [n for _, n in reply.chunks] == [1, 2, 3, 1, 1]


def test_an_sglang_that_does_not_count_tokens_is_believed_where_it_repeats():
    def without(events: list[bytes]) -> list[bytes]:
        return [re.sub(rb'"completion_tokens": \d+, ', b"", e) for e in events]

    parts = [[5], [6, 7], [8]]
    for incremental in (False, True):
        with Raw(answering(*without(sglang(parts, [1, 0], incremental=incremental)))) as server:
            assert ask(server.url, "sglang").tokens == [5, 6, 7, 8]


def test_text_so_far_whose_end_changes():
    """The last character may stand there half: U+FFFD until the rest of its bytes is there."""

    def part(said: str, ids: list[int], finish: str | None = None) -> bytes:
        reason = {"type": finish} if finish else None
        return event({"text": said, "output_ids": ids, "meta_info": {"completion_tokens": len(ids),
                                                                     "finish_reason": reason}})  # fmt: skip

    async def pieces(url: str) -> list[str]:
        async with Client(url, engine="sglang") as client:
            return [chunk.text async for chunk in client.stream(IDS, max_tokens=4)]

    sent = [part("a\ufffd", [1, 2]), part("a🦅", [1, 2, 3]), part("a🦅b", [1, 2, 3, 4], "length"), DONE]
    with Raw(answering(*sent)) as server:
        assert asyncio.run(pieces(server.url)) == ["a\ufffd", "🦅", "b"]


def test_sglang_that_takes_back_what_it_said():
    first, second = sglang([[5, 6]])[0], sglang([[7, 8, 9]])[0]
    assert failing(answering(first, second, DONE), "sglang").kind == "garbled"


def test_llama_cpp_sends_no_parts_of_characters_and_they_are_counted():
    """Seen of b11434: a hawk's emoji is three tokens, of which the stream has the last."""
    accepted = rounds(IDS, LIMIT, "llamacpp")
    sent = llamacpp(groups(IDS, LIMIT, accepted), accepted, lost=(3, 4, LIMIT - 1))
    with Raw(answering(*sent)) as server:
        reply = ask(server.url, "llamacpp")
    whole = tokens(IDS, LIMIT)
    assert reply.tokens == [*whole[:3], *whole[5:-1]]
    assert (reply.lost, reply.count) == (3, LIMIT)
    with Raw(answering(*llamacpp([[7]], lost=(0,)))) as server:
        reply = ask(server.url, "llamacpp", max_tokens=1)
    assert (reply.tokens, reply.count) == ([], 1), "an answer of half a character is one"


def test_comments_other_fields_and_what_follows_done_say_nothing():
    sent = [b": ping\r\n\r\n", b"event: message\nid: 3\nretry: 10\n", *answer("vllm"), b"data: \n\n", b"data"]
    with Raw(answering(*sent)) as server:
        assert ask(server.url, "vllm", model="m").tokens == tokens(IDS, LIMIT)


def test_carriage_returns_before_newlines():
    with Raw(answering(*(e.replace(b"\n", b"\r\n") for e in answer("vllm")))) as server:
        assert ask(server.url, "vllm", model="m").tokens == tokens(IDS, LIMIT)


# ---------------------------------------------------------------- what fails


def error_event(engine: str) -> bytes:
    """As each sent it for a token that it does not have, or a prompt that is too long."""
    return {
        "vllm": event({"error": {"message": "Token id 10000000 is out of vocabulary", "type": "BadRequestError",
                                 "param": None, "code": 400}}),
        "sglang": event({"error": {"message": "The input (1125 tokens) is longer than the model's context length",
                                   "type": "invalid_request_error", "code": 400, "retryable": False}}),
        "llamacpp": event({"error": {"code": 500, "message": "Context size has been exceeded.",
                                     "type": "server_error"}}),
        "openvino": event({"error": {"message": "RuntimeError: Check 'shape.size() != 0u'\nfailed"}, "stop": True}),
    }[engine]  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_in_the_stream_is_said_in_the_server_s_words(engine: str):
    failed = failing(answering(*answer(engine)[:3], error_event(engine), DONE), engine)
    assert failed.kind == "broken"
    message = json.loads(error_event(engine)[6:])["error"]["message"]
    assert " ".join(message.split()) in str(failed) and "\n" not in str(failed)


def test_an_old_llama_cpp_s_error_line():
    failed = failing(answering(b'error: {"code":500,"message":"out of cells"}\n\n'), "llamacpp")
    assert failed.kind == "broken" and "out of cells" in str(failed)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_aborted_answer_is_no_answer(engine: str):
    failed = failing(answering(*STREAMS[engine]([[5], [6]], [0], finish="abort")), engine)
    assert failed.kind == "broken"


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (400, {"error": {"message": "maximum context length is 512 tokens", "code": 400}}, "refused", "512 tokens"),
        (404, {"error": {"message": "The model `nobody` does not exist."}}, "refused", "`nobody` does not exist"),
        (422, {"detail": "body.prompt: field required"}, "refused", "field required"),
        (429, "slow down", "refused", "slow down"),
        (500, {"error": {"message": "CUDA error:\n an illegal\x1b[31m access"}}, "broken", "error: an illegal [31"),
        (502, "<html>\n<h1>Bad Gateway</h1></html>", "broken", "Bad Gateway"),
        (503, {"error": {"code": 503, "message": "Loading model"}}, "broken", "Loading model"),
        (503, b"\xff\xfe\x00", "broken", "503"),
        (500, b"", "broken", "500"),
        (500, b"x" * 500_000, "broken", "xxx"),
        (302, b"", "refused", "302"),
    ],
)  # fmt: skip
def test_statuses_and_bodies(status: int, body: Any, kind: str, said: str):
    failed = failing(lambda request: request.reply(status, body))
    assert failed.kind == kind and str(status) in str(failed) and said in str(failed)
    assert str(failed).isprintable() and len(str(failed)) < 500


@pytest.mark.parametrize(
    "sent",
    [
        b"data: {not json}\n\n", b"data: [1, 2]\n\n", b"data: 3\n\n", b"data: \xff\xfe\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n", event({"choices": 3}), event({"choices": [3]}),
        event({"choices": [{"token_ids": [1], "text": 5}]}), event({"choices": [{"token_ids": [1], "text": {"a": 1}}]}),
        event({"choices": [], "metrics": [1]}), event({"choices": [], "metrics": {"speculative_decoding": [1, 2]}}),
        event({"choices": [{"token_ids": [1], "finish_reason": 7}]}), DONE, b"", b"<html></html>", b"\n\n\n",
        event({"choices": [{"text": "no ids", "finish_reason": "stop"}]}),
        event({"choices": [{"token_ids": [True, "7"], "finish_reason": "stop"}]}),
    ],
    ids=lambda sent: repr(sent[:50]),
)  # fmt: skip
def test_garbage_is_no_answer(sent: bytes):
    assert failing(answering(sent)).kind == "garbled"


@pytest.mark.parametrize("engine", ["sglang", "llamacpp", "openvino"])
@pytest.mark.parametrize(
    "value",
    [{"meta_info": 3}, {"meta_info": {"finish_reason": "x"}}, {"timings": [1], "stop": True, "tokens": [1]},
     {"timings": "soon", "stop": True, "tokens": [2]}, {"content": 7, "text": 7, "tokens": [1], "output_ids": [1]}],
    ids=str,
)  # fmt: skip
def test_events_of_the_wrong_shape(engine: str, value: dict[str, Any]):
    assert failing(answering(event(value), DONE), engine).kind in ("garbled", "gone")


def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("eyas.serve.events.LONGEST_EVENT", 100_000)
    failed = failing(answering(b"data: {", *[b"x" * 10_000] * 1000))
    assert failed.kind == "garbled" and "100,000 bytes" in str(failed)


def test_content_that_cannot_be_decoded():
    def zipped(request: Request) -> None:
        h = request.handler
        h.send_response(200)
        h.send_header("Content-Encoding", "gzip")
        h.send_header("Content-Length", "9")
        h.end_headers()
        h.wfile.write(b"not a zip")

    assert failing(zipped).kind == "garbled"


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for engine, model in (("vllm", "m"), (None, None)):
        with pytest.raises(Failed, match=r"nobody (listens|answers)") as failed:
            ask(url, engine, model=model)
        assert failed.value.kind == "gone"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_connection_that_breaks_in_the_midst(engine: str):
    """At the end of an event, within one, and, of OpenVINO's, in a way that looks like an end."""
    said = answer(engine)
    for sent in ([*said[:3], CUT], [*said[:3], said[3][:20], CUT]):
        failed = failing(answering(*sent, chunked=engine != "openvino"), engine)
        assert failed.kind == "gone"
        assert re.search(r"after [1-9]\d* tokens", str(failed))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stream_that_ends_in_order_before_the_answer_does(engine: str):
    failed = failing(answering(*answer(engine)[:3]), engine)
    assert failed.kind == "gone" and "before the answer did" in str(failed)


@pytest.mark.parametrize(
    "sent", [[2.0], [*vllm([[5], [6]])[:1], 2.0], [x for _ in range(40) for x in (b": ping\n\n", 0.05)]],
    ids=["before the first", "after the first", "but for comments"],
)  # fmt: skip
def test_silence_is_no_answer(sent: list[Any]):
    began = time.perf_counter()
    failed = failing(answering(*sent), timeout=0.3)
    assert failed.kind == "silent" and "said nothing for 0.3 s" in str(failed)
    assert time.perf_counter() - began < 1.5


def test_a_server_that_takes_connections_and_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        for engine, model in (("vllm", "m"), (None, None)):
            with pytest.raises(Failed, match=r"0\.3 s") as failed:
                ask(url, engine, model=model, timeout=0.3)
            assert failed.value.kind == "silent"


def test_a_slow_answer_is_not_silence():
    said = answer("vllm")
    with Raw(answering(*[x for e in said for x in (0.1, e)])) as server:
        assert ask(server.url, "vllm", model="m", timeout=0.8).count == LIMIT


def test_an_interrupted_stream_leaves_what_came():
    reply = Reply()

    async def some(url: str) -> None:
        async with Client(url, engine="vllm", model="m") as client:
            stream = client.stream(IDS, max_tokens=LIMIT, reply=reply)
            async for _ in stream:
                if len(reply.chunks) == 2:
                    break
            await stream.aclose()  # type: ignore[attr-defined]

    with Raw(answering(*answer("vllm"))) as server:
        asyncio.run(some(server.url))
    assert reply.tokens == tokens(IDS, LIMIT)[: len(reply.tokens)] and len(reply.chunks) == 2


# ---------------------------------------------------------------- who is there


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_is_known_by_its_list_of_models(engine: str):
    with Engine(engine, models=["m7"]) as server:
        assert know(server.url) == (engine, None if engine == "openvino" else "m7")
        assert know(server.url, engine=engine)[0] == engine


def test_the_server_for_openvino_says_what_its_fake_does():
    """It runs under another Python; what it calls things stands in its source."""
    source = (Path(servers.__path__[0]) / "openvino_server.py").read_text()
    assert '"owned_by": "openvino"' in source
    said = json.loads(STREAMS["openvino"]([[5], [6]], [0])[-1][6:])
    assert all(f'"{name}"' in source for name in (*said, *said["timings"]))


def listing(models: Any, health: Any = b"", status: int = 200) -> Callable[[Request], None]:
    def respond(request: Request) -> None:
        if request.path == "/v1/models":
            request.reply(status, models)
        else:
            request.reply(200 if health else 404, health)

    return respond


def rows(*names: str, by: str = "vllm") -> dict[str, Any]:
    return {"data": [{"id": name, "owned_by": by} for name in names]}


def test_several_models_have_to_be_named():
    with Raw(listing(rows("a", "b"))) as server:
        with pytest.raises(BadInput, match=r"serves a, b: name the one that is meant \(--model\)"):
            know(server.url)
        assert know(server.url, model="b") == ("vllm", "b")
        with pytest.raises(BadInput, match=r"does not serve 'c' but a, b"):
            know(server.url, model="c")


def test_an_empty_list_of_models():
    with Raw(listing(rows(), {"engine": "sglang"})) as server:
        assert know(server.url) == ("sglang", "")


@pytest.mark.parametrize(
    "models", [b"", b"not json", {}, {"data": None}, {"data": "x"}, {"data": [1, None]}, rows("m", by="organization"),
               [], b"[" * 100_000], ids=lambda m: repr(m)[:30],
)  # fmt: skip
def test_a_server_that_does_not_say_what_it_is(models: Any):
    for health in (b"", b"ok", {"status": "ok"}, {"engine": "triton"}, [1]):
        with Raw(listing(models, health)) as server:
            with pytest.raises(BadInput, match=r"does not say which engine it is.*--engine vllm\|sglang"):
                know(server.url)
            assert know(server.url, engine="llamacpp") == ("llamacpp", None)
            assert know(server.url, engine="llamacpp", model="m") == ("llamacpp", "m")


@pytest.mark.parametrize(("status", "kind"), [(401, "refused"), (403, "refused"), (500, "broken"), (503, "broken")])
def test_a_server_that_refuses_to_say(status: int, kind: str):
    with Raw(listing({"error": {"message": "Loading model"}}, status=status)) as server:
        url = server.url
        with pytest.raises(Failed, match=f"{status}.*Loading model") as failed:
            know(url)
    assert failed.value.kind == kind


@pytest.mark.parametrize("written", ["{}", "{}/", "{}/v1", "{}/v1/", "{}/metrics", "bare"])
def test_addresses_as_people_write_them(written: str):
    with Engine("vllm") as server:
        url = server.url.removeprefix("http://") if written == "bare" else written.format(server.url)
        assert ask(url).count == LIMIT


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://h:1", "http://[::1", "http://h:99999", "http://h:x", "://", "//"]
)
def test_addresses_that_are_none(url: str):
    with pytest.raises(BadInput, match="no http address"):
        Client(url)


def test_an_engine_that_nobody_can_ask():
    with pytest.raises(BadInput, match="'triton': Eyas can ask vllm, sglang, llamacpp, openvino"):
        Client("http://h:1", engine="triton")


def test_the_text_of_the_fakes_is_hard_to_cut():
    assert len(text(tokens(IDS, LIMIT)).splitlines()) > 1, "as Unicode sees it; JSON has one line"


def test_no_proxy_stands_between_us_and_this_machine(monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Engine("vllm") as server:
        assert ask(server.url).count == LIMIT
