"""Which slot of the key cache holds which token of a request: copies between small index tensors.

`req_to_token` [requests, longest] names the slot of each token; a request is a row of it. Segments of several requests
lie one after the other in flat tensors. Each function writes into the tensors that it is given, as the kernels do.
"""

import ctypes

import torch


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """req_to_token[row, start:end] = the next end - start entries of out_cache_loc, for each request."""
    for row, start, end, slots in _segments(req_pool_indices, start_offset, end_offset, out_cache_loc):
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """The reverse: the next end - start entries of out_cache_loc = req_to_token[row, start:end]."""
    for row, start, end, slots in _segments(req_pool_indices, start_offset, end_offset, out_cache_loc):
        slots.copy_(req_to_token[row, start:end])


def _segments(rows, starts, ends, flat):
    """(row, start, end, view of its end - start entries of `flat`) for each request."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, start, end, flat[at : at + end - start]
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """out_cache_loc, topk * num_steps entries a request = the slots that follow its sequence."""
    ends = seq_lens + topk * num_steps
    for row, start, end, slots in _segments(req_pool_indices, seq_lens, ends, out_cache_loc):
        slots.copy_(req_to_token[row, start:end])


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """A table of slots for every branch of every request: its sequence, then the slots of that branch's own steps."""
    table = torch.zeros((req_pool_indices.numel() * topk, pool_len), dtype=req_to_token.dtype)
    for i, (row, size) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        own = req_to_token[row, size : size + topk * num_steps].view(topk, num_steps)
        branches = table[i * topk : (i + 1) * topk]
        branches[:, :size] = req_to_token[row, :size]
        branches[:, size : size + num_steps] = own
    return table


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move slots src_loc to tgt_loc in every layer's buffer, given by address and bytes a slot. They may overlap."""
    source, target = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(base + slot * stride, stride) for slot in source]
        for slot, data in zip(target, held, strict=True):
            ctypes.memmove(base + slot * stride, data, stride)


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    """Shift each request's ids one to the left and put its new token at the end, or at select_index."""
    new = topk_index.flatten().to(input_ids.dtype)
    for i, (start, size) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if size == 0:
            continue
        ids = input_ids[start : start + size]
        ids[:-1] = ids[1:].clone()
        input_ids[start + size - 1 if select_index is None else int(select_index[i])] = new[i]


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted token of each request."""
    rows = accept_tokens.flatten()[: accept_lens.numel() * accept_stride].view(-1, accept_stride)
    bonus_tokens.copy_(rows.gather(1, accept_lens.view(-1, 1).long() - 1).flatten())


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc, size=None):
    """The slots of all accepted tokens, in their order."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]
