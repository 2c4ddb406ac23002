"""What an export will write, decided from configs and headers alone: config, tensors and where their bytes come from.

The planned directory is read as each engine would read it before a byte is written, so that whatever cannot be
expressed is refused with the reason and the ways out.   pytest tests/test_export.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..conventions import Conventions, Known
from ..draft.assemble import Extent, Piece
from ..draft.dialects import Reading, interpret
from ..draft.dialects.keys import MAPS, Source
from ..draft.dialects.spellings import Spelling
from ..draft.directory import check_target, check_tensors
from ..draft.files import DraftFolder, TensorRef
from ..engines.compare import Difference, differences
from ..engines.openvino import mended
from ..engines.profiles import profile
from ..engines.reading import EngineReading, Seen
from ..errors import BadInput, Mismatch
from ..headers import BYTES, read_header
from ..target.facts import TargetFacts

if TYPE_CHECKING:
    import torch

CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
NAMES = {code: name for name, code in CODES.items()} | {"F64": "float64"}
ROWS = 4096  # of an embedding, compared at a time
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class NotExpressible(Mismatch):
    """A draft and a destination that do not belong together (exit code 3)."""


@dataclass(frozen=True)
class Item:
    """One tensor to be written."""

    name: str
    """As the destination spells it."""
    canonical: str
    dtype: str
    shape: tuple[int, ...]
    source: Source | torch.Tensor


@dataclass(frozen=True)
class Plan:
    """All that will lie in config.json and model.safetensors."""

    reading: Reading
    spelling: Spelling
    config: dict[str, Any]
    items: tuple[Item, ...]
    conventions: Conventions
    vocab_map: str
    """Digest of the map (`VocabMap.digest`)."""
    dtype: str
    """How weights are stored: a name of CODES, or "as stored"."""
    facts: TargetFacts | None
    notes: tuple[str, ...] = ()

    def folder(self, out: Path, eyas: dict[str, Any] | None = None) -> DraftFolder:
        """The directory to be; its tensors have no bytes of their own yet, their numbers are those of their sources."""

        def array(item: Item) -> np.ndarray[Any, Any]:
            return item.source.ref.array() if isinstance(item.source, Source) else item.source.numpy()

        def load(item: Item) -> torch.Tensor:
            return item.source.load() if isinstance(item.source, Source) else item.source

        refs = {
            i.name: TensorRef(i.name, i.shape, i.dtype, out / "model.safetensors", partial(load, i), partial(array, i))
            for i in self.items
        }
        return DraftFolder(out, self.config, eyas, refs, ())

    def pieces(self) -> Iterable[Piece]:
        """For `assemble`: extents of files where bytes stay as they are, else one tensor at a time in memory."""
        headers: dict[Path, Any] = {}
        for item in self.items:
            source = item.source
            if not isinstance(source, Source):
                parts: tuple[Any, ...] = (_bits(source),)
            elif source.dtype == item.dtype and source.ref.file.suffix == ".safetensors":
                if source.ref.file not in headers:
                    headers[source.ref.file] = read_header(source.ref.file)
                entry = headers[source.ref.file].entries[source.ref.name]
                row = entry.bytes // max(1, entry.shape[0]) if entry.shape else entry.bytes
                start = entry.start + source.start * row
                parts = (Extent(source.ref.file, start, start + _size(item)),)
            else:
                parts = (partial(_converted, item),)
            yield Piece(item.name, item.dtype, item.shape, parts)


def make_plan(
    reading: Reading, spelling: Spelling, dtype: str, facts: TargetFacts | None, target_dir: str | Path | None
) -> Plan:
    """Decide. `dtype`: a name of CODES, anything else keeps each tensor's own.

    The target's weights are opened only where the draft has a copy of its embedding, or lacks a head. Raises BadInput
    naming what is missing, Mismatch for another target, NotExpressible for latent attention.
    """
    if reading.conventions.attention != "gqa":
        raise NotExpressible(
            f"{reading.folder.path} has latent attention (MLA): Eyas describes such drafts but does not rewrite them; "
            f"rename its keys with the tool that trained it"
        )
    notes = list(reading.notes)
    shape, c = reading.shape, reading.conventions
    if facts is not None and target_dir is not None:
        check_target(reading, facts.vocab_size, facts.hidden_size, target_dir)
    full = shape.draft_vocab_size == shape.vocab_size
    sources: dict[str, Source | torch.Tensor] = {
        name: source for name, source in reading.canonical.sources.items() if name not in MAPS
    }
    borrowed = HEAD not in sources and full and target_dir is not None and same_width(reading)
    check_tensors(reading, skip={HEAD} if borrowed else set())
    if borrowed:
        sources[HEAD] = _ends(target_dir).head
    embedding = _embedding(reading, sources, target_dir, notes)
    known = {"d2t": "none" if full else "offset", "head": "own", "embedding": embedding}
    known = {name: value for name, value in known.items() if getattr(c, name) != value}
    c = c.with_(Known.INFERRED, **known) if known else c
    items = [_item(spelling, name, source, CODES.get(dtype)) for name, source in sources.items()]
    for item in [i for i in items if i.canonical.startswith("layers.") and i.canonical.endswith("hidden_norm.weight")]:
        twin = item.canonical.replace("hidden_norm", "input_layernorm")
        items.append(replace(item, name=spelling.rename(twin), canonical=twin))
    if wrong := [i for i in items if i.dtype not in NAMES]:
        raise BadInput(
            f"{reading.folder.path}: {wrong[0].canonical} is stored as {wrong[0].dtype}, expected floating point"
        )
    digest, maps = _maps(reading)
    if not full:
        items += [_item(spelling, name, source, None) for name, source in maps.items()]
    stored = next(i.dtype for i in items if i.canonical == "fc.weight")
    config = spelling.config(shape, c, facts, NAMES.get(stored, "float32"))
    return Plan(reading, spelling, config, tuple(items), c, digest, dtype, facts, tuple(notes))


def _embedding(reading: Reading, sources: dict[str, Any], target_dir: str | Path | None, notes: list[str]) -> str:
    """Whose embedding the draft reads; a copy of the target's is taken out of `sources`."""
    own, shape = sources.get(EMBEDDING), reading.shape
    if own is None:
        if not same_width(reading):
            raise BadInput(
                f"{reading.folder.path}: the draft is {shape.hidden_size} wide and its target "
                f"{shape.target_hidden_size}, so it must own an embedding, but {EMBEDDING} is missing"
            )
        return "target"
    if target_dir is not None and _same_rows(own, _ends(target_dir).embedding):
        del sources[EMBEDDING]
        notes.append(f"{EMBEDDING} is the target's own and was left out: every engine puts the target's")
        return "target"
    if target_dir is None:
        notes.append(f"{EMBEDDING} is kept; name the target (--target) to leave out a copy of its rows")
    return "own"


