"""What is no EAGLE-3 draft is called by its name, whatever its config pretends.   pytest -q tests/test_kinds.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafts import flat_config, foreign_tensors, make_draft
from eyas.draft.checkpoint import read_draft
from eyas.errors import BadInput

H = 32
LLAMA = {f"self_attn.{x}_proj.weight": (H, H) for x in "qkvo"} | {"mlp.gate_proj.weight": (48, H)}
SCALED = {"layers.0.mlp.down_proj.weight_scale": (1,)}


def layer(prefix: str) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{name}": shape for name, shape in LLAMA.items()}


def write(folder: Path, shapes: dict[str, tuple[int, ...]], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    base = {
        "model_type": "llama",
        "hidden_size": H,
        "vocab_size": 300,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    (folder / "config.json").write_text(json.dumps(base | {"intermediate_size": 48} | config))
    return folder


@pytest.mark.parametrize(
    ("words", "shapes", "config"),
    [
        ("a set of Medusa heads", {"medusa_head.0.0.linear.weight": (H, H)}, {}),
        ("a set of Medusa heads", {"0.0.linear.weight": (H, H)}, {"medusa_num_heads": 4}),
        ("an MTP module", {"model.layers.61.eh_proj.weight": (H, 2 * H), "model.layers.61.enorm.weight": (H,)}, {}),
        ("an MTP module", {"fc.weight": (H, 2 * H), **layer("model.layers.0.")}, {"architectures": ["Qwen3NextMTP"]}),
        ("a DFlash draft", {"fc.weight": (H, 5 * H), **layer("layers.0.")}, {"architectures": ["DFlashDraftModel"]}),
        ("a DFlash draft", {"fc.weight": (H, 5 * H)}, {"speculators_model_type": "dflash"}),
        ("an EAGLE-1/2 draft", {"fc.weight": (H, 2 * H), **layer("layers.0.")}, {}),
        ("a whole language model", {k: v for i in range(4) for k, v in layer(f"model.layers.{i}.").items()}, {}),
        ("a LoRA adapter", {"base_model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, H)}, {}),
        ("a quantised checkpoint", {"fc.weight": (H, 3 * H), "midlayer.hidden_norm.weight": (H,), **SCALED}, {}),
        ("a quantised checkpoint", {"fc.weight": (H, 3 * H), "layers.0.mlp.up_proj.input_scale": (1,)}, {}),
        ("a DFlash draft", {"fc.weight": (H, 5 * H), **layer("layers.0.")}, {"dflash_config": {"mask_token_id": 3}}),
        ("a DSpark draft", {"fc.weight": (H, 5 * H), **layer("layers.0.")}, {"architectures": ["DSparkDraftModel"]}),
        ("a P-EAGLE draft", {"fc.weight": (H, 3 * H), "midlayer.hidden_norm.weight": (H,), "mask_hidden": (1, 1, H)},
         {"parallel_drafting": True}),
        ("not an EAGLE-3 draft", {"something.weight": (2, 2)}, {}),
    ],
)  # fmt: skip
def test_other_kinds_are_named(tmp_path: Path, words: str, shapes: dict, config: dict):
    with pytest.raises(BadInput) as caught:
        read_draft(write(tmp_path / "x", shapes, **config))
    assert words in str(caught.value)
    assert str(tmp_path / "x") in str(caught.value)


@pytest.mark.parametrize("scheme", ["midlayer", "layers0", "prefixed", "fused"])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_no_draft_is_taken_for_something_else(tmp_path: Path, scheme: str, taps: int):
    """Two taps make fc as wide as EAGLE-1's; three layers make as many as a small model."""
    ids = list(range(1, 1 + taps))
    draft, vocab_map = make_draft(sizes={"num_taps": taps, "num_layers": 3}, taps=tuple(ids))
    tensors = {k: v.contiguous() for k, v in foreign_tensors(draft, vocab_map, scheme).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = flat_config(draft, eagle_aux_hidden_state_layer_ids=ids)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_draft(tmp_path).shape == draft.shape
