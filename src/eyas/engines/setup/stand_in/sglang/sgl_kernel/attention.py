"""Attention over paged keys and values, as the two operators that SGLang's CPU backend calls."""

import torch
import torch.nn.functional as F

_library = torch.library.Library("sgl_kernel", "FRAGMENT")  # the operators live as long as this object


def register():
    """Declare and implement the operators; their arguments are those that SGLang passes, in its order."""
    _library.define(
        "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor k_buffer, Tensor v_buffer, "
        "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
        "Tensor extend_seq_lens, Tensor extend_start_loc, int longest, float scaling, float logit_cap, "
        "bool is_cross, int window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool causal) -> ()"
    )
    _library.define(
        "decode_attention_cpu(Tensor q, Tensor(b!) k_buffer, Tensor(c!) v_buffer, float k_scale, float v_scale, "
        "Tensor(a!) out, Tensor? k, Tensor? v, Tensor slot, Tensor(d!) scratch, Tensor req_to_token, "
        "Tensor req_pool_indices, Tensor seq_lens, float scaling, float logit_cap, bool is_cross, int window, "
        "Tensor? encoder_lens, Tensor? sinks) -> ()"
    )
    _library.impl("extend_attention_cpu", _extend, "CPU")
    _library.impl("decode_attention_cpu", _decode, "CPU")


def _extend(
    q, k, v, out, k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens,
    extend_seq_lens, extend_start_loc, longest, scaling, logit_cap, is_cross, window, encoder_lens, sinks,
    tree_mask, causal,
):  # fmt: skip
    """The last `extend` tokens of each request against all of its tokens, which are in the buffers already.

    tree_mask: for each request, flat, which of its new tokens sees which of them; else causal.
    """
    _only_plain(is_cross, window, logit_cap, sinks)
    mask_at = 0
    rows = zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True
    )
    for row, length, new, start in rows:
        sees = torch.ones(new, length, dtype=torch.bool)
        if causal:
            sees = sees.tril(length - new)
        if tree_mask is not None:
            sees[:, length - new :] = tree_mask[mask_at : mask_at + new * new].view(new, new)
            mask_at += new * new
        slots = req_to_token[row, :length].long()
        out[start : start + new] = _attend(q[start : start + new], k_buffer[slots], v_buffer[slots], sees, scaling)


def _decode(
    q, k_buffer, v_buffer, k_scale, v_scale, out, k, v, slot, scratch, req_to_token, req_pool_indices, seq_lens,
    scaling, logit_cap, is_cross, window, encoder_lens, sinks,
):  # fmt: skip
    """One new token of each request, stored first, against all of its tokens."""
    _only_plain(is_cross, window, logit_cap, sinks)
    if k is not None:
        k_buffer[slot.long()] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[slot.long()] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length].long()
        out[i : i + 1] = _attend(q[i : i + 1], k_buffer[slots], v_buffer[slots], None, scaling)


def _attend(q, k, v, sees, scaling):
    """q [new, heads, dim], k and v [length, key heads, dim] -> [new, heads, dim], computed in float32."""
    q, k, v = (x.transpose(0, 1)[None].float() for x in (q, k, v))
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scaling, enable_gqa=True)
    return found[0].transpose(0, 1)


def _only_plain(is_cross, window, logit_cap, sinks):
    if is_cross or window > 0 or logit_cap or sinks is not None:
        raise NotImplementedError("the stand-in has plain causal attention only: no encoder, window, soft-cap or sinks")
