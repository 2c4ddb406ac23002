"""Conversation files -> encoded documents, with everything that cannot be used named and counted.

A line is a JSON object with `messages` (role, content, tool_calls, ...; optional `tools`), or the ShareGPT spelling
`conversations` (from, value), or `prompt_token_ids` and `response_token_ids`, which are then used as they are.
Exercise it:  pytest tests/test_features_extract.py      eyas extract CONVERSATIONS.jsonl --target T --show
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.chat import Encoded, Unusable, common_length, encode_conversation, encode_recorded, shared_prefix
from eyas.errors import BadInput
from eyas.rows import is_lines, read_rows, without_nulls
from eyas.untrusted import lines, parse_json

EXPECTED = "expected a JSON object with `messages`, or with `prompt_token_ids` and `response_token_ids`"
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function": "tool", "function_response": "tool",
}  # fmt: skip
REFUSED = ("mask_all_zero", "mask_all_one")  # a template or a file is wrong, not one conversation: these stop the run


@dataclass(frozen=True)
class Document:
    """One conversation ready for the target."""

    id: str
    encoded: Encoded
    origin: str = ""
    """Digest of the file that its states come from, where they are not computed here."""

    @property
    def ids(self) -> torch.Tensor:
        """int32 [L]"""
        return self.encoded.ids

    @property
    def mask(self) -> torch.Tensor:
        """uint8 [L]"""
        return self.encoded.mask

    def __len__(self) -> int:
        return len(self.encoded)


@dataclass(frozen=True)
class SetAside:
    """A conversation that was not used."""

    id: str
    line: int
    reason: str
    detail: str
    text: str | None = None
    """The line itself where it is malformed, so that it can be mended."""

    def to_json(self) -> str:
        """One line of `set-aside.jsonl`."""
        return json.dumps({k: v for k, v in self.__dict__.items() if v is not None}, ensure_ascii=False)


@dataclass
class Collection:
    """All documents of a conversation file, and what was set aside."""

    documents: list[Document] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)

    def reasons(self) -> dict[str, int]:
        """Count of each reason."""
        return dict(sorted(Counter(s.reason for s in self.set_aside).items()))

    def set_aside_text(self) -> str:
        """The content of `set-aside.jsonl`."""
        return "".join(s.to_json() + "\n" for s in self.set_aside)

    def counts(self) -> dict[str, Any]:
        """documents, tokens, supervised_tokens, set_aside {reason: count}."""
        return {
            "documents": len(self.documents),
            "tokens": sum(len(d) for d in self.documents),
            "supervised_tokens": sum(int(d.mask.sum()) for d in self.documents),
            "set_aside": self.reasons(),
        }


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Numbered, non-empty lines of a JSONL file, plain or gzip. Raises BadInput where it cannot be read."""
    path = Path(path)
    try:
        for number, line in enumerate(lines(path), 1):
            if line.strip():
                yield number, line
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise BadInput(f"{path}: the conversations cannot be read ({error}); name a JSONL file") from error


def table_rows(source: str | Path) -> list[dict[str, Any]]:
    """Conversations of a Parquet or Arrow file, a folder, a saved dataset or a dataset id. Raises BadInput for a row
    that is no object, and what `read_rows` raises."""
    out = []
    for file, number, row in read_rows(source):
        try:
            parsed = parse_line(row.encode()) if isinstance(row, str) else without_nulls(row)
        except Unusable as error:
            raise BadInput(f"{file}, line {number}: {error}") from error
        if not isinstance(parsed, dict):
            raise BadInput(f"{file}, line {number}: a {type(parsed).__name__}; {EXPECTED}")
        out.append(parsed)
    return out


def parse_line(line: bytes) -> dict[str, Any]:
    """One line as an object. Raises Unusable("malformed") saying what was expected."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise Unusable("malformed", f"not JSON ({error}); {EXPECTED}") from error
    if not isinstance(row, dict):
        raise Unusable("malformed", f"a JSON {type(row).__name__}; {EXPECTED}")
    return row


def encode_row(
    row: Mapping[str, Any],
    tokenizer: Any,
    *,
    vocab_size: int,
    max_length: int | None = None,
    eos_ids: Iterable[int] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> Encoded:
    """One conversation as ids and mask. Raises Unusable naming the reason."""
    prompt, response = row.get("prompt_token_ids"), row.get("response_token_ids")
    if prompt is not None and response is not None:
        for name, ids in (("prompt_token_ids", prompt), ("response_token_ids", response)):
            if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
                raise Unusable("malformed", f"`{name}` must be a list of ids from 0 to {vocab_size - 1}")
        return encode_recorded(prompt, response, max_length, _ranges(row.get("supervised")))
    messages = row.get("messages")
    if messages is None and isinstance(row.get("conversations"), list):
        messages = [_from_sharegpt(m) for m in row["conversations"]]
    if messages is None:
        raise Unusable("malformed", f"an object with {sorted(row)[:8] or 'no keys'}; {EXPECTED}")
    tools = row.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise Unusable("malformed", f"`tools` is a {type(tools).__name__}; expected a list of JSON schemas")
    encoded = encode_conversation(
        tokenizer, messages, tools, max_length=max_length, eos_ids=eos_ids, **(template_kwargs or {})
    )
    if int(encoded.ids.max()) >= vocab_size:
        raise BadInput(
            f"the tokenizer gives id {int(encoded.ids.max())}, the target's embedding has {vocab_size} rows; the "
            "tokenizer belongs to another model; copy the target's own tokenizer into its folder"
        )
    return encoded


def _ranges(value: Any) -> list[list[int]] | None:
    """`supervised` of a recorded conversation of several turns (dialogue.py). Raises Unusable for anything else."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(i) is int for i in pair) for pair in value
    ):
        raise Unusable("malformed", "`supervised` must be a list of [start, end] pairs")
    return value


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, Mapping) or "from" not in message:
        return message
    role = SHAREGPT_ROLES.get(str(message["from"]).lower())
    if role is None:
        raise Unusable("malformed", f"`from` is {message['from']!r}; expected one of {sorted(SHAREGPT_ROLES)}")
    return {"role": role, "content": message.get("value")}


