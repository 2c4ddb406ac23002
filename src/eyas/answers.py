"""A folder of answers as `eyas regenerate` writes it: its names, and how its conversations were asked.

template_arguments(Path("answers/conversations.jsonl"), None)
pytest tests/test_template_arguments.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.artifacts import MANIFEST, read_manifest
from eyas.errors import Mismatch

STAGE = "regenerate"
SCHEMA = "eyas-regenerate/1"
CONVERSATIONS = "conversations.jsonl"
SET_ASIDE = "set_aside.jsonl"
JOURNAL = "answers.partial.jsonl"
STATES = "states"
FIELDS = {"id": str, "asked": str, "outcome": dict}  # of a line of the journal


def template_arguments(conversations: Path, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the chat template of a conversations file is to be given: what it was answered under, or `given`.

    Raises Mismatch where the file was answered under others than `given`: the answers would follow other prompts.
    """
    beside = conversations.parent / MANIFEST
    if conversations.name != CONVERSATIONS or not beside.is_file():
        return dict(given or {})
    manifest = read_manifest(conversations.parent)
    if manifest["stage"] != STAGE:
        return dict(given or {})
    answered = dict((manifest["config"] or {}).get("template_kwargs") or {})
    if given is not None and dict(given) != answered:
        raise Mismatch(
            f"{conversations} was answered with the template arguments {answered or 'none'}, not {dict(given)}; leave "
            f"--template-arg out, or answer the prompts again with these"
        )
    return answered
