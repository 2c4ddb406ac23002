"""Export to other spellings: what is written is read back equal, bit by bit, or refused with the reason.

pytest -q tests/test_export_spellings.py
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafts import foreign_tensors, make_draft, write_flat, write_speculators
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.draft.dialects import interpret
from eyas.draft.dialects.spellings import SPELLINGS
from eyas.draft.files import open_folder
from eyas.errors import BadInput, EyasError
from eyas.export import NotExpressible, export_draft, write
from eyas.export.check import check_draft
from eyas.target.facts import read_facts

PLAIN = ("sglang", "vllm", "llamacpp", "openvino", "speculators", "specforge", "eagle")


@pytest.fixture
def source(tmp_path: Path, tiny_target: Path) -> Path:
    return write_flat(tmp_path / "source", *make_draft(5), "layers0", "sharded")


@pytest.mark.parametrize("to", PLAIN)
def test_every_spelling_is_read_back_equal(to: str, tmp_path: Path, source: Path, tiny_target: Path):
    report = export_draft(source, tmp_path / "out", to=to, target_dir=tiny_target)
    assert report.to == to and report.verified and not (set(SPELLINGS[to].readers) & {e for e in report.engines
                                                                                     if report.engines[e]})  # fmt: skip
    before, its_map, conventions = load_draft(source, tiny_target)
    folder = open_folder(tmp_path / "out")
    plain = interpret(replace(folder, eyas=None), 8)  # as its own readers see it, without eyas.json
    assert plain.dialect == SPELLINGS[to].dialect
    assert set(plain.conventions.differences(conventions)) <= {"max_position"}
    for name, tensor in before.owned_state_dict().items():
        assert torch.equal(plain.canonical.sources[name].load(), tensor), name
    assert torch.equal(plain.canonical.sources["d2t"].load(), its_map.d2t)
    assert check_draft(tmp_path / "out").ok
    again = export_draft(tmp_path / "out", tmp_path / "back", dtype="keep")  # and back
    first = export_draft(source, tmp_path / "first", target_dir=tiny_target)
    assert first.dtype == again.dtype == "float32"
    assert (tmp_path / "back/model.safetensors").stat().st_size == (tmp_path / "first/model.safetensors").stat().st_size
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "first"))
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("to", ["speculators", "vllm"])
def test_two_layers_keep_both_names_of_their_norm(to: str, tmp_path: Path, tiny_target: Path):
    draft, vocab_map = make_draft(3, {"num_layers": 2})
    save_draft(draft, vocab_map, tmp_path / "d", facts=read_facts(tiny_target))
    export_draft(tmp_path / "d", tmp_path / "out", to=to, dtype="keep")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(stored["layers.1.hidden_norm.weight"], stored["layers.1.input_layernorm.weight"])
    with pytest.raises(NotExpressible, match="one layer"):
        export_draft(tmp_path / "d", tmp_path / "no", to="eagle")


@pytest.mark.parametrize(
    ("conventions", "sizes", "to", "words"),
    [
        ({"norm_before_residual": True}, {}, "sglang", "norm_before_residual is true, it runs false"),
        ({"norm_before_residual": True}, {}, "specforge", "it knows no norm_before_residual = True"),
        ({"norm_output": True}, {}, "llamacpp", "norm_output is true"),
        ({"norm_output": True}, {}, "specforge", "norm_output"),
        ({"fc_norm": True}, {}, "eagle", "fc_norm"),
        ({"taps": (1, 3, 6)}, {}, "eagle", r"taps is \(1, 3, 6\), its config would be read as \(2, 4, 5\)"),
        ({"taps": (1, 2, 4, 5)}, {"num_taps": 4}, "llamacpp", "exactly three"),
        ({"taps": (1, 2, 4, 5)}, {"num_taps": 4}, "specforge", "three taps"),
        ({"qk_norm": True}, {}, "sglang", "Eagle3Qwen3ForCausalLM"),
        ({"logit_scale": 0.5}, {}, "speculators", "logit_scale is 0.5"),
    ],
)
def test_what_a_destination_cannot_express_is_refused(conventions, sizes, to, words, tmp_path: Path, tiny_target):
    draft, vocab_map = make_draft(1, sizes, **conventions)
    save_draft(draft, vocab_map, tmp_path / "d", facts=read_facts(tiny_target))
    with pytest.raises(NotExpressible, match=words) as refused:
        export_draft(tmp_path / "d", tmp_path / "out", to=to)
    assert "; " in str(refused.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("container", ["bin", "training_state", "sharded", "safetensors"])
@pytest.mark.parametrize("scheme", ["fused", "prefixed", "legacy_norms", "midlayer"])
def test_every_container_and_key_scheme_arrives_bit_by_bit(container, scheme, tmp_path: Path, tiny_target: Path):
    draft, vocab_map = make_draft(2, fc_norm=scheme == "legacy_norms")
    draft = draft.to(torch.bfloat16)
    folder = write_flat(tmp_path / "d", draft, vocab_map, scheme, container, fc_norm=scheme == "legacy_norms")
    report = export_draft(folder, tmp_path / "out", target_dir=tiny_target)
    assert report.dtype == "bfloat16"
    stored = load_file(tmp_path / "out/model.safetensors")
    wanted = foreign_tensors(draft, vocab_map)
    assert stored.keys() == wanted.keys() and all(torch.equal(stored[k], wanted[k]) for k in wanted)


def test_embeddings_a_copy_is_left_out_and_an_own_one_kept(tmp_path: Path, source: Path, tiny_target: Path):
    from eyas.target.weights import load_ends

    table = load_ends(tiny_target).embedding
    folder = write_flat(tmp_path / "d", *make_draft(5))
    file = folder / "model.safetensors"
    for rows, kept in ((table, False), (table.flip(0).contiguous(), True)):
        save_file({**load_file(file), "embed_tokens.weight": rows}, file)
        report = export_draft(folder, tmp_path / f"out{kept}", target_dir=tiny_target)
        assert ("embed_tokens.weight" in load_file(tmp_path / f"out{kept}/model.safetensors")) is kept
        assert any("left out" in note for note in report.notes) is not kept
        assert bool(report.engines["sglang"]) is kept  # it would put the target's
    with pytest.raises(NotExpressible, match="embedding is own"):
        export_draft(folder, tmp_path / "no", to="sglang", target_dir=tiny_target)


def test_a_head_that_the_target_lends_is_written_down(tmp_path: Path, tiny_target: Path):
    draft, vocab_map = make_draft(1, {"draft_vocab_size": 300})
    taps = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    folder = write_flat(tmp_path / "d", draft, vocab_map, draft_vocab_size=None, **taps)
    file = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k not in ("lm_head.weight", "d2t", "t2d")}, file)
    with pytest.raises(BadInput, match="lm_head"):
        export_draft(folder, tmp_path / "no")
    export_draft(folder, tmp_path / "out", to="sglang", target_dir=tiny_target)
    assert load_file(tmp_path / "out/model.safetensors")["lm_head.weight"].shape == (300, 32)


def test_without_verify_nothing_is_read_twice(tmp_path: Path, source: Path, tiny_target: Path, monkeypatch):
    monkeypatch.setattr(write, "compare_written", None)
    report = export_draft(source, tmp_path / "out", target_dir=tiny_target, verify=False)
    assert not report.verified and json.loads((tmp_path / "out/eyas.json").read_text())["tensors"] == {}
    assert check_draft(tmp_path / "out").ok  # nothing recorded, nothing to differ


def test_a_disk_that_lies_is_found_out(tmp_path: Path, source: Path, tiny_target: Path, monkeypatch):
    assemble = write.assemble

    def flipped(out: Path, *rest: object) -> None:
        assemble(out, *rest)
        raw = bytearray(out.read_bytes())
        raw[-100] ^= 1
        out.write_bytes(raw)

    monkeypatch.setattr(write, "assemble", flipped)
    with pytest.raises(EyasError, match="is not what was written"):
        export_draft(source, tmp_path / "out", target_dir=tiny_target)
    assert not (tmp_path / "out").exists()


def test_speculators_flags_survive(tmp_path: Path, tiny_target: Path):
    flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    folder = write_speculators(tmp_path / "s", *make_draft(1, **flags))
    export_draft(folder, tmp_path / "out", to="speculators", target_dir=tiny_target)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {name: config[name] for name in flags} == flags and config["fc_norm"] is False
    assert config["transformer_layer_config"]["sliding_window"] == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(dtype, value, tmp_path: Path, tiny_target: Path):
    draft, vocab_map = make_draft(1)
    with torch.no_grad():
        draft.midlayer.mlp.up_proj.weight[3, 5] = value
    folder = write_flat(tmp_path / "d", draft.to(dtype), vocab_map)
    with pytest.raises(BadInput, match=r"NaN or infinite values in midlayer\.mlp\.up_proj\.weight"):
        export_draft(folder, tmp_path / "out", target_dir=tiny_target)
    assert not (tmp_path / "out").exists()
    file = folder / "model.safetensors"
    save_file({**load_file(file), "norm.weight": torch.ones(32, dtype=torch.int8)}, file)
    with pytest.raises(BadInput, match="I8, expected floating point"):
        export_draft(folder, tmp_path / "out", target_dir=tiny_target)
