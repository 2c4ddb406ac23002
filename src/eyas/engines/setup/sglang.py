"""SGLang on a CPU without AMX: the published package, and a stand-in for the kernels that PyPI has for CUDA only.

Everything is SGLang's own but what stand_in/sglang/ holds: attention and the bookkeeping of drafting, in plain PyTorch.
Left out of what it requires: the kernels, for that reason, and what only they, audio and other hardware need.

    eyas engines setup sglang
"""

from __future__ import annotations

import shutil

from .recipe import STAND_IN, VENV, Build, Recipe, Step, packages_step, torch_step, tree_digest

VERSION = "0.5.23"
FILES = STAND_IN / "sglang"
PTH = "eyas_stand_in.pth"


def _stand_in(build: Build) -> None:
    """Put the stand-ins on the path of every Python of the environment, and load the hook that goes with them."""
    folder = build.folder / "stand_in"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FILES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (build.site_packages() / PTH).write_text(f"{folder}\nimport eyas_sglang_cpu\n")


def _check(build: Build) -> str:
    code = (
        "import sgl_kernel, sglang; from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3; "
        "print('sglang', sglang.__version__)"
    )
    return build.run(build.python, "-c", code).strip().splitlines()[-1]


RECIPE = Recipe(
    engine="sglang",
    version=VERSION,
    steps=(
        VENV,
        torch_step(),
        packages_step("sglang", f"sglang {VERSION} and what it imports"),
        Step("stand_in", "stand-ins for its CUDA kernels", _stand_in, (tree_digest(FILES),)),
    ),
    check=_check,
    disk_mib=3100,
    minutes=4,
    variables={"SGLANG_USE_CPU_ENGINE": "1"},
    programs={"serve": "stand_in/serve.py"},
)
