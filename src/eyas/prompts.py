"""Prompts in, whatever their file (rows.py) and layout: several spellings, one representation.

    prompts = load_prompts("prompts.jsonl")
    pytest tests/test_prompts.py

A row is one of: `prompt` (text, or messages), `messages` (OpenAI: role, content), `conversations` (ShareGPT: from,
value), `turns` (texts of the user, as in MT-bench); optional `id`, `source`, `tools`. Assistant turns that the file
already has are not used: the target answers every one of them anew, on its own history. Only an assistant's tool calls
stay, since the tool's result that follows belongs to them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.artifacts import canonical_json
from eyas.errors import BadInput
from eyas.rows import read_rows, without_nulls
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


@dataclass(frozen=True)
class BadRow:
    """A row that is no prompt."""

    file: str
    line: int
    expected: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.expected}"


@dataclass
class Prompts:
    """All prompts of a source, in its order, and what was left out on the way."""

    prompts: list[Prompt] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    duplicates: int = 0
    """Rows that ask exactly what an earlier row asks."""
    renamed: int = 0
    """Rows whose id an earlier, different row had: they got a suffix (`7` becomes `7~2`)."""


class _Malformed(Exception):
    """What was expected of a row, and what stood there."""


# ------------------------------------------------------------------------------------------------ whole sources


def load_prompts(source: str | Path, *, skip_bad: bool = False, limit: int | None = None) -> Prompts:
    """Read prompts from a file, a folder of such files, a saved dataset (`folder`, `folder@split`), a `datasets` id
    (`id`, `id:config`, `id@split`), or `builtin`.

    Raises BadInput naming file, line and what was expected at the first malformed row, unless `skip_bad`: then such
    rows are set aside in `.bad`. `limit` counts good, distinct prompts.
    """
    out = Prompts()
    seen: set[str] = set()
    ids: dict[str, int] = {}
    for prompt in read_prompts(source, skip_bad=skip_bad, on_bad=out.bad.append):
        digest = prompt.digest()
        if digest in seen:
            out.duplicates += 1
            continue
        seen.add(digest)
        name = prompt.id
        while name in ids:
            ids[prompt.id] += 1
            name = f"{prompt.id}~{ids[prompt.id]}"
        ids[name] = 1
        if name != prompt.id:
            out.renamed += 1
            prompt = Prompt(name, prompt.turns, prompt.tools, prompt.source)
        out.prompts.append(prompt)
        if limit is not None and len(out.prompts) >= limit:
            break
    if not out.prompts:
        why = f"{len(out.bad)} malformed rows" if out.bad else "it is empty"
        raise BadInput(f"{source}: no prompt can be used ({why}). {EXPECTED.capitalize()}.")
    return out


def read_prompts(
    source: str | Path, *, skip_bad: bool = False, on_bad: Callable[[BadRow], None] | None = None
) -> Iterator[Prompt]:
    """Prompts of a source one by one, duplicates included. See `load_prompts`."""
    if str(source) == "builtin":
        from eyas.prompt_sets import training_prompts

        yield from training_prompts()
        return
    for file, line, row in read_rows(source):
        try:
            yield parse_row(_object(row), default_source=Path(file).name.split(".")[0])
        except _Malformed as error:
            text = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)
            bad = BadRow(file, line, str(error), text.strip()[:2000])
            if not skip_bad:
                raise BadInput(f"{bad}. Mend the line, or set such lines aside with --skip-bad.") from None
            if on_bad:
                on_bad(bad)


# ------------------------------------------------------------------------------------------------ one row


def parse_row(row: Mapping[str, Any], default_source: str = "") -> Prompt:
    """One row as a prompt. Raises _Malformed, which readers turn into a BadRow."""
    messages = _messages(row)
    turns = _turns(messages)
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json_text(tools, "tools") if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise _Malformed(f"`tools` is a {type(tools).__name__}; expected a list of JSON schemas")
    tools = without_nulls(tools) or None
    name = next((row[k] for k in ("id", "question_id", "task_id", "uuid") if row.get(k) not in (None, "")), None)
    source = row.get("source") or default_source
    return Prompt(str(name) if name is not None else _content_id(turns, tools), turns, tools, str(source))


def _content_id(turns: tuple[tuple[Message, ...], ...], tools: Any) -> str:
    return hashlib.sha256(canonical_json([turns, tools]).encode()).hexdigest()[:16]


def _object(row: Any) -> Mapping[str, Any]:
    if isinstance(row, str):
        try:
            row = parse_json(row)
        except ValueError as error:
            raise _Malformed(f"not JSON ({error}); {EXPECTED}") from None
    if not isinstance(row, Mapping):
        raise _Malformed(f"a JSON {type(row).__name__}; {EXPECTED}")
    return row


def _json_text(text: str, key: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise _Malformed(f"`{key}` is text but not JSON ({error}); expected a list") from None


def _messages(row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row, in the OpenAI spelling."""
    for key in ("messages", "conversations", "prompt", "turns"):
        value = row.get(key)
        if value is None:
            continue
        if key == "prompt" and isinstance(value, str):
            if not value.strip():
                raise _Malformed("`prompt` is empty; expected the text of a request")
            system = row.get("system")
            head = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
            return [*head, {"role": "user", "content": value}]
        if isinstance(value, str):
            value = _json_text(value, key)
        if not isinstance(value, list) or not value:
            raise _Malformed(
                f"`{key}` is {'an empty list' if value == [] else 'a ' + type(value).__name__}; {EXPECTED}"
            )
        if key == "turns":
            if not all(isinstance(t, str) and t.strip() for t in value):
                raise _Malformed("`turns` holds something else than text; expected what the user says, turn by turn")
            asked = [{"role": "user", "content": t} for t in value]
            return [m for a in asked for m in (a, {"role": "assistant", "content": ""})][:-1]
        return [_message(m, key, i) for i, m in enumerate(value)]
    raise _Malformed(f"an object with {', '.join(f'`{k}`' for k in sorted(row)[:8]) or 'no keys'}; {EXPECTED}")


def _message(value: Any, key: str, index: int) -> Message:
    if not isinstance(value, Mapping):
        raise _Malformed(f"`{key}`[{index}] is a {type(value).__name__}; expected an object with a role and a content")
    message = without_nulls(dict(value))
    spelling = "role" if "role" in message else "from"
    role = message.pop(spelling, None)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise _Malformed(f"`{key}`[{index}] has {spelling} {role!r}; expected one of {', '.join(sorted(ROLES))}")
    content = message.pop("content", None)
    if content is None:
        content = message.pop("value", None)
    role = ROLES[role.lower()]
    if role == "user" and (content is None or (isinstance(content, str) and not content.strip())):
        raise _Malformed(f"`{key}`[{index}] ({role}) has no content; expected what the user says")
    extra = {k: message[k] for k in ("tool_calls", "tool_call_id", "name") if k in message}
    return {"role": role, "content": "" if content is None else content, **extra}


def _turns(messages: list[Message]) -> tuple[tuple[Message, ...], ...]:
    """Cut messages at the assistant's answers, which are dropped. Raises _Malformed where nobody asks anything."""
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
        raise _Malformed("no message of the user comes before an answer; expected at least one with role `user`")
    return tuple(turns)
