"""Is the text the one that comes without the draft?   pytest tests/test_measure_server.py

Compared token for token in float32; a first difference is forgiven where both tokens' logits are within NEAR_TIE of the
best one (decode/prove.py), which another order of sums decides. Other precisions differ without any fault of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .asking import Answered


def compare(
    with_draft: Sequence[Answered], without: Sequence[Answered], against: str, target: Path | None = None
) -> dict[str, Any]:
    """{"lossless": bool or None where nothing was compared, "compared", "identical", "differences": [...], "against"}.

    target: where the logits at a difference can be looked up. Answers of which tokens did not come (`Reply.lost`) and
    that differ are `unclear`, and then nothing is known. Raises EyasError where the target cannot be loaded.
    """
    plain = {(a.question.set, a.question.index): a for a in without if a.reply is not None}
    pairs = [(a, plain[a.question.set, a.question.index]) for a in with_draft
             if a.reply is not None and (a.question.set, a.question.index) in plain]  # fmt: skip
    differ = [(a, b, at) for a, b in pairs if (at := _first(a, b)) is not None]
    found = [(a, b, at) for a, b, at in differ if not (_lost(a) or _lost(b))]
    unclear = len(differ) - len(found)
    told = _described(found, target) if found and target is not None else [_bare(a, b, at) for a, b, at in found]
    real = [d for d in told if not d.get("near_tie")]
    why = f"{unclear} answers differ, and their server does not send every token" if unclear and not real else ""
    return {
        "lossless": (not real) if pairs and not why else None,
        "compared": len(pairs),
        "identical": len(pairs) - len(differ),
        "unclear": unclear,
        "why": why,
        "near_ties": [d for d in told if d.get("near_tie")],
        "differences": real,
        "against": against,
    }


def _first(a: Answered, b: Answered) -> int | None:
    assert a.reply is not None
    assert b.reply is not None
    x, y = a.reply.tokens, b.reply.tokens
    at = next((i for i, (m, n) in enumerate(zip(x, y, strict=False)) if m != n), None)
    return min(len(x), len(y)) if at is None and len(x) != len(y) else at


def _lost(a: Answered) -> int:
    return a.reply.lost if a.reply is not None else 0


def _bare(a: Answered, b: Answered, at: int) -> dict[str, Any]:
    assert a.reply is not None
    assert b.reply is not None
    q = a.question
    sides = {"plain": {"token": _at(b.reply.tokens, at)}, "speculative": {"token": _at(a.reply.tokens, at)}}
    return {"set": q.set, "prompt": q.index, "position": at, **sides, "gap": None, "near_tie": False}


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None


def _described(found: Sequence[tuple[Answered, Answered, int]], folder: Path) -> list[dict[str, Any]]:
    """With the float32 logits of the reference target."""
    import torch

    from ..decode.answers import Answer
    from ..decode.cases import Case
    from ..decode.lossless import SHOWN, describe_difference
    from ..target.model import Target

    target = Target.load(folder, dtype=torch.float32)
    out = []
    for a, b, at in found[:SHOWN]:
        assert a.reply is not None
        assert b.reply is not None
        case = Case(a.question.set, a.question.index, list(a.question.ids), Answer(b.reply.tokens),
                    Answer(a.reply.tokens))  # fmt: skip
        out.append(describe_difference(target, case, at))
    return out + [_bare(a, b, at) for a, b, at in found[SHOWN:]]
