"""The stand-ins for SGLang's kernels compute what the kernels do, on cases small enough to be written out.

pytest -q tests/test_engines_stand_in.py
"""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from eyas.engines.setup.steps import STAND_IN


@pytest.fixture(scope="module")
def kernels():
    sys.path.insert(0, str(STAND_IN / "sglang"))
    try:
        yield importlib.import_module("sgl_kernel")
    finally:
        sys.path.remove(str(STAND_IN / "sglang"))


def built(kernels, parent_list, selected, length: int, nodes: int, topk: int, mode: int = 1):
    """(mask [nodes, width], positions, first child, next sibling) of one tree behind `length` verified tokens."""
    width = nodes if mode == 1 else length + nodes
    mask = torch.ones(nodes * width, dtype=torch.bool)
    positions = torch.empty(nodes, dtype=torch.long)
    index, first, sibling = (torch.full((1, nodes), -1) for _ in range(3))
    kernels.build_tree_kernel_efficient_cpu(
        torch.tensor([parent_list]), torch.tensor([selected]), torch.tensor([length]), mask, positions,
        index, first, sibling, topk, 2, nodes, mode,
    )  # fmt: skip
    assert index.tolist() == [list(range(nodes))]
    return mask.view(nodes, width), positions.tolist(), first[0].tolist(), sibling[0].tolist()


def test_a_chain_is_a_triangle(kernels):
    mask, positions, first, sibling = built(kernels, [-1, 0, 1], [0, 1, 2], 10, 4, topk=1)
    assert mask.equal(torch.ones(4, 4, dtype=torch.bool).tril())
    assert positions == [10, 11, 12, 13]
    assert first == [1, 2, 3, -1] and sibling == [-1] * 4


def test_a_tree_lets_a_node_see_its_ancestors_only(kernels):
    # Two branches of the root (candidates 0 and 1), and the best child of each (2 and 4: groups 1 and 2).
    mask, positions, first, sibling = built(kernels, [-1, 0, 1], [0, 1, 2, 4], 5, 5, topk=2)
    sees = [[i for i, seen in enumerate(row) if seen] for row in mask.tolist()]
    assert sees == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    assert positions == [5, 6, 6, 7, 7]
    assert first == [1, 3, 4, -1, -1] and sibling == [-1, 2, -1, -1, -1]
    whole, *_ = built(kernels, [-1, 0, 1], [0, 1, 2, 4], 5, 5, topk=2, mode=0)
    assert whole[:, :5].all() and whole[:, 5:].equal(mask)
    with pytest.raises(NotImplementedError, match="mode 2"):
        built(kernels, [-1, 0, 1], [0, 1, 2, 4], 5, 5, topk=2, mode=2)


def test_verification_follows_the_targets_choices(kernels):
    nodes = 5
    index = torch.arange(2 * nodes).view(2, nodes)
    first, sibling = torch.tensor([[1, 3, 4, -1, -1]] * 2), torch.tensor([[-1, 2, -1, -1, -1]] * 2)
    candidates = torch.tensor([[9, 20, 21, 30, 31]] * 2)
    chosen = torch.zeros(2, nodes, dtype=torch.long)
    chosen[0, 0], chosen[0, 2], chosen[0, 4] = 21, 31, 77  # the second branch, whole, and a bonus token
    chosen[1, 0] = 50  # nothing drafted
    predicts = torch.zeros(2 * nodes, dtype=torch.long)
    accepted, number = torch.full((2, 3), -1), torch.zeros(2, dtype=torch.long)
    kernels.verify_tree_greedy_cpu(predicts, accepted, number, candidates, index, first, sibling, chosen)
    assert accepted.tolist() == [[0, 2, 4], [5, -1, -1]] and number.tolist() == [2, 0]
    assert predicts[[0, 2, 4, 5]].tolist() == [21, 31, 77, 50]


def test_bookkeeping_round_trips(kernels):
    pool = torch.zeros(3, 8, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([3, 3])
    slots = torch.tensor([11, 12, 13, 14, 15])
    kernels.assign_req_to_token_pool_cpu(rows, pool, start, end, slots, 8)
    assert pool[2, 1:3].tolist() == [11, 12] and pool[0, :3].tolist() == [13, 14, 15]
    back = torch.zeros(5, dtype=torch.long)
    kernels.assign_extend_cache_locs_cpu(rows, pool, start, end, back, 8)
    assert back.equal(slots)
    ids = torch.tensor([1, 2, 3, 4, 5])
    kernels.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[70], [80]]))
    assert ids.tolist() == [2, 3, 70, 5, 80]
    bonus = torch.zeros(2, dtype=torch.long)
    kernels.fill_bonus_tokens_cpu(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [2, 4]
    kept = torch.zeros(3, dtype=torch.long)
    kernels.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [4, -1, -1]]), slots, kept)
    assert kept.tolist() == [11, 13, 15]


def test_moving_keys_reads_before_it_writes(kernels):
    layers = [torch.arange(12, dtype=torch.float32).view(6, 2) + 100 * i for i in range(2)]
    pointers = torch.tensor([layer.data_ptr() for layer in layers])
    kernels.copy_all_layer_kv_cache_cpu(pointers, torch.tensor([8, 8]), torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert layers[0].tolist() == [[0, 1], [0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]
    assert layers[1][2].tolist() == [102, 103]


def test_attention_over_pages_is_attention(kernels):
    generator = torch.Generator().manual_seed(0)
    length, new, heads, key_heads, width = 7, 3, 4, 2, 8
    q = torch.randn(new, heads, width, generator=generator)
    k_buffer, v_buffer = (torch.randn(16, key_heads, width, generator=generator) for _ in range(2))
    pool = torch.zeros(1, 16, dtype=torch.int32)
    pool[0, :length] = torch.tensor([3, 9, 1, 12, 5, 8, 0])
    slots, out = pool[0, :length].long(), torch.empty_like(q)
    one, sizes = torch.tensor([0]), torch.tensor([length])
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, None, None, out, k_buffer, v_buffer, 1.0, 1.0, pool, one, sizes, torch.tensor([new]), one, new, 0.3, 0.0,
        False, -1, None, None, None, True,
    )  # fmt: skip
    k, v = (x[slots].repeat_interleave(heads // key_heads, 1) for x in (k_buffer, v_buffer))
    for i in range(new):
        end = length - new + i + 1
        weights = torch.einsum("hd,khd->hk", q[i], k[:end]).mul(0.3).softmax(-1)
        assert torch.allclose(out[i], torch.einsum("hk,khd->hd", weights, v[:end]), atol=1e-5)
    last = torch.empty_like(q[:1])
    torch.ops.sgl_kernel.decode_attention_cpu(
        q[-1:], k_buffer, v_buffer, 1.0, 1.0, last, k_buffer[slots[-1:]], v_buffer[slots[-1:]], slots[-1:],
        torch.empty(0), pool, one, sizes, 0.3, 0.0, False, -1, None, None,
    )  # fmt: skip
    assert torch.allclose(last[0], out[-1], atol=1e-6)
