"""Drafts with latent attention (MLA; Kimi, DeepSeek) are read, checked, described and loaded; no export rewrites them.

How they run: tests/test_draft_latent.py.

pytest -q tests/test_latent_attention.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from drafts import MLA, write_latent
from eyas.cli.inspect import command
from eyas.conventions import Known
from eyas.describe import inspect_draft
from eyas.doctor.examine import examine
from eyas.draft.checkpoint import load_draft, read_draft, save_draft
from eyas.draft.expected import Inventory
from eyas.draft.shape import DraftShape
from eyas.errors import BadInput

IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0."])
@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}])
def test_it_is_read_and_nothing_is_missing_or_unknown(tmp_path: Path, prefix: str, changes: dict):
    folder = write_latent(tmp_path / "d", rename=lambda n: n.replace("midlayer.", prefix), **IDS, **changes)
    reading = read_draft(folder)
    mla = reading.shape.mla
    assert mla is not None
    assert {name: getattr(mla, name) for name in MLA} == MLA | changes
    assert (reading.shape.head_dim, mla.output_gate) == (10, False)
    assert reading.conventions.attention == "mla"
    assert reading.conventions.known("attention") is Known.INFERRED
    found = Inventory.of(reading)
    assert (found.missing, found.unknown, found.misshapen) == ({}, [], {})
    assert DraftShape.from_dict(json.loads(json.dumps(reading.shape.to_dict()))) == reading.shape


def test_the_fused_projection_is_two(tmp_path: Path):
    folder = write_latent(tmp_path / "d", **IDS)
    tensors = load_file(folder / "model.safetensors")
    attention = "midlayer.self_attn."
    parts = [tensors.pop(f"{attention}{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    save_file(
        {**tensors, f"{attention}fused_qkv_a_proj_with_mqa.weight": torch.cat(parts)}, folder / "model.safetensors"
    )
    reading = read_draft(folder)
    found = Inventory.of(reading)
    assert (found.missing, found.unknown, found.misshapen) == ({}, [], {})
    assert torch.equal(reading.canonical.sources[f"{attention}kv_a_proj_with_mqa.weight"].load(), parts[1])


def test_kimi_k3_without_rotation_and_with_a_gate(tmp_path: Path):
    folder = write_latent(tmp_path / "d", gate=True, mla_use_nope=True, hidden_act="situ", **IDS)
    reading = read_draft(folder)
    assert (reading.conventions.rope_type, reading.conventions.hidden_act) == ("none", "situ")
    assert reading.shape.mla is not None
    assert reading.shape.mla.output_gate
    assert Inventory.of(reading).unknown == []
    assert inspect_draft(folder)["conventions"]["rope_type"] == {"value": "none", "how": "declared"}
    assert "EY-READ" not in [finding.id for finding in examine(folder)]


@pytest.mark.parametrize(("ids", "taps"), [([1, 3, 5], (2, 4, 6)), ([2, 4, 6], (2, 4, 6)), ([3, 4, 6], (3, 4, 6))])
def test_nested_ids_are_numbered_as_their_targets_classes_do(tmp_path: Path, ids: list[int], taps: tuple[int, ...]):
    """SGLang's DeepSeek and Kimi classes add 1 only to ids that begin with 1."""
    folder = write_latent(tmp_path / "d", eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    assert read_draft(folder).conventions.taps == taps


def test_it_is_described_and_examined(tmp_path: Path):
    folder = write_latent(tmp_path / "d", **IDS)
    report = inspect_draft(folder, stats=True)
    assert report["shape"]["mla"]["kv_lora_rank"] == MLA["kv_lora_rank"]
    assert report["conventions"]["attention"] == {"value": "mla", "how": "inferred"}
    assert json.loads(json.dumps(report)) == report
    said = " ".join(CliRunner().invoke(command, [str(folder)]).output.split())
    assert "latent attention (MLA) of 4 heads: queries from 12, keys and values from 10, keys 6 + 4 wide" in said
    ids = [finding.id for finding in examine(folder)]
    assert not {"EY-READ", "EY-TENSOR-MISSING", "EY-TENSOR-UNKNOWN", "EY-TENSOR-SHAPE"} & set(ids)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path):
    folder = write_latent(tmp_path / "d", **IDS)
    tensors = load_file(folder / "model.safetensors")
    del tensors["midlayer.self_attn.kv_a_layernorm.weight"]
    tensors["midlayer.self_attn.o_proj.weight"] = torch.zeros(32, 3)
    save_file(tensors, folder / "model.safetensors")
    said = " ".join(finding.evidence for finding in examine(folder))
    assert "midlayer.self_attn.kv_a_layernorm.weight [10]" in said
    assert "midlayer.self_attn.o_proj.weight [32, 3], expected [32, 20]" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"qk_rope_head_dim": 3}, "mla.qk_rope_head_dim = 3 must be even"),
        ({"v_head_dim": "5"}, "v_head_dim = '5', expected a whole number"),
        ({"q_lora_rank": 0}, "mla.q_lora_rank = 0 must be a whole number of at least 1"),
    ],
)
def test_impossible_sizes_are_named(tmp_path: Path, changes: dict, words: str):
    folder = write_latent(tmp_path / "d", **IDS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadInput) as caught:
        read_draft(folder)
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"rope_interleave": False}])
def test_it_is_loaded_as_it_is_stored(tmp_path: Path, changes: dict):
    folder = write_latent(tmp_path / "d", **IDS, **changes)
    draft, _, conventions = load_draft(folder)
    stored = load_file(folder / "model.safetensors")
    name = "midlayer.self_attn.kv_b_proj.weight"
    assert torch.equal(draft.state_dict()[name], stored[name])
    assert conventions.attention == "mla"
    assert draft.shape.mla is not None
    assert draft.shape.mla.rope_interleave is changes.get("rope_interleave", True)


def test_saving_it_writes_a_config_that_is_read_back(tmp_path: Path):
    changes = {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                "original_max_position_embeddings": 64}}  # fmt: skip
    draft, vocab_map, conventions = load_draft(write_latent(tmp_path / "d", **IDS, **changes))
    save_draft(draft, vocab_map, tmp_path / "own")
    (tmp_path / "own" / "eyas.json").unlink()  # what engines see
    reading = read_draft(tmp_path / "own")
    assert reading.shape == draft.shape
    assert reading.conventions.differences(conventions).keys() <= {"num_target_layers"}


def test_exporting_it_is_refused_in_one_sentence(tmp_path: Path):
    folder = write_latent(tmp_path / "d", **IDS)
    out = subprocess.run(
        [sys.executable, "-m", "eyas", "export", str(folder), "--out", str(tmp_path / "out")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert out.returncode in (2, 3)
    assert out.stderr.count("\n") == 1, out.stderr
    assert "MLA" in out.stderr
    assert not (tmp_path / "out").exists()
