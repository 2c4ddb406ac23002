"""How much of the text a draft vocabulary of each size would cover, and what this one misses.

pytest tests/test_report_run.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.errors import EyasError

POINTS = 60
MISSED = 12


def read_vocabulary(folder: Path, held_out: Path, tokenizer: Any = None) -> dict[str, Any]:
    """ids, target_ids, coverage of the counted text and of held-out answers, both over the size of the vocabulary, and
    the most frequent held-out tokens that the draft cannot say.

    tokenizer: (tokenizer, fingerprint) for their text. Raises EyasError for a map that cannot be read.
    """
    import torch

    from eyas.features.count import count_supervised
    from eyas.features.reader import FeatureSet
    from eyas.vocab import VocabMap

    made = VocabMap.load(folder)
    out: dict[str, Any] = {"ids": made.size, "target_ids": made.target_size, "coverage": None,
                           "held_out_coverage": None, "curve": None, "missed": []}  # fmt: skip
    held = None
    try:
        features = FeatureSet.open(held_out)
        held = count_supervised(features)
    except EyasError:  # removed, or not extracted yet: the rest is still worth showing
        features = None
    if held is not None and held.numel() == made.target_size:
        out["held_out_coverage"] = round(made.coverage(held), 6)
        lacking = held.masked_fill(made.t2d, 0)
        most = lacking.sort(descending=True, stable=True)
        for count, token in zip(most.values[:MISSED].tolist(), most.indices[:MISSED].tolist(), strict=True):
            if count:
                out["missed"].append({"id": token, "count": count, "text": _text(tokenizer, features, token)})
    if made.counts is None or not int(made.counts.sum()):
        return out
    out["coverage"] = round(made.coverage(made.counts), 6)
    rank = made.counts.clone()
    rank[list(made.always)] = torch.iinfo(torch.int64).max  # they are in whatever their counts
    order = rank.sort(descending=True, stable=True).indices
    sizes = sorted({*_sizes(made.target_size), made.size})
    at = torch.tensor(sizes) - 1
    out["curve"] = {"ids": sizes, "counted": _shares(made.counts[order], at),
                    "held_out": None if held is None else _shares(held[order], at)}  # fmt: skip
    return out


def _shares(counts: Any, at: Any) -> list[float]:
    sums = counts.cumsum(0)
    return [round(x, 5) for x in (sums[at] / max(int(sums[-1]), 1)).tolist()]


def _sizes(target: int) -> list[int]:
    """Sizes spread evenly on a logarithmic axis, from 16 (or fewer) to the target's whole vocabulary."""
    low = min(16, target)
    return [round(low * (target / low) ** (i / POINTS)) for i in range(POINTS + 1)] if target > 1 else [1]


def _text(tokenizer: Any, features: Any, token: int) -> str | None:
    if tokenizer is None or features is None or tokenizer[1] != features.meta.tokenizer:
        return None
    return str(tokenizer[0].decode([token], skip_special_tokens=False))
