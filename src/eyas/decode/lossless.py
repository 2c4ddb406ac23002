"""Is decoding with a draft lossless: are its answers those of plain decoding, token for token?

The first difference of two answers is a near-tie of the target's logits, or it is a fault.   pytest tests/test_prove.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from eyas.decode.acceptance import rounded
from eyas.decode.cases import Case
from eyas.target.model import Target

NEAR_TIE = 1e-3
"""Gap of float32 logits below which another order of sums may change the greedy choice (design.md, section 3)."""
SHOWN = 20
"""Differences described at most; each costs a forward."""


def losslessness(target: Target, cases: Sequence[Case], temperature: float) -> dict[str, Any]:
    """Compare the two answers of every prompt; describe the first differences of up to SHOWN of them."""
    if temperature > 0:
        return {"lossless": None, "compared": 0, "identical": 0, "near_ties": [], "differences": []}
    found = [(case, at) for case in cases if (at := first_difference(case)) is not None]
    described = [describe_difference(target, case, at) for case, at in found[:SHOWN]]
    differences = [d for d in described if not d["near_tie"]]
    return {
        "lossless": not differences and len(found) <= SHOWN,
        "compared": len(cases),
        "identical": len(cases) - len(found),
        "near_ties": [d for d in described if d["near_tie"]],
        "differences": differences,
    }


def first_difference(case: Case) -> int | None:
    """Index of the first token in which the two answers differ; None where they are identical."""
    assert case.plain is not None
    assert case.speculative is not None
    a, b = case.plain.tokens, case.speculative.tokens
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if at is None and len(a) != len(b) else at


def describe_difference(target: Target, case: Case, at: int) -> dict[str, Any]:
    """Both tokens at a difference, with the logits of one whole forward over the text before it: no cache, no draft.

    A near-tie: both tokens are within NEAR_TIE of the best logit.
    """
    assert case.plain is not None
    assert case.speculative is not None
    before = case.ids + case.plain.tokens[:at]
    _, final = target.states(torch.tensor([before]), taps=[0])
    logits = target.head(final[0, -1]).float()
    sides: dict[str, Any] = {}
    gap = 0.0
    for name, answer in (("plain", case.plain), ("speculative", case.speculative)):
        token = answer.tokens[at] if at < len(answer.tokens) else None  # the answer ends there
        logit = -math.inf if token is None else float(logits[token])
        text = None if token is None else target.tokenizer.decode([token])
        sides[name] = {"token": token, "text": text, "logit": None if token is None else rounded(logit, 6)}
        gap = max(gap, float(logits.max()) - logit)
    return {
        "set": case.set,
        "prompt": case.index,
        "position": at,
        **sides,
        "gap": None if math.isinf(gap) else rounded(gap, 6),
        "near_tie": gap < NEAR_TIE,
    }
