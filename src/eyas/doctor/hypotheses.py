"""Hypotheses: for every convention the alternatives that occur in the field, as substitutions on a specimen.

    for h in hypotheses(base, context): h.apply(base)

A hypothesis is one substitution; those of one group exclude each other. A group is a field of `Conventions` where there
is one, else named like the tensors that it concerns. Sources: failures seen in public reports (docs/doctor.md).
    pytest tests/test_doctor_hypotheses.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..conventions import default_taps
from . import hypotheses_of_tensors, maps
from .hypothesis import Context, Hypothesis, convention
from .specimen import EMBEDDING, HEAD, Specimen

THETAS = (10000.0, 1e5, 5e5, 1e6)


def hypotheses(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """All alternatives to `base` that can be tested on it."""
    for family in (_maps, _taps, _flags, _positions, _ends, _shifts, *hypotheses_of_tensors.FAMILIES):
        yield from family(base, context)


def _maps(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """d2t in each form that it was ever found in."""
    for label, ids, about in maps.alternatives(base, context.maps):
        if not torch.equal(ids, base.ids):
            yield Hypothesis("d2t", label, label, _ids(label, ids), cheap=True, about=about)


def _ids(label: str, ids: torch.Tensor) -> Callable[[Specimen], Specimen]:
    return lambda s: s.with_("d2t", label, ids=ids)


def _taps(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """Other states: one layer on or back, all or one of them; defaults; the slices in another order."""
    taps = base.slices
    wanted: dict[tuple[int, ...], str] = {}
    layers = base.conventions.num_target_layers or (context.facts.num_layers if context.facts else None)
    for shift, about in (
        (1, "ids that count outputs of layers, read as taps"),
        (-1, "taps, read as outputs of layers"),
    ):
        wanted.setdefault(tuple(t + shift for t in taps), about)
    if layers is not None and layers >= 7 and len(taps) == 3:
        usual = default_taps(layers)
        wanted.setdefault(usual, "the default of SafeAILab, vLLM and SGLang")
        wanted.setdefault(tuple(t + 1 for t in usual), "the default of OpenVINO")
        wanted.setdefault(tuple(t - 1 for t in usual), "the default, one back")
        wanted.setdefault((0, 1, 2), "the first three states")
    for engine, read in context.engines.items():
        wanted.setdefault(read.slices, f"as {engine} reads the config")
    for i in range(len(taps)):
        for shift in (1, -1):
            wanted.setdefault(tuple(t + shift * (i == j) for j, t in enumerate(taps)), "one of the layers is another")
    if layers is not None:
        wanted.setdefault((*taps[:-1], layers), "the last layer instead of the highest tap")
    for taps_, about in wanted.items():
        if taps_ != taps and set(taps_) <= context.taps and len(set(taps_)) == len(taps_):
            yield _slices("taps", taps_, about)
    if len(taps) <= 3:
        for order in itertools.permutations(range(len(taps))):
            if order != tuple(range(len(taps))):
                yield _slices("slice_order", tuple(taps[i] for i in order), "the slices of fc in another order")


def _slices(group: str, taps: tuple[int, ...], about: str) -> Hypothesis:
    label = "/".join(map(str, taps))
    return Hypothesis(group, label, list(taps), lambda s: s.with_(group, label, slices=taps), about=about)


def _flags(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """Where norms sit, and which state is fed back."""
    c = base.conventions
    yield convention("norm_before_residual", not c.norm_before_residual, "the residual stream starts elsewhere")
    yield convention("norm_output", not c.norm_output, "another state is fed back to the next step")
    yield convention("norm_before_head", not c.norm_before_head, "the norm before the head is left out or put in")
    if c.norm_before_fc or c.fc_norm:
        off = {"norm_before_fc": False, "fc_norm": False}
        yield Hypothesis(
            "norm_before_fc" if c.norm_before_fc else "fc_norm", "false", False,
            lambda s: s.with_("norm_before_fc" if c.norm_before_fc else "fc_norm", "false", conventions=off),
            about="engines that do not know the norm leave it out",
        )  # fmt: skip
    else:
        for name in ("norm_before_fc", "fc_norm"):
            on = base.with_(conventions={name: True})
            if not set(on.lacking) - set(base.lacking):
                yield convention(name, True, "its tensors are there, its flag is not")
            elif name == "norm_before_fc":
                yield _ones_before_fc(base)
    for act in ("silu", "gelu", "relu"):
        if act != c.hidden_act:
            yield convention("hidden_act", act, "another activation in the MLP")
    offset = not c.rms_norm_offset
    yield convention("rms_norm_offset", offset, "norm weights stored as w - 1")


def _ones_before_fc(base: Specimen) -> Hypothesis:
    wide = base.shape.num_taps * base.shape.target_hidden_size
    ones = {"input_norm.weight": torch.ones(wide)}
    return Hypothesis(
        "norm_before_fc", "true, weights lost", True,
        lambda s: s.with_("norm_before_fc", "true, weights lost", conventions={"norm_before_fc": True}, tensors=ones),
        about="a norm before fc whose weights are not in the file",
    )  # fmt: skip


def _positions(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """RoPE base, kind and step; attention window."""
    c, facts = base.conventions, context.facts
    thetas = {*THETAS, *((facts.rope_theta,) if facts else ())}
    thetas |= {read.conventions.rope_theta for read in context.engines.values()}
    for theta in sorted(thetas - {c.rope_theta}):
        about = "the target's base" if facts and theta == facts.rope_theta else "another base"
        yield convention("rope_theta", theta, about)
    theirs = {k: v for k, v in facts.rope_parameters.items() if not isinstance(v, Mapping)} if facts else {}
    kind = str(theirs.pop("rope_type", "default"))
    theirs.pop("rope_theta", None)
    if c.rope_type != "default":
        yield _rope(c.rope_theta, "default", {}, "no scaling of RoPE")
    elif facts and kind != "default":
        yield _rope(facts.rope_theta, kind, theirs, "the target's scaling of RoPE")
    yield convention("rope_step", 1 - c.rope_step, "later steps keep the position of the first")
    if c.sliding_window is not None:
        yield convention("sliding_window", None, "no attention window")


def _rope(theta: float, kind: str, scaling: Mapping[str, Any], about: str) -> Hypothesis:
    fields = {"rope_theta": theta, "rope_type": kind, "rope_scaling": dict(scaling)}
    return Hypothesis("rope_type", kind, kind, lambda s: s.with_("rope_type", kind, conventions=fields), about=about)


def _ends(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """Where embedding and head come from, and the embedding's scale."""
    shape, c = base.shape, base.conventions
    target = context.embedding
    own = base.tensors.get(EMBEDDING)
    if target is not None and target.shape[1] == shape.hidden_size and base.embedding is not target:
        yield Hypothesis("embedding", "target", "target", _embedding("target", target),
                         about="the target's embedding instead of the stored one")  # fmt: skip
    if (
        own is not None
        and tuple(own.shape) == (shape.vocab_size, shape.hidden_size)
        and c.embedding == "target"
        and target is not None
        and not torch.equal(own, target.to(own.dtype))
    ):
        yield Hypothesis("embedding", "own", "own", _embedding("own", own), about="the stored embedding")
    for scale in (math.sqrt(shape.hidden_size), *((context.facts.embedding_scale,) if context.facts else ()), 1.0):
        if not math.isclose(scale, c.embedding_scale):
            yield convention("embedding_scale", scale, "the embedding rows are scaled")
    head = context.head
    if head is not None and head.shape[1] == shape.hidden_size:
        for label, rows, about in (
            ("target_rows", head[base.ids.clamp(min=0)], "the target's head at the ids of the map"),
            ("first_rows", head[: shape.draft_vocab_size], "the first rows of the target's head"),
        ):
            held = base.tensors.get(HEAD)
            if held is None or not torch.equal(rows, held.to(rows.dtype)):
                yield Hypothesis("head", label, label, _head(label, rows), about=about)


def _embedding(label: str, table: torch.Tensor) -> Callable[[Specimen], Specimen]:
    return lambda s: s.with_("embedding", label, conventions={"embedding": label}, embedding=table)


def _head(label: str, rows: torch.Tensor) -> Callable[[Specimen], Specimen]:
    return lambda s: s.with_("head", label, conventions={"head": "target_rows"}, tensors={HEAD: rows})


def _shifts(base: Specimen, context: Context) -> Iterator[Hypothesis]:
    """Tokens and states against each other, and what is predicted."""
    for shift, about in ((-1, "states one token late"), (1, "states one token early, which a server does not have")):
        value = base.state_shift + shift
        yield Hypothesis("state_shift", f"{value:+d}", value, _shifted("state_shift", f"{value:+d}", value),
                         about=about)  # fmt: skip
    for shift in (-1, 1):
        value = base.label_shift + shift
        yield Hypothesis("label_shift", f"{value:+d}", value, _shifted("label_shift", f"{value:+d}", value), cheap=True,
                         about="it predicts another token than the one after its input")  # fmt: skip


def _shifted(group: str, label: str, value: int) -> Callable[[Specimen], Specimen]:
    fields: dict[str, Any] = {group: value}
    return lambda s: s.with_(group, label, **fields)
