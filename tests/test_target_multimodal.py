"""Targets that also see: tiny random ones of transformers' own classes, written by it and read as any other target.

pytest -q tests/test_target_multimodal.py
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.target.model import Target
from eyas.target.weights import load_ends

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 128,
}  # fmt: skip
SIGHT = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
TOWER = {**SIGHT, "num_hidden_layers": 1, "num_attention_heads": 2}


def build(family: str) -> Any:
    """A random model of that family."""
    import transformers as t

    torch.manual_seed(0)
    if family == "Gemma3":
        config: Any = t.Gemma3Config(text_config=TEXT, vision_config=TOWER)
    elif family == "Qwen3VL":
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
        config = t.Qwen3VLConfig(
            text_config={**TEXT, "rope_parameters": rope},
            vision_config={"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
                           "out_hidden_size": 32, "deepstack_visual_indexes": []},
        )  # fmt: skip
    elif family == "Mistral3":
        config = t.Mistral3Config(
            text_config={"model_type": "mistral", **TEXT}, vision_config={"model_type": "pixtral", **TOWER}
        )
    else:
        sight = {**TOWER, "intermediate_size": 32, "vision_output_dim": 16, "projector_input_dim": 16,
                 "projector_output_dim": 16}  # fmt: skip
        config = t.Llama4Config(
            text_config={**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2}, vision_config=sight
        )
    return getattr(t, f"{family}ForConditionalGeneration")(config)


@pytest.mark.parametrize("family", ["Gemma3", "Qwen3VL", "Mistral3", "Llama4"])
def test_states_head_and_ends_of_a_multimodal_target(family: str, tiny_target: Path, tmp_path: Path):
    model = build(family)
    model.save_pretrained(tmp_path)
    for file in tiny_target.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, tmp_path / file.name)
    ends = load_ends(tmp_path)
    assert torch.equal(ends.embedding, model.get_input_embeddings().weight)
    target = Target.load(tmp_path)
    ids = torch.arange(3, 15)[None]
    taps, final = target.states(ids)
    assert taps.shape == (1, 12, 96)
    with torch.no_grad():
        theirs = model.eval()(input_ids=ids).logits
    torch.testing.assert_close(target.head(final), theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ends.logits(final), theirs, rtol=1e-4, atol=1e-4)
