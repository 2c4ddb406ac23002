"""Operations on both ends of a draft: where its embedding and its head come from.

The target's are read as `target.weights` finds them; of a head only the rows of the map are taken.
    pytest tests/test_repair_operations.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BadInput
from . import maps, places
from .overlay import DTYPES, Overlay
from .refs import bits, changed, code, computed
from .tensors import FLOATS, begins, floats, shown

HEAD, EMBEDDING, FC = "lm_head.weight", "embed_tokens.weight", "fc.weight"


def head_from_target(overlay: Overlay, target: str, rows: str = "map") -> Overlay:
    """Write a head of the target's rows: at the ids of the map ("map"), or its first ones ("first")."""
    ends = _ends(overlay, target)
    size = overlay.raw.draft_vocab
    held = overlay.stored(HEAD)
    if size is None or rows not in ("map", "first"):
        raise BadInput(
            f"head-from-target: rows = {rows!r} (map or first), or {overlay.path} names no draft_vocab_size; "
            "correct the argument, or add it to the config"
        )
    ids = _ids(overlay, size, ends.head.shape[0]) if rows == "map" else np.arange(size)
    if ends.head_bias is not None:
        raise BadInput(f"{target}: its head has a bias, which no draft has; train the draft's own head")
    kind = _dtype(overlay, held)
    new = overlay.spelled(HEAD)
    file = overlay.tensors[held].file if held is not None else overlay.base.files[0]

    def array() -> Any:
        import torch

        return bits(ends.head[torch.from_numpy(ids)].to(getattr(torch, DTYPES[kind])))

    ref = computed(new, (size, ends.head.shape[1]), kind, file, array)
    out = overlay.with_tensors({new: ref}).declare(head="own")
    config = dict(out.config)
    if out.raw.said("tie_word_embeddings") is True:
        config = places.write(config, "tie_word_embeddings", False)
    first = shown(ends.head[int(ids[0]), :3].float())
    which = f"rows {ids[:3].tolist()} ... {int(ids[-1]):,}" if rows == "map" else f"the first {size:,} rows"
    return out.with_config(config).tell(
        f"found {'a head, ' + begins(overlay.tensors[held]) if held else 'no head'}",
        f"writes {new} [{size:,}, {ends.head.shape[1]:,}] {kind}: {which} of the target's head; it begins {first}",
    )


def map_from_head(overlay: Overlay, target: str) -> Overlay:
    """Write the map that the head tells by itself: the target id of whose row each of its own began as.

    Refused where the head is none of the target's rows, or where they do not ascend.
    """
    from ..doctor.maps import of_head

    ends = _ends(overlay, target)
    head = overlay.ref(HEAD).load()
    told = of_head(head, ends.head, None)
    if told is None:
        raise BadInput(
            f"{overlay.path}: the rows of its head are not the target's, so they tell no map; take the map from the "
            "training run (--reference)"
        )
    ids, vocab = told.numpy(), ends.head.shape[0]
    if not maps.is_map(ids, None, vocab):
        odd = int((np.diff(ids) <= 0).sum())
        raise BadInput(
            f"{overlay.path}: the head's rows in the target give no map ({odd} of {len(ids):,} do not ascend): "
            "training moved them too far, or they are in another order; take the map from the training run "
            "(--reference)"
        )
    said = f"each row of {HEAD} is one of the target's: that tells the map"
    return maps.write_both(overlay.tell(said), ids, vocab)


def _ids(overlay: Overlay, size: int, vocab: int) -> Any:
    """The map's target ids, int64 [size]."""
    if overlay.stored("d2t") is None and size == vocab:
        return np.arange(size)
    d2t, marked, total = maps.offsets(overlay)
    ids = np.arange(len(d2t)) + d2t
    if len(ids) != size or total != vocab or not maps.is_map(ids, marked, vocab):
        raise BadInput(f"{overlay.path}: d2t ({maps.quote(d2t)}) is no map of {size:,} of {vocab:,} ids; mend it first")
    return ids


