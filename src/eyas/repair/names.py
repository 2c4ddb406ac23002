"""Operations on names: tensors under the names that readers look for, fused projections taken apart or put together.

No number changes, and no bytes go through memory: a renamed tensor is an extent of the old file.
    pytest tests/test_repair_operations.py
"""

from __future__ import annotations

from collections.abc import Callable

from ..draft.dialects.keys import FUSED, canonical_name, fused_rows, has_latent_attention
from ..draft.expected import expected_tensors
from ..draft.files import TensorRef
from ..errors import BadInput
from .overlay import APART, Overlay
from .refs import joined, rows, transposed
from .step import Step

METADATA = "__metadata__"  # what safetensors keeps beside the tensors
SCHEMES = ("midlayer.", "layers.0.")


def rename(overlay: Overlay, name: str, to: str, transpose: bool = False) -> Overlay:
    """Give a stored tensor a canonical name, spelled as this draft spells its others."""
    if name not in overlay.tensors:
        raise BadInput(f"rename: {overlay.path} has no tensor {name}")
    if overlay.stored(to) is not None or overlay.fused(to) is not None:
        raise BadInput(f"rename: {overlay.path} has {to} already ({overlay.stored(to) or overlay.fused(to)})")
    ref, new = overlay.tensors[name], overlay.spelled(to)
    ref = transposed(ref) if transpose else ref
    reading = overlay.reading
    wanted = expected_tensors(reading.shape, reading.conventions).get(to) if reading else None
    if wanted is not None and wanted != ref.shape:
        raise BadInput(f"rename: {name} is {list(ref.shape)}, {to} must be {list(wanted)}")
    turned = ", transposed" if transpose else ""
    return overlay.with_tensors({name: None, new: ref}).tell(f"{name} -> {new}{turned} {list(ref.shape)}")


def rename_back(before: Overlay, after: Overlay, name: str, to: str, transpose: bool = False) -> list[Step]:
    """Exact."""
    turn = [Step("transpose", {"name": to, "undo": True})] if transpose else []
    return [*turn, Step("rename-keys", {"names": {before.spelled(to): name}})]


def rename_keys(overlay: Overlay, names: dict[str, str]) -> Overlay:
    """Stored names -> stored names, all at once."""
    odd = [new for new in names.values() if not new or not new.isprintable() or new == METADATA]
    if odd:
        raise BadInput(f"rename-keys: {odd[0]!r} is no name of a tensor")
    missing = [name for name in names if name not in overlay.tensors]
    kept = overlay.tensors.keys() - names.keys()
    twice = sorted(set(names.values()) & kept) or [n for n in names.values() if list(names.values()).count(n) > 1]
    if missing or twice or not names:
        why = f"there is no {missing[0]}" if missing else f"{twice[0]} is there already" if twice else "none is named"
        raise BadInput(f"rename-keys: {why} in {overlay.path}")
    moved: dict[str, TensorRef] = {new: overlay.tensors[old] for old, new in names.items()}
    out = overlay.with_tensors({**dict.fromkeys(names), **moved})
    first = next(iter(names.items()))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return out.tell(f"{first[0]} -> {first[1]}{more}")


def keys_back(before: Overlay, after: Overlay, names: dict[str, str]) -> list[Step]:
    """Exact."""
    return [Step("rename-keys", {"names": {new: old for old, new in names.items()}})]


def respell(overlay: Overlay, first: str = "midlayer.", prefix: str = "") -> Overlay:
    """Name all tensors as a dialect does: `midlayer.` or `layers.0.` for the first layer, with or without `model.`."""
    return rename_keys(overlay, respelled(overlay, first, prefix))


def respell_back(before: Overlay, after: Overlay, first: str = "midlayer.", prefix: str = "") -> list[Step]:
    """Exact."""
    return keys_back(before, after, respelled(before, first, prefix))


