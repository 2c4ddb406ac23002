"""Ids of a target's special tokens and of given texts, read from the tokenizer's files without importing transformers.

    special_ids(folder)          # begin, end, end of turn, padding, and the markers that the chat template writes
    token_ids(folder, "</think>")

Exercise it:  pytest tests/test_vocab_stage.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.errors import BadInput
from eyas.target.facts import TargetFacts, read_facts, read_json
from eyas.target.source import chat_templates

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens", "extra_special_tokens")


def special_ids(folder: str | Path, facts: TargetFacts | None = None) -> tuple[int, ...]:
    """Ids, ascending, that a draft vocabulary should always have.

    They are the ids that end an answer, the special tokens that tokenizer_config.json names, and those added tokens
    that the chat template contains literally (turn markers, thinking tags). Reserved tokens that nothing uses are out.
    """
    folder = Path(folder)
    facts = facts or read_facts(folder)
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    named = {text for name in NAMED for text in _texts(config.get(name))}
    written = "\n".join(chat_templates(folder).values())
    added = _added(folder, config)
    ids = {i for text, i in added.items() if text in named or text in written}
    return tuple(sorted(i for i in ids | set(facts.eos_ids) if i < facts.vocab_size))


def token_ids(folder: str | Path, text: str) -> tuple[int, ...]:
    """Ids of `text`: its own where it is one token, else those it is split into. BadInput without a tokenizer.json."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise BadInput(f"{folder} has no tokenizer.json to look up {text!r}; give the ids themselves")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own = tokenizer.token_to_id(text)
    ids = (own,) if own is not None else tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    if not ids:
        raise BadInput(f"{folder}: the tokenizer makes no token of {text!r}; give the ids themselves")
    return ids


def _texts(value: Any) -> list[str]:
    """A special token may be spelled as text, as {content: text}, as a list or as a dict of these."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [value["content"]] if isinstance(value.get("content"), str) else _texts(list(value.values()))
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []


def _added(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Added tokens by text."""
    listed = {str(a["content"]): int(i) for i, a in (config.get("added_tokens_decoder") or {}).items()}
    if (folder / "tokenizer.json").is_file():
        added = read_json(folder / "tokenizer.json").get("added_tokens") or []
        listed |= {str(a["content"]): int(a["id"]) for a in added}
    return listed
