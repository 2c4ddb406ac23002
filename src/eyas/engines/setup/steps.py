"""The steps of which recipes are made, and those that several share: a venv, torch, pinned packages, stand-ins.

pytest tests/test_engines_setup.py
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...digests import sha256_json
from ...errors import EyasError
from .build import Build, CommandFailed

PINS = Path(__file__).with_name("pins")
STAND_IN = Path(__file__).with_name("stand_in")


@dataclass(frozen=True)
class Step:
    """One piece of work that may be repeated but, once stamped, is not."""

    name: str  # also the stamp's file name
    says: str  # what it does, for the person who waits
    work: Callable[[Build], None]
    pins: tuple[str, ...] = ()  # versions, options and digests of files that its result depends on


def tree_digest(folder: Path) -> str:
    """All Python files below a folder as a step's pin."""
    files = sorted(path for path in folder.rglob("*.py"))
    return sha256_json([[path.relative_to(folder).as_posix(), path.read_text()] for path in files])[:16]


def make_venv(build: Build) -> None:
    """A step's work. Anew if it was cut short: a half-made one cannot be told from a whole one."""
    try:
        build.run(sys.executable, "-m", "venv", "--clear", build.folder / "venv")
    except CommandFailed as error:
        if "ensurepip" in error.said:
            raise EyasError(
                "this Python cannot make virtual environments: install its venv module (Debian and Ubuntu: "
                "`apt-get install python3-venv`) and run the same command again."
            ) from None
        raise


VENV = Step("venv", "a virtual environment", make_venv, (f"python {sys.version_info[0]}.{sys.version_info[1]}",))


def torch_step(version: str = "2.13.0") -> Step:
    """torch first and alone: asked for by another package's range, pip would take a CUDA build of several GB."""
    return Step("torch", f"PyTorch {version}", lambda build: build.pip("install", f"torch=={version}"), (version,))


def stand_in_step(engine: str, says: str, imported: str = "") -> Step:
    """stand_in/<engine>/ on the path of every Python of the environment; `imported`: a module of it to start with."""
    files = STAND_IN / engine

    def work(build: Build) -> None:
        folder = build.folder / "stand_in"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(files, folder, ignore=shutil.ignore_patterns("__pycache__"))
        lines = [str(folder), *([f"import {imported}"] if imported else [])]
        (build.site_packages() / "eyas_stand_in.pth").write_text("\n".join(lines) + "\n")

    return Step("stand_in", says, work, (tree_digest(files), imported))


def packages_step(pins: str, says: str) -> Step:
    """Every package of pins/<pins>.txt, and no other.

    Those files are closed: nothing that they name needs a package that they lack, except what is left out on purpose
    (see the recipe). So pip need not resolve, and the environment is the same on every day.
    """
    path = PINS / f"{pins}.txt"
    digest = sha256_json(sorted(path.read_text().split()))[:16]
    return Step("packages", says, lambda build: build.pip("install", "--no-deps", "-r", path), (digest,))
