"""An independent, naive EAGLE-3 in float64: one row at a time, from the words of the contract. Slow and obvious.

Nothing here uses Eyas's own modules: parity tests compare against it.
"""

from __future__ import annotations

import math

import torch


def rms(x, weight, eps):
    x = x.double()
    return x / torch.sqrt((x * x).mean() + eps) * weight.double()


def turn(x, position, theta):
    """Rotate one head's vector to a position: pairs (d, d + half)."""
    half = len(x) // 2
    first, second = [], []
    for d in range(half):
        angle = position / theta ** (2 * d / len(x))
        a, b = x[d], x[d + half]
        first.append(a * math.cos(angle) - b * math.sin(angle))
        second.append(b * math.cos(angle) + a * math.sin(angle))
    return torch.stack(first + second)


class Naive:
    """Weights by canonical name, conventions by attribute; one document at a time, one layer."""

    def __init__(self, weights, embedding, conventions, heads, kv_heads):
        self.w = {k: v.detach().double() for k, v in weights.items()}
        self.e, self.c, self.heads, self.kv = embedding.double(), conventions, heads, kv_heads

    def fuse(self, aux):
        aux, c = aux.double(), self.c
        if c.norm_before_fc:
            aux = rms(aux, self.w["input_norm.weight"], c.rms_norm_eps)
        if c.fc_norm:
            slices = aux.chunk(len(c.taps))
            aux = torch.cat([rms(s, self.w[f"fc_norm.{i}.weight"], c.rms_norm_eps) for i, s in enumerate(slices)])
        return self.w["fc.weight"] @ aux

    def qkv(self, token, state, position):
        c, w = self.c, self.w
        e = rms(self.e[token], w["midlayer.input_layernorm.weight"], c.rms_norm_eps)
        g = rms(state, w["midlayer.hidden_norm.weight"], c.rms_norm_eps)
        x = torch.cat([e, g])
        q, k, v = (w[f"midlayer.self_attn.{n}_proj.weight"] @ x for n in "qkv")
        q = [turn(h, position, c.rope_theta) for h in q.chunk(self.heads)]
        k = [turn(h, position, c.rope_theta) for h in k.chunk(self.kv)]
        return q, k, list(v.chunk(self.kv)), (g if c.norm_before_residual else state)

    def finish(self, q, keys, values, residual):
        w, group = self.w, self.heads // self.kv
        out = []
        for h in range(self.heads):
            scores = torch.stack([q[h] @ k[h // group] for k in keys]) / math.sqrt(len(q[h]))
            share = torch.softmax(scores, 0)
            out.append(sum(s * v[h // group] for s, v in zip(share, values, strict=True)))
        h = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
        m = rms(h, w["midlayer.post_attention_layernorm.weight"], self.c.rms_norm_eps)
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ m, w["midlayer.mlp.up_proj.weight"] @ m
        return h + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)

    def logits(self, h):
        return self.w["lm_head.weight"] @ rms(h, self.w["norm.weight"], self.c.rms_norm_eps)

    def unroll(self, ids, aux, row, tokens):
        """Outputs of `row` at steps 0.. for the inputs `tokens` (token of step k at tokens[k])."""
        keys, values, q, residual = [], [], None, None
        for i in range(row + 1):
            token = tokens[0] if i == row else ids[i + 1]
            q, k, v, residual = self.qkv(token, self.fuse(aux[i]), i)
            keys.append(k)
            values.append(v)
        outputs = [self.finish(q, keys, values, residual)]
        for step, token in enumerate(tokens[1:], start=1):
            state = outputs[-1]
            if self.c.norm_output:
                state = rms(state, self.w["norm.weight"], self.c.rms_norm_eps)
            q, k, v, residual = self.qkv(token, state, row + step)
            keys.append(k)
            values.append(v)
            outputs.append(self.finish(q, keys, values, residual))
        return outputs
