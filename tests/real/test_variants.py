"""The variants are what they say, without any engine.   pytest -q tests/real/test_variants.py"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from variants import VARIANTS, D, H, V, config, tensors, write_all


def test_there_are_many_and_each_says_what_it_is():
    assert len(VARIANTS) >= 35
    for name, write in VARIANTS.items():
        lines = (write.__doc__ or "").strip().splitlines()
        assert len(lines) == 1 and lines[0].endswith("."), name


def test_each_is_a_directory_of_its_own(tmp_path: Path):
    seen = set()
    for name, folder in write_all(tmp_path).items():
        text = json.dumps(json.loads((folder / "config.json").read_text()), sort_keys=True)
        shapes = [
            (key, tuple(t.shape), t.dtype, t.flatten()[:3].tolist())
            for path in sorted(folder.glob("*.safetensors"))
            for key, t in sorted(load_file(path).items())
        ]
        kind = (text, str(shapes), *sorted(path.name for path in folder.iterdir()))
        assert kind not in seen, f"{name} is the same as another variant"
        seen.add(kind)


def test_the_plain_one_is_whole():
    weights = tensors()
    assert weights["fc.weight"].shape == (H, 3 * H) and weights["lm_head.weight"].shape == (D, H)
    ids = weights["d2t"] + torch.arange(D)
    assert weights["t2d"].nonzero().flatten().equal(ids) and len(weights["t2d"]) == V
    assert config(draft_vocab_size=...).get("draft_vocab_size", "gone") == "gone"
