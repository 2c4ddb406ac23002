"""From another trainer's features to a proven export with three shards of a target's hundreds: nothing else is opened.

pytest -q tests/test_train_partial.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.draft.checkpoint import load_draft
from eyas.errors import Mismatch
from eyas.export import export_draft
from eyas.features.count import count_supervised
from eyas.features.foreign import import_foreign
from eyas.features.reader import FeatureSet
from eyas.target.model import Target
from eyas.target.weights import missing_files
from eyas.train.loop import train
from eyas.train.settings import TrainSettings
from eyas.vocab import VocabMap
from training import SETTINGS, conversations


def sharded(target: Path, folder: Path) -> Path:
    """The same target with one file a tensor."""
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{i:03}.safetensors" for i, name in enumerate(sorted(tensors))}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


@pytest.fixture
def whole(tiny_target: Path, tmp_path: Path) -> Path:
    return sharded(tiny_target, tmp_path / "whole")


@pytest.fixture
def partial(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "partial"
    shutil.copytree(whole, folder)
    held = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in held.items():
        if not name.endswith(("embed_tokens.weight", "model.norm.weight")):
            (folder / file).unlink()
    return folder


def states(target: Path, folder: Path) -> Path:
    """Hidden states as speculators stores them, with masks in a JSONL file."""
    loaded, rows = Target.load(target), []
    folder.mkdir()
    for i, row in enumerate(conversations(8, 1)):
        ids = torch.tensor(row["prompt_token_ids"] + row["response_token_ids"])
        with loaded.recording((2, 4, 5, 8)) as seen:
            loaded.decoder(input_ids=ids[None], use_cache=False)
        stacked = torch.stack([seen[tap][0] for tap in (2, 4, 5, 8)], 1)
        save_file({"hidden_states": stacked.contiguous(), "token_ids": ids}, folder / f"hs_{i}.safetensors")
        mask = [0] * len(row["prompt_token_ids"]) + [1] * len(row["response_token_ids"])
        rows.append(json.dumps({"input_ids": ids.tolist(), "loss_mask": mask}))
    (folder / "masks.jsonl").write_text("\n".join(rows))
    return folder


def test_import_train_and_export_with_the_ends_alone(whole: Path, partial: Path, tmp_path: Path):
    assert len(missing_files(partial)) > 50
    source = states(whole, tmp_path / "states")
    import_foreign("speculators", source, partial, tmp_path / "features", masks=source / "masks.jsonl", progress=False)
    features = FeatureSet.open(tmp_path / "features")
    assert features.meta.target == f"ends:{features.meta.ends}"
    vocab_map = VocabMap.from_counts(count_supervised(features), 150, always=(0, 1, 2))
    settings = TrainSettings(**SETTINGS)
    train(features, tmp_path / "run", target_dir=partial, vocab_map=vocab_map, settings=settings, progress=False)
    export_draft(tmp_path / "run", tmp_path / "draft", target_dir=partial, features=features)
    told = json.loads((tmp_path / "draft" / "eyas.json").read_text())["target"]
    assert told["ends"] == features.meta.ends
    there, _, _ = load_draft(tmp_path / "draft", whole)
    here, _, _ = load_draft(tmp_path / "draft", partial)
    assert torch.equal(there.lm_head.weight, here.lm_head.weight)
    # The whole target is the same one, a target with another embedding is not.
    export_draft(tmp_path / "run", tmp_path / "again", target_dir=whole)
    file = json.loads((whole / "model.safetensors.index.json").read_text())["weight_map"]["model.embed_tokens.weight"]
    stored = load_file(whole / file)
    save_file({name: tensor + 1 for name, tensor in stored.items()}, whole / file)
    with pytest.raises(Mismatch, match="was trained for target ends:"):
        export_draft(tmp_path / "run", tmp_path / "other", target_dir=whole)
