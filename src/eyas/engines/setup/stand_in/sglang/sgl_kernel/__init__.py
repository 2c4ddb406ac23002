"""A stand-in, in plain PyTorch, for the kernels of SGLang that are published for CUDA only.

It has the entry points that SGLang 0.5.23 calls on a CPU for dense Llama-like models with EAGLE-3 drafting, and no
other: for checking drafts, not for speed. Not here: quantisation, sliding windows, sinks, soft-caps, encoders.

    bookkeeping.py     where tokens and keys of a request lie
    tree.py            the tree of drafted tokens and its greedy verification
    attention.py       attention over paged keys and values
"""

from .attention import register
from .bookkeeping import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.0.0+eyas"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

register()
