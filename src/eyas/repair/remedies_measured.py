"""Remedies for what was measured: the convention that fits the weights, written into the files.

A hypothesis says what a draft becomes (`Hypothesis.apply` on a specimen); the step makes the files say or hold just
that. One function for each convention; `steps` looks it up.   pytest tests/test_repair_remedies.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..conventions import Conventions
from ..doctor.groups import HEAD_ROWS
from .situation import Situation
from .step import Step

Remedy = Callable[[Situation], list[Step]]


def steps(s: Situation) -> list[Step]:
    """Candidates for a confirmed finding by its convention; [] where there are none."""
    if s.convention.startswith("name of "):
        return _name(s)
    if s.convention.startswith("tensor "):
        name = s.long(s.convention.removeprefix("tensor "))
        return s.from_reference(name) if name else []
    remedy = REMEDIES.get(s.convention)
    if remedy is None or (s.best is None and s.convention != "sliding_window"):  # no window is a value, too
        return []
    return remedy(s)


def _map(s: Situation) -> list[Step]:
    label = str(s.best)
    if label == "another map":  # of another run: only where its commonest tokens went is known
        return s.map_from_reference()
    if label == HEAD_ROWS:
        return [s.step("map-from-head", target=str(s.target))] if s.target is not None else []
    shape, _, of = label.partition(" of ")
    if of and shape in ("offsets", "ids"):
        return s.map_from_reference(shape)
    plain = {"absolute": "absolute-to-offset", "subtracted twice": "add-arange", "t2d": "d2t-from-t2d"}
    first = [s.step(plain[label])] if label in plain else []
    return [*first, s.step("set-map-form", form=label), *s.map_from_reference()]


def _taps(s: Situation) -> list[Step]:
    return [s.step("write-taps", taps=list(s.best))] if isinstance(s.best, list | tuple) else []


def _slices(s: Situation) -> list[Step]:
    """Slice i of fc reads tap best[i]; the files must have them ascending. The norms before fc go with their slices, or
    only fc was permuted: each is less wrong than what is there, and a measurement tells which is right."""
    if not isinstance(s.best, list | tuple):
        return []
    order = [list(s.best).index(tap) for tap in sorted(s.best)]
    normed = any(n.startswith(("input_norm.", "fc_norm.")) for n in s.overlay.raw.tensors)
    whole = s.step("permute-fc-slices", not normed, order=order)
    return [whole, s.step("permute-fc-slices", sure=False, order=order, norms=False)] if normed else [whole]


def _flag(s: Situation) -> list[Step]:
    return [s.step("set-flag", name=s.convention, value=s.best)]


def _norm_before_fc(s: Situation) -> list[Step]:
    begin = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm."}[s.convention]
    there = any(name.startswith(begin) for name in s.overlay.raw.tensors)
    if not s.best:
        return [s.step("without-norms", flag=s.convention)] if there else _flag(s)
    if there:
        return _flag(s)
    lost = [s.step("norm-of-ones", name="input_norm.weight")] if s.convention == "norm_before_fc" else []
    return [*s.from_reference(*([begin + "weight"] if lost else [])), *lost]


def _offset(s: Situation) -> list[Step]:
    """Measured true: the weights are stored as w - 1, while readers take them for w."""
    return [s.step("add-to-norms", value=1.0)] if s.best else _declare(s)


def _declare(s: Situation) -> list[Step]:
    return [s.step("declare", name=s.convention, value=s.best)]


def _halves(s: Situation) -> list[Step]:
    """Declared otherwise, eyas.json alone is wrong; else the columns are."""
    standard = Conventions.__dataclass_fields__["layer_input"].default
    return _declare(s) if s.best == standard else [s.step("swap-halves")]


def _swap(s: Situation) -> list[Step]:
    a, b = (s.long(part) for part in str(s.best).split(" <-> "))
    return [s.step("swap", a=a, b=b)] if a and b else []


def _transpose(s: Situation) -> list[Step]:
    name = s.long(str(s.best))
    return [s.step("transpose", name=name)] if name else []


def _rotary(s: Situation) -> list[Step]:
    if s.overlay.reading is not None and s.overlay.reading.shape.mla is not None:
        # Engines rotate neighbours anyway: weights for halves cannot be mended by a word in the config.
        values = {"config.json": {"/rope_interleave": True}}
        return [s.step("write-fields", values=values)] if s.best == "neighbours" else []
    return [s.step("permute-rotary", stored_as=s.best)]


def _theta(s: Situation) -> list[Step]:
    return [s.step("set-rope", theta=float(s.best))]


def _kind(s: Situation) -> list[Step]:
    """As the hypothesis has it: no scaling, or the target's kind with the target's numbers."""
    if s.best == "default":
        return [s.step("set-rope", kind="default")]
    if s.facts is None:
        return []
    scaling = {k: v for k, v in s.facts.rope_parameters.items() if not isinstance(v, Mapping)}
    scaling = {k: v for k, v in scaling.items() if k not in ("rope_type", "type", "rope_theta")}
    return [s.step("set-rope", theta=float(s.facts.rope_theta), kind=s.best, scaling=scaling)]


def _step_of_rope(s: Situation) -> list[Step]:
    return _declare(s) if s.best == 1 else []  # 0 is what no engine does


def _embedding(s: Situation) -> list[Step]:
    if s.best != "target":
        return _declare(s)
    stored = [s.step("embedding-from-target", sure=False, target=str(s.target))] if s.target else []
    return [s.step("drop-embedding"), *stored]


def _embedding_scale(s: Situation) -> list[Step]:
    """The factor goes into a stored embedding; one that is the target's cannot be scaled."""
    c = s.overlay.reading.conventions if s.overlay.reading else None
    if s.overlay.stored("embed_tokens.weight") is None or c is None:
        return []
    return [s.step("scale", name="embed_tokens.weight", factor=float(s.best) / c.embedding_scale)]


def _head(s: Situation) -> list[Step]:
    """Head and map do not belong together: the target's rows fit; so might the head of a reference."""
    rows = {"target_rows": "map", "first_rows": "first"}.get(str(s.best))
    own = s.from_reference("lm_head.weight")
    if rows is None or s.target is None:
        return own
    return [*own, s.step("head-from-target", target=str(s.target), rows=rows)]


def _name(s: Situation) -> list[Step]:
    """best: the canonical spelling of the name under which it lies there."""
    name, held = s.long(s.convention.removeprefix("name of ")), s.overlay.stored(str(s.best))
    if name is None or held is None:
        return []
    size, shape = s.wanted.get(name), s.overlay.tensors[held].shape
    turned = size is not None and shape != size and shape[::-1] == size
    return [s.step("rename", name=held, to=name, **({"transpose": True} if turned else {}))]


REMEDIES: dict[str, Remedy] = {
    "d2t": _map,
    "taps": _taps,
    "slice_order": _slices,
    "norm_before_residual": _flag,
    "norm_output": _flag,
    "norm_before_fc": _norm_before_fc,
    "fc_norm": _norm_before_fc,
    "hidden_act": _flag,
    "sliding_window": _flag,
    "rms_norm_offset": _offset,
    "norm_names": _swap,
    "qkv": _swap,
    "gate_up": _swap,
    "layer_input": _halves,
    "transposed": _transpose,
    "rope_layout": _rotary,
    "rope_theta": _theta,
    "rope_type": _kind,
    "rope_step": _step_of_rope,
    "embedding": _embedding,
    "embedding_scale": _embedding_scale,
    "head": _head,
}
