"""Operations that take a map from elsewhere, or what lies there as something else than offsets.

The forms are those that the doctor tries (doctor/maps.py); only a trial or a reference tells which was trained.
    pytest tests/test_repair_operations.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..draft.dialects.keys import MAPS
from ..draft.shape import DraftShape
from ..errors import BadInput
from .maps import is_map, marks, offsets, quote, write_both
from .overlay import Overlay
from .refs import Array
from .step import Step

if TYPE_CHECKING:
    import torch


def map_from_reference(overlay: Overlay, reference: str, read_as: str | None = None) -> Overlay:
    """Take the map of another checkpoint, of d2t.pt, d2t.npy or vocab_mapping.pt.

    read_as: "offsets" or "ids"; None decides by the numbers, and refuses those that fit as both.
    """
    size, vocab = overlay.raw.draft_vocab, overlay.raw.vocab
    if size is None or vocab is None:
        raise BadInput(f"{overlay.path}: the sizes of its vocabularies are not known; give --target")
    if read_as not in (None, "offsets", "ids"):
        raise BadInput(f"map-from-reference: read_as = {read_as!r}; expected offsets or ids")
    path = Path(reference)
    found = _map_of_draft(overlay, path) if path.is_dir() else _map_of_file(path, size, vocab)
    marked = marks(overlay)
    fits = {name: ids for name, ids in found.items() if is_map(ids, None, vocab) and read_as in (None, name)}
    if len(fits) > 1 and marked is not None:
        fits = {name: ids for name, ids in fits.items() if np.array_equal(ids, marked)} or fits
    if len(fits) != 1:
        first = next(iter(found.values()))
        both = "fits both as offsets and as absolute ids: say read_as"
        raise BadInput(
            f"{path}: its map {both if fits else 'is broken: examine it first'} ({quote(first, 'ids')}); give "
            "another --reference"
        )
    name, ids = next(iter(fits.items()))
    return write_both(overlay.tell(f"{path} holds a map as {name}"), ids, vocab)


def _map_of_draft(overlay: Overlay, path: Path) -> dict[str, Array]:
    """Both readings of the d2t of a draft directory: "offsets" and "ids" -> target ids."""
    other = Overlay.of(path, overlay.facts)
    theirs, marked, vocab = offsets(other)
    mine = overlay.raw
    if len(theirs) != mine.draft_vocab or vocab != mine.vocab:
        raise BadInput(
            f"{path} maps {len(theirs):,} of {vocab:,} ids, {overlay.path} needs {mine.draft_vocab or 0:,} of "
            f"{mine.vocab or 0:,}: they are not of the same draft"
        )
    ids = np.arange(len(theirs)) + theirs
    if not is_map(ids, marked, vocab):
        raise BadInput(f"{path}: its own map is broken ({quote(theirs)}); examine it first")
    return {"offsets": ids}


def _map_of_file(path: Path, size: int, vocab: int) -> dict[str, Array]:
    from ..doctor.reference import reference

    # Of a shape only the two vocabularies matter to a saved map.
    shape = DraftShape(1, 1, 1, 1, 1, 2, vocab, size)
    maps = reference(path, shape, {}).maps
    return {name.partition(" of ")[0]: ids.numpy() for name, ids in maps.items()}


def set_map_form(overlay: Overlay, form: str) -> Overlay:
    """Take what lies there as one of the forms of `doctor.maps.alternatives`, and write it as offsets, t2d in step."""
    ids = _forms(overlay).get(form)
    if ids is None:
        known = ", ".join(_forms(overlay)) or "none"
        raise BadInput(f"{overlay.path}: there is no map here as {form!r}; found {known}; name the form that was found")
    vocab = overlay.raw.vocab or 0
    if (ids < 0).any() or len(np.unique(ids)) < len(ids):
        bad = int((ids < 0).sum())
        raise BadInput(
            f"{overlay.path}: read as {form!r}, {bad:,} of {len(ids):,} draft ids lead nowhere and "
            f"{len(ids) - bad - len(np.unique(ids[ids >= 0])):,} to a token that another one means: that is no map"
        )
    return write_both(overlay.tell(f"d2t is read as {form!r}"), ids, vocab)


def form_back(before: Overlay, after: Overlay, form: str) -> list[Step] | None:
    """Exact where only multiples of arange were moved and t2d stayed as it was."""
    names = {"absolute": "offset-to-absolute", "subtracted twice": "subtract-arange"}
    held, now = before.stored("t2d"), after.stored("t2d")
    marked_alike = held is not None and now is not None and before.tensors[held] is after.tensors[now]
    known = form in names and marked_alike and before.ref("d2t").dtype == "I64"
    return [Step(names[form])] if known else None


def _forms(overlay: Overlay) -> dict[str, Array]:
    """Label -> target ids [D], -1 where a draft id leads nowhere."""
    from ..doctor import maps
    from ..doctor.specimen import Specimen, stored_ids

    reading = overlay.reading
    if reading is None:
        raise BadInput(f"{overlay.path} cannot be read as a draft ({overlay.refusal}); mend that first")
    shape, c = reading.shape, reading.conventions
    sources = reading.canonical.sources
    tensors: dict[str, torch.Tensor] = {name: sources[name].load() for name in MAPS if name in sources}
    specimen = Specimen(shape, c, tensors, stored_ids(tensors, shape), None, c.taps)
    return {label: ids.numpy() for label, ids, _ in maps.alternatives(specimen, {})}
