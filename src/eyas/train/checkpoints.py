"""The whole state of a training run on disk: weights, optimizer, RNG, place in the data.

    checkpoints/step-000100/{draft.safetensors, optimizer.safetensors, state.json}

A checkpoint is written into a temporary folder and renamed, so under its final name it is always whole; `latest` checks
it by digest all the same and falls back to the one before. No pickle.   Exercise it:  pytest tests/test_train_loop.py
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..digests import sha256_file
from ..errors import EyasError, Mismatch
from ..untrusted import content, parse_json
from ..writes import atomic_dir, atomic_save_safetensors, atomic_write_json, remove_leftovers
from .ranks import like, whole

SCHEMA = "eyas-training/1"
FOLDER = "checkpoints"
WEIGHTS, OPTIMIZER, STATE = "draft.safetensors", "optimizer.safetensors", "state.json"


@dataclass
class Checkpoint:
    """A checkpoint read back: tensors, and what `state.json` keeps."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]
    damaged: list[str] = field(default_factory=list)
    """Newer checkpoints that could not be read, each with the reason."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.state["step"])


def save(
    folder: Path,
    step: int,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write `folder/step-NNNNNN`, then remove all but the newest `keep`. State must be JSON, optimizer from `flatten`.

    Raises EyasError naming the file where the disk is full; earlier checkpoints are then still there.
    """
    out = folder / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_dir(out) as temporary:
        atomic_save_safetensors(weights, temporary / WEIGHTS)
        atomic_save_safetensors({**optimizer, **rng_states()}, temporary / OPTIMIZER)
        digests = {name: sha256_file(temporary / name) for name in (WEIGHTS, OPTIMIZER)}
        record = {"schema": SCHEMA, "step": step, "files": digests, **state}
        atomic_write_json(temporary / STATE, record)
    # Whatever is newer than this step was damaged, or the run would have gone on from there.
    sound = [other for other in steps(folder) if other <= step]
    for old in set(steps(folder)) - set(sound[-keep:]):
        shutil.rmtree(folder / f"step-{old:06d}", ignore_errors=True)
    return out


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints under their final names, ascending."""
    found = (re.fullmatch(r"step-(\d+)", p.name) for p in folder.glob("step-*") if p.is_dir())
    return sorted(int(m[1]) for m in found if m)


def latest(folder: Path, identity: Mapping[str, Any]) -> Checkpoint | None:
    """The newest whole checkpoint, None where there is none. Clears what killed writers left.

    identity: what decides the run's result, as JSON; it is kept in the state as `identity`. Raises Mismatch naming what
    differs when the checkpoint is of another run, EyasError when there are checkpoints and none can be read.
    """
    if folder.is_dir():
        remove_leftovers(folder)
    damaged: list[str] = []
    for step in reversed(steps(folder)):
        place = folder / f"step-{step:06d}"
        try:
            state = parse_json(content(place / STATE))
            if state["schema"] != SCHEMA:
                raise ValueError(f"schema {state['schema']!r}, expected {SCHEMA!r}")
            for name, digest in state["files"].items():
                if sha256_file(place / name) != digest:
                    raise ValueError(f"{name} is not what was written: its SHA-256 differs")
            weights, optimizer = load_file(place / WEIGHTS), load_file(place / OPTIMIZER)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, EyasError) as error:
            damaged.append(f"{place.name} ({error})")
            continue
        _check_identity(folder, state.get("identity", {}), identity)
        return Checkpoint(weights, optimizer, state, damaged)
    if damaged:
        raise EyasError(
            f"{folder}: no checkpoint can be read: {'; '.join(damaged)}. Remove the folder to train from the start."
        )
    return None


def _check_identity(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise Mismatch naming every value that differs between the run on disk and the one asked for."""
    old, new = _flat(there), _flat(here)
    differs = [f"{name} was {old.get(name)}, now {new.get(name)}" for name in sorted(old.keys() | new.keys())
               if old.get(name) != new.get(name)]  # fmt: skip
    if differs:
        raise Mismatch(
            f"{folder} holds a run made with other settings or inputs: {'; '.join(differs)}. Choose another --out "
            f"(with --init-from to go on from this run's draft), or remove {folder} to start again."
        )


def _flat(values: Mapping[str, Any]) -> dict[str, str]:
    """One level: `{"settings": {"lr": 1}}` -> `{"settings.lr": "1"}`; digests shortened."""
    out = {}
    for name, value in values.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, leaf in inner:
            out[f"{name}.{key}" if key else name] = leaf[:64] if isinstance(leaf, str) else json.dumps(leaf)
    return out


# ---------------------------------------------------------------- optimizer and RNG


def rng_states() -> dict[str, torch.Tensor]:
    """Generator states, uint8: `rng.cpu` and, where CUDA is in use, `rng.cuda.0` and so on."""
    out = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out |= {f"rng.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return out


def restore_rng(tensors: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `rng_states`. A machine with another number of CUDA devices keeps its own CUDA states."""
    torch.set_rng_state(tensors["rng.cpu"])
    devices = sum(name.startswith("rng.cuda.") for name in tensors)
    if devices and torch.cuda.is_available() and devices == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([tensors[f"rng.cuda.{i}"] for i in range(devices)])


def flatten(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Optimizer states as flat tensors `{optimizer}.{parameter}.{name}`; numbers become 0-d tensors, shards whole ones.

    So a checkpoint does not tell how many processes wrote it. With FSDP2 all of them must call this.
    """
    out = {}
    for i, optimizer in enumerate(optimizers):
        for p, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                out[f"{i}.{p}.{name}"] = whole(torch.as_tensor(value).detach()).cpu().contiguous()
    return out


def restore(optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `flatten`, into optimizers made with the same parameters in the same order."""
    for i, optimizer in enumerate(optimizers):
        full = optimizer.state_dict()
        full["state"] = {}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for name, tensor in tensors.items():
            if name.startswith(f"{i}."):
                _, p, key = name.split(".", 2)
                cut = like(tensor, parameters[int(p)]) if tensor.ndim else tensor
                full["state"].setdefault(int(p), {})[key] = cut
        optimizer.load_state_dict(full)
