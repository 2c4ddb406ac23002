"""Remedies for what the files show of single tensors: missing, misspelled, misshapen, never trained.

One function for each kind of finding; `remedies_static` looks them up.   pytest tests/test_repair_remedies.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .situation import Situation
from .sizes import head_dims
from .step import Step
from .tensors import norms as all_norms


def missing(s: Situation) -> list[Step]:
    """Of the reference, all at once; or the one tensor that nothing reads and that fits, under its right name."""
    found = s.inventory
    names = [name for name in found.missing if name != "lm_head.weight"]
    return [*s.from_reference(*names), *misspelled(s)]


def misspelled(s: Situation) -> list[Step]:
    """Pairs of a tensor that is missing and the only unknown one of its shape."""
    found, raw = s.inventory, s.overlay.raw.tensors
    out = []
    for name, size in found.missing.items():
        fit = [n for n in found.unknown if n in raw and raw[n].shape in (size, size[::-1])]
        if len(fit) == 1:
            turned = {"transpose": True} if raw[fit[0]].shape != size else {}
            out.append(s.step("rename", sure=False, name=raw[fit[0]].name, to=name, **turned))
    return out


def unknown(s: Situation) -> list[Step]:
    """Under its right name, or taken out where nothing is missing."""
    found, raw = s.inventory, s.overlay.raw.tensors
    spare = [raw[name].name for name in found.unknown if name in raw]
    dropped = [s.step("drop-tensors", sure=False, names=spare)] if spare and not found.missing else []
    return [*misspelled(s), *dropped]


def sizes(s: Situation) -> list[Step]:
    """Of several sizes of a head that fit a measurement decides."""
    ways = head_dims(s.overlay)
    if len(ways) < 2:
        return [s.step("sizes-from-tensors")]
    return [s.step("sizes-from-tensors", sure=False, head_dim=dim) for dim in ways]


def shapes(s: Situation) -> list[Step]:
    """The config follows the tensors, which is the usual case, or a matrix is turned."""
    turned = [name for name, (held, size) in s.inventory.misshapen.items() if held == size[::-1]]
    vocab = [s.step("name-draft-vocabulary")] if "lm_head.weight" in s.inventory.misshapen else []
    return [*sizes(s), *vocab, *(s.step("transpose", name=name) for name in turned)]


def fc_turned(s: Situation) -> list[Step]:
    """fc lies there as [in, out]."""
    return [s.step("transpose", name="fc.weight")]


def broken(s: Situation) -> list[Step]:
    """Single tensors that hold nothing: by the convention that the check names."""
    if s.convention == "head":
        return head(s)
    if s.convention == "embedding":
        return [s.step("drop-embedding")]
    name = s.long(s.convention.removeprefix("tensor "))
    return s.from_reference(name) if name else []


def head(s: Situation) -> list[Step]:
    """A reference's, one under another name, or the target's rows, which only a measurement may keep."""
    rows = [s.step("head-from-target", sure=False, target=str(s.target), rows="map")] if s.target else []
    named = [step for step in misspelled(s) if step.arguments.get("to") == "lm_head.weight"]
    return [*s.from_reference("lm_head.weight"), *named, *rows]


def norms(s: Situation) -> list[Step]:
    """All or some norms are ones."""

    def ones(ref: Any) -> bool:
        one: Any = 0x3F80 if ref.dtype == "BF16" else 1
        return bool(np.all(ref.array() == one))

    held = {ref.name for ref in all_norms(s.overlay) if ones(ref)}
    return s.from_reference(*(name for name in s.wanted if s.overlay.stored(name) in held))
