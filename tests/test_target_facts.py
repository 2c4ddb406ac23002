"""Facts in one vocabulary, whatever the config calls them.   pytest -q tests/test_target_facts.py"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.errors import BadInput
from eyas.target.facts import TargetFacts, read_facts

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 5e5,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 7,
}  # fmt: skip


def _facts(folder: Path, config: dict[str, Any], **files: Any) -> TargetFacts:
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_facts(folder)


def test_a_llama_config_in_both_spellings_of_rope(tmp_path: Path):
    facts = _facts(tmp_path, {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (facts.hidden_size, facts.vocab_size, facts.num_layers, facts.head_dim) == (64, 100, 8, 32)
    assert (facts.num_heads, facts.num_kv_heads, facts.intermediate_size, facts.max_position) == (4, 2, 96, 512)
    assert facts.rope_theta == 5e5
    assert dict(facts.rope_parameters) == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert facts.default_taps == (2, 4, 5)
    assert not facts.tied
    assert facts.dtype == "bfloat16"
    new = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    facts = _facts(tmp_path, {**new, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert facts.rope_theta == 5e5


def test_plain_families_need_no_transformers(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = (
        "import sys; from eyas.target.facts import read_facts as r; r(sys.argv[1]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_defaults_that_a_family_leaves_out_come_from_its_class(tmp_path: Path):
    """A Gemma 2 config.json may name neither tying nor soft-cap: its class has them, and they decide the logits."""
    gemma = {k: v for k, v in LLAMA.items() if k not in ("tie_word_embeddings", "rope_theta")} | {
        "model_type": "gemma2"
    }
    facts = _facts(tmp_path, gemma)
    assert facts.tied
    assert facts.logit_softcap == 30.0
    assert facts.embedding_scale == 8.0
    assert facts.norm_offset
    assert facts.rope_theta == 10000.0


def test_a_nested_config(tmp_path: Path):
    """Gemma 3: sizes in text_config, one RoPE a layer type; the full-attention one counts."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 16,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    facts = _facts(tmp_path, {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 999}})
    assert (facts.hidden_size, facts.num_layers, facts.embedding_scale) == (16, 8, 4.0)
    assert facts.rope_theta == 1e6
    assert facts.tied
    assert facts.norm_offset


def test_a_family_unknown_to_transformers_is_read_from_its_json(tmp_path: Path):
    own = {**LLAMA, "model_type": "from_the_future", "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    assert _facts(tmp_path, own).hidden_size == 64


def test_logit_scales(tmp_path: Path):
    assert _facts(tmp_path, {**LLAMA, "model_type": "granite", "logits_scaling": 8.0}).logit_scale == 1 / 8
    assert _facts(tmp_path, {**LLAMA, "model_type": "cohere", "logit_scale": 0.25}).logit_scale == 0.25
    facts = _facts(tmp_path, {**LLAMA, "final_logit_softcapping": 2.0, "logit_scale": 3.0})
    logits = torch.tensor([0.1, 50.0])
    torch.testing.assert_close(facts.finish_logits(logits), 2 * torch.tanh(3 * logits / 2))


def test_eos_ids_of_all_files(tmp_path: Path):
    generation = {"eos_token_id": [9, 7]}
    tokenizer = {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}
    facts = _facts(tmp_path, LLAMA, generation_config=generation, tokenizer_config=tokenizer)
    assert facts.eos_ids == (9, 7, 5)
    full = {"added_tokens": [{"id": 4, "content": "</s>"}]}
    facts = _facts(tmp_path, LLAMA, generation_config={}, tokenizer_config={"eos_token": "</s>"}, tokenizer=full)
    assert facts.eos_ids == (7, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "none of hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers = 0 is not a positive"),
        ({"vocab_size": "many"}, "vocab_size = 'many' is not a positive"),
    ],
)
def test_impossible_configs_are_refused(tmp_path: Path, change: dict[str, Any], words: str):
    with pytest.raises(BadInput, match=words):
        _facts(tmp_path, {**LLAMA, **change})


def test_unreadable_configs_are_refused(tmp_path: Path):
    with pytest.raises(BadInput, match=r"config\.json is missing"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not readable JSON"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadInput, match="holds a list"):
        read_facts(tmp_path)
    with pytest.raises(BadInput, match="no default taps"):
        _facts(tmp_path, {**LLAMA, "num_hidden_layers": 4}).default_taps