def _maps(reading: Reading) -> tuple[str, dict[str, Source | torch.Tensor]]:
    """(digest of the vocabulary map, `d2t` and `t2d`): as they lie where they are right, else as VocabMap mends them.

    Raises BadInput where they are wrong.
    """
    sources, shape = reading.canonical.sources, reading.shape
    d2t, t2d = (sources.get(name) for name in MAPS)
    if d2t is not None and t2d is not None and (d2t.dtype, t2d.dtype) == ("I64", "BOOL"):
        offsets, marks = d2t.ref.array(), t2d.ref.array()
        if offsets.shape == (shape.draft_vocab_size,) and marks.shape == (shape.vocab_size,):
            ids = offsets + np.arange(len(offsets))
            if np.array_equal(ids, np.flatnonzero(marks)):  # ascending, in range and agreed upon
                content = np.ascontiguousarray(offsets, "<i8").tobytes()
                digest = hashlib.sha256(f"{shape.vocab_size}:".encode() + content).hexdigest()
                return digest, {"d2t": d2t, "t2d": t2d}
    from ..draft.checkpoint import read_vocab_map

    vocab_map = read_vocab_map(reading)
    return vocab_map.digest(), {"d2t": vocab_map.d2t.cpu().long(), "t2d": vocab_map.t2d.cpu().bool()}


