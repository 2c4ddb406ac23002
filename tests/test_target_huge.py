"""Targets of hundreds of shards: only those with the ends are opened, fetched, needed; nested configs and names.

pytest -q tests/test_target_huge.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from eyas.errors import BadInput, Mismatch
from eyas.export.write import _fingerprints
from eyas.features.extract import feature_meta
from eyas.features.reader import FeatureSet
from eyas.target import source
from eyas.target.facts import read_facts
from eyas.target.source import ends_fingerprint, fingerprint, other_target, resolve_target
from eyas.target.weights import load_ends, missing_files

SHARDS = 300
TEXT = {
    "hidden_size": 16, "vocab_size": 40, "num_hidden_layers": SHARDS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 24, "rms_norm_eps": 1e-6, "max_position_embeddings": 128,
    "rope_theta": 50000.0,
}  # fmt: skip
KIMI = {
    **TEXT, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 8, "q_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "tie_word_embeddings": False,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0,
                     "beta_slow": 1.0, "original_max_position_embeddings": 64},
}  # fmt: skip


def build(folder: Path, prefix: str = "language_model.model.", head: str = "language_model.lm_head.weight") -> Path:
    """A multimodal target whose blocks lie in `SHARDS` files, its ends in the first, the last and the last but one."""
    folder.mkdir()
    config = {"model_type": "kimi_k25", "text_config": KIMI, "vision_config": {"hidden_size": 9}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE"}, "added_tokens": []}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    ends = {1: {prefix + "embed_tokens.weight": random(40, 16)}, SHARDS - 1: {head: random(40, 16)},
            SHARDS: {prefix + "norm.weight": random(16)}}  # fmt: skip
    weight_map = {}
    for i in range(1, SHARDS + 1):
        name = f"model-{i:05}-of-{SHARDS:05}.safetensors"
        tensors = {f"{prefix}layers.{i - 1}.mlp.gate.weight": random(2, 2), **ends.get(i, {})}
        tensors |= {"vision_tower.norm.weight": random(9)} if i == 2 else {}
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("huge") / "whole")


@pytest.fixture(scope="module")
def partial(whole: Path, tmp_path_factory) -> Path:
    """The three shards that a user downloaded."""
    folder = tmp_path_factory.mktemp("partial") / "target"
    shutil.copytree(whole, folder)
    for file in folder.glob("*.safetensors"):
        if int(file.name[6:11]) not in (1, SHARDS - 1, SHARDS):
            file.unlink()
    return folder


def test_only_three_of_three_hundred_shards_are_opened(whole: Path, partial: Path, monkeypatch: pytest.MonkeyPatch):
    import safetensors

    opened: list[str] = []
    plain = safetensors.safe_open

    def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(Path(file).name)
        return plain(file, *args, **kwargs)

    monkeypatch.setattr(safetensors, "safe_open", watched)
    ends = load_ends(whole)
    assert sorted(name[6:11] for name in opened) == ["00001", "00299", "00300"]
    some = load_ends(partial)
    assert torch.equal(ends.head, some.head)
    assert torch.equal(ends.embedding, some.embedding)
    assert ends.final_norm is not None
    assert ends.final_norm.shape == (16,)
    assert len(missing_files(partial)) == SHARDS - 3


def test_a_partial_folder_is_the_same_target_as_the_whole_one(whole: Path, partial: Path, tmp_path: Path):
    assert ends_fingerprint(whole) == ends_fingerprint(partial)
    assert fingerprint(partial) == f"ends:{ends_fingerprint(whole)}"
    declared, ends = fingerprint(whole), ends_fingerprint(whole)
    assert other_target(declared, ends, partial) is None
    assert other_target(fingerprint(partial), "", whole) is None
    assert other_target(declared, "", partial) is None, "features from before this was recorded: nobody can tell"
    assert _fingerprints(partial, {"target": declared, "ends": ends}, tmp_path)["target"] == declared
    other = tmp_path / "other"
    shutil.copytree(partial, other)
    shard = other / f"model-{SHARDS - 1:05}-of-{SHARDS:05}.safetensors"
    save_file({"language_model.lm_head.weight": torch.ones(40, 16).bfloat16()}, shard)
    assert other_target(declared, ends, other) == (f"ends:{ends}", f"ends:{ends_fingerprint(other)}")
    with pytest.raises(Mismatch, match="was trained for target ends:"):
        _fingerprints(other, {"target": declared, "ends": ends}, tmp_path)


def test_features_of_the_whole_target_are_accepted_with_the_partial_one(whole: Path, partial: Path, tmp_path: Path):
    facts = read_facts(whole)
    meta = feature_meta(whole, facts, (2, 150, 297))
    again = type(meta).from_dict(json.loads(json.dumps(meta.to_dict())))
    assert again == meta
    features = FeatureSet(tmp_path, {}, [], again)
    features.check(target=partial)
    features.check(target=whole)
    config = json.loads((partial / "config.json").read_text())
    other = tmp_path / "other"
    shutil.copytree(partial, other)
    config["text_config"]["rope_theta"] = 1e6
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(Mismatch, match="made with target ends:"):
        features.check(target=other)


def test_the_hub_is_asked_for_these_files_alone(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    fetched: list[str] = []

    def snapshot(name: str, revision: Any, ignore_patterns: Any, allow_patterns: Any) -> str:
        assert (name, revision) == ("org/huge", "main")
        files = [f.name for f in whole.iterdir()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            if not (tmp_path / file).is_file():
                fetched.append(file)
                shutil.copy(whole / file, tmp_path / file)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    folder = resolve_target("org/huge@main", part="ends")
    weights = sorted(int(name[6:11]) for name in fetched if name.endswith(".safetensors"))
    assert weights == [1, SHARDS - 1, SHARDS]
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= set(fetched)
    assert torch.equal(load_ends(folder).head, load_ends(whole).head)
    assert fingerprint(folder).startswith(source.PARTIAL)
    resolve_target("org/huge@main")  # a command that needs the model itself fetches the rest
    assert missing_files(folder) == []


def test_an_index_that_lists_no_head_is_told_before_anything_is_fetched(whole: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    del index["weight_map"]["language_model.lm_head.weight"]
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match="no head among the tensors"):
        load_ends(copy)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head.weight"),  # Qwen2.5-VL, Qwen3-VL, GLM-4V, Mistral 3 as transformers 5 writes
        ("language_model.model.", "language_model.lm_head.weight"),  # Kimi K2.5, Llama 4, InternVL, Gemma 3, LLaVA
        ("model.", "lm_head.weight"),  # Qwen2-VL, with visual.* beside
        ("thinker.model.", "thinker.lm_head.weight"),  # Qwen-Omni
        ("model.language_model.model.", "model.language_model.lm_head.weight"),
    ],
)
def test_names_of_multimodal_families(tmp_path: Path, prefix: str, head: str):
    from test_target_weights import _folder, _state

    state = _state(prefix, head)
    # Towers with the same endings, elsewhere: they are nobody's ends.
    others = {f"{tower}.{name}": torch.zeros(3) for tower in ("vision_tower", "visual", "talker.model", "audio_tower")
              for name in ("norm.weight", "embed_tokens.weight")}  # fmt: skip
    save_file(state | others, _folder(tmp_path, nested=True) / "model.safetensors")
    ends = load_ends(tmp_path)
    assert torch.equal(ends.embedding, state[prefix + "embed_tokens.weight"])
    assert torch.equal(ends.head, state[head])
    assert ends.final_norm is not None
    assert torch.equal(ends.final_norm, state[prefix + "norm.weight"])


def test_the_norm_beside_the_embedding_wins(tmp_path: Path):
    from test_target_weights import _folder, _state

    state = _state("language_model.model.", "language_model.lm_head.weight")
    save_file(state | {"model.norm.weight": torch.zeros(8)}, _folder(tmp_path, nested=True) / "model.safetensors")
    norm = load_ends(tmp_path).final_norm
    assert norm is not None
    assert torch.equal(norm, state["language_model.model.norm.weight"])


def test_facts_of_a_kimi_like_config(whole: Path):
    facts = read_facts(whole)
    assert (facts.hidden_size, facts.vocab_size, facts.num_layers, facts.tied) == (16, 40, SHARDS, False)
    assert facts.rope_theta == 50000.0
    assert facts.rope_parameters["rope_type"] == "yarn"
    assert facts.default_taps == (2, 150, 297)
