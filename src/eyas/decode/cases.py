"""What is decoded with and without a draft: a prompt of a set as token ids, and the two answers to it.

cases, left_out = make_cases(target, {"mt_bench": ["Hello"]}, room=64)          pytest tests/test_prove.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.decode.answers import Answer
from eyas.errors import BadInput
from eyas.prompt import Prompt
from eyas.repetition import trailing_period
from eyas.target.model import Target

Asked = str | Prompt | Sequence[int] | Sequence[Mapping[str, Any]]
"""One user message, a prompt as read from a file, token ids as they are, or messages for the chat template."""


@dataclass
class Case:
    """One prompt, and its answers."""

    set: str
    index: int
    """Place in its set."""
    ids: list[int]
    plain: Answer | None = None
    speculative: Answer | None = None
    loop: int | None = None
    """Tokens of the answer before it begins to repeat itself endlessly."""


def token_ids(target: Target, prompt: Asked, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """A prompt as the target reads it, up to where its answer begins."""
    from eyas.chat import render

    messages: Any = prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Prompt):
        messages = prompt.messages
    elif prompt and isinstance(prompt[0], int):
        return [int(i) for i in messages]
    tools = prompt.tools if isinstance(prompt, Prompt) else None
    return render(target.tokenizer, messages, tools, True, **(template_kwargs or {}))


def make_cases(
    target: Target,
    prompt_sets: Mapping[str, Sequence[Asked]],
    room: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[Case], dict[str, int]]:
    """Token ids of all prompts, and how many of each set leave less than `room` tokens of the target's context.

    Raises BadInput where nothing of a set is left, naming it.
    """
    cases: list[Case] = []
    left_out: dict[str, int] = {}
    limit = target.facts.max_position or math.inf
    for name, prompts in prompt_sets.items():
        texts = [token_ids(target, prompt, template_kwargs) for prompt in prompts]
        fitting = [ids for ids in texts if len(ids) + room <= limit]
        if not fitting:
            raise BadInput(
                f"prompt set {name}: none of its {len(prompts)} prompts leaves {room} tokens of the target's context "
                f"of {limit}; give shorter prompts or a smaller --max-new-tokens"
            )
        left_out[name] = len(texts) - len(fitting)
        cases += [Case(name, index, list(ids)) for index, ids in enumerate(fitting)]
    return cases, left_out


def loop_start(tokens: Sequence[int]) -> int | None:
    """Length of an answer up to the end of the first cycle of an endless repetition; None where there is none."""
    found = trailing_period(tokens)
    return None if found is None else len(tokens) - found[1] + found[0]
