"""A target behind an OpenAI-compatible server (vLLM, SGLang, llama.cpp, a hosted one): answers by HTTP, many at a time.

    eyas regenerate prompts.jsonl --base-url http://localhost:8000/v1 --out runs/answers

Requests that fail for a passing reason (no connection, timeout, 408, 409, 425, 429, 5xx) are repeated with exponential
back-off and jitter, after the time that the server asks for in Retry-After. One that the server refuses for good
becomes an error of that prompt; a server that refuses everything stops the run.

    pytest tests/test_regenerate_server.py
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from eyas.dialogue import Dialogue, Outcome, Reply
from eyas.errors import EyasError
from eyas.untrusted import parse_json

PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}
REFUSED_FOR_ALL = {401: "the key", 403: "the key", 404: "the address or the model's name"}


@dataclass(frozen=True)
class ServerOptions:
    """How to talk to a server."""

    base_url: str
    model: str | None = None
    """None: the only one that the server lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; it may be unset for a server of one's own."""
    concurrency: int = 64
    timeout_s: float = 600.0
    attempts: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0


class _Refused(Exception):
    """The server will not answer this request, however often it is asked."""


class Server:
    """Asks an OpenAI-compatible server. `answer_all` is what regenerate uses."""

    def __init__(
        self, options: ServerOptions, *, max_new_tokens: int, temperature: float,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.options = options
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.template_kwargs = dict(template_kwargs or {})
        self.retries = 0
        self._token_ids = True  # ask for them until the server says that it does not know the field
        self._answered = 0
        self._failed_in_a_row = 0
        self._jitter = random.Random(0)

    def answer_all(self, start: Callable[[], Dialogue | None], done: Callable[[Dialogue, Outcome], bool]) -> None:
        """Carry dialogues to their outcome, `concurrency` at a time.

        start: the next dialogue, or None while there is none to begin. done: takes an outcome, True ends the work.
        """
        asyncio.run(self._answer_all(start, done))

    async def _answer_all(
        self, start: Callable[[], Dialogue | None], done: Callable[[Dialogue, Outcome], bool]
    ) -> None:
        async with self._client() as client:
            model = self.options.model or await self._only_model(client)
            running: set[asyncio.Task[tuple[Dialogue, Outcome]]] = set()
            try:
                while True:
                    while len(running) < self.options.concurrency and (dialogue := start()) is not None:
                        running.add(asyncio.create_task(self._converse(client, model, dialogue)))
                    if not running:
                        return
                    finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in finished:
                        if done(*task.result()):
                            return
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def _client(self) -> httpx.AsyncClient:
        key = os.environ.get(self.options.api_key_env, "")
        return httpx.AsyncClient(
            base_url=self.options.base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.options.timeout_s, connect=min(30.0, self.options.timeout_s)),
            limits=httpx.Limits(max_connections=self.options.concurrency),
        )

    async def _only_model(self, client: httpx.AsyncClient) -> str:
        try:
            listed = await self._send(client, "GET", "models", None)
            names = [m["id"] for m in listed["data"]]
        except (_Refused, KeyError, TypeError) as error:
            raise EyasError(
                f"{self.options.base_url} does not list its models ({error}). Check --base-url (it usually ends in "
                f"/v1), or name the model with --model."
            ) from error
        if len(names) != 1:
            raise EyasError(f"{self.options.base_url} serves {names or 'no model'}; choose one with --model.")
        return str(names[0])

    async def _converse(self, client: httpx.AsyncClient, model: str, dialogue: Dialogue) -> tuple[Dialogue, Outcome]:
        while True:
            try:
                reply = await self._ask(client, model, dialogue)
                self._answered += 1
                self._failed_in_a_row = 0
            except _Refused as error:
                self._note_failure(str(error))
                words = str(error).lower()
                long = "context" in words and ("length" in words or "exceed" in words or "long" in words)
                return dialogue, dialogue.set_aside("too_long" if long else "error", str(error))
            outcome = dialogue.take(reply)
            if outcome is not None:
                return dialogue, outcome

    def _note_failure(self, message: str) -> None:
        """Stop when nothing is ever answered: a wrong address must not set ten thousand prompts aside."""
        self._failed_in_a_row += 1
        limit = 8 if not self._answered else max(64, 2 * self.options.concurrency)
        if self._failed_in_a_row >= limit:
            raise EyasError(
                f"{self.options.base_url}: {self._failed_in_a_row} requests in a row failed, the last with: {message}. "
                f"What was answered is kept; the same command goes on from there."
            )

    async def _ask(self, client: httpx.AsyncClient, model: str, dialogue: Dialogue) -> Reply:
        body: dict[str, Any] = {
            "model": model,
            "messages": dialogue.messages,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        }
        if dialogue.seed is not None:
            body["seed"] = dialogue.seed & 0x7FFFFFFF  # some servers hold it in 32 bits
        if self.template_kwargs:  # as vLLM, SGLang and llama.cpp call them
            body["chat_template_kwargs"] = self.template_kwargs
        if dialogue.prompt.tools:
            body["tools"] = dialogue.prompt.tools
        if self._token_ids:
            try:
                return _reply(await self._send(client, "POST", "chat/completions", body | {"return_token_ids": True}))
            except _Refused as error:
                if "return_token_ids" not in str(error):
                    raise
                self._token_ids = False
        return _reply(await self._send(client, "POST", "chat/completions", body))

    async def _send(self, client: httpx.AsyncClient, method: str, path: str, body: Any) -> Any:
        """One request, repeated while it fails for a passing reason. Raises _Refused in the end."""
        message = ""
        for attempt in range(self.options.attempts):
            asked_wait: float | None = None
            try:
                response = await client.request(method, path, json=body)
                if response.status_code == 200:
                    return parse_json(response.content)
                message = f"HTTP {response.status_code}: {response.text[:300].strip()}"
                if response.status_code in REFUSED_FOR_ALL:
                    raise EyasError(
                        f"{self.options.base_url} answered {message}. Check {REFUSED_FOR_ALL[response.status_code]} "
                        f"(--base-url, --model, and the key in ${self.options.api_key_env})."
                    )
                if response.status_code not in PASSING:
                    raise _Refused(message)
                asked_wait = retry_after(response.headers.get("retry-after"))
            except (httpx.TransportError, ValueError) as error:  # no connection, timeout; a body that is not JSON
                message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if attempt + 1 < self.options.attempts:
                self.retries += 1
                wait = min(self.options.longest_wait_s, self.options.first_wait_s * 2**attempt)
                await asyncio.sleep(max(wait * self._jitter.uniform(0.5, 1.0), asked_wait or 0.0))
        raise _Refused(f"{message} (asked {self.options.attempts} times)")


