"""Targets that are not the one a draft was made for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def moved(target: Path, out: Path) -> Path:
    """A target whose weights went on: what a fine-tune does to a draft that was made before it."""
    out.mkdir()
    for file in target.iterdir():
        if file.suffix == ".safetensors":
            torch.manual_seed(0)
            save_file({n: t + 0.1 * t.float().std().to(t.dtype) * torch.randn_like(t) if t.dim() == 2 else t
                       for n, t in load_file(file).items()}, out / file.name, {"format": "pt"})  # fmt: skip
        elif file.is_file():
            (out / file.name).write_bytes(file.read_bytes())
    return out
