"""The tree of drafted tokens: how it is laid out for verification, and which path of it the target agrees with.

Node 0 of a request is its last verified token, the nodes that follow are drafted. `retrive_index` (SGLang's spelling)
numbers the nodes of the batch, `next_token` is a node's first child and `next_sibling` its sibling, -1 where none is.
"""

import torch

FULL_MASK, QLEN_ONLY = 0, 1


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, verified_seq_len, tree_mask, positions,
    retrive_index, retrive_next_token, retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    """Fill mask, positions and links of a batch of trees with `draft_token_num` nodes each.

    A drafted candidate has a number: step * topk^2 + branch of the step before * topk + rank, step 0 having topk only.
    `selected_index` [requests, nodes - 1] are the numbers that were kept; `parent_list` leads from the group of topk
    that a number lies in to the number of the group's parent.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"the stand-in builds no tree mask of mode {tree_mask_mode}")
    nodes = draft_token_num
    mask_at = 0
    for b, length in enumerate(verified_seq_len.tolist()):
        parents = _parents(selected_index[b].tolist(), parent_list[b].tolist(), topk)
        first, sibling = _links(parents)
        sees = torch.eye(nodes, dtype=torch.bool)  # sees[i, j]: node i attends to node j
        level = [0] * nodes
        for node in range(1, nodes):  # parents come before their children
            sees[node] |= sees[parents[node]]
            level[node] = level[parents[node]] + 1
        retrive_index[b] = torch.arange(b * nodes, (b + 1) * nodes)
        retrive_next_token[b] = torch.tensor(first)
        retrive_next_sibling[b] = torch.tensor(sibling)
        positions[b * nodes : (b + 1) * nodes] = length + torch.tensor(level)
        width = nodes if tree_mask_mode == QLEN_ONLY else length + nodes
        block = tree_mask[mask_at : mask_at + nodes * width].view(
            nodes, width
        )  # the part before it stays as given: true
        block[:, width - nodes :] = sees
        mask_at += nodes * width


def _parents(selected, parent_list, topk):
    """The parent of each node; node 0 has none."""
    node_of = {number: node for node, number in enumerate(selected, start=1)}
    groups = [number // topk for number in selected]
    return [-1] + [0 if group == 0 else node_of[parent_list[group]] for group in groups]


def _links(parents):
    """(first child, next sibling) of each node: children in the order of their nodes."""
    first, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        sibling[node], first[parents[node]] = first[parents[node]], node
    return first, sibling


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Walk down each tree along the target's own choices; write the accepted nodes, their number and the choices."""
    chosen = target_predict.flatten().tolist()
    for b in range(candidates.shape[0]):
        ids, number = candidates[b].tolist(), retrive_index[b].tolist()
        first, sibling = retrive_next_token[b].tolist(), retrive_next_sibling[b].tolist()
        path = [0]
        while len(path) < accept_index.shape[1]:
            child = first[path[-1]]
            while child != -1 and ids[child] != chosen[number[path[-1]]]:
                child = sibling[child]
            if child == -1:
                break
            path.append(child)
        accepted = [number[node] for node in path]
        accept_index[b, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[b] = len(accepted) - 1
        for node in accepted:
            predicts[node] = chosen[node]
