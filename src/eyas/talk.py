"""A conversation with a target that has a draft: turns, history, and what each answer's rounds accepted.

    talk = Conversation(tokenizer, Local(target, drafter, k=4), eos_ids=facts.eos_ids)
    turn = talk.begin("hello")
    for done in talk.rounds(turn): ...              # as they come; may be left at any time
    talk.end(turn)

Answers come from the reference decoder (`Local`) or from a served engine (`Served`); both give rounds. Each turn is
rendered by the chat template with all that was said before, and read anew.   pytest tests/test_talk.py
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from eyas.errors import BadInput

if TYPE_CHECKING:
    from eyas.decode.rules import Rule
    from eyas.decode.step import ChainDrafter
    from eyas.decode.talk import Round
    from eyas.measure.counting import Rounds
    from eyas.target.model import Target

DEFINITION = (
    "tau = 1 + accepted / rounds, prefill's token excluded, and each answer's last round, which its end may have cut "
    "off; tokens per second: of all tokens after prefill's"
)


class Source(Protocol):
    """Who answers."""

    visible: bool
    """Can accepted drafts be told from the target's own tokens? Known once an answer has begun."""

    def rounds(self, ids: Sequence[int], limit: int) -> Iterator[Round]:
        """The answer to a rendered conversation, `limit` tokens at most."""


@dataclass
class Turn:
    """One question and its answer so far."""

    say: str
    ids: list[int]
    """The conversation up to here, rendered."""
    limit: int
    rounds: list[Round] = field(default_factory=list)
    finish: str = ""
    """stop, length or interrupted."""
    seconds: float = 0.0
    """From the first round, which is prefill's, to the last."""

    @property
    def tokens(self) -> list[int]:
        """The answer."""
        return [token for done in self.rounds for token in done.tokens]

    @property
    def own(self) -> list[bool | None]:
        """Of each token, whether the target said it itself; see `Round.own`."""
        return [own for done in self.rounds for own in done.own]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rounds, and accepted and verified drafts in them; verified is 0 where that is not known.

        Prefill's is none. Nor is the last of a finished answer: it may be cut off, and a server does not say how much
        of it was accepted.
        """
        later = self.rounds[1:] if self.finish in ("", "interrupted") else self.rounds[1:-1]
        return len(later), sum(r.accepted for r in later), sum(r.drafted for r in later)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all tokens after prefill's round; None where there is none."""
        tokens = sum(len(done.tokens) for done in self.rounds[1:])
        return tokens / self.seconds if tokens and self.seconds > 0 else None


def tau(turns: Sequence[Turn]) -> float | None:
    """Accept length over all rounds of some turns; None without a round."""
    counts = [turn.counts for turn in turns]
    rounds = sum(n for n, _, _ in counts)
    return 1 + sum(a for _, a, _ in counts) / rounds if rounds else None


class Conversation:
    """What was said, and who answers. `room`: tokens of the target's context; 0 where it names no limit."""

    def __init__(
        self, tokenizer: Any, source: Source, *, system: str | None = None, eos_ids: Collection[int] = (),
        max_new_tokens: int = 256, room: int = 0,
    ) -> None:  # fmt: skip
        self.tokenizer, self.source, self.system, self.eos_ids = tokenizer, source, system, frozenset(eos_ids)
        self.max_new_tokens, self.room = max_new_tokens, room
        self.reset()

    def reset(self) -> None:
        """Forget what was said, but not the system's message."""
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        self.turns: list[Turn] = []

    def begin(self, say: str) -> Turn:
        """Render the conversation with one more message of the user.

        Raises BadInput where the template rejects it, or where the target's context has no room for an answer.
        """
        from eyas.chat import render

        messages = [*self.messages, {"role": "user", "content": say}]
        ids = render(self.tokenizer, messages, None, add_generation_prompt=True)
        limit = min(self.max_new_tokens, self.room - len(ids)) if self.room else self.max_new_tokens
        if limit < 1:
            raise BadInput(
                f"the conversation has {len(ids)} tokens and the target's context ends after {self.room} (a round's "
                f"drafts included), so there is no room for an answer; begin anew (/reset)"
            )
        return Turn(say, ids, limit)

    def rounds(self, turn: Turn) -> Iterator[Round]:
        """The answer's rounds, noted in the turn as they come."""
        begun = 0.0
        with contextlib.closing(self.source.rounds(turn.ids, turn.limit)) as coming:  # type: ignore[type-var]
            for done in coming:
                now = time.perf_counter()
                begun = begun or now
                turn.rounds.append(done)
                turn.finish, turn.seconds = done.finish, now - begun
                yield done
        turn.finish = turn.finish or ("stop" if len(turn.tokens) < turn.limit else "length")

    def end(self, turn: Turn) -> None:
        """Keep question and answer, whole or not, for the turns to come."""
        turn.finish = turn.finish or "interrupted"
        self.turns.append(turn)
        self.messages += [{"role": "user", "content": turn.say}, {"role": "assistant", "content": self.text(turn)}]

    def text(self, turn: Turn) -> str:
        """The answer as the next turn's template gets it: without special tokens."""
        return str(self.tokenizer.decode(turn.tokens, skip_special_tokens=True))


