"""Where an engine's reading of a draft departs from another reading, point by point, and what each point costs.

departures(best, readings.as_read["vllm"], declared)          pytest tests/test_doctor_measure.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..draft.expected import expected_tensors
from .evidence import Gain, Paired
from .hypothesis import Hypothesis
from .specimen import Specimen
from .trial import Bench

NOT_RUN = {"how", "d2t", "taps", "num_target_layers", "embedding", "head", "final_state", "teacher", "mask_shift"}


def departures(best: Specimen, read: Specimen, declared: Specimen) -> list[Hypothesis]:
    """Each point in which `read` differs from `best`, as a substitution that makes it so.

    What an engine reads as it was declared is no departure of its own.
    """
    c, out = best.conventions, []
    theirs = read.conventions.differences(declared.conventions)
    if read.slices not in (best.slices, declared.slices):
        out.append(_point("taps", list(read.slices), slices=read.slices))
    for name, (value, _) in read.conventions.differences(c).items():
        if name in theirs and name not in NOT_RUN:
            trial = best.with_(conventions={name: value})
            out.append(_point(name, value, conventions={name: value}, tensors=_supplied(trial, read)))
    if not torch.equal(read.ids, best.ids) and not torch.equal(read.ids, declared.ids):
        out.append(_point("d2t", "as it applies it", ids=read.ids))
    if read.embedding is not best.embedding and read.embedding is not declared.embedding:
        out.append(_point("embedding", read.conventions.embedding, embedding=read.embedding))
    for name in expected_tensors(read.shape, c):
        held = read.tensors.get(name)
        if best.tensors.get(name) is not held and held is not None and held is not declared.tensors.get(name):
            out.append(_point(name, "what stands there for it", tensors={name: held}))
    return out


def _point(group: str, value: Any, **fields: Any) -> Hypothesis:
    label = str(value).lower() if isinstance(value, bool) else str(value)
    return Hypothesis(group, label, value, lambda s: s.with_(group, label, **fields), about="as an engine reads it")


def _supplied(trial: Specimen, read: Specimen) -> Mapping[str, torch.Tensor]:
    """Tensors that a convention asks for and that only the engine's reading has."""
    wanted = expected_tensors(trial.shape, trial.conventions)
    return {n: read.tensors[n] for n in wanted if n not in trial.tensors and n in read.tensors}


def costs(bench: Bench, paired: Paired, best: Specimen, read: Specimen, declared: Specimen) -> list[tuple[str, Gain]]:
    """What each departure costs (a negative gain), taken alone; the dearest first."""
    points = departures(best, read, declared)
    base, *others = bench.surprise([best, *(h.apply(best) for h in points)])
    gains = [(h.group, paired.gain(base, s, len(points))) for h, s in zip(points, others, strict=True)]
    return sorted(gains, key=lambda pair: pair[1].mean)


def same(a: Specimen, b: Specimen) -> bool:
    """Do two specimens run the same, tensor by tensor?"""
    if a.slices != b.slices or a.state_shift != b.state_shift or not torch.equal(a.ids, b.ids):
        return False
    if set(a.conventions.differences(b.conventions)) - NOT_RUN - {"max_position", "rope_offset"}:
        return False
    pairs = [(a.embedding, b.embedding)]
    pairs += [(a.tensors.get(n), b.tensors.get(n)) for n in expected_tensors(a.shape, a.conventions)]
    return all(x is y or (x is not None and y is not None and torch.equal(x, y.to(x.dtype))) for x, y in pairs)
