"""`eyas inspect` on a draft of the size of Kimi-K2's (1.2B parameters): seconds and memory beside a bare import.

    python benchmarks/inspect.py

The weights are a hole in a file: they take no disk, and nobody should read them. Medians of separate processes.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HIDDEN, INTER, HEADS, KV, DIM, VOCAB, DRAFT = 7168, 20480, 64, 64, 128, 163_840, 32_000
ROUNDS = 5
MEASURE = """
import resource, time
t = time.perf_counter()
{}
print(time.perf_counter() - t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def kimi_shaped(folder: Path) -> int:
    """Write config.json and model.safetensors; returns its bytes."""
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
        file.truncate(8 + len(raw) + place)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INTER, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV,
        "head_dim": DIM, "vocab_size": VOCAB, "draft_vocab_size": DRAFT, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "max_position_embeddings": 262_144, "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return place


def run(code: str) -> tuple[float, float]:
    """(seconds, MiB) of a process of its own; the medians."""
    rows = []
    for _ in range(ROUNDS):
        out = subprocess.run([sys.executable, "-c", MEASURE.format(code)], capture_output=True, text=True, check=True)
        rows.append([float(x) for x in out.stdout.split()[-2:]])
    seconds, memory = zip(*rows, strict=True)
    return statistics.median(seconds), statistics.median(memory)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        size = kimi_shaped(Path(folder))
        print(f"a draft of {size / 1e9:.2f} GB")
        bare = run("import safetensors")
        mine = run(f"from eyas.draft.inspect import inspect_draft; inspect_draft({folder!r})")
        print(f"import safetensors  {bare[0]:6.3f} s  {bare[1]:6.1f} MiB")
        print(f"inspect_draft       {mine[0]:6.3f} s  {mine[1]:6.1f} MiB  ({mine[1] - bare[1]:+.1f} MiB)")


if __name__ == "__main__":
    main()
