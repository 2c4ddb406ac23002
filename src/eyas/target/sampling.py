"""The next token from logits: greedy, or drawn with random numbers that depend on an answer's own seed only."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pick(logits: torch.Tensor, temperature: float, draws: Sequence[float], top_k: int | None = None) -> torch.Tensor:
    """Tokens int64 [n] from logits [n, V]: the argmax, or the inverse of the cumulative distribution at `draws`.

    draws: [n] numbers in [0, 1). top_k: only the k likeliest tokens can be drawn.
    """
    if temperature == 0.0:
        return logits.argmax(-1)
    ids: torch.Tensor | None = None
    if top_k is not None and top_k < logits.shape[-1]:
        logits, ids = logits.topk(top_k, -1)  # [n, k] each, likeliest first
    cumulative = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    points = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, points, right=True).clamp_(max=logits.shape[-1] - 1)  # [n, 1]
    return (place if ids is None else ids.gather(1, place))[:, 0]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from an answer's seed and a position in it (splitmix64's finaliser, Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53
