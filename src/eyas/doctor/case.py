"""What static checks look at: config, tensor headers, small tensors. Nothing here needs torch or reads a large tensor.

A broken draft often cannot be interpreted; then `reading` is None, `refusal` says why, and the raw view still works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..draft.dialects import Reading, interpret
from ..draft.dialects.keys import canonical_name
from ..draft.files import DraftFolder, TensorRef, open_folder
from ..errors import BadInput
from ..headers import BYTES
from ..target.facts import TargetFacts

if TYPE_CHECKING:
    import numpy as np

SMALL = 64 << 20  # bytes; a tensor beyond it is not read by a static check


@dataclass(frozen=True)
class Case:
    """One draft directory, and what is known of its target."""

    folder: DraftFolder
    facts: TargetFacts | None = None
    engines: tuple[str, ...] = ()
    """Those that it is meant for; all where empty."""
    reading: Reading | None = None
    refusal: str = ""
    launch: Mapping[str, Any] = field(default_factory=dict)
    """Flags of the command that serves it (`engines.launch.options`); {} where nobody said."""

    @classmethod
    def open(
        cls,
        path: str | Path | DraftFolder,
        facts: TargetFacts | None = None,
        engines: tuple[str, ...] = (),
        launch: Mapping[str, Any] | None = None,
    ) -> Case:
        """A directory, or one that is open (with changes laid over it). Raises BadInput only where not even the files
        can be read."""
        folder = path if isinstance(path, DraftFolder) else open_folder(path)
        try:
            reading = interpret(folder, facts.num_layers if facts else None)
            return cls(folder, facts, engines, reading, launch=launch or {})
        except BadInput as error:
            return cls(folder, facts, engines, refusal=str(error), launch=launch or {})

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self.folder.config

    @cached_property
    def tensors(self) -> dict[str, TensorRef]:
        """By canonical name; fused projections stay fused. Of two with one name the first is kept."""
        out: dict[str, TensorRef] = {}
        for name, ref in self.folder.tensors.items():
            out.setdefault(canonical_name(name), ref)
        return out

    def said(self, name: str) -> Any:
        """The first non-null value of a config field, in any of the places where drafts keep it."""
        nested = [self.config.get(key) for key in ("eagle_config", "transformer_layer_config", "text_config")]
        places = [self.config, *(place for place in nested if isinstance(place, Mapping))]
        return next((place[name] for place in places if place.get(name) is not None), None)

    def number(self, name: str) -> int | None:
        """A whole number that the config says, None for anything else."""
        value = self.said(name)
        return value if type(value) is int else None

    @property
    def vocab(self) -> int | None:
        """V: the target's, where it is known, else what the draft says."""
        return self.facts.vocab_size if self.facts else self.number("vocab_size")

    @property
    def draft_vocab(self) -> int | None:
        """D: what the config says, else the head's rows, else V."""
        said, head = self.number("draft_vocab_size"), self.tensors.get("lm_head.weight")
        return said if said is not None else head.shape[0] if head and head.shape else self.vocab

    def array(self, name: str) -> np.ndarray[Any, Any] | None:
        """A small tensor by canonical name; floats of 16 bits come as bits. None where it is absent or large."""
        ref = self.tensors.get(name)
        if ref is None:
            return None
        return ref.array() if math.prod(ref.shape) * BYTES[ref.dtype] <= SMALL else None
