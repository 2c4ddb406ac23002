"""Ask a running server, whichever engine it is: tokens as they come, and what it counted for this request.

    client = Client("http://127.0.0.1:8000")
    reply = await client.ask([1, 2, 3], max_tokens=64)          # reply.tokens, reply.counts, reply.chunks
    async for chunk in client.stream([1, 2, 3], max_tokens=64): ...

Nothing is asked twice here: a request that fails is a `Failed` that says how.   pytest tests/test_serve_client.py
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from ..errors import BadInput, EyasError
from .dialects import DIALECTS, Asked, Dialect, Said

CONNECT = 10.0
LONGEST_EVENT = 16 << 20


class Failed(EyasError):
    """A request that got no whole answer.

    kind: gone (nobody listens, or the connection broke), silent (no event for `timeout` seconds), refused (HTTP 4xx),
    broken (HTTP 5xx), garbled (an answer that is no answer).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Chunk:
    """Tokens that arrived together."""

    tokens: tuple[int, ...]
    text: str
    at: float
    """Seconds since the request was sent."""


@dataclass
class Reply:
    """A whole answer."""

    tokens: list[int] = field(default_factory=list)
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the request was sent, how many tokens came then)."""
    counts: dict[str, Any] = field(default_factory=dict)
    """What the server says of this request's acceptance, by its own names; {} where it says nothing."""
    finish: str = ""
    seconds: float = 0.0


class Client:
    """One server. `timeout`: seconds without a word after which an answer counts as lost.

    `engine` and `model` are found by asking where they are not given. Raises BadInput for an address that is none,
    Failed where nobody answers there.
    """

    def __init__(
        self, url: str, *, engine: str | None = None, model: str | None = None, timeout: float = 600.0
    ) -> None:
        url = url if "//" in url else f"http://{url}"
        parts = httpx.URL(url)
        if parts.scheme not in ("http", "https") or not parts.host:
            raise BadInput(f"{url!r} is no http address of a server, as http://localhost:8000 would be")
        if engine is not None and engine not in DIALECTS:
            raise BadInput(f"engine {engine!r}: Eyas can ask {', '.join(DIALECTS)}")
        self.url = url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
        self.engine, self.model, self.timeout = engine, model, timeout
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a new one each: none is stale
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=CONNECT), limits=limits)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def know(self) -> Dialect:
        """Which engine it is, and which model it serves, asked once. Raises Failed, and BadInput where that is unclear.

        An engine's list of models names its maker: vLLM's and SGLang's say so, llama.cpp's too; Eyas' server for
        OpenVINO says it at /health.
        """
        if self.engine is None or (self.engine == "vllm" and self.model is None):
            listed = await self._get("/v1/models")
            models = listed.get("data") if isinstance(listed, Mapping) else None
            rows = [m for m in models if isinstance(m, Mapping)] if isinstance(models, list) else []
            if self.engine is None:
                makers = {str(m.get("owned_by")).lower() for m in rows}
                self.engine = next((name for name in DIALECTS if name in makers), None) or await self._by_health()
            names = [str(m["id"]) for m in rows if "id" in m]
            if self.model is None and self.engine in ("vllm", "sglang", "llamacpp"):
                if len(names) > 1:
                    raise BadInput(f"{self.url} serves {', '.join(names)}: name the one that is meant (--model)")
                self.model = names[0] if names else ""
            elif self.model is not None and names and self.model not in names:
                raise BadInput(f"{self.url} does not serve {self.model!r} but {', '.join(names)}")
        return DIALECTS[self.engine]

    async def stream(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        ignore_eos: bool = False,
        seed: int | None = None,
        reply: Reply | None = None,
    ) -> AsyncIterator[Chunk]:
        """Tokens as they come; `reply` is filled on the way. Raises Failed."""
        dialect = await self.know()
        reply = Reply() if reply is None else reply
        asked = Asked(ids, max_tokens, temperature, ignore_eos, seed, self.model or "")
        text, begun = "", time.perf_counter()
        try:
            async with self._http.stream("POST", self.url + dialect.path, json=dialect.body(asked)) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _status(response, dialect.path)
                async for event in _events(response):
                    said = _said(dialect, event)
                    new, fresh = _new(said, reply.tokens, text)
                    text += fresh
                    reply.finish = said.finish or reply.finish
                    reply.counts |= said.counts
                    if new:
                        at = time.perf_counter() - begun
                        reply.tokens += new
                        reply.chunks.append((at, len(new)))
                        yield Chunk(tuple(new), fresh, at)
        except httpx.TimeoutException as error:
            within = CONNECT if isinstance(error, httpx.ConnectTimeout) else self.timeout
            kind = "gone" if isinstance(error, httpx.ConnectTimeout) else "silent"
            raise Failed(kind, f"{self.url} said nothing for {within:g} s (asked for {max_tokens} tokens after "
                               f"{len(ids)}, {len(reply.tokens)} came)") from error  # fmt: skip
        except httpx.TransportError as error:
            what = "nobody listens" if isinstance(error, httpx.ConnectError) else "the connection broke"
            why = str(error) or type(error).__name__
            raise Failed("gone", f"{self.url}: {what} ({why}) after {len(reply.tokens)} tokens") from error
        finally:
            reply.seconds = time.perf_counter() - begun
        if not reply.tokens:
            raise Failed("garbled", f"{self.url}{dialect.path} answered without token ids; is it {dialect.engine}, "
                                    "and new enough to return them?")  # fmt: skip

    async def ask(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        ignore_eos: bool = False,
        seed: int | None = None,
    ) -> Reply:
        """The whole answer. Raises Failed."""
        reply = Reply()
        how: dict[str, Any] = {"temperature": temperature, "ignore_eos": ignore_eos, "seed": seed}
        async for _ in self.stream(ids, max_tokens=max_tokens, reply=reply, **how):
            pass
        return reply

    async def _get(self, path: str) -> Any:
        """JSON of a page; None where there is none."""
        try:
            response = await self._http.get(self.url + path, timeout=min(CONNECT, self.timeout))
            return response.json() if response.status_code == 200 else None
        except httpx.TimeoutException as error:
            raise Failed("silent", f"{self.url}{path} did not answer within {CONNECT:g} s") from error
        except httpx.TransportError as error:
            raise Failed("gone", f"{self.url}: nobody answers ({error}); is a server running there?") from error
        except ValueError:
            return None

    async def _by_health(self) -> str:
        health = await self._get("/health")
        named = health.get("engine") if isinstance(health, Mapping) else None
        if named in DIALECTS:
            return str(named)
        raise BadInput(f"{self.url} does not say which engine it is; name it (--engine {'|'.join(DIALECTS)})")


