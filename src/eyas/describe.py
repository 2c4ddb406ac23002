"""What a draft directory is: dialect, sizes, conventions and how each is known, its vocabulary map, what engines do.

    report = inspect_draft("path/to/draft"); report["map"]["identity_prefix"]

Only configs, headers, `d2t` and `t2d` are read, without torch, so that a draft of gigabytes answers at once; `stats`
reads every tensor once, piece by piece.   eyas inspect DRAFT          pytest tests/test_inspect.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .draft.dialects import Reading, interpret
from .draft.dialects.keys import MAPS
from .draft.files import open_folder
from .engines.launch import options
from .engines.matrix import engine_row
from .engines.profiles import PROFILES
from .errors import BadInput
from .headers import BYTES
from .target.facts import read_facts

SHOWN = 4  # first entries of a map that are quoted
PIECE = 1 << 22  # numbers at a time when statistics are taken


def inspect_draft(
    path: str | Path, target_dir: str | Path | None = None, stats: bool = False, launch: str = ""
) -> dict[str, Any]:
    """Describe a draft as plain JSON values; see `describe_map` for the vocabulary map.

    `target_dir` is needed where the draft leaves the taps to its target, and makes the engines' rows those for that
    target's family. `launch` is the command line that serves it, whose flags change what an engine does. Raises
    BadInput naming file and key for what is no readable EAGLE-3 draft.
    """
    facts = read_facts(target_dir) if target_dir is not None else None
    reading = interpret(open_folder(path), facts.num_layers if facts else None)
    tensors, flags = list(_tensors(reading, stats)), options(launch)
    c = reading.conventions
    names = [f.name for f in dataclasses.fields(c) if f.name != "how"]
    return {
        "path": str(path),
        "dialect": reading.dialect,
        "producer": reading.producer,
        "shape": reading.shape.to_dict(),
        "parameters": sum(math.prod(t["shape"]) for t in tensors if t["canonical"] not in MAPS),
        "bytes": sum(math.prod(t["shape"]) * BYTES[t["dtype"]] for t in tensors),
        "conventions": {name: {"value": _plain(getattr(c, name)), "how": str(c.known(name))} for name in names},
        "map": describe_map(reading),
        "tensors": tensors,
        "notes": [*reading.notes, *_not_finite(tensors)],
        "engines": {p.engine: engine_row(p, reading, facts, flags) for p in PROFILES},
        "target": None if facts is None else {"model_type": facts.model_type, "layers": facts.num_layers},
    }


def describe_map(reading: Reading) -> dict[str, Any]:
    """Facts of `d2t` and `t2d` as they are stored, whatever they should be.

    first, at_1000: stored numbers. identity_prefix: how many first ids coincide when the numbers are offsets, which is
    how engines read them: a run of zeros there is right. ascending, in_range, distinct: of the target ids that offsets
    give. agrees_with_t2d: are these ids exactly the ones that t2d marks? None where t2d is missing.
    """
    import numpy as np

    sources, shape = reading.canonical.sources, reading.shape
    d2t, t2d = (sources[name].ref.array() if name in sources else None for name in MAPS)
    out: dict[str, Any] = {"kind": reading.conventions.d2t, "size": shape.draft_vocab_size, "target": shape.vocab_size}
    if t2d is not None:
        out["t2d_marks"] = int(np.count_nonzero(t2d))
    if d2t is None:
        return out
    if d2t.ndim != 1 or d2t.dtype.kind not in "iu":
        raise BadInput(f"{sources['d2t'].ref.file}: d2t is {d2t.dtype} {list(d2t.shape)}, expected a list of integers")
    ids = np.arange(len(d2t)) + d2t.astype(np.int64)
    moved = np.flatnonzero(d2t)
    out |= {
        "first": d2t[:SHOWN].tolist(),
        "at_1000": int(d2t[1000]) if len(d2t) > 1000 else None,
        "identity_prefix": int(moved[0]) if len(moved) else len(d2t),
        "ascending": bool(np.all(np.diff(ids) > 0)),
        "in_range": bool(len(ids)) and bool(ids.min() >= 0) and bool(ids.max() < shape.vocab_size),
        "distinct": bool(np.all(np.diff(np.sort(ids)) > 0)),
        "lowest": int(ids.min()) if len(ids) else None,
        "highest": int(ids.max()) if len(ids) else None,
        "agrees_with_t2d": None,
    }
    if t2d is not None:
        marked = np.flatnonzero(t2d)
        out["agrees_with_t2d"] = bool(np.array_equal(np.sort(ids), marked))
    return out


def _tensors(reading: Reading, stats: bool) -> Iterator[dict[str, Any]]:
    """One entry a stored tensor, in the file's order, with the canonical name that it has, or why it has none."""
    canonical: dict[str, list[str]] = {}
    for name, source in reading.canonical.sources.items():
        canonical.setdefault(source.ref.name, []).append(name)
    for name, ref in reading.folder.tensors.items():
        entry: dict[str, Any] = {
            "name": name,
            "canonical": " + ".join(canonical.get(name, [])) or None,
            "dtype": ref.dtype,
            "shape": list(ref.shape),
            "file": ref.file.name,
        }
        if name in reading.canonical.ignored:
            entry["ignored"] = reading.canonical.ignored[name]
        if stats:
            entry["stats"] = _statistics(ref.load())
        yield entry


def _statistics(tensor: Any) -> dict[str, Any]:
    """Root mean square, extremes, share of zeros, and how many values are not finite; in float32, piece by piece."""
    flat = tensor.flatten()
    squares, zeros, broken, low, high = 0.0, 0, 0, math.inf, -math.inf
    for start in range(0, len(flat), PIECE):
        part = flat[start : start + PIECE].float()
        finite = part.isfinite()
        broken += int((~finite).sum())
        part = part[finite]
        if len(part):
            squares += float(part.double().square().sum())
            zeros += int((part == 0).sum())
            low, high = min(low, float(part.min())), max(high, float(part.max()))
    count = len(flat) - broken
    return {
        "rms": math.sqrt(squares / count) if count else None,
        "min": low if count else None,
        "max": high if count else None,
        "zeros": zeros / count if count else None,
        "not_finite": broken,
    }


def _not_finite(tensors: list[dict[str, Any]]) -> list[str]:
    """Where statistics were taken: a single NaN makes every answer of a draft NaN."""
    counts = {t["name"]: t["stats"]["not_finite"] for t in tensors if "stats" in t}
    return [f"{name} holds {count:,} NaN or infinite values" for name, count in counts.items() if count]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else dict(value) if hasattr(value, "items") else value
