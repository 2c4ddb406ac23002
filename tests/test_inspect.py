"""`eyas inspect`: what is said of a draft is what stands in its files, and reading it costs neither torch nor weights.

pytest -q tests/test_inspect.py
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

from drafts import flat_config, foreign_tensors, make_draft, write_flat
from eyas.cli.inspect import command
from eyas.describe import inspect_draft
from eyas.draft.checkpoint import save_draft
from eyas.errors import BadInput
from eyas.vocab import VocabMap


def mapped(folder: Path, d2t: torch.Tensor, **more: torch.Tensor) -> dict:
    """A draft whose stored map is replaced, as inspect describes it."""
    draft, vocab_map = make_draft()
    tensors = foreign_tensors(draft, vocab_map) | {"d2t": d2t} | more
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(flat_config(draft, eagle_aux_hidden_state_layer_ids=[2, 4, 5])))
    return inspect_draft(folder)["map"]


def test_eyas_own_directory(tmp_path: Path):
    draft, vocab_map = make_draft(norm_before_fc=True)
    out = save_draft(draft, vocab_map, tmp_path / "draft")
    report = inspect_draft(out)
    assert report["dialect"] == "eyas"
    assert report["producer"].startswith("Eyas ")
    assert report["shape"] == draft.shape.to_dict()
    assert report["conventions"]["norm_before_fc"] == {"value": True, "how": "declared"}
    assert report["conventions"]["taps"] == {"value": [2, 4, 5], "how": "declared"}
    assert report["parameters"] == sum(p.numel() for p in draft.parameters())
    stored = load_file(out / "model.safetensors")
    assert {t["name"]: t["shape"] for t in report["tensors"]} == {k: list(v.shape) for k, v in stored.items()}
    assert report["bytes"] == sum(v.numel() * v.itemsize for v in stored.values())
    assert report["map"]["agrees_with_t2d"] is True
    assert {name: engine["runs"] for name, engine in report["engines"].items()} == {
        "sglang": "as trained", "vllm": "as trained", "llamacpp": "as trained", "openvino": "otherwise",
    }  # fmt: skip
    assert json.loads(json.dumps(report)) == report


def test_how_a_value_is_known_and_what_an_engine_cannot(tmp_path: Path, tiny_target: Path):
    draft, vocab_map = make_draft(norm_output=True)
    write_flat(tmp_path / "flat", draft, vocab_map, norm_output=True)
    with pytest.raises(BadInput, match="does not name the taps"):
        inspect_draft(tmp_path / "flat")
    report = inspect_draft(tmp_path / "flat", tiny_target)
    conventions = report["conventions"]
    assert conventions["taps"] == {"value": [2, 4, 5], "how": "default"}
    assert conventions["norm_output"] == {"value": True, "how": "guessed"}
    assert conventions["qk_norm"] == {"value": False, "how": "inferred"}
    assert report["target"] == {"model_type": "llama", "layers": 8}
    assert report["engines"]["llamacpp"]["runs"] == "otherwise"
    assert "norm_output is true, it runs false" in report["engines"]["llamacpp"]["differences"][0]["what"]


def test_fused_and_foreign_names_are_shown_as_what_they_are(tmp_path: Path, tiny_target: Path):
    draft, vocab_map = make_draft()
    tensors = foreign_tensors(draft, vocab_map, "fused") | {"model.rotary_emb.inv_freq": torch.ones(4)}
    tmp_path.joinpath("config.json").write_text(json.dumps(flat_config(draft)))
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    by_name = {t["name"]: t for t in inspect_draft(tmp_path, tiny_target)["tensors"]}
    fused = by_name["midlayer.self_attn.qkv_proj.weight"]["canonical"]
    assert fused.count("midlayer.self_attn.") == 3
    assert by_name["model.rotary_emb.inv_freq"]["canonical"] is None
    assert "RoPE" in by_name["model.rotary_emb.inv_freq"]["ignored"]


def test_the_map_of_the_founding_story(tmp_path: Path):
    """Offsets that begin with zeros are healthy; subtracting arange once more breaks them, and it is said."""
    ids = torch.cat([torch.arange(20), torch.arange(20, 120) + 7])  # D = 120 of V = 300
    right = VocabMap.from_absolute(ids, 300)
    healthy = mapped(tmp_path / "healthy", right.d2t, t2d=right.t2d)
    assert healthy["first"] == [0, 0, 0, 0]
    assert healthy["identity_prefix"] == 20
    assert all(healthy[name] for name in ("ascending", "in_range", "distinct", "agrees_with_t2d"))
    said = CliRunner().invoke(command, [str(tmp_path / "healthy")]).output
    assert "the first 20 ids coincide, so their offsets are rightly 0" in " ".join(said.split())

    broken = mapped(tmp_path / "broken", right.d2t - torch.arange(120), t2d=right.t2d)
    assert (broken["in_range"], broken["distinct"], broken["agrees_with_t2d"]) == (True, False, False)
    said = " ".join(CliRunner().invoke(command, [str(tmp_path / "broken")]).output.split())
    assert "READ AS OFFSETS, AS ENGINES DO, it gives ids 0 to 7: doubled, out of order" in said
    assert "T2D MARKS OTHER IDS" in said

    absolute = mapped(tmp_path / "absolute", ids + 180, t2d=right.t2d)
    assert not absolute["in_range"]


def test_statistics_are_those_of_the_values(tmp_path: Path, tiny_target: Path):
    draft, vocab_map = make_draft()
    with torch.no_grad():
        draft.fc.weight[0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
        draft.norm.weight.zero_()
    out = write_flat(tmp_path / "draft", draft, vocab_map)
    assert "stats" not in inspect_draft(out, tiny_target)["tensors"][0]
    by_name = {t["name"]: t["stats"] for t in inspect_draft(out, tiny_target, stats=True)["tensors"]}
    assert by_name["fc.weight"]["not_finite"] == 2
    fc = draft.fc.weight.detach().flatten()[2:]
    assert by_name["fc.weight"]["rms"] == pytest.approx(float(fc.square().mean().sqrt()), rel=1e-5)
    assert (by_name["fc.weight"]["min"], by_name["fc.weight"]["max"]) == (float(fc.min()), float(fc.max()))
    assert by_name["norm.weight"] == {"rms": 0.0, "min": 0.0, "max": 0.0, "zeros": 1.0, "not_finite": 0}


def test_the_command(tmp_path: Path):
    draft, vocab_map = make_draft()
    out = save_draft(draft, vocab_map, tmp_path / "draft")
    done = CliRunner().invoke(command, [str(out), "--json", "--stats"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["dialect"] == "eyas"
    shown = CliRunner().invoke(command, [str(out), "--stats", "--all"])
    assert shown.exit_code == 0
    assert "midlayer.self_attn.q_proj.weight" in shown.output
    assert "rope_offset" in shown.output
    (tmp_path / "empty").mkdir()
    missing = subprocess.run(
        [sys.executable, "-m", "eyas", "inspect", str(tmp_path / "empty")], capture_output=True, text=True
    )
    assert missing.returncode == 2
    assert "holds no weights" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_without_statistics_torch_is_not_imported(tmp_path: Path):
    """What opens a draft of gigabytes in an instant."""
    draft, vocab_map = make_draft()
    out = save_draft(draft, vocab_map, tmp_path / "draft")
    code = (
        "import sys; from eyas.describe import inspect_draft; "
        f"inspect_draft({str(out)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
