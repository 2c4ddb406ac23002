"""Operations on the vocabulary map: `d2t` and `t2d`, in whatever form they lie there.

Target id of draft id i: i + d2t[i]. An operation looks at the numbers before it touches them: "absolute to offset"
refuses a map that is right as offsets, which is how a week was once lost.   pytest tests/test_repair_operations.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..draft.dialects.keys import MAPS
from ..draft.files import TensorRef
from ..errors import BadInput
from .overlay import Overlay
from .refs import Array, of_array
from .step import Step

KEEPS = "Nothing was changed"
WHOLE = {"I64": "int64", "I32": "int32", "I16": "int16", "F64": "float64", "F32": "float32", "F16": "float16"}
"""Dtypes in which a map may be stored, and numpy's names."""


# ---------------------------------------------------------------- what lies there


def offsets(overlay: Overlay) -> tuple[Array, Array | None, int]:
    """d2t as int64 [D], the ids that t2d marks (None where there is no usable t2d), V. Raises BadInput without them."""
    case = overlay.raw
    d2t, vocab = case.array("d2t"), case.vocab
    if d2t is None or d2t.ndim != 1 or d2t.dtype.kind not in "iu":
        raise BadInput(
            f"{overlay.path}: there is no d2t of whole numbers to work on; rebuild it from t2d, or take it from "
            "--reference"
        )
    if vocab is None:
        raise BadInput(f"{overlay.path}: the size of the target's vocabulary is not known; give --target")
    return np.asarray(d2t).astype(np.int64), marks(overlay), vocab


def marks(overlay: Overlay) -> Array | None:
    """The ids that t2d marks, ascending int64; None where there is no t2d with one entry a target id."""
    t2d = overlay.raw.array("t2d")
    usable = t2d is not None and t2d.ndim == 1 and len(t2d) == overlay.raw.vocab
    return np.flatnonzero(t2d) if usable and t2d is not None else None


def is_map(ids: Array, marked: Array | None, vocab: int) -> bool:
    """Ascending, in range, and what t2d marks, where it does."""
    possible = bool(len(ids) and ids[0] >= 0 and ids[-1] < vocab and np.all(np.diff(ids) > 0))
    return possible and (marked is None or np.array_equal(ids, marked))


def quote(values: Array, name: str = "d2t") -> str:
    """First values, those around 1,000, how many."""
    text = f"{len(values):,} numbers, it begins {values[:4].tolist()}"
    return text + (f", {name}[1000:1003] = {values[1000:1003].tolist()}" if len(values) > 1000 else "")


# ---------------------------------------------------------------- one arange more or less


def absolute_to_offset(overlay: Overlay) -> Overlay:
    """Subtract arange(D), once, where d2t holds absolute target ids."""
    return _mended(overlay, -1, "If it holds absolute ids, they are of another target")


def add_arange(overlay: Overlay) -> Overlay:
    """Add arange(D), once: undoes a needless subtraction."""
    return _mended(overlay, 1, "Another mistake was made")


def offset_to_absolute(overlay: Overlay) -> Overlay:
    """Add arange(D) to a right map: only to undo `absolute-to-offset`."""
    return _unmended(overlay, 1)


def subtract_arange(overlay: Overlay) -> Overlay:
    """Subtract arange(D) from a right map: only to undo `add-arange`."""
    return _unmended(overlay, -1)


def _mended(overlay: Overlay, times: int, otherwise: str) -> Overlay:
    d2t, marked, vocab = offsets(overlay)
    place = np.arange(len(d2t))
    if is_map(place + d2t, marked, vocab):
        said = ", and t2d marks exactly these ids" if marked is not None else ""
        raise BadInput(
            f"{overlay.path}: d2t is right as it stands: read as offsets it gives ascending target ids in range{said} "
            f"({quote(d2t)}). Zeros at its beginning only say that the first ids coincide. {KEEPS}"
        )
    new = d2t + times * place
    if not is_map(place + new, marked, vocab):
        raise BadInput(
            f"{overlay.path}: that would not make a map of d2t ({quote(d2t)}): the ids would still not ascend, leave "
            f"the target's {vocab:,} ids, or differ from those that t2d marks. {otherwise}"
        )
    return _write(overlay, new)


def _unmended(overlay: Overlay, times: int) -> Overlay:
    d2t, marked, vocab = offsets(overlay)
    place = np.arange(len(d2t))
    if not is_map(place + d2t, marked, vocab):
        raise BadInput(f"{overlay.path}: d2t ({quote(d2t)}) is no right map, so this undoes nothing. {KEEPS}")
    return _write(overlay, d2t + times * place)


def back(operation: str) -> Any:
    """The inverse of one that adds or subtracts arange: exact where d2t was stored as int64 before."""

    def inverse(before: Overlay, after: Overlay) -> list[Step] | None:
        return [Step(operation)] if before.ref("d2t").dtype == "I64" else None

    return inverse


# ---------------------------------------------------------------- each rebuilt from the other


def d2t_from_t2d(overlay: Overlay) -> Overlay:
    """Rebuild d2t from the ids that t2d marks, if they are as many as the head has rows."""
    marked, size = marks(overlay), overlay.raw.draft_vocab
    if marked is None:
        raise BadInput(
            f"{overlay.path}: there is no t2d with one entry a target id to rebuild d2t from; take the map from "
            "--reference"
        )
    if len(marked) != size:
        raise BadInput(
            f"{overlay.path}: t2d marks {len(marked):,} ids, the draft vocabulary has {size or 0:,}: it is of "
            "another map, so rebuilding d2t from it would be wrong; take the map from --reference"
        )
    return _write(overlay, marked - np.arange(len(marked)))


