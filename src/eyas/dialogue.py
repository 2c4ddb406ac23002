"""A prompt on its way to becoming a conversation: the target answers turn by turn, on its own history.

Whoever generates (locally or a server) asks a `Dialogue` for its next request and hands the answer back, until it ends
in an `Outcome`: a conversation to keep, or the reason why it is set aside.   pytest tests/test_regenerate.py
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.prompt import Message, Prompt
from eyas.repetition import is_endless

REASONS = ("repetition", "empty", "too_long", "error")


@dataclass(frozen=True)
class Outcome:
    """What became of a prompt: a conversation, or why there is none."""

    conversation: dict[str, Any] | None = None
    """A line of conversations.jsonl."""
    tokens: int = 0
    """Answer tokens in it that may be trained on."""
    reason: str = ""
    detail: str = ""
    answer: str = ""
    """What was answered, where it is set aside."""


@dataclass(frozen=True)
class Reply:
    """An answer to one turn."""

    content: str
    finish: str
    """`stop`, `length`, or `loop` where the generator itself noticed one."""
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    tokens: int = 0
    """Tokens of the answer, where the ids are not known."""
    extra: Message = field(default_factory=dict)
    """Further fields of the message: tool calls, reasoning."""


def answer_seed(run_seed: int, prompt_id: str) -> int:
    """The seed of one prompt's random numbers: it depends on the run's seed and the prompt's id, not on the order."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}:{prompt_id}".encode()).digest()[:8], "big") >> 1


class Dialogue:
    """One prompt, its answers so far, and the token ids where they are known."""

    def __init__(self, index: int, prompt: Prompt, seed: int | None):
        self.index = index
        self.prompt = prompt
        self.seed = seed
        """None where answers are greedy."""
        self.messages: list[Message] = list(prompt.turns[0])
        self.answered = 0
        self._spans: list[list[int]] = []
        self._known: list[int] = []  # prompt and answer ids of the last turn
        self._exact = True
        self._counted = 0
        self._finish = "stop"

    def take(self, reply: Reply) -> Outcome | None:
        """Add an answer. Returns the outcome when the conversation has ended, else None: `messages` goes on."""
        if not reply.content.strip() and not reply.extra.get("tool_calls"):
            return self.set_aside("empty", f"the answer to turn {self.answered + 1} has no text")
        ids = reply.ids if reply.ids is not None else pseudo_ids(reply.content)
        if reply.finish == "loop" or is_endless(ids, reply.finish):
            return self.set_aside("repetition", f"turn {self.answered + 1} repeats itself endlessly", reply.content)
        self._note_ids(reply)
        self.messages.append({"role": "assistant", "content": reply.content, **reply.extra})
        self.answered += 1
        self._finish = reply.finish
        # A follow-up to an answer that was cut off, or to a tool call nobody ran, is no conversation anyone would have.
        if self.answered < len(self.prompt.turns) and reply.finish == "stop" and not reply.extra.get("tool_calls"):
            self.messages += self.prompt.turns[self.answered]
            return None
        return self._finished()

    def set_aside(self, reason: str, detail: str, answer: str = "") -> Outcome:
        assert reason in REASONS, reason
        return Outcome(reason=reason, detail=detail, answer=answer)

    def _note_ids(self, reply: Reply) -> None:
        """Keep where the answers lie in the token ids of the last turn, as long as histories are what was generated.

        A template may rewrite the history (drop thinking, normalise spaces): earlier answers are then not supervised,
        since what stands there is not what the target said.
        """
        self._counted += reply.tokens or len(reply.ids or ())
        if reply.ids is None or reply.prompt_ids is None:
            self._exact = False
            return
        if reply.prompt_ids[: len(self._known)] != self._known:
            self._spans = []
        self._spans.append([len(reply.prompt_ids), len(reply.prompt_ids) + len(reply.ids)])
        self._known = [*reply.prompt_ids, *reply.ids]

    def _finished(self) -> Outcome:
        record: dict[str, Any] = {"id": self.prompt.id, "source": self.prompt.source, "messages": self.messages}
        if self.prompt.tools:
            record["tools"] = self.prompt.tools
        if self._exact:
            start = self._spans[-1][0]
            record |= {"prompt_token_ids": self._known[:start], "response_token_ids": self._known[start:]}
            if self.answered > 1:
                record["supervised"] = self._spans  # half-open ranges in prompt + response
            tokens = sum(end - begin for begin, end in self._spans)
        else:
            record |= {"prompt_token_ids": None, "response_token_ids": None}
            tokens = self._counted
        record |= {"finish": self._finish, "seed": self.seed}
        return Outcome(record, tokens)


def pseudo_ids(text: str) -> Sequence[int]:
    """Numbers for words and signs, to look for repetition where a server gives no token ids."""
    return [zlib.crc32(piece.encode()) for piece in re.findall(r"\w+|[^\w\s]|\s+", text)]
