"""Ask a running server, whichever engine it is: tokens as they come, and what it counted for this request.

    client = Client("http://127.0.0.1:8000")
    reply = await client.ask([1, 2, 3], max_tokens=64)          # reply.tokens, reply.counts, reply.chunks
    async for chunk in client.stream([1, 2, 3], max_tokens=64): ...

Nothing is asked twice here: a request that fails is a `Failed` that says how.   pytest tests/test_serve_client.py
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from ..errors import BadInput
from ..untrusted import parse_json
from .dialects import DIALECTS, Asked, Dialect, Said
from .events import SHOWN, Failed, beginning, events, plain, refusal

CONNECT = 10.0


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
    lost: int = 0
    """Tokens that the server counted and did not send: llama.cpp's stream leaves out the parts of a character."""

    @property
    def count(self) -> int:
        """Tokens of the answer, those that did not come, too."""
        return len(self.tokens) + self.lost


class Client:
    """One server. `timeout`: seconds without a word after which an answer counts as lost.

    `engine` and `model` are found by asking where they are not given. Raises BadInput for an address that is none,
    Failed where nobody answers there.
    """

    def __init__(
        self, url: str, *, engine: str | None = None, model: str | None = None, timeout: float = 600.0
    ) -> None:
        self.url = address(url)
        if engine is not None and engine not in DIALECTS:
            raise BadInput(f"engine {engine!r}: Eyas can ask {', '.join(DIALECTS)}; choose one of these")
        self.engine, self.model, self.timeout = engine, model, timeout
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a new one each: none is stale
        secure = self.url.startswith(
            "https"
        )  # else certificates, which take longer to read than an answer, are not needed
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, connect=CONNECT), limits=limits, verify=secure, trust_env=not _here(self.url)
        )

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

        An engine's list of models names its maker: vLLM's, SGLang's and llama.cpp's do, and that of Eyas' server for
        OpenVINO.
        """
        if self.engine is None or (self.engine == "vllm" and self.model is None):
            listed = await self._get("/v1/models")
            models = listed.get("data") if isinstance(listed, Mapping) else None
            rows = [m for m in models if isinstance(m, Mapping)] if isinstance(models, list) else []
            if self.engine is None:
                makers = {str(m.get("owned_by")).lower() for m in rows}
                self.engine = next((name for name in DIALECTS if name in makers), None) or await self._by_health()
            names = [plain(str(m["id"])) for m in rows if "id" in m]
            if self.model is None and self.engine in ("vllm", "sglang", "llamacpp"):
                if len(names) > 1:
                    raise BadInput(f"{self.url} serves {', '.join(names)}: name the one that is meant (--model)")
                self.model = names[0] if names else ""
            elif self.model is not None and names and self.model not in names:
                raise BadInput(
                    f"{self.url} does not serve {self.model!r} but {', '.join(names)}; choose one of these (--model)"
                )
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
                    raise refusal(response, dialect.path, await beginning(response))
                async for event in events(response, self.timeout):
                    said = _said(dialect, event)
                    new, fresh, text = _new(said, reply.tokens, text)
                    reply.tokens += new
                    reply.finish = said.finish or reply.finish
                    reply.counts |= said.counts
                    reply.lost = max(reply.lost, (said.total or 0) - len(reply.tokens))
                    if new:
                        at = time.perf_counter() - begun
                        reply.chunks.append((at, len(new)))
                        yield Chunk(tuple(new), fresh, at)
        except (httpx.TimeoutException, TimeoutError) as error:
            within = CONNECT if isinstance(error, httpx.ConnectTimeout) else self.timeout
            kind = "gone" if isinstance(error, httpx.ConnectTimeout) else "silent"
            raise Failed(kind, f"{self.url} said nothing for {within:g} s (asked for {max_tokens} tokens after "
                               f"{len(ids)}, {reply.count} came)") from error  # fmt: skip
        except httpx.TransportError as error:
            what = "nobody listens" if isinstance(error, httpx.ConnectError) else "the connection broke"
            why = str(error) or type(error).__name__
            raise Failed("gone", f"{self.url}: {what} ({why}) after {reply.count} tokens") from error
        except httpx.HTTPError as error:  # content that cannot be decoded
            raise Failed("garbled", f"{self.url}{dialect.path}: {plain(str(error))}") from error
        finally:
            reply.seconds = time.perf_counter() - begun
        if not reply.count:
            raise Failed("garbled", f"{self.url}{dialect.path} answered without token ids; is it {dialect.engine}, "
                                    "and new enough to return them?")  # fmt: skip
        if not reply.finish:
            raise Failed("gone", f"{self.url}: the connection ended after {reply.count} tokens, before the answer did")

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
        """JSON of a page; None where there is none. Raises Failed where nobody answers, or an error."""
        try:
            response = await self._http.get(self.url + path, timeout=min(CONNECT, self.timeout))
        except httpx.TimeoutException as error:
            within = min(CONNECT, self.timeout)
            raise Failed("silent", f"{self.url}{path} did not answer within {within:g} s") from error
        except httpx.HTTPError as error:
            raise Failed("gone", f"{self.url}: nobody answers ({error}); is a server running there?") from error
        if response.status_code in (401, 403) or response.status_code >= 500:
            raise refusal(response, path, response.text)
        try:
            return parse_json(response.content) if response.status_code == 200 else None
        except ValueError:
            return None

    async def _by_health(self) -> str:
        health = await self._get("/health")
        named = health.get("engine") if isinstance(health, Mapping) else None
        if named in DIALECTS:
            return str(named)
        raise BadInput(f"{self.url} does not say which engine it is; name it (--engine {'|'.join(DIALECTS)})")


def address(url: str) -> str:
    """A server's address as users write it -> scheme, host and port. Raises BadInput for what is none."""
    whole = url if "//" in url else f"http://{url}"
    try:
        parts = httpx.URL(whole)
        right = parts.scheme in ("http", "https") and bool(parts.host) and 0 < (parts.port or 80) < 65536
    except (httpx.InvalidURL, ValueError):
        right = False
    if not right:
        raise BadInput(f"{url!r} is no http address of a server, as http://localhost:8000 would be; give its address")
    return whole.rstrip("/").removesuffix("/v1").removesuffix("/metrics")


