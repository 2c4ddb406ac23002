"""Single tensors: every layout on disk, nothing else read, and no index that leads out of the folder.

pytest -q tests/test_target_weights.py
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import BadInput, EyasError, Mismatch
from eyas.target.source import fingerprint
from eyas.target.weights import load_ends, read_tensors, tensor_files

V, H = 11, 8


def _state(prefix: str = "model.", head: str | None = "lm_head.weight", seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {
        f"{prefix}embed_tokens.weight": torch.randn(V, H, generator=generator),
        f"{prefix}layers.0.self_attn.q_proj.weight": torch.randn(H, H, generator=generator),
        f"{prefix}layers.0.input_layernorm.weight": torch.randn(H, generator=generator),
        f"{prefix}norm.weight": torch.randn(H, generator=generator),
    }
    return state | ({head: torch.randn(V, H, generator=generator)} if head else {})


def _folder(path: Path, tied: bool = False, nested: bool = False) -> Path:
    text = {
        "model_type": "llama", "hidden_size": H, "vocab_size": V, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": 64, "tie_word_embeddings": tied,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "some_vision_wrapper", "text_config": text} if nested else text
    (path / "config.json").write_text(json.dumps(config))
    return path


def _sharded(folder: Path, state: dict[str, torch.Tensor], places: dict[str, str]) -> None:
    """Write `state` as shards; places: part of a tensor's name -> file name, "" for the rest."""
    weight_map = {n: next((f for part, f in places.items() if part and part in n), places[""]) for n in state}
    for file in set(weight_map.values()):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file({n: t for n, t in state.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_single_file(tmp_path: Path):
    state = _state()
    save_file(state, _folder(tmp_path) / "model.safetensors")
    ends = load_ends(tmp_path)
    assert torch.equal(ends.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(ends.head, state["lm_head.weight"])
    assert ends.final_norm is not None
    assert torch.equal(ends.final_norm, state["model.norm.weight"])


@pytest.mark.parametrize("others", ["absent", "garbage"])
def test_only_the_shards_with_the_ends_are_opened(tmp_path: Path, others: str):
    state = _state()
    _sharded(
        _folder(tmp_path), state, {"layers": "blocks.safetensors", "lm_head": "b.safetensors", "": "a.safetensors"}
    )
    if others == "absent":
        (tmp_path / "blocks.safetensors").unlink()
    else:
        (tmp_path / "blocks.safetensors").write_bytes(b"\xff" * 64)
    ends = load_ends(tmp_path)
    assert torch.equal(ends.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(ends.head, state["lm_head.weight"])
    with pytest.raises(EyasError, match=r"blocks\.safetensors"):
        read_tensors(tmp_path, ["model.layers.0.input_layernorm.weight"])


def test_a_tied_target_never_reads_its_stored_head(tmp_path: Path):
    state = _state()
    _sharded(_folder(tmp_path, tied=True), state, {"lm_head": "head.safetensors", "": "a.safetensors"})
    (tmp_path / "head.safetensors").unlink()
    ends = load_ends(tmp_path)
    assert torch.equal(ends.head, state["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.language_model.", None),
        ("", "lm_head.weight"),
    ],
)
def test_nested_names_and_configs(tmp_path: Path, prefix: str, head: str | None):
    state = _state(prefix, head)
    state["vision_tower.embeddings.norm.weight"] = torch.zeros(3)
    save_file(state, _folder(tmp_path, tied=head is None, nested=True) / "model.safetensors")
    ends = load_ends(tmp_path)
    assert torch.equal(ends.embedding, state[prefix + "embed_tokens.weight"])
    assert torch.equal(ends.head, state[head or prefix + "embed_tokens.weight"])
    assert ends.final_norm is not None
    assert torch.equal(ends.final_norm, state[prefix + "norm.weight"])


@pytest.mark.parametrize("zipped", [True, False])
def test_bin_checkpoints(tmp_path: Path, zipped: bool):
    state = _state()
    torch.save(state, _folder(tmp_path) / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert torch.equal(load_ends(tmp_path).head, state["lm_head.weight"])
    save_file(state, _folder(tmp_path / "as_safetensors") / "model.safetensors")
    assert fingerprint(tmp_path) == fingerprint(tmp_path / "as_safetensors")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bin_checkpoint_never_runs_code(tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for payload in (lambda f: torch.save({"x": Evil()}, f), lambda f: f.write_bytes(pickle.dumps(Evil()))):
        payload(_folder(tmp_path) / "pytorch_model.bin")
        with pytest.raises(EyasError, match="weights_only"):
            load_ends(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/hostname", "a/../../x", "..", "link/x.safetensors", "C:x", ""]
)
def test_an_index_may_not_lead_out_of_the_folder(tmp_path: Path, name: str):
    folder = _folder(tmp_path / "model")
    save_file(_state(), tmp_path / "outside.safetensors")
    (tmp_path / "elsewhere").mkdir()
    save_file(_state(), tmp_path / "elsewhere" / "x.safetensors")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.embed_tokens.weight": name}})
    )
    with pytest.raises(BadInput, match="leads out of the folder"):
        tensor_files(folder)


def test_an_entry_that_is_itself_a_symlink_is_read(tmp_path: Path):
    """Hub caches look so: snapshots/REVISION/model.safetensors -> ../../blobs/HASH."""
    state, folder = _state(), _folder(tmp_path / "snapshots" / "r")
    _sharded(folder, state, {"": "sub/model-1.safetensors"})
    (tmp_path / "blobs").mkdir()
    (folder / "sub/model-1.safetensors").rename(tmp_path / "blobs" / "hash")
    (folder / "sub/model-1.safetensors").symlink_to(tmp_path / "blobs" / "hash")
    assert torch.equal(load_ends(folder).head, state["lm_head.weight"])


def test_what_is_missing_or_wrong_is_named(tmp_path: Path):
    folder = _folder(tmp_path)
    with pytest.raises(BadInput, match="holds none of"):
        load_ends(folder)
    save_file({k: v for k, v in _state().items() if k != "lm_head.weight"}, folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"no head among the tensors.*tie_word_embeddings"):
        load_ends(folder)
    save_file({"model.norm.weight": torch.ones(H)}, folder / "model.safetensors")
    with pytest.raises(BadInput, match="no embedding among 1 tensors"):
        load_ends(folder)
    save_file(_state() | {"lm_head.weight": torch.ones(V + 1, H)}, folder / "model.safetensors")
    with pytest.raises(Mismatch, match=r"lm_head.weight has shape \[12, 8\], config.json says \[11, 8\]"):
        load_ends(folder)
    save_file(_state() | {"lm_head.weight": torch.ones(V, H, dtype=torch.uint8)}, folder / "model.safetensors")
    with pytest.raises(
        BadInput, match=r"lm_head\.weight is stored in a format .* \(weight uint8 \[11, 8\]\); give it unquantised"
    ):
        load_ends(folder)
    with pytest.raises(BadInput, match=r"no tensor 'x'"):
        read_tensors(folder, ["x"])
    cut = (folder / "model.safetensors").read_bytes()[:-7]
    (folder / "model.safetensors").write_bytes(cut)
    with pytest.raises(EyasError, match="header promises"):
        load_ends(folder)
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match="adapter, not a model"):
        load_ends(folder)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(BadInput, match="weight_map"):
        load_ends(folder)


def test_fingerprint_follows_content_not_sharding(tmp_path: Path):
    state = _state()
    save_file(state, _folder(tmp_path / "one") / "model.safetensors")
    _sharded(_folder(tmp_path / "two"), state, {"layers": "b.safetensors", "": "a.safetensors"})
    base = fingerprint(tmp_path / "one")
    assert base == fingerprint(tmp_path / "two") == fingerprint(tmp_path / "one")

    changed = {k: v.clone() for k, v in state.items()}
    changed["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1e-3
    save_file(changed, tmp_path / "one" / "model.safetensors")
    assert fingerprint(tmp_path / "one") != base, "a fine-tune of one inner tensor is another target"
    save_file({k: v.bfloat16() for k, v in state.items()}, tmp_path / "one" / "model.safetensors")
    assert fingerprint(tmp_path / "one") != base, "other numbers"
    save_file(state, tmp_path / "one" / "model.safetensors")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    for name, value, same in [("rope_theta", 5e5, False), ("eos_token_id", 7, True), ("torch_dtype", "float16", True)]:
        (tmp_path / "one" / "config.json").write_text(json.dumps({**config, name: value}))
        assert (fingerprint(tmp_path / "one") == base) is same, name


def test_ends_of_the_tiny_target(tiny_target: Path, make_tiny_target, tmp_path: Path):
    stored = load_file(tiny_target / "model.safetensors")
    ends = load_ends(tiny_target)
    assert torch.equal(ends.embedding, stored["model.embed_tokens.weight"])
    assert ends.head is ends.embedding
    untied = load_ends(make_tiny_target(tmp_path / "untied", tied=False))
    assert not torch.equal(untied.head, untied.embedding)
