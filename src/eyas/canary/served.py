"""Ask an engine: serve the canary, or ask a server that does, prompt by prompt.

    served(canary, "vllm", target, "runs/canary/draft")           heard_at(canary, "http://127.0.0.1:8000")

Prompts go in as token ids, greedy, `ignore_eos`, one at a time: what a prompt gives depends on no other.
    make test-engines (tests/real/test_canary.py)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import EyasError
from ..measure.counting import all_rounds
from ..serve import Launch, running
from ..serve.client import Client, Reply
from .check import Heard

Tell = Callable[[str], None]


def served(
    canary: Mapping[str, Any], engine: str, target: Path, draft: Path, *, dtype: str = "float32",
    extra: tuple[str, ...] = (), tell: Tell = lambda text: None,
) -> Heard:  # fmt: skip
    """Start the engine here, ask, stop it. Raises BadInput where it is not set up, EyasError where it fails."""
    launch = Launch(engine, target, draft, k=int(canary["k"]), dtype=dtype, context=context(canary), extra=extra)
    with running(launch, tell=tell) as server:
        tell(f"asking {engine}")
        return heard_at(canary, server.url, engine=engine, model=server.model)


def context(canary: Mapping[str, Any]) -> int:
    """Longest sequence, and some room: positions to serve at least."""
    longest = max(len(p["ids"]) for p in canary["prompts"]) + int(canary["tokens"]) + 2 * int(canary["k"])
    return -(-longest // 256) * 256


def heard_at(canary: Mapping[str, Any], url: str, *, engine: str | None = None, model: str | None = None) -> Heard:
    """Ask a running server. Raises EyasError where it does not answer, or does not say what it accepted."""
    name, replies = asyncio.run(_ask(canary, url, engine, model))
    found = all_rounds(name, replies)
    lost = [i for i, rounds in enumerate(found) if rounds is None]
    if lost:
        raise EyasError(
            f"{url} ({name}) does not say what it accepted of {len(lost)} of {len(found)} prompts; does it serve a "
            "draft, and with its per-request counts on? Start it as `eyas serve --print` shows"
        )  # fmt: skip
    rounds = [r for r in found if r is not None]
    k, each = int(canary["k"]), tuple(r.each for r in rounds)
    at_least: tuple[int, ...] = ()
    if all(len(r.each) == r.rounds for r in rounds):
        at_least = tuple(sum(n >= j for r in rounds for n in r.each) for j in range(1, k + 1))
    steps = {r.steps for r in rounds if r.steps}
    drafted = steps.pop() if len(steps) == 1 else None
    return Heard(
        sum(r.rounds for r in rounds), sum(r.accepted for r in rounds), at_least,
        tuple(tuple(r.tokens) for r in replies), each if at_least else (), name, drafted,
    )  # fmt: skip


async def _ask(canary: Mapping[str, Any], url: str, engine: str | None, model: str | None) -> tuple[str, list[Reply]]:
    async with Client(url, engine=engine, model=model) as client:
        name = (await client.know()).engine
        tokens = int(canary["tokens"])
        return name, [await client.ask(p["ids"], max_tokens=tokens, ignore_eos=True) for p in canary["prompts"]]
