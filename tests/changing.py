"""A small draft without torch, changes of it, and its state as digests: for the tests of repairs in place.

from changing import CHANGES, state, write_draft
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eyas.draft.assemble import Extent, Piece, assemble
from eyas.draft.files import open_folder
from eyas.headers import read_header
from eyas.repair.change import Change

SHAPES = {
    "d2t": ("I64", (40,)), "t2d": ("BOOL", (90,)), "fc.weight": ("F32", (48, 32)), "norm.weight": ("BF16", (16,)),
    "lm_head.weight": ("BF16", (40, 16)), "scale": ("F32", ()),
}  # fmt: skip
SHARDS = {
    "model-1.safetensors": ["d2t", "fc.weight", "norm.weight"],
    "model-2.safetensors": ["lm_head.weight", "scale"],
    "model-3.safetensors": ["t2d"],
}
KINDS = {"I64": "<i8", "BOOL": "?", "F32": "<f4", "BF16": "<u2"}


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A temporary folder, in memory where that can be: there an fsync takes no time, and these tests do thousands."""
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as name:
        yield Path(name)


def values(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random numbers, bfloat16 as bits."""
    return np.random.default_rng(seed).integers(0, 100, shape).astype(KINDS[dtype])


def piece(name: str, dtype: str, shape: tuple[int, ...], seed: int) -> Piece:
    return Piece(name, dtype, shape, (values(dtype, shape, seed),))


def write_draft(folder: Path, sharded: bool = False, eyas: bool = True) -> Path:
    """config.json, weights in one file or three, and an eyas.json with their digests."""
    folder.mkdir(parents=True)
    files = SHARDS if sharded else {"model.safetensors": list(SHAPES)}
    for file, names in files.items():
        pieces = [piece(name, *SHAPES[name], 7 + i) for i, name in enumerate(names)]
        assemble(folder / file, pieces, {"format": "pt", "made": "by hand"})
    if sharded:
        where = {name: file for file, names in files.items() for name in names}
        total = sum(piece(name, *SHAPES[name], 0).bytes for name in SHAPES)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16, "draft_vocab_size": 40}))
    (folder / "README.md").write_text("a draft\n")
    if eyas:
        table = {}
        for name, ref in open_folder(folder).tensors.items():
            raw = np.ascontiguousarray(ref.array()).tobytes()
            dtype = {"I64": "int64", "BOOL": "bool", "F32": "float32", "BF16": "bfloat16"}[ref.dtype]
            table[name] = {"sha256": hashlib.sha256(raw).hexdigest(), "dtype": dtype, "shape": list(ref.shape)}
        (folder / "eyas.json").write_text(json.dumps({"schema": "eyas-draft/1", "tensors": table}))
    return folder


def state(folder: Path) -> dict[str, str]:
    """Digest of every file but the journal's."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".eyas" not in path.relative_to(folder).parts
    }


def leftovers(folder: Path) -> list[str]:
    """What lies in the store though no change is under way and no record names it."""
    root = folder / ".eyas"
    records = [json.loads(path.read_text()) for path in sorted((root / "journal").glob("*.json"))]
    named = {part[3] for r in records for f in r["files"] for part in f["undo"] or () if part[0] == "blob"}
    odd = [str(p.relative_to(root)) for folder in ("redo", "staged") for p in (root / folder).glob("*")]
    odd += [f"undo/{p.name}" for p in (root / "undo").glob("*") if p.name not in named]
    return odd + [p.name for p in root.glob("pending*")]


def extent(folder: Path, name: str) -> Extent:
    """Where a tensor lies."""
    file = open_folder(folder).tensors[name].file
    entry = read_header(file).entries[name]
    return Extent(file, entry.start, entry.stop)


def same_size(folder: Path) -> Change:
    return Change({"d2t": piece("d2t", "I64", (40,), 100)})


def other_size(folder: Path) -> Change:
    return Change(
        {"d2t": piece("d2t", "I64", (33,), 101), "lm_head.weight": piece("lm_head.weight", "F32", (33, 16), 2)}
    )


def left_out(folder: Path) -> Change:
    return Change({"t2d": None, "norm.weight": None})


def added(folder: Path) -> Change:
    return Change({"fc.bias": piece("fc.bias", "F32", (48,), 103)})


def renamed(folder: Path) -> Change:
    """No bytes pass through memory."""
    ref = open_folder(folder).tensors["fc.weight"]
    dtype, shape = ref.dtype, ref.shape
    longer = "model.layers.0.fc_of_another_name.weight"
    return Change({"fc.weight": None, longer: Piece(longer, dtype, shape, (extent(folder, "fc.weight"),))})


def renamed_shorter(folder: Path) -> Change:
    """The header keeps its length."""
    dtype, shape = SHAPES["lm_head.weight"]
    return Change({"lm_head.weight": None, "head": Piece("head", dtype, shape, (extent(folder, "lm_head.weight"),))})


def sliced(folder: Path) -> Change:
    """Rows of a tensor, as a part of the file itself; and a function that makes an array."""
    whole = extent(folder, "lm_head.weight")
    half = Extent(whole.file, whole.start, whole.start + 640)
    return Change({
        "lm_head.weight": Piece("lm_head.weight", "BF16", (20, 16), (half,)),
        "fc.weight": Piece("fc.weight", "F32", (48, 32), (lambda: values("F32", (48, 32), 5),)),
    })  # fmt: skip


def of_config(folder: Path) -> Change:
    return Change(config={"hidden_size": 16, "draft_vocab_size": 40, "norm_before_fc": True})


def of_everything(folder: Path) -> Change:
    return Change(
        {"d2t": piece("d2t", "I64", (40,), 104), "t2d": None, "scale": piece("scale", "F32", (), 105)},
        config={"hidden_size": 17},
        eyas={"schema": "eyas-draft/1", "tensors": {"scale": {}}, "note": "new"},
    )


CHANGES: dict[str, Callable[[Path], Change]] = {
    f.__name__: f
    for f in (same_size, other_size, left_out, added, renamed, renamed_shorter, sliced, of_config, of_everything)
}


def loaded(folder: Path) -> dict[str, Any]:
    """All tensors as (dtype, numbers)."""
    return {name: (ref.dtype, np.array(ref.array())) for name, ref in open_folder(folder).tensors.items()}