class Local:
    """The reference decoder answers."""

    visible = True

    def __init__(
        self, target: Target, drafter: ChainDrafter, *, k: int = 4, rule: Rule | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.k, self.rule, self.eos_ids = target, drafter, k, rule, eos_ids

    def rounds(self, ids: Sequence[int], limit: int) -> Iterator[Round]:
        from eyas.decode.talk import rounds

        how: dict[str, Any] = {"k": self.k, "rule": self.rule, "eos_ids": self.eos_ids}
        return rounds(self.target, ids, self.drafter, max_new_tokens=limit, **how)


class Served:
    """A running engine answers, by an `eyas.serve.client.Client`.

    Where an engine sends a round at a time (vLLM, SGLang), all but the last token of a chunk were drafted; where the
    answer's end cuts a round off, nobody knows of the last one. The other engines send token by token, whoever made it.
    Two rounds that arrive together look like one; what the server counted (`counted`) tells.
    """

    def __init__(
        self, client: Any, *, temperature: float = 0.0, seed: int | None = None, eos_ids: Collection[int] = ()
    ) -> None:
        self.client, self.temperature, self.seed, self.eos_ids = client, temperature, seed, frozenset(eos_ids)
        self.visible = False
        self.engine = ""
        self.counted: Rounds | None = None
        """What the server itself counted of the last whole answer, by its own rule."""
        self._loop = asyncio.new_event_loop()

    def rounds(self, ids: Sequence[int], limit: int) -> Iterator[Round]:
        """Raises Failed (EyasError) where the server does not answer."""
        from eyas.decode.talk import Round
        from eyas.measure.counting import rounds_of
        from eyas.serve.client import Reply

        reply, self.counted = Reply(), None
        dialect = self._wait(self.client.know())
        self.engine, self.visible = dialect.engine, dialect.by_round
        how: dict[str, Any] = {"max_tokens": limit, "temperature": self.temperature, "seed": self.seed, "reply": reply}
        stream: AsyncGenerator[Any, None] = self.client.stream(ids, **how)
        said = 0
        try:
            while (chunk := self._wait(anext(stream, None))) is not None:
                n, begun = len(chunk.tokens), said > 0
                if n == 0:
                    continue
                said += n
                told = self.visible and (begun or n == 1)  # a first chunk of several: prefill's and more, unknown which
                own: list[bool | None] = [i == n - 1 for i in range(n)] if told else [None] * n
                if begun and (said >= limit or chunk.tokens[-1] in self.eos_ids):
                    own[-1] = None  # the answer ends here, maybe in the midst of what was drafted
                yield Round(tuple(chunk.tokens), tuple(own), n - 1 if told else 0)
            self.counted = rounds_of(self.engine, reply)
        finally:
            self._wait(stream.aclose())

    def close(self) -> None:
        """Close the connection."""
        self._wait(self.client.close())
        self._loop.close()

    def _wait(self, coming: Any) -> Any:
        """Run something of the client's to its end; where the user interrupts, end it first."""
        task = self._loop.create_task(_awaited(coming))
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    self._loop.run_until_complete(task)
            raise


async def _awaited(coming: Any) -> Any:
    return await coming