def encode_all(
    conversations: str | Path | Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    skip_bad: bool = False,
    limit: int | None = None,
    supervise: str = "answers",
    **how: Any,
) -> Collection:
    """Encode a conversation file (or the rows themselves); `how` goes to `encode_row`.

    supervise: `answers`, the assistant's tokens; or `all`, whatever follows the tokens with which the template begins
    every conversation. A prompt is not the target's own text, but its odds for the next token are there as well.

    A malformed line, or a mask that is all zeros or all ones, raises BadInput with file and line number unless
    `skip_bad`; what is merely of no use (no assistant turn, too long, refused by the template) is always set aside.
    Raises BadInput when nothing is left.
    """
    out = Collection()
    if isinstance(conversations, str | Path) and not is_lines(conversations):
        conversations = table_rows(conversations)
    where = str(conversations) if isinstance(conversations, str | Path) else "conversations"
    prefix = shared_prefix(tokenizer, **(how.get("template_kwargs") or {})) if supervise == "all" else None
    numbered: Iterable[tuple[int, bytes | Mapping[str, Any]]] = (
        read_lines(conversations) if isinstance(conversations, str | Path) else enumerate(conversations, 1)
    )
    for number, line in numbered:
        name = f"line-{number}"
        try:
            row = parse_line(line) if isinstance(line, bytes) else line
            if row.get("id") is not None:
                name = str(row["id"])
            encoded = encode_row(row, tokenizer, **how)
            if prefix is not None:
                encoded = supervise_all(encoded, prefix)
            out.documents.append(Document(name, encoded))
        except Unusable as error:
            if error.reason in ("malformed", *REFUSED) and not skip_bad:
                raise BadInput(
                    f"{where}, line {number} ({name}): {error}. Mend it, or set such lines aside with --skip-bad"
                ) from error
            text = line.decode(errors="replace").rstrip("\n") if isinstance(line, bytes) else None
            bad = error.reason == "malformed"
            out.set_aside.append(SetAside(name, number, error.reason, str(error), text if bad else None))
        if limit is not None and len(out.documents) >= limit:
            break
    if not out.documents:
        why = ", ".join(f"{n} {reason}" for reason, n in out.reasons().items()) or "it is empty"
        first = f"First: line {out.set_aside[0].line}: {out.set_aside[0].detail}" if out.set_aside else ""
        hint = first or f"Write one conversation a line: {EXPECTED}"
        raise BadInput(f"{where}: no conversation can be used ({why}). {hint}.")
    return out


def supervise_all(encoded: Encoded, prefix: Sequence[int]) -> Encoded:
    """The same conversation with every token supervised, but those that it shares with `prefix` and the first."""
    mask = torch.ones_like(encoded.mask)
    mask[: max(1, common_length(encoded.ids.tolist(), prefix))] = 0
    return Encoded(encoded.ids, mask)


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a target's folder. Raises BadInput naming the folder."""
    from transformers import AutoTokenizer

    from eyas.target.source import with_template

    try:
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        return with_template(AutoTokenizer.from_pretrained(folder, **options), folder)
    except Exception as error:
        raise BadInput(
            f"{folder}: transformers cannot load its tokenizer ({error}); download the target's files again"
        ) from error


def parse_template_kwargs(pairs: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` pairs for the chat template."""
    return parse_key_values(pairs, "template argument", "enable_thinking=false")


def parse_key_values(pairs: Sequence[str], what: str, example: str) -> dict[str, Any]:
    """`KEY=VALUE` pairs, values as JSON where they are JSON. Raises BadInput that calls a pair `what`."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", key):
            raise BadInput(f"{what} {pair!r}: expected KEY=VALUE, for example {example}")
        try:
            out[key] = parse_json(value)
        except ValueError:
            out[key] = value
    return out
