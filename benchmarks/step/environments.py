"""Environments of the peers, built once below the cache and used again while they are whole.

    python benchmarks/train_step.py --tools specforge speculators --works "full mask, L = 512" --steps 1 --rounds 1

One is built under a temporary name; its marker, which holds the recipe, is written last, and then it gets its name. So
a folder that has its name is whole, and one of another recipe is built again. Only its `bin/python` is ever called: the
scripts beside it still name the temporary folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from eyas.cache import cache_dir
from eyas.engines.environment import read_json
from eyas.engines.setup.build import clean_environment
from eyas.errors import EyasError
from eyas.writes import atomic_write_json

MARKER = "whole.json"
TORCH = "torch==2.13.0"
"""Installed first and alone: by another package's range pip would take a newer one, built for GPUs (6 GB)."""
# Arguments of `pip`, one call each, and a line of Python that must run afterwards. torch is named once more with what
# requires it, or torchvision's newest would replace it; torchvision and torchaudio are left out again, since PyPI's are
# built for GPUs and cannot load beside a CPU torch. Nothing that is timed here needs them.
RECIPES: dict[str, tuple[list[list[str]], str]] = {
    "specforge": (
        [
            ["install", TORCH],
            ["install", TORCH, "transformers==5.8.1", "safetensors", "pydantic", "pyyaml", "tqdm", "numpy"],
            ["install", "--no-deps", "specforge==0.2.0"],
        ],
        "import importlib.metadata as m; assert m.version('specforge') == '0.2.0'",
    ),
    "speculators": (
        [
            ["install", TORCH],
            ["install", TORCH, "speculators==0.9.0"],
            ["uninstall", "--yes", "torchvision", "torchaudio"],
        ],
        "from speculators.models.eagle3 import Eagle3DraftModel",
    ),
}
SAME_TORCH = f"import torch; assert torch.__version__.split('+')[0] == {TORCH.split('==')[1]!r}, torch.__version__"


def peers_root() -> Path:
    """Where the environments lie: `peers` below Eyas's cache ($EYAS_CACHE, or ~/.cache/eyas)."""
    return cache_dir() / "peers"


def whole(folder: Path, recipe: object) -> bool:
    """Was this folder finished, by that recipe?"""
    return read_json(folder / MARKER).get("recipe") == recipe and (folder / "bin" / "python").exists()


def environment(peer: str, say: Callable[[str], None]) -> Path:
    """The Python of a peer's environment, which is built first where it is missing.

    Raises EyasError with the end of what pip said where it cannot be built.
    """
    installs, check = RECIPES[peer]
    recipe = json.loads(json.dumps([installs, check, list(sys.version_info[:2])]))
    final = peers_root() / peer
    if not whole(final, recipe):
        say(f"{peer}: building its environment in {final}, once")
        building = final.with_name(f".{peer}-{os.getpid()}")
        try:
            building.parent.mkdir(parents=True, exist_ok=True)
            _call(peer, [sys.executable, "-m", "venv", "--clear", str(building)])
            python = str(building / "bin" / "python")
            for arguments in installs:
                say(f"{peer}: pip {' '.join(arguments)}")
                _call(peer, [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", *arguments])
            _call(peer, [python, "-c", f"{SAME_TORCH}; {check}"])
            atomic_write_json(building / MARKER, {"recipe": recipe})
            shutil.rmtree(final, ignore_errors=True)
            building.rename(final)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return final / "bin" / "python"


def _call(peer: str, command: list[str]) -> None:
    done = subprocess.run(
        command, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip
    if done.returncode != 0:
        raise EyasError(f"{peer}: `{' '.join(command)}` left with {done.returncode}: {done.stdout[-2000:].strip()}")