def _here(url: str) -> bool:
    """Is it this machine, where a proxy has no business?"""
    host = httpx.URL(url).host
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _said(dialect: Dialect, event: Mapping[str, Any]) -> Said:
    try:
        said = dialect.read(event)
    except (TypeError, AttributeError, LookupError) as error:
        raise Failed("garbled", f"an event that no {dialect.engine} sends: {plain(str(event), 100)}") from error
    right = isinstance(said.text, str) and isinstance(said.finish, str) and isinstance(said.counts, Mapping)
    if not right:
        raise Failed("garbled", f"an event that no {dialect.engine} sends: {plain(str(event), 100)}")
    if said.finish in ("abort", "error"):
        raise Failed("broken", f"the server broke the answer off: {plain(str(event), SHOWN)}")
    return said


def _new(said: Said, tokens: list[int], text: str) -> tuple[list[int], str, str]:
    """What of an event had not come before: its tokens, its text, and all of the text so far.

    SGLang sends the answer so far, or with --incremental-streaming-output what is new; which one its own count of
    tokens tells. An old one that does not count is taken to repeat where it does.
    """
    before = len(tokens)
    if not said.whole or (said.total is None and list(said.tokens[:before]) != tokens):
        return list(said.tokens), said.text, text + said.text
    if list(said.tokens[:before]) != tokens:
        raise Failed("garbled", f"the server took back what it had said: {before} tokens came that are not its own now")
    same = len(text)
    if not said.text.startswith(text):  # half a character at the end became a whole one
        same = next((i for i, (a, b) in enumerate(zip(text, said.text, strict=False)) if a != b), len(said.text))
    return list(said.tokens[before:]), said.text[same:], said.text
