"""A prompt, and the layouts of a row that holds one: several spellings, one representation.

    parse_row({"turns": ["What is a hawk?", "And an eyas?"]})
    pytest tests/test_prompts.py

A row is one of: `prompt` (text, or messages), `messages` (OpenAI: role, content), `conversations` (ShareGPT: from,
value), `turns` (texts of the user, as in MT-bench); optional `id`, `source`, `tools`. Assistant turns that the file
already has are not used: the target answers every one of them anew, on its own history. Only an assistant's tool calls
stay, since the tool's result that follows belongs to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.digests import canonical_json
from eyas.rows import without_nulls
from eyas.untrusted import parse_json

Message = dict[str, Any]
EXPECTED = (
    "expected an object with `prompt` (text), `messages` (a list of {role, content}), `conversations` (a list of "
    "{from, value}) or `turns` (a list of texts)"
)
ROLES = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "assistant": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """What the target is to answer."""

    id: str
    turns: tuple[tuple[Message, ...], ...]
    """The messages before each of the assistant's answers; most prompts have one turn."""
    tools: list[Any] | None = None
    source: str = ""

    @property
    def messages(self) -> list[Message]:
        """The messages before the first answer, ready for a chat template."""
        return list(self.turns[0])

    @property
    def text(self) -> str:
        """All that the user says, for comparing prompts."""
        parts = (m.get("content") for turn in self.turns for m in turn if m["role"] == "user")
        return "\n".join(p if isinstance(p, str) else canonical_json(p) for p in parts)

    def digest(self) -> str:
        """Hex digest of what is asked, whatever its id and source."""
        return hashlib.sha256(canonical_json([self.turns, self.tools]).encode()).hexdigest()

    def to_row(self) -> dict[str, Any]:
        """A row that `load_prompts` reads back."""
        messages: list[Message] = []
        for i, turn in enumerate(self.turns):
            messages += [{"role": "assistant", "content": ""}] if i else []
            messages += turn
        row: dict[str, Any] = {"id": self.id, "source": self.source}
        if len(messages) == 1 and set(messages[0]) == {"role", "content"} and messages[0]["role"] == "user":
            row["prompt"] = messages[0]["content"]
        else:
            row["messages"] = messages
        return row | ({"tools": self.tools} if self.tools else {})

    @classmethod
    def single(cls, text: str, *, id: str | None = None, source: str = "", system: str | None = None) -> Prompt:
        """One question. Without an id, the digest of what is asked names it."""
        head = [{"role": "system", "content": system}] if system else []
        turns = ((*head, {"role": "user", "content": text}),)
        return cls(id or _content_id(turns, None), turns, None, source)


class Malformed(Exception):
    """What was expected of a row, and what stood there: readers of files turn it into a BadRow."""


def parse_row(row: Mapping[str, Any], default_source: str = "") -> Prompt:
    """One row as a prompt. Raises Malformed, which readers of files turn into a BadRow."""
    messages = _messages(row)
    turns = _turns(messages)
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json_text(tools, "tools") if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise Malformed(f"`tools` is a {type(tools).__name__}; expected a list of JSON schemas")
    tools = without_nulls(tools) or None
    name = next((row[k] for k in ("id", "question_id", "task_id", "uuid") if row.get(k) not in (None, "")), None)
    source = row.get("source") or default_source
    return Prompt(str(name) if name is not None else _content_id(turns, tools), turns, tools, str(source))


def _content_id(turns: tuple[tuple[Message, ...], ...], tools: Any) -> str:
    return hashlib.sha256(canonical_json([turns, tools]).encode()).hexdigest()[:16]


def _json_text(text: str, key: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise Malformed(f"`{key}` is text but not JSON ({error}); expected a list") from None


def _messages(row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row, in the OpenAI spelling."""
    for key in ("messages", "conversations", "prompt", "turns"):
        value = row.get(key)
        if value is None:
            continue
        if key == "prompt" and isinstance(value, str):
            if not value.strip():
                raise Malformed("`prompt` is empty; expected the text of a request")
            system = row.get("system")
            head = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
            return [*head, {"role": "user", "content": value}]
        if isinstance(value, str):
            value = _json_text(value, key)
        if not isinstance(value, list) or not value:
            raise Malformed(f"`{key}` is {'an empty list' if value == [] else 'a ' + type(value).__name__}; {EXPECTED}")
        if key == "turns":
            if not all(isinstance(t, str) and t.strip() for t in value):
                raise Malformed("`turns` holds something else than text; expected what the user says, turn by turn")
            asked = [{"role": "user", "content": t} for t in value]
            return [m for a in asked for m in (a, {"role": "assistant", "content": ""})][:-1]
        return [_message(m, key, i) for i, m in enumerate(value)]
    raise Malformed(f"an object with {', '.join(f'`{k}`' for k in sorted(row)[:8]) or 'no keys'}; {EXPECTED}")


def _message(value: Any, key: str, index: int) -> Message:
    if not isinstance(value, Mapping):
        raise Malformed(f"`{key}`[{index}] is a {type(value).__name__}; expected an object with a role and a content")
    message = without_nulls(dict(value))
    spelling = "role" if "role" in message else "from"
    role = message.pop(spelling, None)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise Malformed(f"`{key}`[{index}] has {spelling} {role!r}; expected one of {', '.join(sorted(ROLES))}")
    content = message.pop("content", None)
    if content is None:
        content = message.pop("value", None)
    role = ROLES[role.lower()]
    if role == "user" and (content is None or (isinstance(content, str) and not content.strip())):
        raise Malformed(f"`{key}`[{index}] ({role}) has no content; expected what the user says")
    extra = {k: message[k] for k in ("tool_calls", "tool_call_id", "name") if k in message}
    return {"role": role, "content": "" if content is None else content, **extra}


def _turns(messages: list[Message]) -> tuple[tuple[Message, ...], ...]:
    """Cut messages at the assistant's answers, which are dropped. Raises Malformed where nobody asks anything."""
    turns: list[tuple[Message, ...]] = []
    current: list[Message] = []
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            if any(m["role"] in ("user", "tool") for m in current):
                turns.append(tuple(current))
                current = []
            # else: a greeting before the first question; the target did not say it
        else:
            current.append(message)
    if current and current[-1]["role"] in ("user", "tool"):
        turns.append(tuple(current))
    if not turns:
        raise Malformed("no message of the user comes before an answer; expected at least one with role `user`")
    return tuple(turns)
