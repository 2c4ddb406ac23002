"""Conversations -> token ids and loss mask, by the target's own chat template, rendered and tokenised once.

The mask is 1 on exactly the tokens that the assistant itself would have generated: from the first one after the
generation prompt to the end-of-turn token, and not the newline after it. Nothing is tokenised twice: turns are found as
character spans of the one rendering and mapped to tokens by the tokenizer's offsets.

Where a turn begins and ends is said by the template's `{% generation %}` markers, or found by `tracers`.

Exercise it:  pytest tests/test_chat.py      eyas extract CONVERSATIONS.jsonl --target T --show
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.contents import settle
from eyas.errors import BadInput
from eyas.tracers import Messages, Tracing, Unusable, render_text
from eyas.turn_ends import Ends, end_texts

__all__ = ["Encoded", "Unusable", "common_length", "encode_conversation", "encode_recorded", "render"]
_MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Encoded:
    """One conversation as the target reads it."""

    ids: torch.Tensor  # int32 [L]
    mask: torch.Tensor  # uint8 [L], 1 on the assistant's tokens

    def __len__(self) -> int:
        return len(self.ids)


def render(
    tokenizer: Any,
    messages: Messages,
    tools: list[Any] | None = None,
    add_generation_prompt: bool = False,
    **template_kwargs: Any,
) -> list[int]:
    """Token ids of `messages` by the tokenizer's chat template, which writes its special tokens itself.

    Raises Unusable("template_rejects") with the template's own words.
    """
    text = render_text(tokenizer, settle(tokenizer, messages), tools, add_generation_prompt, template_kwargs)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def shared_prefix(tokenizer: Any, **template_kwargs: Any) -> list[int]:
    """Token ids with which every prompt of one user message begins: the template's opening, and its system message."""
    asked = ([{"role": "user", "content": c}] for c in ("a", "Why 7?"))
    try:
        a, b = (render(tokenizer, messages, None, True, **template_kwargs) for messages in asked)
    except Unusable:
        return []
    return a[: common_length(a, b)]


def encode_conversation(
    tokenizer: Any,
    messages: Messages,
    tools: list[Any] | None = None,
    *,
    max_length: int | None = None,
    eos_ids: Iterable[int] = (),
    **template_kwargs: Any,
) -> Encoded:
    """Render `messages` once and mark the assistant's tokens. -> ids int32 [L], mask uint8 [L].

    A token belongs to the assistant when its first character does: one that begins in the header is not what the target
    generates after the generation prompt, one that begins in the answer and reaches past it is. `eos_ids` are further
    end-of-turn ids (generation_config), beside the tokenizer's own. Extra keywords reach the template.
    Raises Unusable naming the reason; an all-zero and an all-one mask are such reasons.
    """
    _check_messages(messages)
    messages = settle(tokenizer, messages)
    text, spans = _assistant_spans(tokenizer, messages, tools, template_kwargs, end_texts(tokenizer, eos_ids))
    if not getattr(tokenizer, "is_fast", False):
        raise BadInput(
            f"the tokenizer {type(tokenizer).__name__} gives no character offsets, which the loss mask needs; convert "
            "it to a tokenizer.json (AutoTokenizer with use_fast), or give prompt_token_ids and response_token_ids"
        )
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = torch.tensor(tokens["input_ids"], dtype=torch.int32)
    starts = torch.tensor(tokens["offset_mapping"], dtype=torch.int64).reshape(-1, 2)[:, 0].contiguous()  # [L]
    edges = torch.tensor([edge for span in spans for edge in span], dtype=torch.int64)  # b0 e0 b1 e1 ..., ascending
    mask = (torch.searchsorted(edges, starts, right=True) % 2).to(torch.uint8)  # an odd count: inside a span
    return checked(ids, mask, max_length)


def encode_recorded(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    max_length: int | None = None,
    supervised: Sequence[Sequence[int]] | None = None,
) -> Encoded:
    """Ids that a server or a generator recorded, as they are: prompt 0, response 1. Raises Unusable as above.

    supervised: half-open ranges [start, end) of prompt + response that are the target's own words, where several turns
    were recorded; they replace the rule above.
    """
    ids = torch.tensor([*prompt_ids, *response_ids], dtype=torch.int32)
    mask = torch.zeros(len(ids), dtype=torch.uint8)
    mask[len(prompt_ids) :] = supervised is None
    for start, end in supervised or ():
        if not 0 <= start < end <= len(ids):
            raise Unusable("malformed", f"`supervised` has the range [{start}, {end}) over {len(ids)} tokens")
        mask[start:end] = 1
    return checked(ids, mask, max_length)


def checked(ids: torch.Tensor, mask: torch.Tensor, max_length: int | None = None) -> Encoded:
    """Refuse a mask that teaches nothing or everything, and what is longer than `max_length` tokens."""
    if max_length is not None and len(ids) > max_length:
        raise Unusable("too_long", f"{len(ids)} tokens, longer than the {max_length} allowed; raise --max-length")
    if not mask.any():
        raise Unusable("mask_all_zero", "no token is the assistant's, so nothing would be trained; see it with --show")
    if mask.all():
        raise Unusable(
            "mask_all_one", "every token is the assistant's: no prompt is left to condition on; see it with --show"
        )
    return Encoded(ids, mask)


# ------------------------------------------------------------------------------------------------ rendering


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise Unusable("malformed", "`messages` must be a non-empty list of {role, content}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Unusable("malformed", f"message {i} must be an object with a `role` and a `content`")
        if not {"content", "tool_calls"} & set(message):
            raise Unusable("malformed", f"message {i} ({message['role']}) has neither `content` nor `tool_calls`")
    if not any(m["role"] == "assistant" for m in messages):
        roles = sorted({m["role"] for m in messages})
        raise Unusable("no_assistant_turn", f"no message has the role 'assistant' (roles here: {', '.join(roles)})")


def _assistant_spans(
    tokenizer: Any, messages: Messages, tools: list[Any] | None, kwargs: Mapping[str, Any], ends: Ends
) -> tuple[str, list[tuple[int, int]]]:
    """The rendering of `messages` and the character span of each assistant turn in it, ascending and disjoint."""
    if _MARKERS.search(_template(tokenizer, tools)):
        text, spans = _spans_by_markers(tokenizer, messages, tools, kwargs)
        spans = [ends.settle(text, start, end) for start, end in spans if end > start]
    else:
        text = render_text(tokenizer, messages, tools, False, kwargs)
        spans = Tracing(tokenizer, messages, tools, kwargs, text).spans(ends)
    clean: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        start = max(start, clean[-1][1] if clean else 0)
        if end > start:
            clean.append((start, end))
    return text, clean


def _template(tokenizer: Any, tools: list[Any] | None) -> str:
    try:
        return tokenizer.get_chat_template(None, tools)
    except (ValueError, AttributeError) as error:
        raise BadInput(
            "the target's tokenizer has no chat template; add chat_template.jinja to its folder, or give conversations "
            "with prompt_token_ids and response_token_ids"
        ) from error


def _spans_by_markers(
    tokenizer: Any, messages: Messages, tools: list[Any] | None, kwargs: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(
            conversations=[[dict(m) for m in messages]],
            tools=tools,
            chat_template=_template(tokenizer, tools),
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **kwargs},
        )
    except Exception as error:
        raise Unusable("template_rejects", f"the chat template rejects it: {error}") from error
    texts, spans = rendered
    return texts[0], [(int(a), int(b)) for a, b in spans[0]]
