"""A loss mask as text: the assistant's tokens stand out, in colour on a terminal and between marks elsewhere.

    eyas extract conversations.jsonl --target smollm2 --show 3

Exercise it:  pytest tests/test_features_show.py
"""

from __future__ import annotations

import itertools
from typing import Any

from eyas.features.conversations import Document
from eyas.terminal import harmless

ON, FAINT, OFF = "\x1b[30;42m", "\x1b[2m", "\x1b[0m"
OPEN, CLOSE = "⟦", "⟧"
NEWLINE = "↵"


def legend(color: bool) -> str:
    """What the marks mean, in one line."""
    supervised = f"{ON}supervised{OFF}" if color else f"{OPEN}supervised{CLOSE}"
    rest = f"{FAINT}not supervised{OFF}" if color else "not supervised"
    return f"{supervised} (loss mask 1: the assistant's tokens)   {rest} (loss mask 0)   {NEWLINE} a newline"


def mask_runs(document: Document) -> list[tuple[int, int, bool]]:
    """Runs of equal mask as (start, end, supervised)."""
    mask = document.mask
    edges = [0, *((mask[1:] != mask[:-1]).nonzero().flatten() + 1).tolist(), len(mask)]
    return [(a, b, bool(mask[a])) for a, b in itertools.pairwise(edges)]


def show_document(document: Document, tokenizer: Any, color: bool) -> str:
    """One conversation: a line with its counts, then its text with the mask.

    Each run is decoded on its own, special tokens included, so that what is shown is exactly what is supervised.
    """
    runs = mask_runs(document)
    turns = sum(on for _, _, on in runs)
    supervised = int(document.mask.sum())
    name = harmless(document.id)
    parts = [f"{name}: {len(document)} tokens, {supervised} supervised, {turns} turn{'s' * (turns != 1)}\n"]
    for start, end, on in runs:
        text = tokenizer.decode(document.ids[start:end].tolist(), skip_special_tokens=False)
        text = harmless(text).replace("\n", NEWLINE + "\n")
        if color:
            style = ON if on else FAINT
            parts.append("\n".join(f"{style}{line}{OFF}" if line else "" for line in text.split("\n")))
        else:
            parts.append(f"{OPEN}{text}{CLOSE}" if on else text)
    return "".join(parts).rstrip("\n")
