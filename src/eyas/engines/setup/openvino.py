"""OpenVINO GenAI, and optimum-intel, which converts models for it.

Among the pins are einops and diffusers: the remote code with which optimum-intel exports drafts imports them. Left out
is torchvision, a CUDA build on PyPI; beside a CPU torch the converter would not even start.

    eyas engines setup openvino
"""

from __future__ import annotations

from .build import Build
from .recipe import Recipe
from .steps import VENV, packages_step, torch_step

VERSION = "2026.4.1"
OPTIMUM = "2.2.0"


def _check(build: Build) -> str:
    build.run(build.folder / "venv" / "bin" / "optimum-cli", "export", "openvino", "--help")
    said = build.run(build.python, "-c", "import openvino_genai; print(openvino_genai.__version__)")
    return said.strip().splitlines()[-1]


RECIPE = Recipe(
    engine="openvino",
    version=VERSION,
    steps=(
        VENV,
        torch_step(),
        packages_step("openvino", f"openvino-genai {VERSION}, optimum-intel {OPTIMUM} and what they need"),
    ),
    check=_check,
    disk_mib=1650,
    minutes=5,
    programs={"optimum-cli": "venv/bin/optimum-cli"},
)
