"""What to compare with: another checkpoint of the same draft, or a saved vocabulary map.

    reference("d2t.pt", shape, {}); reference("path/to/draft", shape, tensors)     pytest tests/test_doctor_reference.py

Files: a draft directory; `d2t.pt`, `d2t.npy`; `vocab_mapping.pt` and the like, a dict with `d2t` (speculators and
SpecForge write those).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..draft.dialects import interpret
from ..draft.dialects.keys import MAPS
from ..draft.files import open_folder
from ..draft.shape import DraftShape
from ..errors import BadInput
from ..untrusted import load_tensors, regular
from .specimen import EMBEDDING, fitted

ANY_LAYERS = 10_000
"""Of the target: only so that a draft which leaves its taps out can be read, they do not matter here."""
FEW = 8
"""More differing tensors than this are another training run, not a fault in one of them."""


@dataclass(frozen=True)
class Reference:
    """Maps by name (target ids, int64 [D]) and the few tensors that differ."""

    maps: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    """All that differ, also where they are too many to try."""


def reference(path: str | Path, shape: DraftShape, tensors: Mapping[str, torch.Tensor]) -> Reference:
    """Read `path` and compare. `tensors`: the draft's own, by canonical name. Raises BadInput for what is neither."""
    path = Path(path)
    if path.is_dir():
        return _of_draft(path, shape, tensors)
    if not path.is_file():
        raise BadInput(
            f"{path} does not exist; --reference takes a draft directory, d2t.pt, d2t.npy or vocab_mapping.pt; "
            "check the path"
        )
    d2t = _saved_map(path)
    if d2t.dim() != 1 or d2t.dtype.is_floating_point or len(d2t) != shape.draft_vocab_size:
        raise BadInput(
            f"{path} holds {d2t.dtype} {list(d2t.shape)}; a map of this draft has {shape.draft_vocab_size} "
            "integers; give the map of this draft"
        )
    return Reference(_read_both_ways(path.name, d2t.long(), shape))


def _of_draft(path: Path, shape: DraftShape, tensors: Mapping[str, torch.Tensor]) -> Reference:
    other = interpret(open_folder(path), ANY_LAYERS) if (path / "config.json").is_file() else None
    if other is None:
        raise BadInput(f"{path} has no config.json; --reference takes a draft directory or a saved map")
    if other.shape.draft_vocab_size != shape.draft_vocab_size or other.shape.vocab_size != shape.vocab_size:
        raise BadInput(
            f"{path} maps {other.shape.draft_vocab_size} of {other.shape.vocab_size} ids, this draft "
            f"{shape.draft_vocab_size} of {shape.vocab_size}: they are not of the same draft; give the map of this "
            "draft"
        )
    sources = other.canonical.sources
    maps = {}
    if "d2t" in sources:
        maps = _read_both_ways(path.name, sources["d2t"].load().long(), shape)
    found = {}
    for name, source in sources.items():
        mine = tensors.get(name)
        if name in MAPS or name == EMBEDDING or (mine is not None and tuple(mine.shape) != source.shape):
            continue
        theirs = source.load()
        if mine is None or not torch.equal(mine, theirs.to(mine.dtype)):
            found[name] = theirs
    return Reference(maps, found if len(found) <= FEW else {}, tuple(found))


def _saved_map(path: Path) -> torch.Tensor:
    if path.suffix == ".npy":
        import numpy as np

        try:
            return torch.from_numpy(np.load(regular(path), allow_pickle=False))
        except Exception as error:  # numpy raises a dozen kinds for a damaged array
            raise BadInput(
                f"{path} cannot be read as an array ({error}); save it again with numpy.save, or give a draft directory"
            ) from error
    try:
        held: Any = load_tensors(path)
    except Exception as error:  # pickle and zip raise a dozen types
        raise BadInput(
            f"{path} cannot be read with weights_only ({error}); save it again as safetensors, or give a draft "
            "directory"
        ) from error
    if isinstance(held, Mapping):
        held = next((held[name] for name in ("d2t", "draft_id_to_target_id") if name in held), None)
    if not isinstance(held, torch.Tensor):
        raise BadInput(
            f"{path} holds neither a tensor nor a dict with `d2t`; give the map that training saved, or a draft "
            "directory"
        )
    return held


def _read_both_ways(name: str, d2t: torch.Tensor, shape: DraftShape) -> dict[str, torch.Tensor]:
    """As offsets and as ids: whichever of the two it is, trials tell."""
    size, vocab = shape.draft_vocab_size, shape.vocab_size
    return {
        f"offsets of {name}": fitted(torch.arange(len(d2t)) + d2t, size, vocab),
        f"ids of {name}": fitted(d2t, size, vocab),
    }
