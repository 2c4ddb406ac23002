"""A change to the files of a draft: what they become, not how that came to be decided.

    Change({"d2t": Piece("d2t", "I64", (4,), (array,)), "lm_head.bias": None}, config={...})

`write_new` makes a new directory of it, `repair_in_place` changes the draft itself.

pytest tests/test_repair_in_place.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..draft.assemble import Piece


@dataclass(frozen=True)
class Change:
    """What the files become. What is not named stays as it is, byte for byte."""

    tensors: Mapping[str, Piece | None] = field(default_factory=dict)
    """By stored name: the new bytes, or None where the tensor is left out. A piece may consist of extents of the
    draft's own files, so that a renamed tensor passes through no memory."""
    config: Mapping[str, Any] | None = None
    """The whole new config.json, None where it stays."""
    eyas: Mapping[str, Any] | None = None
    """The whole new eyas.json, None where only the digests of changed tensors follow by themselves."""
