"""The events of a server's stream, and what it says where it refuses.   pytest tests/test_serve_client.py"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import httpx

from ..errors import EyasError

LONGEST_EVENT = 16 << 20
SHOWN = 300  # characters of what a server says


class Failed(EyasError):
    """A request that got no whole answer.

    kind: gone (nobody listens, or the connection ended before the answer did), silent (no event for `timeout` seconds),
    refused (HTTP 4xx), broken (HTTP 5xx, or an error amidst an answer), garbled (an answer that is no answer).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Lines that end with a newline and nothing else: JSON may hold all other separators that Unicode knows.

    What follows the last newline is left out: it is an event that was cut off.
    """
    rest = bytearray()
    async for part in response.aiter_bytes():
        *whole, last = part.split(b"\n")
        for line in whole:
            yield bytes(rest + line)
            rest.clear()
        rest += last
        if len(rest) > LONGEST_EVENT:
            raise Failed("garbled", f"an event of more than {LONGEST_EVENT:,} bytes is no part of an answer")


async def events(response: httpx.Response, patience: float) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events. TimeoutError after `patience` seconds without one."""
    lines = _lines(response)
    while True:
        async with asyncio.timeout(patience):  # never across a yield, where it would end somebody else's work
            event = await _event(lines)
        if event is None:
            return
        yield event


async def _event(lines: AsyncGenerator[bytes, None]) -> Mapping[str, Any] | None:
    """The next one; None at the end. Comments, `event:` lines and [DONE] say nothing."""
    async for line in lines:
        field, _, value = line.strip().partition(b":")
        value = value.strip()
        if field == b"error":
            raise _told(value.decode("utf-8", "replace"))
        if field != b"data" or value in (b"", b"[DONE]"):
            continue
        try:
            event = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Failed("garbled", f"an event that is not JSON: {plain(repr(value[:100]))}") from error
        if not isinstance(event, Mapping):
            raise Failed("garbled", f"an event that is no object: {plain(repr(value[:100]))}")
        if event.get("error"):
            raise _told(event["error"])
        return event
    return None


def _told(error: Any) -> Failed:
    """The engines' errors are objects with a message, or a text."""
    message = error.get("message") if isinstance(error, Mapping) else None
    return Failed("broken", f"the server says: {plain(str(message or error))}")


async def beginning(response: httpx.Response) -> str:
    """The beginning of a body, however long it is."""
    found = b""
    async for part in response.aiter_bytes():
        found += part
        if len(found) > 4 * SHOWN:
            break
    return found.decode("utf-8", "replace")


def refusal(response: httpx.Response, path: str, body: str) -> Failed:
    code = response.status_code
    kind = "broken" if code >= 500 else "refused"
    said = plain(_message(body))
    return Failed(kind, f"{response.url.host}:{response.url.port}{path} answers {code} {response.reason_phrase}"
                        f"{': ' + said if said else ''}")  # fmt: skip


def _message(body: str) -> str:
    """What an error's body says: the engines' are objects with error.message, or a message."""
    try:
        values = json.loads(body)
        inner = values.get("error", values)
        return str(inner.get("message") or body) if isinstance(inner, Mapping) else str(inner)
    except (ValueError, AttributeError, RecursionError):
        return body


def plain(text: str, limit: int = SHOWN) -> str:
    """One printable line: what a server says ends up in a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:limit]
