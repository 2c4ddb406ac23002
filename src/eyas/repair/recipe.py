"""One version of a file told by another: bytes that are kept, and blobs for all that is not.

    (Blob(sha, 0, 96), Keep(96, 2_000_000))      a new header, the tensors as they lie in the other version

Recipes can be inverted, chained and cut, so that any earlier version of a file follows from the present one and from
the few bytes that each change replaced, bit for bit.   pytest tests/test_repair_history.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import BadInput


@dataclass(frozen=True)
class Keep:
    """Bytes `start` to `stop` of the other version of the same file."""

    start: int
    stop: int


@dataclass(frozen=True)
class Blob:
    """Bytes `start` to `stop` of a blob of the store."""

    sha256: str
    """Of the whole blob."""
    start: int
    stop: int
    what: str = field(default="", compare=False)
    """For messages: the tensor, `header`, or the file itself."""


Recipe = tuple[Keep | Blob, ...]


def length(recipe: Recipe) -> int:
    """Bytes of the file that the recipe makes."""
    return sum(part.stop - part.start for part in recipe)


def joined(parts: Iterable[Keep | Blob]) -> Recipe:
    """Without empty parts, neighbours that are kept as one."""
    out: list[Keep | Blob] = []
    for part in parts:
        if part.start == part.stop:
            continue
        last = out[-1] if out else None
        if isinstance(part, Keep) and isinstance(last, Keep) and last.stop == part.start:
            out[-1] = Keep(last.start, part.stop)
        else:
            out.append(part)
    return tuple(out)


def cut(recipe: Recipe, start: int, stop: int) -> Recipe:
    """The recipe of bytes `start` to `stop` of the file that `recipe` makes. Raises BadInput where it is shorter."""
    if start < 0 or stop > length(recipe):
        raise BadInput(
            f"bytes {start:,} to {stop:,} of a file of {length(recipe):,} are not there; something else wrote to "
            "it: run the same command again"
        )
    out: list[Keep | Blob] = []
    place = 0
    for part in recipe:
        size = part.stop - part.start
        low, high = max(start - place, 0), min(stop - place, size)
        if low < high:
            if isinstance(part, Keep):
                out.append(Keep(part.start + low, part.start + high))
            else:
                out.append(Blob(part.sha256, part.start + low, part.start + high, part.what))
        place += size
    return joined(out)


def chained(recipe: Recipe, other: Recipe) -> Recipe:
    """`recipe` makes A of B, `other` makes B of C: the recipe that makes A of C."""
    out: list[Keep | Blob] = []
    for part in recipe:
        out += cut(other, part.start, part.stop) if isinstance(part, Keep) else (part,)
    return joined(out)


def moved(recipe: Recipe, start: int, stop: int) -> tuple[int, int] | None:
    """Where bytes `start` to `stop` of the other version lie in this one, None where they do not in one piece."""
    place = 0
    for part in recipe:
        if isinstance(part, Keep) and part.start <= start and stop <= part.stop:
            return place + start - part.start, place + stop - part.start
        place += part.stop - part.start
    return None


def inverse(recipe: Recipe, size: int, cuts: Sequence[tuple[int, str]]) -> list[tuple[int, int, int | None, str]]:
    """The other version's `size` bytes, in order, as (start, stop, place in this version or None, what).

    cuts: (first byte, what begins there) of the other version; what is not kept is cut there, so that each tensor
    becomes a blob of its own.
    """
    kept, place = [], 0
    for part in recipe:
        if isinstance(part, Keep):
            kept.append((part.start, part.stop, place))
        place += part.stop - part.start
    out: list[tuple[int, int, int | None, str]] = []
    at = 0
    for start, stop, where in sorted(kept):
        if stop <= at:
            continue  # kept twice
        where, start = where + max(at - start, 0), max(at, start)
        out += _pieces(at, start, cuts)
        out.append((start, stop, where, ""))
        at = stop
    return out + _pieces(at, size, cuts)


def _pieces(start: int, stop: int, cuts: Sequence[tuple[int, str]]) -> list[tuple[int, int, int | None, str]]:
    bounds = sorted({start, stop, *(at for at, _ in cuts if start < at < stop)})
    names = sorted(cuts, key=lambda c: c[0])
    out: list[tuple[int, int, int | None, str]] = []
    for low, high in itertools.pairwise(bounds):
        what = next((name for at, name in reversed(names) if at <= low), "")
        out.append((low, high, None, what))
    return out


def stays(recipe: Recipe, size: int) -> bool:
    """Can it be made by writing blobs into the other version, of `size` bytes: is all that is kept in its place?"""
    place, kept = 0, False
    for part in recipe:
        if isinstance(part, Keep):
            kept = True
            if part.start != place:
                return False
        place += part.stop - part.start
    return kept and place == size


def to_json(recipe: Recipe | None) -> list[list[Any]] | None:
    """Plain values; None (no such file) stays None."""
    if recipe is None:
        return None
    return [["keep", p.start, p.stop] if isinstance(p, Keep) else ["blob", p.start, p.stop, p.sha256, p.what]
            for p in recipe]  # fmt: skip


def from_json(values: Any) -> Recipe | None:
    """What `to_json` wrote."""
    if values is None:
        return None
    return tuple(Keep(v[1], v[2]) if v[0] == "keep" else Blob(v[3], v[1], v[2], v[4]) for v in values)
