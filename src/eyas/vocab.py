"""VocabMap: which D of the target's V token ids the draft can say, and the two ways between draft ids and target ids.

`d2t` holds OFFSETS: the target id of draft id i is `i + d2t[i]`. So a run of zeros is right wherever ids coincide: with
the first 20 target ids in the map, `d2t[:20]` is all zeros. `t2d` is true exactly at the D ids of the map.

    eyas vocab runs/demo/features --size 8192 --out runs/demo/vocab        Exercise it:  pytest tests/test_vocab.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from eyas.errors import BadInput, EyasError
from eyas.writes import atomic_save_safetensors

SCHEMA = "eyas-vocab/1"
FILE = "vocab.safetensors"
SUSPICIOUS = 8  # so many offsets without one repetition are taken for absolute ids


@dataclass(frozen=True, eq=False)
class VocabMap:
    """A draft vocabulary. Invariant: `i + offsets[i]` is strictly increasing and within [0, target_size).

    Raises BadInput saying which entry breaks it. Equality of maps is equality of `digest()`.
    """

    offsets: torch.Tensor  # int64 [D]
    target_size: int
    counts: torch.Tensor | None = field(default=None, repr=False)  # int64 [V], what it was cut from
    always: tuple[int, ...] = field(default=(), repr=False)
    """Target ids that were put in whatever their counts; kept when the map is re-cut."""

    def __post_init__(self) -> None:
        offsets = _whole_numbers(self.offsets, "d2t")
        object.__setattr__(self, "offsets", offsets)
        if not 0 < offsets.numel() <= self.target_size:
            raise BadInput(
                f"a draft vocabulary of {offsets.numel()} ids does not fit a target vocabulary of {self.target_size}; "
                f"expected 1 to {self.target_size}"
            )
        problem = _problem(torch.arange(offsets.numel()) + offsets, self.target_size)
        if problem:
            raise BadInput(f"d2t: {problem}")
        if self.counts is not None:
            object.__setattr__(self, "counts", _checked_counts(self.counts, self.target_size))

    # ---------------------------------------------------------------- constructors

    @classmethod
    def from_offsets(cls, offsets: torch.Tensor | Iterable[int], target_size: int, *, sure: bool = False) -> VocabMap:
        """From `d2t` as SafeAILab, SGLang, vLLM and llama.cpp read it: int [D], target id minus draft id.

        Raises BadInput where they are not offsets, and says so plainly when they look like absolute target ids. Offsets
        of 8 entries or more without one repetition name no two neighbouring target ids, which no vocabulary counted
        from text does; they are refused as absolute ids unless `sure`.
        """
        values = _whole_numbers(offsets, "d2t")
        absolute_fit = values.numel() > 0 and _problem(values, target_size) is None
        offsets_fit = _problem(torch.arange(values.numel()) + values, target_size) is None
        if absolute_fit and not offsets_fit:
            last = values.numel() - 1
            raise BadInput(
                f"these {values.numel()} numbers are absolute target ids, not offsets: they ascend within the target's "
                f"{target_size} ids as they are, but read as offsets, draft id {last} would be target id {last} + "
                f"{int(values[-1])} = {last + int(values[-1])}. d2t must hold target id minus draft id; use "
                f"VocabMap.from_absolute, or subtract arange({values.numel()}) from the stored d2t"
            )
        if absolute_fit and values.numel() >= SUSPICIOUS and not sure:
            raise BadInput(
                f"these {values.numel()} numbers look like absolute target ids, not offsets: none of them repeats, so "
                f"as offsets they would name no two neighbouring target ids. d2t must hold target id minus draft id; "
                f"use VocabMap.from_absolute, or from_offsets(..., sure=True) if they really are offsets"
            )
        return cls(values, target_size)

    @classmethod
    def from_absolute(cls, ids: torch.Tensor | Iterable[int], target_size: int) -> VocabMap:
        """From the target ids themselves, int [D], strictly ascending (the order of the head's rows)."""
        values = _whole_numbers(ids, "target ids")
        problem = _problem(values, target_size)
        if problem:
            raise BadInput(f"target ids of a draft vocabulary: {problem}")
        return cls(values - torch.arange(values.numel()), target_size)

    @classmethod
    def from_t2d(cls, mask: torch.Tensor) -> VocabMap:
        """From `t2d`, bool (or 0/1) [V]."""
        if mask.ndim != 1 or not bool(((mask == 0) | (mask == 1)).all()):
            raise BadInput(
                f"t2d has shape {list(mask.shape)} and dtype {mask.dtype}; expected one true or false a target id"
            )
        return cls.from_absolute(mask.cpu().bool().nonzero().flatten(), mask.numel())

    @classmethod
    def from_counts(cls, counts: torch.Tensor, size: int, always: Iterable[int] = ()) -> VocabMap:
        """The `always` ids and the most frequent others, `size` in all. counts: int [V].

        Of equally frequent ids the lower is taken, so where fewer than `size` ids were observed the map is filled with
        the lowest ids not yet in: in a BPE vocabulary these are bytes and the earliest, most general merges.
        Raises BadInput when `size` does not fit, or an `always` id is not one of the target's.
        """
        counts = _checked_counts(counts, counts.numel())
        chosen = tuple(sorted({int(i) for i in always}))
        outside = [i for i in chosen if not 0 <= i < counts.numel()]
        if outside:
            raise BadInput(
                f"ids {outside} cannot be in the map: the target's ids run from 0 to {counts.numel() - 1}; leave "
                "them out"
            )
        if not 1 <= size <= counts.numel():
            raise BadInput(f"draft vocabulary size {size}: expected 1 to {counts.numel()}, the target's vocabulary")
        if len(chosen) > size:
            raise BadInput(f"{len(chosen)} ids must always be in the map, more than its size {size}; make it larger")
        rank = counts.clone()
        rank[list(chosen)] = torch.iinfo(torch.int64).max
        last = rank.kthvalue(counts.numel() - size + 1).values  # the smallest that is in, perhaps not with all its ids
        inside = rank > last
        tied = (rank == last).nonzero().flatten()
        inside[tied[: size - int(inside.sum())]] = True
        ids = inside.nonzero().flatten()  # [D]
        return cls(ids - torch.arange(size), counts.numel(), counts, chosen)

    @classmethod
    def identity(cls, target_size: int) -> VocabMap:
        """The whole target vocabulary."""
        return cls(torch.zeros(target_size, dtype=torch.int64), target_size)

    # ---------------------------------------------------------------- what it says

    @property
    def size(self) -> int:
        """D."""
        return self.offsets.numel()

    @property
    def d2t(self) -> torch.Tensor:
        """Offsets, int64 [D]."""
        return self.offsets

    @cached_property
    def ids(self) -> torch.Tensor:
        """Target ids, ascending, int64 [D]."""
        return self.offsets + torch.arange(self.size)

    @cached_property
    def t2d(self) -> torch.Tensor:
        """Is a target id in the map, bool [V]."""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.ids] = True
        return mask

    @cached_property
    def _draft_ids(self) -> dict[torch.device, torch.Tensor]:
        table = torch.full((self.target_size,), -1, dtype=torch.int64)  # [V]
        table[self.ids] = torch.arange(self.size)
        return {table.device: table}

    def to_draft(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids, int64, same shape and device; -1 for whatever is not in the map, also for ids the target lacks."""
        tables = self._draft_ids
        if target_ids.device not in tables:
            tables[target_ids.device] = tables[torch.device("cpu")].to(target_ids.device)
        known = (target_ids >= 0) & (target_ids < self.target_size)
        looked_up = tables[target_ids.device][target_ids.long().clamp(0, self.target_size - 1)]
        return torch.where(known, looked_up, -1)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids, int64, same shape and device. Raises IndexError for a draft id that is not in [0, D)."""
        if draft_ids.numel() and (int(draft_ids.min()) < 0 or int(draft_ids.max()) >= self.size):
            raise IndexError(
                f"draft ids run from {int(draft_ids.min())} to {int(draft_ids.max())}, the map has {self.size}"
            )
        return self.ids.to(draft_ids.device)[draft_ids.long()]

    def coverage(self, counts: torch.Tensor) -> float:
        """Share of the counted tokens that the draft can say. counts: int [V]. Raises BadInput where all are zero."""
        counts = _checked_counts(counts, self.target_size)
        total = int(counts.sum())
        if total == 0:
            raise BadInput(
                "coverage of no tokens at all: the counts are all zero; is the loss mask empty? Look at `eyas "
                "extract --show`"
            )
        return int(counts[self.ids].sum()) / total

    def recut(self, size: int, always: Iterable[int] = ()) -> VocabMap:
        """The same counts cut to another size; ids once chosen stay in. Raises BadInput where no counts were kept."""
        if self.counts is None:
            raise BadInput(
                "this vocabulary map keeps no counts, so it cannot be re-cut; run `eyas vocab` on the features"
            )
        return self.from_counts(self.counts, size, {*self.always, *always})

    def digest(self) -> str:
        """SHA-256 (hex) of the map itself: target size and offsets, not the counts."""
        content = self.offsets.to(torch.int64).numpy().astype("<i8").tobytes()
        return hashlib.sha256(f"{self.target_size}:".encode() + content).hexdigest()

    # ---------------------------------------------------------------- on disk

    def save(self, path: str | Path) -> None:
        """Write `d2t` int64 [D], `t2d` bool [V] and, where kept, `counts` int64 [V] as safetensors, atomically."""
        tensors = {"d2t": self.offsets, "t2d": self.t2d}
        if self.counts is not None:
            tensors["counts"] = self.counts
        metadata = {"schema": SCHEMA, "always": ",".join(map(str, self.always))}
        atomic_save_safetensors(tensors, Path(path), metadata)

    @classmethod
    def load(cls, path: str | Path) -> VocabMap:
        """Read what `save` wrote, or any safetensors with `d2t` and `t2d`; `path` may be the folder that holds it.

        Raises BadInput when a tensor is missing, breaks the invariant, or when d2t and t2d contradict each other.
        """
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        tensors, metadata = _load(path)
        missing = {"d2t", "t2d"} - set(tensors)
        if missing:
            raise BadInput(
                f"{path}: {' and '.join(sorted(missing))} missing, so it is not a vocabulary map; give what `eyas "
                "vocab` wrote"
            )
        try:
            named = cls.from_t2d(tensors["t2d"])
            always = _listed(metadata.get("always", ""))
            if named.size > 1 and torch.equal(_whole_numbers(tensors["d2t"], "d2t"), named.ids):
                raise BadInput("d2t holds absolute target ids, not offsets; subtract arange from it")
            out = cls(tensors["d2t"], named.target_size, tensors.get("counts"), always)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from error
        if not torch.equal(out.ids, named.ids):
            raise BadInput(
                f"{path}: d2t and t2d contradict each other: {out.size} ids against {named.size}; "
                f"take both from the same training run"
            )
        return out


def _listed(text: str) -> tuple[int, ...]:
    """Ids from the metadata of a map: `0,1,2`."""
    parts = [part for part in text.split(",") if part]
    if not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise BadInput(f"always = {text[:80]!r} in its metadata, expected ids with commas between them")
    return tuple(map(int, parts))


def _problem(ids: torch.Tensor, target_size: int) -> str | None:
    """Why `ids` [D] are not strictly ascending target ids, as a clause; None if they are."""
    outside = ((ids < 0) | (ids >= target_size)).nonzero().flatten()
    if outside.numel():
        i = int(outside[0])
        return f"draft id {i} would be target id {int(ids[i])}, but the target's ids run from 0 to {target_size - 1}"
    bad = (ids[1:] <= ids[:-1]).nonzero().flatten()
    if bad.numel():
        i = int(bad[0])
        how = "the same target id" if ids[i] == ids[i + 1] else "target ids out of order"
        return (
            f"draft ids {i} and {i + 1} would be {how} ({int(ids[i])}, {int(ids[i + 1])}); they must ascend strictly: "
            f"sort them, and the head's rows alike"
        )
    return None


def _whole_numbers(values: torch.Tensor | Iterable[int], what: str) -> torch.Tensor:
    tensor = torch.as_tensor(values if isinstance(values, torch.Tensor) else list(values)).detach().cpu()
    if tensor.numel() == 0:
        tensor = tensor.to(torch.int64)
    if tensor.ndim != 1 or tensor.dtype.is_floating_point or tensor.dtype in (torch.bool, torch.complex64):
        raise BadInput(f"{what}: expected a list of whole numbers, found {tensor.dtype} {list(tensor.shape)}")
    return tensor.to(torch.int64).contiguous()


def _checked_counts(counts: torch.Tensor, target_size: int) -> torch.Tensor:
    counts = _whole_numbers(counts, "counts")
    if counts.numel() != target_size:
        raise BadInput(
            f"counts of {counts.numel()} ids, but the target has {target_size}; were they made with another one? "
            "Count with this target"
        )
    if counts.numel() and int(counts.min()) < 0:
        raise BadInput(
            f"counts: id {int(counts.argmin())} was counted {int(counts.min())} times; counts are never negative; "
            "count again (`eyas vocab`)"
        )
    return counts


def _load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            wanted = [name for name in ("d2t", "t2d", "counts") if name in file.keys()]  # noqa: SIM118 (not a dict)
            return {name: file.get_tensor(name) for name in wanted}, dict(file.metadata() or {})
    except FileNotFoundError as error:
        raise BadInput(f"{path} is missing; `eyas vocab` writes it") from error
    except Exception as error:  # safetensors raises its own type
        raise EyasError(f"{path} cannot be read as safetensors ({error}); run `eyas vocab` again") from error
