"""Rewriting a safetensors file: what changes is what was asked, everything else is bit for bit.

pytest -q tests/test_rewrite.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyas.draft.rewrite import rewrite
from eyas.errors import BadInput, EyasError

TENSORS = {
    "a": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "half": torch.randn(7, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "ids": torch.arange(9),
    "marks": torch.tensor([True, False, True]),
    "none": torch.zeros(0, 4),
}
NEW = {"a": np.ones((2, 2), np.float32), "ids": np.arange(4), "marks": np.array([False, True]), "x": np.int32([1])}


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(list(NEW))), st.sets(st.sampled_from(list(TENSORS))))
def test_what_was_asked_and_nothing_else(tmp_path_factory, replaced: set[str], dropped: set[str]):
    folder = tmp_path_factory.mktemp("rewrite")
    save_file(TENSORS, folder / "old.safetensors", {"format": "pt", "ü": "ß"})
    changes = {name: NEW[name] for name in replaced} | dict.fromkeys(dropped - replaced)
    rewrite(folder / "old.safetensors", folder / "new.safetensors", changes)
    got = load_file(folder / "new.safetensors")
    wanted = {k: v for k, v in TENSORS.items() if k not in dropped or k in replaced}
    wanted |= {name: torch.from_numpy(np.ascontiguousarray(NEW[name])) for name in replaced}
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
    with safe_open(folder / "new.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt", "ü": "ß"}


def test_without_changes_the_values_and_a_second_time_the_bytes_are_the_same(tmp_path: Path):
    save_file(TENSORS, tmp_path / "0")
    rewrite(tmp_path / "0", tmp_path / "1", {})
    rewrite(tmp_path / "1", tmp_path / "2", {})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_refusals(tmp_path: Path):
    save_file(TENSORS, tmp_path / "old")
    with pytest.raises(BadInput, match="holds no nothing"):
        rewrite(tmp_path / "old", tmp_path / "new", {"nothing": None})
    with pytest.raises(BadInput, match="no dtype for complex64"):
        rewrite(tmp_path / "old", tmp_path / "new", {"a": np.zeros(2, np.complex64)})
    assert not (tmp_path / "new").exists()
    with pytest.raises(EyasError, match="cannot be written"):
        rewrite(tmp_path / "old", tmp_path / "old", {})
    assert torch.equal(load_file(tmp_path / "old")["ids"], TENSORS["ids"])
