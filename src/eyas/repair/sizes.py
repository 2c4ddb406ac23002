"""Operations on the sizes that config.json names: from the tensors, which were trained, or from the target.

pytest tests/test_repair_operations.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..draft.dialects.keys import has_latent_attention
from ..draft.expected import Inventory
from ..errors import BadInput
from . import places
from .overlay import Overlay

HEAD = "lm_head.weight"
LAYER = "midlayer."


def name_draft_vocabulary(overlay: Overlay) -> Overlay:
    """draft_vocab_size = rows of the head."""
    held = overlay.stored(HEAD)
    if held is None or not overlay.tensors[held].shape:
        raise BadInput(f"{overlay.path}: there is no {HEAD} whose rows could be counted; restore the head first")
    rows, old = overlay.tensors[held].shape[0], overlay.raw.said("draft_vocab_size")
    if rows == old:
        raise BadInput(f"{overlay.path}: draft_vocab_size is {rows:,} already, the rows of {HEAD}; leave the step out")
    vocab = overlay.raw.vocab
    if vocab is not None and rows > vocab:
        raise BadInput(
            f"{overlay.path}: {HEAD} has {rows:,} rows, more than the {vocab:,} ids of the target; name the draft's "
            "own target"
        )
    return _written(overlay, {"draft_vocab_size": rows}, model=False)


def set_vocab_size(overlay: Overlay, vocab_size: int) -> Overlay:
    """vocab_size = the target's, which must be what t2d, a stored embedding and the target say, where they are."""
    case = overlay.raw
    t2d, table = case.tensors.get("t2d"), case.tensors.get("embed_tokens.weight")
    seen = {"t2d": t2d.shape[0] if t2d and t2d.shape else None,
            "embed_tokens.weight": table.shape[0] if table and table.shape else None,
            "the target": overlay.facts.vocab_size if overlay.facts else None}  # fmt: skip
    others = {name: size for name, size in seen.items() if size is not None}
    against = {name: size for name, size in others.items() if size != vocab_size}
    if not others or against:
        said = ", ".join(f"{name} {size:,}" for name, size in against.items()) or "nothing; give --target"
        raise BadInput(
            f"{overlay.path}: vocab_size = {vocab_size:,} is not what the target's ids are counted by: {said}; give "
            "the target's own number"
        )
    if case.number("vocab_size") == vocab_size:
        raise BadInput(f"{overlay.path}: vocab_size is {vocab_size:,} already; leave the step out")
    return _written(overlay, {"vocab_size": vocab_size}, model=True)


def sizes_from_tensors(overlay: Overlay, head_dim: int | None = None) -> Overlay:
    """Widths, numbers of heads and of layers = what the tensors are.

    head_dim: the size of a head, of which the tensors do not tell where config.json neither names it nor its norm is
    there. Raises BadInput where they leave more than one.
    """
    if has_latent_attention(overlay.tensors):
        raise BadInput(
            f"{overlay.path}: latent attention (MLA) has sizes that its tensors do not tell apart; copy them from "
            "the config of training"
        )
    ways = head_dims(overlay)
    if head_dim is None and len(ways) > 1:
        raise BadInput(f"{overlay.path}: heads of {' or '.join(map(str, ways))} rows fit its tensors: say head_dim")
    found = _sizes(overlay, head_dim or next(iter(ways), None))
    case = overlay.raw
    new = {name: size for name, size in found.items() if size is not None and case.number(name) != size}
    if case.number("head_dim") is None and new.get("head_dim") == _usual_dim(case.number("hidden_size"), found):
        new.pop("head_dim", None)  # left out it means hidden_size / heads, which is right then
    if not new:
        raise BadInput(f"{overlay.path}: config.json names the sizes of its tensors already; leave the step out")
    out = _written(overlay, new, model=True)
    wrong = Inventory.of(out.reading).misshapen if out.reading is not None else {}
    still = {name: held for name, (held, _) in wrong.items() if name != HEAD and not name.startswith("fc")}
    if still:
        shown = ", ".join(f"{name} {list(held)}" for name, held in still.items())
        raise BadInput(
            f"{overlay.path}: no sizes fit all tensors: with {new} these would still not: {shown}; copy the config "
            "of training"
        )
    return out


def _usual_dim(hidden: int | None, found: Mapping[str, int | None]) -> int | None:
    heads = found.get("num_attention_heads")
    return hidden // heads if hidden and heads and hidden % heads == 0 else None


def _rows(overlay: Overlay, name: str) -> int | None:
    ref = overlay.raw.tensors.get(name)
    return ref.shape[0] if ref and ref.shape else None


def _attention_rows(overlay: Overlay) -> tuple[int | None, int | None]:
    """Rows of q and of k."""
    q, k = (_rows(overlay, f"{LAYER}self_attn.{x}_proj.weight") for x in "qk")
    fused = _rows(overlay, LAYER + "self_attn.qkv_proj.weight")
    o = overlay.raw.tensors.get(LAYER + "self_attn.o_proj.weight")
    if q is None and fused is not None and o is not None and len(o.shape) == 2:
        q, k = o.shape[1], (fused - o.shape[1]) // 2
    return q, k


def _sizes(overlay: Overlay, dim: int | None) -> dict[str, int | None]:
    """What the tensors say, None where they do not."""
    case, (q, k) = overlay.raw, _attention_rows(overlay)
    both = _rows(overlay, LAYER + "mlp.gate_up_proj.weight")
    inter = _rows(overlay, LAYER + "mlp.gate_proj.weight") or (both // 2 if both else None)
    layers = {int(n.split(".")[1]) for n in case.tensors if n.startswith("layers.") and n.split(".")[1].isdigit()}
    return {
        "hidden_size": _rows(overlay, "norm.weight"),
        "intermediate_size": inter,
        "num_attention_heads": q // dim if q and dim and q % dim == 0 else None,
        "num_key_value_heads": k // dim if k and dim and k % dim == 0 else None,
        "head_dim": dim,
        "num_hidden_layers": 1 + max(layers, default=0),
    }


def head_dims(overlay: Overlay) -> list[int]:
    """Sizes of a head that may be: that of the norm on q, as named, or what makes one of the numbers of heads right."""
    case, (q, k) = overlay.raw, _attention_rows(overlay)
    normed = case.tensors.get(LAYER + "self_attn.q_norm.weight")
    heads, kv, named = (case.number(n) for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    hidden = case.number("hidden_size")
    if not q or not k:
        return []

    def fits(dim: int | None) -> bool:
        return bool(dim and q % dim == 0 and k % dim == 0)

    known = normed.shape[0] if normed is not None and normed.shape else named
    if fits(known):
        return [known] if known else []
    ways = [hidden // heads if hidden and heads else None, k // kv if kv and k % kv == 0 else None]
    ways.append(q // heads if heads and q % heads == 0 else None)
    # Of the two numbers of heads one is taken for right.
    return [dim for dim in dict.fromkeys(ways) if dim and fits(dim) and (q // dim == heads or k // dim == kv)]


def _written(overlay: Overlay, sizes: Mapping[str, int], model: bool) -> Overlay:
    config: dict[str, Any] = dict(overlay.config)
    old = {name: overlay.raw.said(name) for name in sizes}
    for name, size in sizes.items():
        config = places.write(config, name, size, model)
    names = {
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "num_hidden_layers": "num_layers",
    }
    out = overlay.with_config(config).declare_sizes(**{names.get(name, name): size for name, size in sizes.items()})
    texts = (f"{name}: {'absent' if old[name] is None else old[name]} -> {size:,}" for name, size in sizes.items())
    return out.tell(*texts)