def retry_after(header: str | None, now: datetime.datetime | None = None) -> float | None:
    """Seconds to wait from a Retry-After header, a number or a date (RFC 9110, 10.2.3); at most an hour."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(header)
        except ValueError:
            return None
        seconds = (moment - (now or datetime.datetime.now(datetime.UTC))).total_seconds()
    return min(max(seconds, 0.0), 3600.0)


def _reply(answer: Any) -> Reply:
    """A chat completion, with token ids where there are any.

    vLLM: `prompt_token_ids` beside `choices`, `token_ids` in a choice. SGLang: the same names, or in `meta_info`.
    """
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        told = [choice, message, answer.get("usage") or {}, choice.get("meta_info") or answer.get("meta_info") or {}]
        tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        content = message.get("content") or ""
        if not isinstance(content, str) or not all(isinstance(part, dict) for part in told):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError):
        raise _Refused(f"no choices[0].message with text in the answer: {str(answer)[:200]}") from None
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length", "tool_calls", "eos", None):
        raise _Refused(f"the answer ended with finish_reason {finish!r}")
    meta = choice.get("meta_info") or answer.get("meta_info") or {}
    ids = _first(
        choice.get("token_ids"), choice.get("output_ids"), meta.get("output_token_ids"), meta.get("output_ids")
    )
    prompt_ids = _first(
        answer.get("prompt_token_ids"),
        choice.get("prompt_token_ids"),
        meta.get("prompt_token_ids"),
        meta.get("input_ids"),
    )
    extra = {k: message[k] for k in ("tool_calls", "reasoning_content") if message.get(k)}
    return Reply(content, "length" if finish == "length" else "stop", ids, prompt_ids, tokens, extra)


def _first(*candidates: Any) -> list[int] | None:
    """The first candidate that is a non-empty list of ids."""
    for ids in candidates:
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return ids
    return None
