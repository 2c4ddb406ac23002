"""The whole state of a training run on disk: weights, optimizer, RNG, place in the data.

    checkpoints/step-000100/{draft.safetensors, optimizer.safetensors, state.json}

A checkpoint is written into a temporary folder and renamed, so under its final name it is always whole; `latest` checks
it by digest all the same and falls back to the one before. No pickle.   Exercise it:  pytest tests/test_train_loop.py
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..artifacts import atomic_dir, atomic_save_safetensors, atomic_write_json, sha256_file
from ..errors import EyasError

SCHEMA = "eyas-training/1"
FOLDER = "checkpoints"
WEIGHTS, OPTIMIZER, STATE = "draft.safetensors", "optimizer.safetensors", "state.json"


@dataclass
class Checkpoint:
    """A checkpoint read back: tensors, and what `state.json` keeps."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.state["step"])


def save(
    folder: Path,
    step: int,
    weights: dict[str, torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write `folder/step-NNNNNN` and remove all but the newest `keep`. State must be JSON."""
    out = folder / f"step-{step:06d}"
    if out.exists():  # left by a run that was killed between this rename and its next line
        shutil.rmtree(out)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_dir(out) as temporary:
        atomic_save_safetensors(weights, temporary / WEIGHTS)
        atomic_save_safetensors(flatten(optimizers), temporary / OPTIMIZER)
        digests = {name: sha256_file(temporary / name) for name in (WEIGHTS, OPTIMIZER)}
        rng = torch.get_rng_state().tolist()
        record = {"schema": SCHEMA, "step": step, "rng": rng, "files": digests, **state}
        atomic_write_json(temporary / STATE, record)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / f"step-{old:06d}", ignore_errors=True)
    return out


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints under their final names, ascending."""
    found = (re.fullmatch(r"step-(\d+)", p.name) for p in folder.glob("step-*") if p.is_dir())
    return sorted(int(m[1]) for m in found if m)


def latest(folder: Path, key: str) -> Checkpoint | None:
    """The newest whole checkpoint of the run `key`, None where there is none.

    Raises EyasError when the checkpoints belong to another run (settings or inputs changed).
    """
    for step in reversed(steps(folder)):
        place = folder / f"step-{step:06d}"
        try:
            state = json.loads((place / STATE).read_text())
            if any(sha256_file(place / name) != digest for name, digest in state["files"].items()):
                raise ValueError("a file's digest differs")
            weights, optimizer = load_file(place / WEIGHTS), load_file(place / OPTIMIZER)
        except (OSError, ValueError, KeyError, EyasError):
            continue  # damaged by something other than us: the one before costs only time
        if state.get("schema") != SCHEMA or state.get("key") != key:
            raise EyasError(
                f"{place} belongs to a run with other settings, features or map. Choose another --out, or remove "
                f"{folder} to start again."
            )
        return Checkpoint(weights, optimizer, state)
    return None


def flatten(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Optimizer states as flat tensors `{optimizer}.{parameter}.{name}`; numbers become 0-d tensors."""
    out = {}
    for i, optimizer in enumerate(optimizers):
        for p, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                out[f"{i}.{p}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return out


def restore(optimizers: Sequence[torch.optim.Optimizer], tensors: dict[str, torch.Tensor]) -> None:
    """The inverse of `flatten`, into optimizers made with the same parameters in the same order."""
    for i, optimizer in enumerate(optimizers):
        whole = optimizer.state_dict()
        whole["state"] = {}
        for name, tensor in tensors.items():
            owner, p, key = name.split(".", 2)
            if int(owner) == i:
                whole["state"].setdefault(int(p), {})[key] = tensor
        optimizer.load_state_dict(whole)