def embedding_from_target(overlay: Overlay, target: str) -> Overlay:
    """Store the target's embedding in the draft, as the target stores it."""
    ends = _ends(overlay, target)
    new, held = overlay.spelled(EMBEDDING), overlay.stored(EMBEDDING)
    file = overlay.tensors[held].file if held is not None else overlay.base.files[0]
    table = ends.embedding
    ref = computed(new, tuple(table.shape), code(table), file, lambda: bits(table))
    found = f"found {begins(overlay.tensors[held])}" if held is not None else "found no embedding"
    said = f"writes {new} {list(table.shape)}, the target's own, it begins {begins(ref)}"
    return overlay.with_tensors({new: ref}).declare(embedding="target").tell(found, said)


def drop_embedding(overlay: Overlay) -> Overlay:
    """Take the stored embedding out, so that every engine shares the target's."""
    held = overlay.stored(EMBEDDING)
    if held is None:
        raise BadInput(f"{overlay.path}: there is no embedding to take out; leave the step out")
    hidden = overlay.raw.number("hidden_size")
    wide = overlay.raw.number("target_hidden_size") or hidden
    theirs = overlay.facts.hidden_size if overlay.facts else wide
    if hidden is None or hidden != wide or hidden != theirs:
        raise BadInput(
            f"{overlay.path}: the draft is {hidden or 0:,} wide, its target {theirs or 0:,}: it must own an embedding, "
            f"so there is none to put in place of the stored one"
        )
    ref = overlay.tensors[held]
    out = overlay.with_tensors({held: None}).declare(embedding="target")
    return out.tell(f"takes out {held} {list(ref.shape)}, which begins {begins(ref)}: engines put the target's")


def scale(overlay: Overlay, name: str, factor: float) -> Overlay:
    """Multiply a tensor, stored in its own dtype again: an embedding's scale, or that of the logits into the head."""
    ref = overlay.ref(name)
    if ref.dtype not in FLOATS or not factor > 0 or factor == 1:
        raise BadInput(f"scale: {name} {ref.dtype} by {factor}; expected weights, and a factor above 0 other than 1")
    new = changed(ref, lambda t: (t.double() * factor).to(t.dtype))
    first = floats(ref.array().reshape(-1)[:3], ref.dtype)
    said = f"{ref.name} times {factor:g}: it begins {begins(ref)} -> {shown([x * factor for x in first])}"
    return overlay.with_tensors({ref.name: new}).tell(said)


def scale_back(before: Overlay, after: Overlay, name: str, factor: float) -> Any:
    """Exact for powers of two, as long as nothing under- or overflows, which is looked at."""
    from .step import Step

    if np.frexp(factor)[0] != 0.5:
        return None
    import torch

    old = before.ref(name).load()
    there = (old.double() * factor).to(old.dtype)
    same = torch.equal((there.double() / factor).to(old.dtype), old)
    return [Step("scale", {"name": name, "factor": 1 / factor})] if same else None


def _dtype(overlay: Overlay, held: str | None) -> str:
    """In which dtype a head is written: that of the one that is there, else of fc."""
    for name in (held, overlay.stored(FC)):
        if name is not None and overlay.tensors[name].dtype in FLOATS:
            return overlay.tensors[name].dtype
    return "F32"


def _ends(overlay: Overlay, target: str) -> Any:
    from ..target.weights import load_ends

    ends = load_ends(target)
    hidden, vocab = overlay.raw.number("hidden_size"), overlay.raw.vocab
    if tuple(ends.embedding.shape) != (vocab, hidden):
        raise BadInput(
            f"{target} has an embedding {list(ends.embedding.shape)}, the draft needs [{vocab}, {hidden}]: it is not "
            f"its target, or the draft must own what it reads"
        )
    return ends
