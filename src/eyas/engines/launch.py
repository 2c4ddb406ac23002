"""The flags of a launch that change how a draft is read.

    options("--speculative-algorithm EAGLE --context-length 2048")["speculative-algorithm"]

Only what follows an engine's own program counts; values that are JSON objects, as vLLM's --speculative-config, are
taken apart.   pytest tests/test_engines_launch.py
"""

from __future__ import annotations

import shlex
from typing import Any

from ..errors import BadInput
from ..untrusted import parse_json


def options(command: str) -> dict[str, Any]:
    """Long options of a command line: name without dashes -> value, True for a switch. Raises BadInput for a line that
    no shell could read."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadInput(f"--launch {command!r} is not a command line ({error}); quote it as a shell would") from error
    out: dict[str, Any] = {}
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[place + 1] if place + 1 < len(words) else "--"
        bare = not equals and following.startswith("--")
        out[name.replace("_", "-")] = True if bare else _value(value if equals else following)
    return out


def _value(text: str) -> Any:
    """A whole number, a JSON object, or the text itself."""
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return value if isinstance(value, int | dict) else text
