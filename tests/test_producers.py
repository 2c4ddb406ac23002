"""Who wrote a draft is told by marks in its config, and fields are read as that project means them.

Each row is a config as that project writes it, cut down.   pytest -q tests/test_producers.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafts import make_draft, write_flat, write_speculators
from eyas.conventions import Known
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.draft.dialects import Reading
from eyas.draft.directory import read_draft
from eyas.export import export_draft

IDS = "eagle_aux_hidden_state_layer_ids"
MODELOPT = {
    "next_layer_regular": True, "use_aux_hidden_state": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "SafeAILab/EAGLE": {"architectures": ["LlamaForCausalLM"], "rope_theta": ...},
    "SpecForge or alike": {},
    "Model Optimizer": {"eagle_config": {**MODELOPT, IDS: [1, 3, 4]}},
    "AngelSlim": {"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3"},
    "TorchSpec": {"_torchspec_version": "0.1.0", "eagle_config": {IDS: [1, 3, 4]}},
    "NeMo Automodel": {"architectures": ["LlamaEagle3DraftModel"], "target_hidden_size": 32, "num_hidden_layers": 8},
    "written for engines": {IDS: [2, 4, 5], "num_aux_hidden_states": 3, "norm_output": False},
    "an unknown producer": {"architectures": ["MyDraft"]},
}


def read(folder: Path, target: Path | None, **config: Any) -> Reading:
    return read_draft(write_flat(folder, *make_draft(), **config), target)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_is_known_by_its_marks(tmp_path: Path, tiny_target: Path, name: str):
    reading = read(tmp_path / "d", tiny_target, **CONFIGS[name])
    assert (reading.producer, reading.dialect) == (name, "flat")
    assert reading.conventions.taps == (2, 4, 5)
    assert reading.shape.num_layers == 1


def test_the_others_name_themselves(tmp_path: Path):
    draft, vocab_map = make_draft()
    folder = write_speculators(tmp_path / "s", draft, vocab_map, speculators_version="0.9.0")
    assert read_draft(folder).producer == "speculators 0.9.0"
    assert read_draft(save_draft(draft, vocab_map, tmp_path / "e")).producer.startswith("Eyas ")


@pytest.mark.parametrize("name", ["SafeAILab/EAGLE", "AngelSlim"])
def test_a_base_that_training_never_read(tmp_path: Path, tiny_target: Path, name: str):
    """Their rotary classes are built with 10,000, whatever the config says."""
    reading = read(tmp_path / "d", tiny_target, **{**CONFIGS[name], "rope_theta": 1e6})
    assert (reading.conventions.rope_theta, reading.conventions.known("rope_theta")) == (1e4, Known.GUESSED)
    assert any(f"rope_theta is 1e+06, but the training code of {name} uses 10000" in note for note in reading.notes)
    plain = read(tmp_path / "p", tiny_target, **{**CONFIGS[name], "rope_theta": 1e4})
    assert plain.conventions.known("rope_theta") is Known.DECLARED


def test_multimodal_rope_reads_its_base_and_is_plain_on_text(tmp_path: Path, tiny_target: Path):
    mrope = {"type": "mrope", "mrope_section": [2, 1, 1]}
    reading = read(tmp_path / "d", tiny_target, **CONFIGS["AngelSlim"], rope_theta=1e6, rope_scaling=mrope)
    c = reading.conventions
    assert (c.rope_theta, c.rope_type, dict(c.rope_scaling)) == (1e6, "default", {})
    assert any("multimodal RoPE" in note for note in reading.notes)


def test_rope_of_each_kind_of_attention(tmp_path: Path, tiny_target: Path):
    """Gemma keeps one table a kind; a draft has one layer, so the first kind is meant."""
    tables = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}
    config = {"rope_theta": ..., "rope_parameters": tables, "hidden_act": ..., "hidden_activation": "gelu_pytorch_tanh"}
    c = read(tmp_path / "d", tiny_target, **config, layer_types=["sliding_attention"], sliding_window=64).conventions
    assert (c.rope_theta, c.hidden_act, c.sliding_window) == (2e4, "gelu_pytorch_tanh", 64)


def test_ids_of_model_optimizer_are_outputs_of_layers_for_certain(tmp_path: Path):
    reading = read(tmp_path / "d", None, eagle_config={**MODELOPT, IDS: [0, 3, 6]})
    assert reading.conventions.taps == (1, 4, 7)
    assert reading.conventions.known("taps") is Known.DECLARED
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
    noted = read(tmp_path / "y", None, eagle_config={**MODELOPT, IDS: [0, 3, 6]}, rope_scaling=yarn)
    assert noted.conventions.rope_type == "yarn"
    assert any("trains Llama-like drafts with plain RoPE" in note for note in noted.notes)


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("SpecForge or alike", True, Known.GUESSED),
        ("SpecForge or alike", False, Known.GUESSED),
        ("NeMo Automodel", True, Known.DECLARED),
        ("written for engines", False, Known.DECLARED),
        ("an unknown producer", True, Known.GUESSED),
    ],
)
def test_norm_output_is_as_sure_as_its_writer(tmp_path: Path, tiny_target: Path, name: str, value: bool, known: Known):
    reading = read(tmp_path / "d", tiny_target, **{**CONFIGS[name], "norm_output": value})
    assert (reading.conventions.norm_output, reading.conventions.known("norm_output")) == (value, known)


@pytest.mark.parametrize("name", ["SafeAILab/EAGLE", "NeMo Automodel"])
def test_one_layer_whatever_the_config_says(tmp_path: Path, tiny_target: Path, name: str):
    """A published draft of SafeAILab's says 40 layers, and NeMo Automodel leaves the target's number."""
    folder = write_flat(tmp_path / "d", *make_draft(), **{**CONFIGS[name], "num_hidden_layers": 40})
    assert load_draft(folder, tiny_target)[0].shape.num_layers == 1
    assert any("num_hidden_layers = 40" in note for note in read_draft(folder, tiny_target).notes)


def test_heads_that_torchspec_pruned_are_doubted(tmp_path: Path, tiny_target: Path):
    notes = read(tmp_path / "d", tiny_target, **CONFIGS["TorchSpec"]).notes
    assert any("rows of such a head belong to other tokens" in note for note in notes)


def test_the_text_part_of_a_multimodal_config(tmp_path: Path, tiny_target: Path):
    draft, vocab_map = make_draft()
    folder = write_flat(tmp_path / "d", draft, vocab_map)
    config = json.loads((folder / "config.json").read_text())
    outer = {name: config.pop(name) for name in ("architectures", "draft_vocab_size")}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    again, _, conventions = load_draft(folder, tiny_target)
    assert again.shape == draft.shape
    assert conventions.differences(draft.conventions) == {}


# ---------------------------------------------------------------- there and back


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("scheme", ["midlayer", "layers0", "prefixed", "prefixed_midlayer", "fused", "legacy_norms"])
@pytest.mark.parametrize(
    ("container", "dtype"),
    [("safetensors", "bfloat16"), *((kind, "keep") for kind in ("safetensors", "sharded", "bin", "training_state"))],
)
def test_what_is_read_and_exported_is_bit_equal(tmp_path, tiny_target, scheme: str, container: str, dtype: str):
    fc_norm = scheme == "legacy_norms"
    draft, vocab_map = make_draft(3, fc_norm=fc_norm)
    folder = write_flat(tmp_path / "d", draft, vocab_map, scheme, container, fc_norm=fc_norm)
    export_draft(folder, tmp_path / "out", dtype=dtype, target_dir=tiny_target)
    wanted = {k: v if dtype == "keep" else v.bfloat16() for k, v in draft.owned_state_dict().items()}
    wanted |= {"d2t": vocab_map.d2t, "t2d": vocab_map.t2d}
    found = stored(tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in wanted.items()
    )


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "an unknown producer"])
def test_every_producers_draft_comes_out_as_it_was_read(tmp_path: Path, tiny_target: Path, name: str):
    """Read, exported, and read again as engines would: the same conventions, now declared."""
    folder = write_flat(tmp_path / "d", *make_draft(), **CONFIGS[name])
    before = read_draft(folder, tiny_target).conventions
    export_draft(folder, tmp_path / "out", target_dir=tiny_target)
    (tmp_path / "out/eyas.json").unlink()
    after = read_draft(tmp_path / "out", tiny_target)
    promised = {"max_position"}  # an export promises the target's where RoPE does not depend on it
    assert set(after.conventions.differences(before)) <= promised
    assert after.producer == "written for engines"


def test_speculators_nested_config_comes_out_flat(tmp_path: Path, tiny_target: Path):
    draft, vocab_map = make_draft(4, norm_before_fc=True, norm_before_residual=True, norm_output=True)
    folder = write_speculators(tmp_path / "d", draft, vocab_map)
    export_draft(folder, tmp_path / "out", target_dir=tiny_target, dtype="keep")
    found = stored(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in draft.owned_state_dict().items())
    save_file(found, tmp_path / "out/model.safetensors")  # as anybody may write it again
    assert load_draft(tmp_path / "out", tiny_target)[2].norm_before_residual is True
