"""Operations on single tensors: exchanged, turned, permuted, shifted, taken from a reference.

The numbers stay in the files until they are asked for. Names are canonical; a fused projection is taken apart first.
    pytest tests/test_repair_operations.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..draft.dialects import interpret
from ..draft.expected import expected_tensors
from ..draft.files import TensorRef, open_folder
from ..errors import BadInput
from . import places
from .names import apart
from .overlay import DTYPES, Overlay
from .refs import changed, computed, renamed, rows, transposed
from .step import Step

ATTENTION = "midlayer.self_attn."
Q, K, V = (f"{ATTENTION}{x}_proj.weight" for x in "qkv")
FLOATS = ("F64", "F32", "F16", "BF16")
FLAGGED = {"input_norm.": "norm_before_fc", "fc_norm.": "fc_norm"}
"""Beginnings of names -> the flag without which engines drop them."""
ANY_LAYERS = 10_000  # of a reference's target: only so that one which leaves its taps out can be read


def swap(overlay: Overlay, a: str, b: str) -> Overlay:
    """Two tensors exchange their names."""
    out = apart(overlay, a, b)
    first, second = out.ref(a), out.ref(b)
    if a == b or first.shape != second.shape:
        raise BadInput(
            f"swap: {a} {list(first.shape)} and {b} {list(second.shape)} cannot stand for each other; name two of "
            "one shape"
        )
    said = f"exchanges {first.name} (it begins {begins(first)}) and {second.name} ({begins(second)})"
    return out.with_tensors({first.name: second, second.name: first}).tell(said)


def itself(operation: str) -> Any:
    """The inverse of what is its own inverse."""

    def inverse(before: Overlay, after: Overlay, **arguments: Any) -> list[Step]:
        return [Step(operation, arguments)]

    return inverse


def transpose(overlay: Overlay, name: str, undo: bool = False) -> Overlay:
    """Turn a matrix round: [in, out] -> [out, in], unless it is right already; of a square one only a trial can tell.

    undo: also one whose shape is right, to take an earlier turn back.
    """
    out = apart(overlay, name)
    ref, reading = out.ref(name), out.reading
    if len(ref.shape) != 2:
        raise BadInput(f"transpose: {ref.name} {list(ref.shape)} is no matrix; name one that is")
    wanted = expected_tensors(reading.shape, reading.conventions).get(name) if reading else None
    if wanted == ref.shape and ref.shape[0] != ref.shape[1] and not undo:
        raise BadInput(f"transpose: {ref.name} is {list(ref.shape)} as it should be. Nothing was changed")
    turned = transposed(ref)
    first = shown(ref.array()[:3, 0], ref.dtype)
    said = f"{ref.name}: {list(ref.shape)} -> {list(turned.shape)}, it begins {first}"
    return out.with_tensors({ref.name: turned}).tell(said)


def transpose_back(before: Overlay, after: Overlay, name: str, undo: bool = False) -> list[Step]:
    """Exact."""
    return [Step("transpose", {"name": name, "undo": not undo})]


def permute_rotary(overlay: Overlay, stored_as: str) -> Overlay:
    """Bring the rows of q and k into halves, from pairs ("interleaved"), or undo that ("halves")."""
    reading = overlay.reading
    if stored_as not in ("interleaved", "halves") or reading is None:
        raise BadInput(
            f"permute-rotary: stored_as = {stored_as!r} (expected interleaved or halves), or {overlay.path} cannot be "
            f"read: {overlay.refusal or 'it can'}"
        )
    dim, out = reading.shape.head_dim, apart(overlay, Q, K)
    refs = [out.ref(name) for name in (Q, K)]
    if any(ref.shape[0] % dim for ref in refs):
        raise BadInput(
            f"permute-rotary: q and k {[list(r.shape) for r in refs]} are no heads of {dim} rows; correct head_dim "
            "in the config first"
        )
    new = {ref.name: _rotary(ref, dim, stored_as) for ref in refs}
    said = f"{', '.join(new)}: the {dim} rows of each head, stored as {stored_as}, into the other layout"
    return out.with_tensors(new).tell(said)


def _rotary(ref: TensorRef, dim: int, stored_as: str) -> TensorRef:
    inner = (dim // 2, 2) if stored_as == "interleaved" else (2, dim // 2)

    def array() -> Any:
        heads = ref.array().reshape(-1, *inner, *ref.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(ref.shape)

    return computed(ref.name, ref.shape, ref.dtype, ref.file, array)


def rotary_back(before: Overlay, after: Overlay, stored_as: str) -> list[Step]:
    """Exact: rows only move."""
    return [Step("permute-rotary", {"stored_as": "halves" if stored_as == "interleaved" else "interleaved"})]


def swap_halves(overlay: Overlay) -> Overlay:
    """Exchange the halves [embedding, state] of the columns of q, k and v in the first layer."""
    out = apart(overlay, Q, K, V)
    refs = [out.ref(name) for name in (Q, K, V)]
    if any(len(ref.shape) != 2 or ref.shape[1] % 2 for ref in refs):
        raise BadInput(
            f"swap-halves: q, k and v {[list(r.shape) for r in refs]} have no two halves of columns; leave the step out"
        )
    new = {ref.name: _halves(ref) for ref in refs}
    return out.with_tensors(new).tell(f"{', '.join(new)}: the two halves of their columns change places")


def _halves(ref: TensorRef) -> TensorRef:
    def array() -> Any:
        return np.roll(ref.array(), ref.shape[1] // 2, axis=1)

    return computed(ref.name, ref.shape, ref.dtype, ref.file, array)


# ---------------------------------------------------------------- norms


def norms(overlay: Overlay) -> list[TensorRef]:
    """All weights of norms, also of those on q and k, and both names of one in layers >= 1."""
    found = overlay.raw.tensors.items()
    return [ref for n, ref in found if re.search(r"norm(\.\d+)?\.weight$", n) and not n.startswith("verifier_")]


def add_to_norms(overlay: Overlay, value: float) -> Overlay:
    """Add to every weight of every norm: 1 where they are stored as w - 1 and engines read w."""
    found = norms(overlay)
    odd = [ref.name for ref in found if ref.dtype not in FLOATS]
    if not found or odd or value not in (1.0, -1.0):
        raise BadInput(f"add-to-norms: value = {value} (1 or -1), no norms, or stored as whole numbers: {odd}")
    new = {ref.name: changed(ref, lambda t: (t.double() + value).to(t.dtype)) for ref in found}
    means = [_mean(ref) for ref in (found[0], new[found[0].name])]
    said = f"{len(new)} norm weights {'plus' if value > 0 else 'minus'} 1; the mean of {found[0].name}: "
    return overlay.with_tensors(new).tell(said + f"{means[0]:.4f} -> {means[1]:.4f}")


def norms_back(before: Overlay, after: Overlay, value: float) -> list[Step] | None:
    """Exact where the stored dtype rounds nothing away on the way there and back, which is looked at."""
    import torch

    def kept(ref: TensorRef) -> bool:
        old = ref.load()
        there = (old.double() + value).to(old.dtype)
        return torch.equal((there.double() - value).to(old.dtype), old)

    return [Step("add-to-norms", {"value": -value})] if all(map(kept, norms(before))) else None


def norm_of_ones(overlay: Overlay, name: str = "input_norm.weight") -> Overlay:
    """Put a norm before fc whose weights are lost, with ones, and set its flag."""
    from .taps import slices

    flag = next((flag for begin, flag in FLAGGED.items() if name.startswith(begin)), None)
    wide = overlay.raw.number("target_hidden_size") or overlay.raw.number("hidden_size")
    count = slices(overlay)
    if flag is None or overlay.stored(name) is not None or not wide or not count:
        raise BadInput(
            f"norm-of-ones: {name}: it is there, or no norm before fc, or the sizes of {overlay.path} fail; leave "
            "the step out"
        )
    fc, size = overlay.ref("fc.weight"), count * wide if flag == "norm_before_fc" else wide
    new = overlay.spelled(name)
    ones = changed(computed(new, (size,), "F32", fc.file, lambda: np.ones(size, np.float32)), lambda t: t, fc.dtype)
    config = places.write(overlay.config, flag, True)
    out = overlay.with_tensors({new: ones}).with_config(config).declare(**{flag: True})
    return out.tell(f"{new}: {size:,} ones, since its weights are lost; {flag} = true")


def without_norms(overlay: Overlay, flag: str) -> Overlay:
    """Take out the norms before fc that a draft was trained without (norm_before_fc, fc_norm), and clear their flag."""
    begin = next((begin for begin, name in FLAGGED.items() if name == flag), None)
    held = [ref.name for name, ref in overlay.raw.tensors.items() if begin is not None and name.startswith(begin)]
    if not held:
        raise BadInput(f"without-norms: {flag}: there are no such norms in {overlay.path}; leave the step out")
    out = overlay.with_tensors(dict.fromkeys(held)).with_config(places.write(overlay.config, flag, False))
    return out.declare(**{flag: False}).tell(f"takes out {', '.join(held)}; {flag} = false")


def dropped_again(before: Overlay, after: Overlay, **_: Any) -> list[Step] | None:
    """Exact where what was written was not there before."""
    new = [name for name in after.tensors if name not in before.tensors]
    gone = [name for name in before.tensors if name not in after.tensors]
    replaced = [name for name, ref in after.tensors.items() if before.tensors.get(name, ref) is not ref]
    return None if gone or replaced else [Step("drop-tensors", {"names": new})]


# ---------------------------------------------------------------- elsewhere from, in another dtype, out


def tensor_from_reference(overlay: Overlay, names: list[str], reference: str) -> Overlay:
    """Take tensors of another checkpoint, byte for byte, and set the flags of norms that come with them."""
    from .refs import digest

    folder = open_folder(Path(reference))
    sources = interpret(folder, overlay.facts.num_layers if overlay.facts else ANY_LAYERS).canonical.sources
    out = apart(overlay, *names)
    wanted = expected_tensors(out.reading.shape, out.reading.conventions) if out.reading else {}
    config = dict(out.config)
    for name in names:
        if name not in sources:
            raise BadInput(f"{reference} has no {name} either; give another --reference")
        source, mine = sources[name], [out.tensors[n] for n in _twins(out, name) if n in out.tensors]
        size = wanted.get(name) or (mine[0].shape if mine else source.shape)
        if source.shape != size:
            raise BadInput(f"{reference}: {name} is {list(source.shape)}, this draft needs {list(size)}")
        stop = source.ref.shape[0] if source.stop is None else source.stop
        ref = rows(source.ref, name, source.start, stop) if source.stop is not None else renamed(source.ref, name)
        flag = next((flag for begin, flag in FLAGGED.items() if name.startswith(begin)), None)
        if flag is not None:
            config = places.write(config, flag, True)
            out = out.declare(**{flag: True})
        out = out.with_tensors(dict.fromkeys(_twins(out, name), ref))
        said = f"{name}: of {reference}, {list(ref.shape)} {ref.dtype}, SHA-256 {digest(ref)[:16]}"
        out = out.tell(said + (f"; {flag} = true" if flag else ""))
    return out.with_config(config)


def _twins(overlay: Overlay, name: str) -> list[str]:
    """Stored names for a canonical tensor: the norm on the stream of a layer >= 1 may lie there under two."""
    twin = name.replace("hidden_norm", "input_layernorm") if re.match(r"layers\.\d+\.hidden_norm", name) else name
    held = [h for n in dict.fromkeys((name, twin)) if (h := overlay.stored(n)) is not None]
    return held or [overlay.spelled(name)]


def cast(overlay: Overlay, dtype: str, names: list[str] | None = None) -> Overlay:
    """Store weights in another floating dtype (F32, BF16, F16). names: canonical ones, all where None."""
    refs = [overlay.ref(n) for n in names] if names else [r for r in overlay.tensors.values() if r.dtype in FLOATS]
    refs = [ref for ref in refs if ref.dtype != dtype]
    if dtype not in FLOATS or not refs or any(ref.dtype not in FLOATS for ref in refs):
        raise BadInput(
            f"cast: dtype = {dtype!r}; expected one of {', '.join(FLOATS)}, for weights in another one of them"
        )
    import torch

    for ref in refs if dtype == "F16" else []:
        held = ref.load()
        if torch.isfinite(held).all() and not torch.isfinite(held.to(torch.float16)).all():
            raise BadInput(f"cast: {ref.name} holds numbers that float16 does not reach; choose BF16")
    config = dict(overlay.config)
    for name in ("dtype", "torch_dtype") if names is None else ():
        if places.standing(config, name):
            config = places.write(config, name, DTYPES[dtype])
    out = overlay.with_tensors({ref.name: changed(ref, lambda t: t, dtype) for ref in refs}).with_config(config)
    return out.tell(f"{len(refs)} tensors: {', '.join(sorted({r.dtype for r in refs}))} -> {dtype}")


def cast_back(before: Overlay, after: Overlay, dtype: str, names: list[str] | None = None) -> list[Step] | None:
    """Exact where the new dtype holds every number of the old ones."""
    refs = {n: ref for n, ref in before.raw.tensors.items() if after.tensors.get(ref.name) is not ref}
    kinds = {ref.dtype for ref in refs.values()}
    wider = {"BF16": ("F32", "F64"), "F16": ("F32", "F64"), "F32": ("F64",)}
    if any(dtype not in wider.get(kind, ()) for kind in kinds):
        return None
    return [Step("cast", {"dtype": kind, "names": [n for n, r in refs.items() if r.dtype == kind]}) for kind in kinds]


def drop_tensors(overlay: Overlay, names: list[str]) -> Overlay:
    """Take out tensors by their stored names. Nothing but the journal brings them back."""
    missing = [name for name in names if name not in overlay.tensors]
    if missing or not names:
        raise BadInput(
            f"drop-tensors: {overlay.path} has no {', '.join(missing) or 'such tensor: none is named'}; name "
            "tensors that `eyas inspect` shows"
        )
    return overlay.with_tensors(dict.fromkeys(names)).tell(f"takes out {', '.join(names)}")


def begins(ref: TensorRef, count: int = 3) -> str:
    """The first numbers, to be read by a person."""
    return shown(ref.array().reshape(-1)[:count], ref.dtype)


def shown(values: Any, dtype: str = "F32") -> str:
    """A few numbers as stored, to be read by a person."""
    return "[" + ", ".join(f"{value:.4g}" for value in floats(values, dtype)) + ", ...]"


def floats(values: Any, dtype: str) -> Sequence[float]:
    """Stored numbers, bfloat16 among them as bits."""
    if dtype == "BF16":
        values = (np.asarray(values).astype(np.uint32) << 16).view(np.float32)
    return [float(value) for value in values]


def _mean(ref: TensorRef) -> float:
    return float(np.mean(floats(ref.array().reshape(-1), ref.dtype)))
