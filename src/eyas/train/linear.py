"""The best linear guess from all that step 0 is given, written into a draft's weights.

Row i knows the taps at i and the token x_{i+1}; the target would predict x_{i+2} from its final state at i+1. The ridge
regression of that state on both is known in seconds, and a draft can hold it exactly but for a rank: `fc` takes the
taps' share, and one query head of each key-value group takes the token's. Such a head attends to its own row. Its query
and key are constant in the pairs of RoPE that turn fastest, whose product falls with every position between them, and
its value and output projections are the token's map, cut to the rank that they have room for. What is a constant to a
layer without biases? The direction of the embeddings' own mean (a regression of 1 on them).

At later steps the same heads add the token that was drafted last to the state that was fed back. Under `norm_output`
that state is normed, so the final norm's factor moves into the head, whose input is then in the space of `fc`'s output,
and one number stays in the norm: the share of the last state in the next. (Numbers are in docs/experiments.md.)
    Exercise it:  pytest tests/test_train_linear.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..draft.model import Attention, Draft
from ..features.reader import FeatureSet
from .ridge import BLOCK, Gram, Rows, keeps_rows, solve_in_place

FEEDBACK_TOKENS = 4_000  # for one unknown
PAIRS = 3  # RoPE pairs that tell the own row from others: the first is blind to 6 positions (2 pi), the next are not
SHARPNESS = 6.0  # logits that each pair adds on the own row: the row before gets e^-5 of its weight (theta 100,000)


@dataclass(frozen=True)
class LinearGuess:
    """final state at i+1, un-scaled ~ from_taps @ fc_input_i + from_token @ normed embedding of x_{i+1}."""

    from_taps: torch.Tensor  # float32 [H, T*Ht]
    from_token: torch.Tensor  # float32 [H, H]
    token_covariance: torch.Tensor  # float32 [H, H], uncentred, of the normed embeddings
    constant: torch.Tensor  # float32 [H]: its product with a normed embedding is about 1


@torch.no_grad()
def fit_guess(
    draft: Draft,
    features: FeatureSet,
    scale: torch.Tensor,
    seed: int,
    rows: int = 100_000,
    space: torch.Tensor | None = None,
) -> LinearGuess:
    """Ridge regression over supervised rows of randomly chosen documents, `rows` or all that there are.

    scale [H]: the final norm's factor, divided out because the draft's own norm applies it again. space [H, Ht]:
    the directions of the target's final state that a draft of another width has. Memory: `fit_bytes`.
    """
    size, wide = draft.fc.weight.shape
    inverse = torch.where(scale.abs() > 1e-6, 1 / scale, 0.0)
    few = keeps_rows(wide + size, min(rows, features.supervised_tokens))
    ridge: Rows | Gram = Rows(wide + size, size) if few else Gram(wide + size, size)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    used = block = 0

    def add() -> None:
        """Multiply out what is held: few large products instead of one a document."""
        if held:
            x, y = (torch.cat(parts) for parts in zip(*held, strict=True))
            held.clear()
            ridge.add(x, y)

    for doc in _order(features, seed):
        part = features.document(doc)
        chosen = part["mask"][1:-1].bool() & part["mask"][2:].bool()  # rows of step 0: the teacher is read at i+1
        token = draft.midlayer.input_layernorm(draft.embed(part["ids"][1:-1][chosen].long()))
        x = torch.cat([fc_input(draft, part["taps"][:-2][chosen].float()), token], -1)
        y = _seen(part["final"][1:-1][chosen].float(), space) * inverse
        # What is not finite is left to the first step that reads this document: it stops the run and names it.
        if not bool((x.sum() + y.sum()).isfinite()):
            continue
        held.append((x, y))
        used, block = used + len(x), block + len(x)
        if block >= BLOCK or used >= rows:
            add()
            block = 0
        if used >= rows:
            break
    add()
    both, token_gram, token_sum = ridge.solve(wide)
    lower = token_gram.tril() / max(1, used)
    covariance = (lower + lower.tril(-1).T).float()
    token_gram.diagonal().add_(ridge.strength)
    constant = solve_in_place(token_gram, token_sum[:, None]).squeeze(1).float()
    return LinearGuess(both[:, :wide], both[:, wide:], covariance, constant)


@torch.no_grad()
def write_guess(draft: Draft, guess: LinearGuess) -> None:
    """Set `fc` and, in the first layer, one head of each group; the other heads write nothing yet."""
    draft.fc.weight.copy_(guess.from_taps)
    attn, size = draft.midlayer.self_attn, draft.shape.hidden_size
    assert isinstance(attn, Attention), "latent attention is not trained"
    d, groups = attn.head_dim, attn.num_kv_heads
    each = attn.num_heads // groups
    token = slice(0, size) if draft.midlayer.embedding_first else slice(size, 2 * size)
    value, out = _low_rank(guess.from_token, guess.token_covariance, groups * d)
    # The strongest components are dealt out to the groups in turn, so that heads are alike in scale.
    dealt = torch.arange(groups * d).view(d, groups).T  # [groups, d]
    rotated = draft._inv_freq.numel()  # pair p is (p, p + rotated)
    pairs = range(min(PAIRS, rotated))
    constant = guess.constant * (SHARPNESS * d**0.5) ** 0.5  # query times key, over sqrt(d), is SHARPNESS
    attn.o_proj.weight.zero_()
    for group in range(groups):
        own = group * each  # the query head
        mine = slice(group * d, (group + 1) * d)
        attn.v_proj.weight[mine] = 0
        attn.v_proj.weight[mine, token] = value[dealt[group]]
        attn.q_proj.weight[own * d : (own + 1) * d] = 0
        for p in pairs:
            attn.q_proj.weight[own * d + p, token] = constant
            attn.k_proj.weight[[group * d + p, group * d + p + rotated]] = 0
            attn.k_proj.weight[group * d + p, token] = constant
        attn.o_proj.weight[:, own * d : (own + 1) * d] = out[:, dealt[group]]


@torch.no_grad()
def fold_norm(
    draft: Draft,
    guess: LinearGuess,
    features: FeatureSet,
    scale: torch.Tensor,
    seed: int,
    space: torch.Tensor | None = None,
) -> None:
    """For a draft with `norm_output` that holds `guess`: the norm's factor goes into the head, c stays in the norm.

    c is the least-squares factor of the normed guess at i in what the share of x_{i+2} leaves of the un-scaled final
    state at i+2, which is what step 1 of row i aims at.
    """
    inverse = torch.where(scale.abs() > 1e-6, 1 / scale, 0.0)
    above = below = 0.0
    used = 0
    for doc in _order(features, seed):
        part = features.document(doc)
        mask = part["mask"].bool()
        chosen = (mask[1:-2] & mask[2:-1] & mask[3:]).nonzero().squeeze(1)  # rows of step 1
        token = draft.midlayer.input_layernorm(draft.embed(part["ids"].long())) @ guess.from_token.T
        state = draft.fuse(part["taps"][chosen].float()) + token[chosen + 1]
        state = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + draft.norm.eps)
        rest = _seen(part["final"][chosen + 2].float(), space) * inverse - token[chosen + 2]
        above += float((state * rest).sum())
        below += float(state.square().sum())
        used += len(chosen)
        if used >= FEEDBACK_TOKENS:
            break
    share = above / below if above > 0 else 1.0
    draft.lm_head.weight.mul_(draft.norm.weight / share)
    draft.norm.weight.fill_(share)


def _seen(final: torch.Tensor, space: torch.Tensor | None) -> torch.Tensor:
    """Final states [..., Ht] in the draft's own space [..., H]."""
    return final if space is None else final @ space.T