def respelled(overlay: Overlay, first: str, prefix: str) -> dict[str, str]:
    """Old stored name -> new one, for those that change. BadInput where there is no such spelling, or nothing."""
    if first not in SCHEMES or prefix not in ("", "model."):
        raise BadInput(f"respell: first = {first!r}, prefix = {prefix!r}; expected {' or '.join(SCHEMES)}, and model.")
    out = {}
    for name in overlay.tensors:
        new = canonical_name(name)
        if new.startswith("midlayer."):
            new = first + new.removeprefix("midlayer.")
        out[name] = new if new in APART else prefix + new
    changed = {old: new for old, new in out.items() if old != new}
    if not changed:
        raise BadInput(f"respell: {overlay.path} names its tensors so already; leave the step out")
    return changed


# ---------------------------------------------------------------- fused projections


def split(overlay: Overlay, names: list[str]) -> Overlay:
    """Take stored fused projections apart: qkv_proj, gate_up_proj, fused_qkv_a_proj_with_mqa."""
    out = overlay
    for name in names:
        kind = _kind(name)
        if kind is None or name not in overlay.tensors:
            raise BadInput(f"split: {overlay.path} has no fused projection {name}; leave the step out")
        ref = overlay.tensors[name]
        counts = _rows(overlay)(kind, ref.shape[0])
        if sum(counts) != ref.shape[0] or min(counts) < 1:
            raise BadInput(
                f"split: {name} has {ref.shape[0]} rows, the config asks for {' + '.join(map(str, counts))}; "
                "correct the sizes in the config first"
            )
        parts: dict[str, TensorRef | None] = {name: None}
        start = 0
        for part, count in zip(FUSED[kind], counts, strict=True):
            new = name.replace(kind, part)
            if new in overlay.tensors:
                raise BadInput(f"split: {overlay.path} has {new} already beside {name}; drop one of them first")
            parts[new] = rows(ref, new, start, start + count)
            start += count
        out = out.with_tensors(parts)
        out = out.tell(f"{name} is taken apart into {', '.join(p.rpartition('.')[2] for p in FUSED[kind])}")
    return out


def fuse(overlay: Overlay, names: list[str]) -> Overlay:
    """Put projections together under these stored names, in the order that readers cut them in."""
    out = overlay
    for name in names:
        kind = _kind(name)
        parts = [name.replace(kind, part) for part in FUSED[kind]] if kind else []
        missing = [part for part in parts if part not in overlay.tensors]
        if kind is None or missing or name in overlay.tensors:
            why = f"there is no {missing[0]}" if missing else "no such fused projection"
            raise BadInput(f"fuse: {name}: {why}; leave it out")
        held = [overlay.tensors[part] for part in parts]
        if len({(ref.dtype, ref.shape[1:]) for ref in held}) > 1:
            raise BadInput(f"fuse: {', '.join(parts)} differ in dtype or width; cast them first")
        out = out.with_tensors({**dict.fromkeys(parts), name: joined(name, held)}).tell(f"{name} is put together")
    return out


def apart(overlay: Overlay, *canonical: str) -> Overlay:
    """With fused tensors taken apart that hold one of these."""
    fused = {held for name in canonical if overlay.stored(name) is None and (held := overlay.fused(name)) is not None}
    return split(overlay, sorted(fused)) if fused else overlay


def is_fused(name: str) -> bool:
    """Is it the name of a fused projection?"""
    return _kind(name) is not None


def split_back(before: Overlay, after: Overlay, names: list[str]) -> list[Step]:
    """Exact."""
    return [Step("fuse", {"names": names})]


def fuse_back(before: Overlay, after: Overlay, names: list[str]) -> list[Step]:
    """Exact."""
    return [Step("split", {"names": names})]


def _kind(name: str) -> str | None:
    return next((kind for kind in FUSED if f".{kind}." in name), None)


def _rows(overlay: Overlay) -> Callable[[str, int], list[int]]:
    """As canonicalise cuts them; from the raw sizes where the draft cannot be interpreted."""
    reading, case = overlay.reading, overlay.raw
    if reading is not None:
        s = reading.shape
        return fused_rows(s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.mla)
    heads, kv, hidden = (case.number(n) for n in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if not heads or not hidden or has_latent_attention(overlay.tensors):
        raise BadInput(f"{overlay.path} cannot be read as a draft ({overlay.refusal}); mend that first")
    dim = case.number("head_dim") or hidden // heads
    return fused_rows(heads * dim, (kv or heads) * dim, None)
