"""The TTT objective as one would first write it: every row at every step, dense masks, whole logits, autograd.

Plain float32 (or whatever the draft is in), nothing shared with Eyas but the weights' names and the embedding.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional as F


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x, positions, theta):
    """x [L, heads, d] to its positions."""
    half = x.shape[-1] // 2
    angle = positions[:, None].float() / theta ** (torch.arange(half) / half)  # [L, half]
    cos, sin = torch.cat([angle, angle], -1).cos()[:, None], torch.cat([angle, angle], -1).sin()[:, None]
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def plain_loss(draft, batch, head_rows, draft_of, steps, decay):
    """The contract's loss over the packed documents of `batch`; target's probabilities over its whole vocabulary."""
    w, c = dict(draft.named_parameters()), draft.conventions
    eps, layers = c.rms_norm_eps, draft.shape.num_layers
    sums, weights = [0.0] * steps, [0.0] * steps
    for start, end in pairwise(batch.packing.offsets.tolist()):
        ids, mask, length = batch.ids[start:end], batch.mask[start:end].float(), end - start
        aux = batch.aux[start:end].to(w["fc.weight"].dtype)
        if c.norm_before_fc:
            aux = rms(aux, w["input_norm.weight"], eps)
        if c.fc_norm:
            slices = aux.chunk(len(c.taps), -1)
            aux = torch.cat([rms(x, w[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(slices)], -1)
        state = aux @ w["fc.weight"].T
        teacher = (batch.final[start:end].float() @ head_rows.T - batch.logsumexp[start:end, None]).exp()
        rows = torch.arange(length)
        past = [([], []) for _ in range(layers)]  # keys and values of every step, layer by layer
        weight = torch.cat([mask[1:], mask.new_zeros(1)])
        for k in range(steps):
            fed = torch.cat([ids[1 + k :], ids[-1:].expand(min(length, 1 + k))])  # x_{i+1+k}, anything past the end
            e = draft.embed_tokens.weight[fed].to(state.dtype)
            h = state
            for layer in range(layers):
                h = plain_layer(draft, w, layer, h, e, rows, k, past[layer])
            out = rms(h, w["norm.weight"], eps)
            log_q = (out @ w["lm_head.weight"].T).log_softmax(-1)
            state = out if c.norm_output else h
            # w(i,k) = m_{i+1} ... m_{i+2+k}, and the teacher of row i sits at i+1+k.
            weight = weight * torch.cat([mask[2 + k :], mask.new_zeros(min(length, 2 + k))])
            p = torch.cat([teacher[1 + k :], teacher.new_zeros(min(length, 1 + k), teacher.shape[1])])
            sums[k] = sums[k] - (weight * (p * log_q).sum(-1)).sum()
            weights[k] = weights[k] + weight.sum()
    return sum(decay**k * s / n.clamp(min=1) for k, (s, n) in enumerate(zip(sums, weights, strict=True)))


def plain_layer(draft, w, layer, x, e, rows, k, past):
    """One layer at step k: x, e [L, H]; past: (keys, values) of earlier steps, to which this one's are added."""
    c, heads, kv = draft.conventions, draft.shape.num_heads, draft.shape.num_kv_heads
    eps, length = c.rms_norm_eps, len(rows)
    name = "midlayer." if layer == 0 else f"layers.{layer}."
    at = f"{name}self_attn."
    normed = rms(x, w[f"{name}hidden_norm.weight"], eps)
    wide = torch.cat([rms(e, w["midlayer.input_layernorm.weight"], eps), normed], -1) if layer == 0 else normed
    q, key, value = ((wide @ w[f"{at}{n}_proj.weight"].T).view(length, -1, draft.shape.head_dim) for n in "qkv")
    if c.qk_norm:
        q, key = rms(q, w[f"{at}q_norm.weight"], eps), rms(key, w[f"{at}k_norm.weight"], eps)
    q, key = turn(q, rows + k, c.rope_theta), turn(key, rows + k, c.rope_theta)
    past[0].append(key)
    past[1].append(value)
    all_keys = torch.cat(past[0]).repeat_interleave(heads // kv, 1)  # [(k + 1) L, heads, d]
    all_values = torch.cat(past[1]).repeat_interleave(heads // kv, 1)
    causal = rows[None, :] <= rows[:, None]
    seen = torch.cat([causal] + [torch.eye(length, dtype=torch.bool)] * k, -1)
    scores = torch.einsum("qhd,khd->hqk", q, all_keys) * q.shape[-1] ** -0.5
    share = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", share, all_values).flatten(1)
    h = (normed if layer == 0 and c.norm_before_residual else x) + attended @ w[f"{at}o_proj.weight"].T
    m = rms(h, w[f"{name}post_attention_layernorm.weight"], eps)
    gate, up = (m @ w[f"{name}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return h + (F.silu(gate) * up) @ w[f"{name}mlp.down_proj.weight"].T
