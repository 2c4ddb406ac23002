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
    heads, kv, eps = draft.shape.num_heads, draft.shape.num_kv_heads, c.rms_norm_eps
    at = "midlayer.self_attn."
    sums, weights = [0.0] * steps, [0.0] * steps
    for start, end in pairwise(batch.packing.offsets.tolist()):
        ids, mask, length = batch.ids[start:end], batch.mask[start:end].float(), end - start
        aux = batch.aux[start:end].to(w["fc.weight"].dtype)
        if c.norm_before_fc:
            aux = rms(aux, w["input_norm.weight"], eps)
        state = aux @ w["fc.weight"].T
        teacher = (batch.final[start:end].float() @ head_rows.T - batch.logsumexp[start:end, None]).exp()
        rows, keys, values = torch.arange(length), [], []
        weight = torch.cat([mask[1:], mask.new_zeros(1)])
        causal = rows[None, :] <= rows[:, None]
        for k in range(steps):
            fed = torch.cat([ids[1 + k :], ids[-1:].expand(min(length, 1 + k))])  # x_{i+1+k}, anything past the end
            e = draft.embed_tokens.weight[fed].to(state.dtype)
            normed = rms(state, w["midlayer.hidden_norm.weight"], eps)
            x = torch.cat([rms(e, w["midlayer.input_layernorm.weight"], eps), normed], -1)
            q, key, value = (x @ w[f"{at}{n}_proj.weight"].T for n in "qkv")
            q, key = turn(q.view(length, heads, -1), rows + k, c.rope_theta), key.view(length, kv, -1)
            keys.append(turn(key, rows + k, c.rope_theta))
            values.append(value.view(length, kv, -1))
            all_keys = torch.cat(keys).repeat_interleave(heads // kv, 1)  # [(k + 1) L, heads, d]
            all_values = torch.cat(values).repeat_interleave(heads // kv, 1)
            seen = torch.cat([causal] + [torch.eye(length, dtype=torch.bool)] * k, -1)
            scores = torch.einsum("qhd,khd->hqk", q, all_keys) * q.shape[-1] ** -0.5
            share = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", share, all_values).flatten(1)
            h = (normed if c.norm_before_residual else state) + attended @ w[f"{at}o_proj.weight"].T
            m = rms(h, w["midlayer.post_attention_layernorm.weight"], eps)
            gate, up = (m @ w[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            h = h + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
            out = rms(h, w["norm.weight"], eps)
            log_q = (out @ w["lm_head.weight"].T).log_softmax(-1)
            state = out if c.norm_output else h
            # w(i,k) = m_{i+1} ... m_{i+2+k}, and the teacher of row i sits at i+1+k.
            weight = weight * torch.cat([mask[2 + k :], mask.new_zeros(min(length, 2 + k))])
            p = torch.cat([teacher[1 + k :], teacher.new_zeros(min(length, 1 + k), teacher.shape[1])])
            sums[k] = sums[k] - (weight * (p * log_q).sum(-1)).sum()
            weights[k] = weights[k] + weight.sum()
    return sum(decay**k * s / n.clamp(min=1) for k, (s, n) in enumerate(zip(sums, weights, strict=True)))
