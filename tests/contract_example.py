"""The example of docs/explanation/contract.md: a draft two numbers wide, one round of two drafts.

by_hand()     every number of the page, in plain Python, from the weights alone
tiny_draft()  the same draft for Eyas's own code            from contract_example import by_hand, tiny_draft
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from eyas.conventions import Conventions, Known
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.vocab import VocabMap

Vector = tuple[float, ...]
Matrix = Sequence[Sequence[float]]

TEXT = (5, 2, 7, 3, 1)  # x_0 .. x_4: two of the prompt, prefill's, one accepted, the bonus token
EMBEDDING: Matrix = ((1, 2), (1, -1), (1, 0), (0, 1), (-1, -2), (-1, 1), (2, 0), (2, 1))  # [V, H]
AUX: Matrix = ((1, 0, 0, 1, 1, 1), (1, 1, 0, 1, 1, -1))  # rows 0 and 1: taps 2, 4, 5 one behind the other
FC: Matrix = ((1, 0, 0, 0, 1, 0), (0, 1, 0, 1, 0, 1))
Q: Matrix = ((1, 0, 1, 0), (0, 1, 0, 1))
K: Matrix = ((1, 0, 0, 0), (0, 1, 0, 0))
V: Matrix = ((0, 0, 1, 0), (0, 0, 0, 1))
ONE: Matrix = ((1, 0), (0, 1))
HEAD: Matrix = ((1, -1), (1, 1), (-1, 2), (-2, 1))  # [D, H]
MAP = (1, 3, 4, 7)  # target ids of draft ids 0 .. 3


def times(matrix: Matrix, x: Sequence[float]) -> Vector:
    return tuple(sum(w * v for w, v in zip(row, x, strict=True)) for row in matrix)


def plus(*vectors: Sequence[float]) -> Vector:
    return tuple(sum(parts) for parts in zip(*vectors, strict=True))


def normed(x: Sequence[float]) -> Vector:
    size = math.sqrt(sum(v * v for v in x) / len(x))
    return tuple(v / size for v in x)


def turned(x: Sequence[float], position: int) -> Vector:
    """RoPE of a head two wide: one pair, turned by `position` radians."""
    c, s = math.cos(position), math.sin(position)
    return (x[0] * c - x[1] * s, x[0] * s + x[1] * c)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def layer(out: dict[str, Vector], name: str, e: Vector, state: Vector, position: int, seen: Sequence[str]) -> None:
    """One row through the layer; `seen`: the rows whose keys it looks at, before its own."""
    both = normed(e) + normed(state)
    out[f"n_{name}"] = both
    out[f"q_{name}"] = turned(times(Q, both), position)
    out[f"k_{name}"] = turned(times(K, both), position)
    out[f"v_{name}"] = times(V, both)
    rows = [*seen, name]
    scores = [sum(a * b for a, b in zip(out[f"q_{name}"], out[f"k_{row}"], strict=True)) / math.sqrt(2) for row in rows]
    total = sum(math.exp(s) for s in scores)
    out[f"w_{name}"] = tuple(math.exp(s) / total for s in scores)
    attended = plus(*(tuple(w * v for v in out[f"v_{row}"]) for w, row in zip(out[f"w_{name}"], rows, strict=True)))
    r = plus(state, attended)
    out[f"r_{name}"] = r
    out[f"h_{name}"] = plus(r, tuple(silu(x) * x for x in normed(r)))
    out[f"z_{name}"] = times(HEAD, normed(out[f"h_{name}"]))


def by_hand() -> dict[str, Vector]:
    """Every number of the page by its name. Rows are written `row.step`."""
    out: dict[str, Vector] = {}
    for row in (0, 1):
        out[f"g_{row}"] = times(FC, AUX[row])
        layer(out, f"{row}.0", EMBEDDING[TEXT[row + 1]], out[f"g_{row}"], row, ["0.0"] if row else [])
    drafted = MAP[max(range(4), key=lambda i: out["z_1.0"][i])]
    layer(out, "1.1", EMBEDDING[drafted], out["h_1.0"], 2, ["0.0", "1.0"])
    return out


def tiny_draft() -> tuple[Draft, VocabMap]:
    """The draft of the page."""
    shape = DraftShape(
        hidden_size=2, target_hidden_size=2, intermediate_size=2, num_heads=1, num_kv_heads=1, head_dim=2, vocab_size=8,
        draft_vocab_size=4, num_taps=3, num_layers=1,
    )  # fmt: skip
    conventions = Conventions(taps=(2, 4, 5), num_target_layers=8, rms_norm_eps=1e-12, how={"taps": Known.DECLARED})
    draft = Draft(shape, conventions)
    weights = {
        "fc": FC, "lm_head": HEAD, "midlayer.self_attn.q_proj": Q, "midlayer.self_attn.k_proj": K,
        "midlayer.self_attn.v_proj": V, "midlayer.self_attn.o_proj": ONE, "midlayer.mlp.gate_proj": ONE,
        "midlayer.mlp.up_proj": ONE, "midlayer.mlp.down_proj": ONE,
    }  # fmt: skip
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            held = weights.get(name.removesuffix(".weight"))
            parameter.copy_(torch.ones(2) if held is None else torch.tensor(held))  # norms: ones
    draft.set_embedding(torch.tensor(EMBEDDING, dtype=torch.float32))
    return draft.eval(), VocabMap.from_absolute(MAP, 8)
