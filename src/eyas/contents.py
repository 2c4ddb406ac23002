"""The content of messages in the form that a chat template reads: text, or a list of parts (multimodal models).

    settle(tokenizer, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])

A template is asked once, with a word that cannot be missed, which of both forms it renders. Parts that a text-only
template would print as Python are joined by a newline, as vLLM does for such templates (0.32.0
renderers/chat_utils.py:1564); text for a template that knows parts alone becomes one part. Nothing but text trains a
draft here: a message with an image, a sound or a video is refused.   Exercise it:  pytest tests/test_contents.py
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.tracers import Messages, Unusable, render_text

TEXT_TYPES = ("text", "input_text", "output_text")  # of chat completions, and of the Responses API
_WORD = "Qz7zebra"
_reads: weakref.WeakKeyDictionary[Any, tuple[Any, bool, bool]] = weakref.WeakKeyDictionary()


def settle(tokenizer: Any, messages: Messages) -> list[dict[str, Any]]:
    """`messages` with contents that the tokenizer's chat template renders; a copy of those that change.

    Raises Unusable("not_text") for parts that are no text, Unusable("malformed") for parts that are none at all.
    """
    lists = [m for m in messages if isinstance(m.get("content"), list | tuple)]
    for message in lists:
        _check_parts(message["content"])
    text, parts = _forms(tokenizer)
    out = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            pieces = [_text(part) for part in content]
            settled: Any = [{"type": "text", "text": piece} for piece in pieces] if parts else "\n".join(pieces)
        elif isinstance(content, str) and parts and not text:
            settled = [{"type": "text", "text": content}]
        else:
            settled = content
        out.append({**message, "content": settled} if settled is not content else dict(message))
    return out


def _check_parts(content: Sequence[Any]) -> None:
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, Mapping):
            raise Unusable("malformed", f"a content part is a {type(part).__name__}; expected {{type, text}}")
        kind = part.get("type", "text" if "text" in part else None)
        if kind not in TEXT_TYPES:
            raise Unusable("not_text", f"it has a part of type {kind!r}; only text becomes features")
        if not isinstance(part.get("text"), str):
            raise Unusable("malformed", f"a part of type {kind!r} has no `text`")


def _text(part: Any) -> str:
    return part if isinstance(part, str) else str(part["text"])


def _forms(tokenizer: Any) -> tuple[bool, bool]:
    """(renders text, renders parts), asked once of each template."""
    template = getattr(tokenizer, "chat_template", None)
    known = _reads.get(tokenizer)
    if known is None or known[0] != template:
        text = _shows(tokenizer, _WORD)
        parts = _shows(tokenizer, [{"type": "text", "text": _WORD}])
        known = _reads[tokenizer] = (template, text or not parts, parts)
    return known[1:]


def _shows(tokenizer: Any, content: Any) -> bool:
    try:
        text = render_text(tokenizer, [{"role": "user", "content": content}], None, False, {})
    except Unusable:
        return False
    # A list that is printed brings its own keys and quotes along.
    return text.count(_WORD) == 1 and f"'{_WORD}'" not in text and f'"{_WORD}"' not in text
