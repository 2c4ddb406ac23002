"""Our forward, at step 0 and later ones, against the trainers' own draft classes, on tiny random drafts in float32.

The classes come from the wheels of SpecForge 0.2.0 and speculators 0.9.0 on PyPI, which are put beside SGLang's
environment (it has what they import).   make test-engines
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafts import make_draft, with_embedding
from eyas.cache import cache_dir
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.draft.unroll import Packing, Unroll
from eyas.engines.environment import Environment, ready
from eyas.export import export_draft

pytestmark = pytest.mark.engine
PEERS = {"specforge": "specforge==0.2.0", "speculators": "speculators==0.9.0"}
LENGTH, STEPS = 24, 4
TOLERANCE = 2e-5  # of logits of about 1: float32 sums in another order
CASES = [
    ("specforge", {}),
    ("specforge", {"fc_norm": True}),
    ("specforge", {"rope_theta": 5e5, "taps": (1, 3, 6)}),
    ("speculators", {}),
    ("speculators", {"fc_norm": True}),
    ("speculators", {"norm_before_fc": True}),
    ("speculators", {"norm_before_residual": True}),
    ("speculators", {"norm_output": True}),
    ("speculators", {"qk_norm": True}),
    ("speculators", {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "rope_theta": 1e6}),
]


@pytest.fixture(scope="session")
def peers() -> Environment:
    """SGLang's environment with both wheels on its path."""
    environment = ready("sglang")
    assert environment is not None, "run `eyas engines setup sglang` (make test-engines does)"
    folder = cache_dir() / "engines" / "peers"
    for name, requirement in PEERS.items():
        if not (folder / name).is_dir():
            pip = [environment.python, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, requirement]
            subprocess.run(pip, check=True)
    return replace(environment, variables={**environment.variables, "PYTHONPATH": os.fspath(folder)})


@pytest.mark.parametrize(("peer", "conventions"), CASES)
def test_the_forward_is_the_trainers_own(peer: str, conventions: dict, peers: Environment, tmp_path: Path):
    draft, vocab_map = make_draft(3, **conventions)
    save_draft(draft, vocab_map, tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / peer, to=peer, dtype="keep")
    (tmp_path / peer / "eyas.json").unlink()
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "ids": torch.randint(0, 300, (LENGTH,), generator=generator),
        "taps": torch.randn(LENGTH, 96, generator=generator),
        "embedding": with_embedding(draft),
        "steps": torch.tensor([STEPS]),
    }
    save_file(inputs, tmp_path / "inputs.safetensors")
    script = Path(__file__).with_name(f"forward_{peer}.py")
    peers.run(script, [tmp_path / peer, tmp_path / "inputs.safetensors", tmp_path / "out.safetensors"])
    theirs = load_file(tmp_path / "out.safetensors")["logits"]
    rows = torch.arange(LENGTH - STEPS)
    for k, mine in enumerate(unrolled(tmp_path / "draft", inputs, rows)):
        assert (mine - theirs[k][rows]).abs().max() < TOLERANCE * mine.abs().max(), f"step {k}"


@torch.inference_mode()
def unrolled(folder: Path, inputs: dict[str, torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    """Logits [rows, D] of our draft at each step, teacher-forced."""
    draft, _, _ = load_draft(folder)
    draft.set_embedding(inputs["embedding"])
    unroll = Unroll(draft, Packing(torch.tensor([0, LENGTH])), rows)
    following = torch.cat([inputs["ids"][1:], inputs["ids"][-1:]])
    embedded = unroll.embed(following)
    h, out = unroll.start(embedded, inputs["taps"]), []
    for k in range(STEPS):
        out.append(draft.logits(h))
        if k + 1 < STEPS:
            h = unroll.step(embedded[rows + k + 1], draft.feedback(h))
    return out
