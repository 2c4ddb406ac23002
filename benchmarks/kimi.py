"""A synthetic draft of the sizes of Kimi-K2's: hidden 7168, vocabulary 163,840, draft vocabulary 32,000; 2.47 GB."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

HIDDEN, INTER, HEADS, KV, DIM, VOCAB, DRAFT = 7168, 20480, 64, 64, 128, 163_840, 32_000


def kimi_shaped(folder: Path, holes: bool = True) -> int:
    """Write config.json and model.safetensors; returns its bytes. holes: the weights take no disk."""
    q, kv = HEADS * DIM, KV * DIM
    layer = {
        "hidden_norm": [HIDDEN], "input_layernorm": [HIDDEN], "post_attention_layernorm": [HIDDEN],
        "self_attn.q_proj": [q, 2 * HIDDEN], "self_attn.k_proj": [kv, 2 * HIDDEN], "self_attn.v_proj": [kv, 2 * HIDDEN],
        "self_attn.o_proj": [HIDDEN, q], "mlp.gate_proj": [INTER, HIDDEN], "mlp.up_proj": [INTER, HIDDEN],
        "mlp.down_proj": [HIDDEN, INTER],
    }  # fmt: skip
    shapes = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": [HIDDEN, 3 * HIDDEN], "norm.weight": [HIDDEN], "lm_head.weight": [DRAFT, HIDDEN]}
    header, place = {}, 0
    kinds = [("d2t", "I64", [DRAFT], 8), ("t2d", "BOOL", [VOCAB], 1)]
    for name, dtype, shape, size in [*kinds, *((n, "BF16", s, 2) for n, s in shapes.items())]:
        stop = place + math.prod(shape) * size
        header[name], place = {"dtype": dtype, "shape": shape, "data_offsets": [place, stop]}, stop
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.write(b"".join((4 * i).to_bytes(8, "little") for i in range(DRAFT)))  # draft id i is target id 5 i
        marks = bytearray(VOCAB)
        marks[: 5 * DRAFT : 5] = b"\1" * DRAFT
        file.write(marks)
        if holes:
            file.truncate(8 + len(raw) + place)
        else:
            block = random.Random(0).randbytes(1 << 24)
            left = 8 + len(raw) + place - file.tell()
            for start in range(0, left, len(block)):
                file.write(block[: left - start])
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INTER, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV,
        "head_dim": DIM, "vocab_size": VOCAB, "draft_vocab_size": DRAFT, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "max_position_embeddings": 262_144, "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return place
