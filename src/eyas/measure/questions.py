"""Prompt sets as token ids, the same for every engine and for the replay.

pytest tests/test_measure_cli.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BadInput
from .asking import Question


def questions_of(target: Path, sets: Mapping[str, Sequence[Any]], room: int) -> list[Question]:
    """Every prompt of at most `room` tokens, through the target's chat template.

    Raises BadInput where none of a set is left.
    """
    from ..features.conversations import load_tokenizer

    tokenizer = load_tokenizer(target)
    out = []
    for name, prompts in sets.items():
        ids = [_ids(tokenizer, prompt) for prompt in prompts]
        kept = [Question(name, place, tuple(x)) for place, x in enumerate(ids) if 0 < len(x) <= room]
        if not kept:
            raise BadInput(
                f"prompt set {name}: none of its {len(prompts)} prompts is at most {room} tokens long, which "
                f"is what the context leaves; give a larger --context-length or shorter prompts"
            )
        out += kept
    return out


def _ids(tokenizer: Any, prompt: Any) -> list[int]:
    from ..chat import render

    return render(tokenizer, prompt.messages, prompt.tools, add_generation_prompt=True)