def t2d_from_d2t(overlay: Overlay) -> Overlay:
    """Rebuild t2d from a d2t that is a map by itself."""
    d2t, _, vocab = offsets(overlay)
    ids = np.arange(len(d2t)) + d2t
    if not is_map(ids, None, vocab):
        raise BadInput(
            f"{overlay.path}: d2t ({quote(d2t)}) is no map itself, so t2d cannot be rebuilt from it; mend d2t first"
        )
    return _mark(overlay, ids, vocab)


# ---------------------------------------------------------------- dtype, or no map at all


def map_dtype(overlay: Overlay, dtype: str = "I64") -> Overlay:
    """Store d2t as whole numbers of 64 bits, where no number changes by it. `dtype`: another one, only to undo that."""
    ref = overlay.ref("d2t")
    if ref.dtype == dtype:
        raise BadInput(f"{overlay.path}: d2t is {dtype} already. {KEEPS}")
    if dtype not in WHOLE or len(ref.shape) != 1:
        raise BadInput(
            f"{overlay.path}: d2t is {ref.dtype} {list(ref.shape)}; a map is one list of {', '.join(WHOLE)}; take "
            "the map from --reference"
        )
    old = _numbers(ref)
    new = old.astype(WHOLE[dtype])
    if not np.array_equal(new.astype(np.float64), old.astype(np.float64)):
        raise BadInput(f"{overlay.path}: d2t ({quote(old)}) holds numbers that {dtype} does not; rebuild it from t2d")
    vocab = overlay.raw.vocab
    if dtype == "I64" and vocab is not None and not is_map(np.arange(len(new)) + new, marks(overlay), vocab):
        raise BadInput(
            f"{overlay.path}: d2t ({quote(new)}) is no map as whole numbers either: it was rounded, or holds "
            f"something else. Rebuild it from t2d"
        )
    return _put(overlay, new, f"d2t: {ref.dtype} -> {dtype}, no number changed")


def dtype_back(before: Overlay, after: Overlay, dtype: str = "I64") -> list[Step] | None:
    """Exact: the numbers are the same ones."""
    old = before.ref("d2t").dtype
    return [Step("map-dtype", {"dtype": old})] if old in WHOLE else None


def drop_maps(overlay: Overlay) -> Overlay:
    """Take d2t and t2d out of a draft over the whole vocabulary, which needs none."""
    case = overlay.raw
    if case.draft_vocab is None or case.draft_vocab != case.vocab:
        raise BadInput(
            f"{overlay.path}: its head chooses among {case.draft_vocab or 0:,} of {case.vocab or 0:,} ids, so it needs "
            f"its map. {KEEPS}"
        )
    names = [held for name in MAPS if (held := overlay.stored(name)) is not None]
    if not names:
        raise BadInput(f"{overlay.path}: there is no map to take out. {KEEPS}")
    out = overlay.with_tensors(dict.fromkeys(names)).declare(d2t="none")
    return out.tell(f"takes out {', '.join(names)}: the whole vocabulary of {case.vocab:,} ids needs no map")


# ---------------------------------------------------------------- writing


def _numbers(ref: TensorRef) -> Array:
    """bfloat16, which comes as bits, as float32; anything else as stored."""
    values = np.asarray(ref.array())
    values = values.reshape(-1)
    return (values.astype(np.uint32) << 16).view(np.float32) if ref.dtype == "BF16" else values


def write_both(overlay: Overlay, ids: Array, vocab: int) -> Overlay:
    """d2t as offsets of `ids`, and t2d in step."""
    out = _write(overlay, ids - np.arange(len(ids)))
    held = marks(overlay)
    if held is not None and np.array_equal(held, np.sort(ids)):
        return out.tell(f"t2d: marks exactly these {len(ids):,} ids already")
    return _mark(out, np.sort(ids), vocab)


def _write(overlay: Overlay, new: Array) -> Overlay:
    held = overlay.raw.array("d2t")
    found = f"found d2t: {quote(_numbers(overlay.ref('d2t')))}" if held is not None else "found no d2t"
    value = np.ascontiguousarray(new.astype(np.int64))
    ids = value + np.arange(len(value))
    out = _put(overlay.tell(found), value, f"writes d2t: {quote(value)}").declare(d2t="offset")
    read = quote(np.asarray(out.ref("d2t").array()))
    return out.tell(f"reads back d2t: {read}; target ids {int(ids.min()):,} to {int(ids.max()):,}")


def _put(overlay: Overlay, value: Array, text: str, canonical: str = "d2t") -> Overlay:
    name = overlay.spelled(canonical)
    held = overlay.tensors.get(name)
    new = of_array(name, value, held.file if held else overlay.base.files[0])
    same = held is not None and held.dtype == new.dtype and np.array_equal(held.array(), value)
    return (overlay if same else overlay.with_tensors({name: new})).tell(text)


def _mark(overlay: Overlay, ids: Array, vocab: int) -> Overlay:
    marked = np.zeros(vocab, dtype=bool)
    marked[ids] = True
    return _put(overlay, marked, f"t2d: marks {len(ids):,} ids of d2t, {int(ids[0]):,} to {int(ids[-1]):,}", "t2d")