def _ends(target_dir: str | Path | None) -> Any:
    from ..target.weights import load_ends

    assert target_dir is not None
    return load_ends(target_dir)


def same_width(reading: Reading) -> bool:
    """Is the draft as wide as its target?"""
    return reading.shape.hidden_size == reading.shape.target_hidden_size


def as_read(folder: DraftFolder, engine: str, facts: TargetFacts | None, taps: tuple[int, ...]) -> EngineReading:
    """The directory as an engine reads it; OpenVINO's once its converted model has been mended for `taps`."""
    read = profile(engine).read(Seen(folder, facts))
    return mended(read, taps) if engine == "openvino" and read.starts else read


def engine_differences(plan: Plan, out: Path, engines: Sequence[str]) -> dict[str, list[Difference]]:
    """Engine -> what it would run otherwise than it was trained; [] where the directory runs as it stands."""
    folder = plan.folder(out)
    return {
        engine: differences(plan.conventions, as_read(folder, engine, plan.facts, plan.conventions.taps))
        for engine in engines
    }


# What config.json cannot say in any spelling, so that it is not compared.
UNSPELLED = {
    "layer_input", "rms_norm_offset", "norm_before_head", "token_shift", "num_target_layers", "embedding", "head",
    "rope_offset", "final_state", "teacher", "mask_shift", "embedding_scale", "max_position",
}  # fmt: skip


def spelled_otherwise(folder: DraftFolder, conventions: Conventions, layers: int | None) -> list[tuple[str, Any, Any]]:
    """(field, declared, read) where the directory, read without eyas.json, says something else than was declared."""
    read = interpret(replace(folder, eyas=None), layers)
    return [
        (name, mine, theirs)
        for name, (mine, theirs) in conventions.differences(read.conventions).items()
        if name not in UNSPELLED
    ]


def _item(spelling: Spelling, name: str, source: Source | torch.Tensor, code: str | None) -> Item:
    shape = tuple(source.shape)
    held = source.dtype if isinstance(source, Source) else _code(source.dtype)
    return Item(spelling.rename(name), name, code or held, shape, source)


def _code(dtype: torch.dtype) -> str:
    import torch

    known = {torch.int64: "I64", torch.bool: "BOOL", torch.bfloat16: "BF16", torch.float16: "F16"}
    return known.get(dtype, "F32")


def _size(item: Item) -> int:
    return int(np.prod(item.shape, dtype=np.int64)) * BYTES[item.dtype]


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    import torch

    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _converted(item: Item) -> np.ndarray[Any, Any]:
    import torch

    assert isinstance(item.source, Source)
    tensor = item.source.load()
    if item.dtype in NAMES and tensor.dtype.is_floating_point:
        before = tensor
        tensor = tensor.to(getattr(torch, NAMES[item.dtype]))
        if not torch.isfinite(tensor).all():
            remedy = "choose bfloat16" if torch.isfinite(before).all() else "train again from an earlier checkpoint"
            raise BadInput(f"{item.canonical}: NaN or infinite values, so the draft cannot be stored; {remedy}")
    return _bits(tensor)


def _same_rows(own: Source, embedding: torch.Tensor) -> bool:
    """Are two tables equal? Compared as the draft stores them, some rows at a time."""
    import torch

    if own.shape != tuple(embedding.shape):
        return False
    table = own.load()
    return all(
        torch.equal(table[i : i + ROWS], embedding[i : i + ROWS].to(table.dtype)) for i in range(0, len(table), ROWS)
    )