async def _events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    async for line in response.aiter_lines():
        if not line.startswith("data:") or line[5:].strip() == "[DONE]":
            if line.startswith("error:"):
                raise Failed("broken", f"the server says: {line[6:].strip()[:300]}")
            continue
        if len(line) > LONGEST_EVENT:
            raise Failed("garbled", f"an event of {len(line):,} characters is no part of an answer")
        try:
            event = json.loads(line[5:])
        except ValueError as error:
            raise Failed("garbled", f"an event that is not JSON: {line[5:105]!r}") from error
        if not isinstance(event, Mapping):
            raise Failed("garbled", f"an event that is no object: {line[5:105]!r}")
        if event.get("error"):
            raise Failed("broken", f"the server says: {str(event['error'])[:300]}")
        yield event


def _said(dialect: Dialect, event: Mapping[str, Any]) -> Said:
    try:
        return dialect.read(event)
    except (TypeError, AttributeError, LookupError) as error:
        raise Failed("garbled", f"an event that no {dialect.engine} sends: {str(event)[:100]}") from error


def _new(said: Said, tokens: list[int], text: str) -> tuple[list[int], str]:
    """What of an event had not come before.

    SGLang sends the answer so far; with --incremental-streaming-output only what is new, which then does not begin as
    the answer does.
    """
    if not said.whole:
        return list(said.tokens), said.text
    before = len(tokens)
    if list(said.tokens[:before]) != tokens:
        return list(said.tokens), said.text
    return list(said.tokens[before:]), said.text.removeprefix(text)


def _status(response: httpx.Response, path: str) -> Failed:
    code = response.status_code
    body = response.text[:300].strip()
    kind = "broken" if code >= 500 else "refused"
    return Failed(kind, f"{response.url.host}:{response.url.port}{path} answers {code} {response.reason_phrase}"
                        f"{': ' + body if body else ''}")  # fmt: skip