def _order(features: FeatureSet, seed: int) -> list[int]:
    """All documents, as `seed` shuffles them."""
    return torch.randperm(features.num_docs, generator=torch.Generator().manual_seed(seed)).tolist()


def _low_rank(matrix: torch.Tensor, covariance: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """value [rank, H] and out [H, rank] whose product is closest to `matrix` [H, H] on inputs of that covariance.

    Reduced-rank regression (Izenman 1975): the singular values of matrix @ covariance^(1/2) tell what to keep. Both
    factors get the root of a singular value; beyond H they are zero. Where there is room for all, as in targets with as
    many key heads as query heads, nothing has to be told apart: decomposing squares of 7,168 would take many minutes.
    """
    size = len(matrix)
    value, out = torch.zeros(rank, size), torch.zeros(size, rank)
    if rank >= size:
        scale = max(float(matrix.norm()) / size**0.5, 1e-12) ** 0.5  # root of the singular values' root mean square
        value[:size] = matrix / scale
        out.fill_diagonal_(scale)
        return value, out
    spread, axes = torch.linalg.eigh(covariance.double())
    root = spread.clamp(min=1e-9 * float(spread.max())).sqrt()
    whitened = matrix.double() @ (axes * root)  # its singular values are the wanted ones; axes.T only turns the inputs
    # Left vectors from the square: several times cheaper than a decomposition of the matrix itself, and since they are
    # orthonormal the product of all factors is the matrix, however little is known of the smallest values.
    square, left = torch.linalg.eigh(whitened @ whitened.T)
    left = left.flip(1)[:, :rank]  # strongest first
    weight = square.flip(0)[:rank].clamp(min=1e-18 * float(square.max()) + 1e-300) ** 0.25
    value.copy_((left / weight).T @ whitened @ (axes / root).T)
    out.copy_(left * weight)
    return value, out


def fc_input(draft: Draft, aux: torch.Tensor) -> torch.Tensor:
    """What `fc` reads: the taps after whichever norm this draft has there."""
    if draft.input_norm is not None:
        return draft.input_norm(aux)
    if len(draft.fc_norm):
        parts = aux.unflatten(-1, (len(draft.fc_norm), -1)).unbind(-2)
        return torch.cat([norm(x) for norm, x in zip(draft.fc_norm, parts, strict=True)], -1)
    return aux
