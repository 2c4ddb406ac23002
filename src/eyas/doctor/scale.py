"""What gives a surprise its scale: the same weights without their states, random weights, mere word frequencies.

controls(bench, best)["states_are_worth"]          pytest tests/test_doctor_measure.py
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .material import Material
from .specimen import Specimen
from .trial import Bench

BARELY = 0.97
"""Share of random weights' surprise that other random weights may reach: on little text frequencies say less yet."""
BLIND = 0.1
"""Nats that a draft must lose when the states of all positions are shuffled; healthy ones lose two."""
PRIOR = 200.0  # tokens' worth of the uniform guess that frequencies are mixed with


def frequencies(material: Material, rows: torch.Tensor, document: torch.Tensor, vocab: int) -> float:
    """Surprise of one who knows only how often each token comes, counted on every other document."""
    labels, learning = material.label(rows, 2), document % 2 == 0
    counts = torch.bincount(labels[learning], minlength=vocab).double()
    p = (counts + PRIOR / vocab) / (counts.sum() + PRIOR)
    judged = labels[~learning] if bool((~learning).any()) else labels
    return round(float(-p[judged].log().mean()), 4)


def controls(bench: Bench, best: Specimen) -> dict[str, float]:
    """What the same weights know without their states, and what random weights know. Nats per token."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(bench.material.ids), generator=generator)
    shuffled = replace(
        bench.material, states={t: x[order] for t, x in bench.material.states.items() if t in best.slices}
    )
    blind = Bench(shuffled, bench.cast.dtype, str(bench.cast.device), bench.steps)
    blind.rows, blind.document = bench.rows, bench.document
    random = {
        name: torch.randn(t.shape, generator=generator) * 0.02 if t.dim() == 2 else t
        for name, t in best.tensors.items() if t.dtype.is_floating_point
    }  # fmt: skip
    return {
        "shuffled_states": (shuffled_ := mean(blind.surprise([best])[0])),
        "states_are_worth": round(shuffled_ - mean(bench.surprise([best])[0]), 4),
        "random_draft": mean(bench.surprise([best.with_(tensors=random)])[0]),
    }


def mean(surprise: torch.Tensor) -> float:
    """Nats per token, rounded for a report."""
    return round(float(surprise.mean()), 4)
