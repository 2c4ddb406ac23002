"""All prompts to one server, so many at once; what came is kept, whatever happens then.

pytest tests/test_measure_asking.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..serve.client import Client, Reply
from ..serve.events import Failed

MOST_FAILURES = 3
"""In a row: then nobody is asked any more."""
INTERRUPTED = "interrupted: what had come by then is kept"


@dataclass(frozen=True)
class Question:
    """One prompt of a set, as token ids."""

    set: str
    index: int
    ids: tuple[int, ...]


@dataclass
class Answered:
    """What came back: a reply, or why there is none."""

    question: Question
    reply: Reply | None = None
    error: str = ""


@dataclass
class Run:
    """One pass over the prompts."""

    concurrency: int
    answered: list[Answered] = field(default_factory=list)
    """In the order of the questions; those that were never asked are left out."""
    seconds: float = 0.0
    stopped: str = ""
    """Why it ended before all were asked."""
    engine: str = ""
    model: str = ""

    @property
    def replies(self) -> list[Answered]:
        """Those with a whole answer."""
        return [a for a in self.answered if a.reply is not None]

    @property
    def errors(self) -> list[str]:
        """Each reason once."""
        return list(
            dict.fromkeys([a.error for a in self.answered if a.error] + ([self.stopped] if self.stopped else []))
        )


@dataclass(frozen=True)
class How:
    """How answers are asked for."""

    max_tokens: int = 64
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0
    timeout: float = 300.0
    """Seconds without a word after which a server counts as hanging."""


def ask_all(
    url: str, questions: Sequence[Question], how: How, *, concurrency: int = 1, engine: str | None = None,
    model: str | None = None, run: Run | None = None, on_answer: Callable[[], None] = lambda: None,
) -> Run:  # fmt: skip
    """Ask every question once. `run` is filled on the way, so that an interrupt (KeyboardInterrupt) loses nothing.

    A server that is gone or hangs, and one that fails MOST_FAILURES times in a row, is asked no further. Raises
    BadInput and Failed where not even the kind of server can be found out.
    """
    run = Run(concurrency) if run is None else run
    asyncio.run(_ask_all(url, questions, how, run, engine, model, on_answer))
    return run


async def _ask_all(
    url: str, questions: Sequence[Question], how: How, run: Run, engine: str | None, model: str | None,
    on_answer: Callable[[], None],
) -> None:  # fmt: skip
    waiting = list(enumerate(questions))[::-1]
    done: dict[int, Answered] = {}
    failures = 0

    async def worker(client: Client) -> None:
        nonlocal failures
        while waiting and not run.stopped:
            place, question = waiting.pop()
            answered = Answered(question)
            try:
                answered.reply = await client.ask(
                    question.ids, max_tokens=how.max_tokens, temperature=how.temperature, ignore_eos=how.ignore_eos,
                    seed=how.seed if how.temperature else None,
                )  # fmt: skip
                failures = 0
            except Failed as error:
                answered.error = str(error)
                failures += 1
                if error.kind in ("gone", "silent"):
                    run.stopped = run.stopped or str(error)
                elif failures >= MOST_FAILURES:
                    run.stopped = run.stopped or f"{failures} requests in a row failed, the last: {error}"
            done[place] = answered
            run.answered = [done[i] for i in sorted(done)]
            on_answer()

    async with Client(url, engine=engine, model=model, timeout=how.timeout) as client:
        dialect = await client.know()
        run.engine, run.model = dialect.engine, client.model or ""
        began = time.perf_counter()
        tasks = {asyncio.create_task(worker(client)) for _ in range(min(run.concurrency, len(questions)))}
        pending = tasks
        try:
            while pending and not run.stopped:
                finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    task.result()
        except asyncio.CancelledError:
            run.stopped = run.stopped or INTERRUPTED
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # before the connections go, which would look broken
            run.seconds = time.perf_counter() - began
