"""The target and the drafts that tests of real engines share.

EYAS_TEST_DRAFT, else runs/demo/export, else one trained here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.export import NotExpressible, export_draft
from eyas.target.source import resolve_target

SMALL = ("ask.count=null", "regenerate.max_supervised_tokens=12000", "prompts.per_source=250", "extract.heldout=8",
         "train.epochs=3", "prove.prompts=1")  # fmt: skip


@pytest.fixture(scope="session")
def target() -> Path:
    return resolve_target("smollm2")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """A trained draft as Eyas exports it."""
    root = tmp_path_factory.mktemp("served")
    given = Path(os.environ.get("EYAS_TEST_DRAFT") or "runs/demo/export")
    given = given if given.is_dir() else trained(root / "run")
    export_draft(given, root / "draft", target_dir=target, engines=("sglang", "vllm", "llamacpp"))
    return root / "draft"


@pytest.fixture(scope="session")
def draft(exported: Path) -> Path:
    return exported


@pytest.fixture(scope="session")
def plain_draft(exported: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that OpenVINO can express, which knows no norm before fc: the same, or another."""
    root = tmp_path_factory.mktemp("plain")
    try:
        export_draft(exported, root / "asked", to="openvino", target_dir=target)
        return exported
    except NotExpressible:
        return trained(root / "run", "train.norm_before_fc=false")


def trained(out: Path, *more: str) -> Path:
    """A small run's export."""
    options = [word for setting in (*SMALL, *more) for word in ("--override", setting)]
    subprocess.run([sys.executable, "-m", "eyas", "run", "demo", "--out", out, *options], check=True)
    return out / "export"
