"""Servers that speak as the real ones do: streams, lists of models and metrics, copied from what vLLM 0.32, SGLang
0.5.23, llama.cpp b11434 and Eyas' server for OpenVINO sent.

    with Engine("vllm") as server: ...                  an engine with a draft, whose rounds are known (`rounds`)
    with Raw(lambda request: request.stream([b"data: ..."])) as server: ...           any bytes at all

Python's own HTTP server in threads: nothing is started, nothing is waited for.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

K = 4
SPARE = {"llamacpp": 1, "openvino": 2}  # tokens of what is left that are not drafted; the others always draft K
CUT = "cut"  # in a stream: the connection breaks off there


class Request:
    """One request, and the ways of answering it."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        self.handler, self.method, self.path, self.raw = handler, handler.command, handler.path, body

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    def reply(self, status: int = 200, body: Any = b"", kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        with contextlib.suppress(OSError):
            self.handler.send_response(status)
            self.handler.send_header("Content-Type", kind)
            self.handler.send_header("Content-Length", str(len(data)))
            self.handler.end_headers()
            self.handler.wfile.write(data)

    def stream(self, parts: Iterable[bytes | float | str], chunked: bool = True) -> None:
        """Bytes, seconds to wait, or CUT. Not `chunked`: until the connection is closed, as OpenVINO's server does."""
        h = self.handler
        with contextlib.suppress(OSError):
            h.protocol_version = "HTTP/1.1" if chunked else "HTTP/1.0"
            h.send_response(200)
            h.send_header("Content-Type", "text/event-stream; charset=utf-8")
            h.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Connection", "close")))
            h.end_headers()
            h.close_connection = True
            for part in parts:
                if isinstance(part, float):
                    time.sleep(part)
                elif isinstance(part, bytes):
                    h.wfile.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
                    h.wfile.flush()
                else:
                    h.connection.shutdown(socket.SHUT_RDWR)
                    return
            if chunked:
                h.wfile.write(b"0\r\n\r\n")


class Raw:
    """A server whose every answer a test decides. `requests`: what was asked."""

    def __init__(self, respond: Callable[[Request], None]) -> None:
        self.requests: list[Request] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_any(self) -> None:
                request = Request(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))
                server.requests.append(request)
                respond(request)

            do_GET = do_POST = handle_any

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                pass  # a client that went away is what tests are about

        self.http = Server(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Bodies of the requests for answers."""
        return [r.body for r in self.requests if r.method == "POST"]

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------- what an engine would answer


def tokens(ids: Sequence[int], n: int) -> list[int]:
    """The target's answer: the same from every engine, with the draft and without."""
    return [3 + (sum(ids) * 7 + i * i * 3 + i) % 250 for i in range(n)]


def acceptable(ids: Sequence[int], begun: int) -> int:
    """Drafts that the target would accept in a round that begins after `begun` tokens."""
    return (0, 1, 0, 4, 2, 0, 3)[(sum(ids) + begun * begun) % 7]


def rounds(ids: Sequence[int], limit: int, engine: str = "vllm", k: int = K) -> list[int]:
    """Accepted drafts of each round, the slow way: an engine that drafts min(k, what fits) until the answer is full."""
    begun, out = 1, []
    while begun < limit:
        drafted = min(k, max(0, limit - begun - SPARE[engine])) if engine in SPARE else k
        out.append(min(drafted, acceptable(ids, begun)))
        begun += out[-1] + 1
    return out


def groups(ids: Sequence[int], limit: int, accepted: Sequence[int]) -> list[list[int]]:
    """The answer's tokens as its rounds bring them, prefill's first, cut at the limit."""
    answer, out, at = tokens(ids, limit), [], 0
    for n in (0, *accepted):
        out.append(answer[at : at + n + 1])
        at += n + 1
    return [group for group in out if group]


def event(value: Any) -> bytes:
    """As all four send it: other alphabets as they are, not escaped."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def text(ids: Sequence[int]) -> str:
    """Every token is one character, some of which Unicode takes for the end of a line, and JSON does not."""
    return "".join("\u2028" if i % 7 == 0 else "\x85" if i % 7 == 1 else chr(0x400 + i) for i in ids)


def vllm(parts: Sequence[Sequence[int]], accepted: Sequence[int] | None = None, *, ids: Sequence[int] = (1,),
         finish: str = "length", k: int = K, level: str = "detailed") -> list[bytes]:  # fmt: skip
    """accepted: of each round; None: without --per-request-spec-decode-metrics."""
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1796056209, "model": "m"}
    out = []
    for place, part in enumerate(parts):
        last = place == len(parts) - 1
        choice = {"index": 0, "text": text(part), "logprobs": None, "finish_reason": finish if last else None,
                  "stop_reason": None, "prompt_token_ids": None if place else list(ids),
                  "token_ids": list(part)}  # fmt: skip
        out.append(event({**head, "choices": [choice]}))
    n = sum(map(len, parts))
    usage = {"prompt_tokens": len(ids), "total_tokens": len(ids) + n, "completion_tokens": n}
    end: dict[str, Any] = {**head, "choices": [], "usage": usage, "system_fingerprint": "vllm-0.32.0-a2ccb8f8"}
    if accepted is not None:
        end["metrics"] = {"speculative_decoding": vllm_counts(accepted, k, level)}
    return [*out, event(end), DONE]


def vllm_counts(accepted: Sequence[int], k: int = K, level: str = "detailed") -> dict[str, Any]:
    n = len(accepted)
    said: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / n if n else 1.0,
        "draft_acceptance_rate": sum(accepted) / (n * k) if n else 0.0,
        "acceptance_histogram": [list(accepted).count(j) for j in range(k + 1)],
        "num_spec_steps": n, "num_accepted_draft_tokens": sum(accepted), "num_draft_tokens": n * k,
        "num_spec_tokens": k,
    }  # fmt: skip
    if level == "detailed" and n:
        said |= {"per_step_accepted": list(accepted), "per_step_drafted": [k] * n}
    return said


def sglang(parts: Sequence[Sequence[int]], accepted: Sequence[int] | None = None, *, ids: Sequence[int] = (1,),
           finish: str = "length", k: int = K, incremental: bool = False) -> list[bytes]:  # fmt: skip
    out, so_far = [], list[int]()
    for place, part in enumerate(parts):
        so_far += part
        last = place == len(parts) - 1
        shown = list(part) if incremental else list(so_far)
        meta: dict[str, Any] = {"id": "ee09", "finish_reason": None, "prompt_tokens": len(ids),
                                "weight_version": "default", "completion_tokens": len(so_far),
                                "cached_tokens": 0}  # fmt: skip
        if last:
            meta["finish_reason"] = {"type": finish, "length": len(so_far)}
            meta |= sglang_counts(accepted, len(so_far), k) if accepted else {}
        out.append(event({"text": text(shown), "output_ids": shown, "meta_info": meta}))
    return [*out, DONE]


def sglang_counts(accepted: Sequence[int], n: int, k: int = K) -> dict[str, Any]:
    """The histogram is as long as the best round needs."""
    return {
        "spec_accept_rate": sum(accepted) / (len(accepted) * k), "spec_accept_length": n / len(accepted),
        "spec_num_correct_drafts": sum(accepted), "spec_num_proposed_drafts": len(accepted) * k,
        "spec_verify_ct": len(accepted),
        "spec_correct_drafts_histogram": [list(accepted).count(j) for j in range(max(accepted) + 1)],
    }  # fmt: skip


def llamacpp(parts: Sequence[Sequence[int]], accepted: Sequence[int] | None = None, *, ids: Sequence[int] = (1,),
             finish: str = "limit", k: int = K, lost: Sequence[int] = ()) -> list[bytes]:  # fmt: skip
    """Token by token. lost: places of tokens that are parts of a character: they are counted and not sent."""
    answer = [token for part in parts for token in part]
    out = [event({"index": 0, "content": text([token]), "tokens": [token], "stop": False, "id_slot": -1,
                  "tokens_predicted": n, "tokens_evaluated": len(ids)})
           for n, token in enumerate(answer, 1) if n - 1 not in lost]  # fmt: skip
    end = {"index": 0, "content": "", "tokens": [], "id_slot": 0, "stop": True, "model": "m",
           "tokens_predicted": len(answer), "tokens_evaluated": len(ids), "generation_settings": {"seed": 4294967295},
           "stop_type": finish, "stopping_word": "", "tokens_cached": len(ids) + len(answer),
           "timings": timings(len(answer), accepted, len(ids))}  # fmt: skip
    return [*out, event(end)]


def timings(n: int, accepted: Sequence[int] | None, prompt: int = 1) -> dict[str, Any]:
    """Of drafts nothing is said where none was drafted."""
    said: dict[str, Any] = {"cache_n": 0, "prompt_n": prompt, "prompt_ms": 398.5, "predicted_n": n, "predicted_ms": 5.7}
    drafted = sum(min(K, max(0, n - begun - 1)) for begun in _begun(accepted or ()))
    return said | ({"draft_n": drafted, "draft_n_accepted": sum(accepted)} if accepted and drafted else {})


def _begun(accepted: Sequence[int]) -> list[int]:
    out = [1]
    for n in accepted[:-1]:
        out.append(out[-1] + n + 1)
    return out[: len(accepted)]


def openvino(parts: Sequence[Sequence[int]], accepted: Sequence[int] | None = None, *, ids: Sequence[int] = (1,),
             finish: str = "limit", k: int = K) -> list[bytes]:  # fmt: skip
    """Rounds as GenAI hands them over; the count of them stands beside the timings."""
    n = sum(map(len, parts))
    out = [event({"tokens": list(part), "content": text(part), "stop": False}) for part in parts]
    end: dict[str, Any] = {"tokens": [], "stop": True, "tokens_evaluated": len(ids), "tokens_predicted": n,
                           "stop_type": finish}  # fmt: skip
    said: dict[str, Any] = {"prompt_n": len(ids), "predicted_n": n, "prompt_ms": 372.3, "predicted_ms": 2307.6}
    if accepted is not None:
        end["rounds"] = len(accepted)
        said |= {"draft_n_accepted": sum(accepted), "draft_n": len(accepted) * k}
    return [*out, event({**end, "timings": said})]


STREAMS: dict[str, Callable[..., list[bytes]]] = {
    "vllm": vllm, "sglang": sglang, "llamacpp": llamacpp, "openvino": openvino
}  # fmt: skip
PATHS = {"vllm": "/v1/completions", "sglang": "/generate", "llamacpp": "/completion", "openvino": "/completion"}


class Engine(Raw):
    """An engine with a draft (or, draft=False, without), its counters running from `before` on.

    counts: does it say for each request what it accepted? wrong: answers otherwise than the target alone. slow: seconds
    before each group. fail(n): how the n-th request (from 0) is answered instead, None as usual.
    """

    def __init__(
        self, engine: str, *, draft: bool = True, counts: bool = True, metrics: bool = True,
        models: Sequence[str] = ("m",), slow: float = 0.0, wrong: bool = False,
        fail: Callable[[int], Callable[[Request], None] | None] | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.draft, self.counts, self.metrics, self.models = engine, draft, counts, metrics, list(models)
        self.slow, self.wrong, self.fail = slow, wrong, fail
        self.lock = threading.Lock()
        self.answered = self.at_once = self.most_at_once = 0
        self.done: dict[str, list[list[int]]] = {}  # model -> accepted drafts of the rounds of each answer
        self.made: dict[str, int] = {}  # model -> tokens
        super().__init__(self._respond)

    def count(self, model: str, n: int, accepted: list[int]) -> None:
        """Add an answer to the counters: somebody's."""
        with self.lock:
            self.made[model] = self.made.get(model, 0) + n
            self.done.setdefault(model, []).append(accepted)

    def _respond(self, request: Request) -> None:
        if request.method == "GET":
            self._page(request)
            return
        with self.lock:
            n = self.answered
            self.answered += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            instead = self.fail(n) if self.fail is not None else None
            if instead is not None:
                instead(request)
            elif request.path != PATHS[self.engine]:
                request.reply(404, {"error": {"message": f"no page {request.path}"}})
            else:
                self._answer(request)
        finally:
            with self.lock:
                self.at_once -= 1

    def _answer(self, request: Request) -> None:
        body = request.body
        ids = body.get("prompt") or body.get("input_ids")
        limit = body.get("max_tokens") or body.get("n_predict") or body["sampling_params"]["max_new_tokens"]
        model = body.get("model") or self.models[0]
        accepted = rounds(ids, limit, self.engine) if self.draft else [0] * (limit - 1)
        parts = groups(ids, limit, accepted)
        if self.wrong:
            parts[-1] = [parts[-1][0] + 1, *parts[-1][1:]]
        said = accepted if self.draft and self.counts else None
        sent: list[bytes | float | str] = []
        for piece in STREAMS[self.engine](parts, said, ids=ids):
            sent += [self.slow, piece] if self.slow else [piece]
        self.count(model, sum(map(len, parts)), accepted)
        request.stream(sent, chunked=self.engine != "openvino")

    def _page(self, request: Request) -> None:
        if request.path == "/v1/models":
            rows = [{"id": name, "object": "model", "created": 1, "owned_by": self.engine} for name in self.models]
            request.reply(200, {"object": "list", "data": rows})
        elif request.path == "/health":
            request.reply(200, "" if self.engine in ("vllm", "sglang") else {"status": "ok"})
        elif request.path == "/metrics" and self.metrics and self.engine != "openvino":
            request.reply(200, self.exposition(), "text/plain")
        else:
            request.reply(404, {"error": {"message": f"no page {request.path}"}})

    def exposition(self) -> str:
        """/metrics as the engine words it."""
        with self.lock:
            made, done = dict(self.made), {name: list(answers) for name, answers in self.done.items()}
        lines = ["# HELP vllm:generation_tokens_total Number of generation tokens processed."]
        for name in {"vllm": self.models[:1]}.get(self.engine, self.models):
            mine = [name] if len(self.models) == 1 or self.engine != "vllm" else self.models
            every = [n for model in mine for answer in done.get(model, ()) for n in answer]
            n = sum(made.get(model, 0) for model in mine)
            answers = sum(len(done.get(model, ())) for model in mine)
            label = f'model_name="{name}"'
            if self.engine == "vllm":
                lines.append(f'vllm:generation_tokens_total{{engine="0",{label}}} {float(n)}')
                if self.draft:
                    lines += vllm_counters(every, f'engine="0",{label}')
            elif self.engine == "sglang":
                lines.append(f"sglang:spec_accept_length{{{label}}} {1.25 if every else 0.0}")
                if answers:  # its counters appear with the first request that ends
                    lines += [f'sglang:generation_tokens_total{{is_streaming="true",{label}}} {float(n)}',
                              f"sglang:spec_verify_calls_total{{{label}}} {float(len(every))}",
                              f"sglang:num_requests_total{{{label}}} {float(answers)}"]  # fmt: skip
            else:
                lines += [f"llamacpp:tokens_predicted_total {n}"]
                if self.draft:
                    lines += [f"llamacpp:spec_decode_num_drafts_total {len(every)}",
                              f"llamacpp:spec_decode_num_draft_tokens_total {K * len(every)}",
                              f"llamacpp:spec_decode_num_accepted_tokens_total {sum(every)}"]  # fmt: skip
        return "\n".join(lines) + "\n"


def vllm_counters(accepted: Sequence[int], labels: str = 'engine="0",model_name="m"', k: int = K) -> list[str]:
    """Lines of vLLM's /metrics after these rounds."""
    per = [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{j}"}} '
           f"{float(sum(n > j for n in accepted))}" for j in range(k)]  # fmt: skip
    return [f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(len(accepted))}",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(k * len(accepted))}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(sum(accepted))}", *per]  # fmt: skip
