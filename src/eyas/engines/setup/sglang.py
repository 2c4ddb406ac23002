"""SGLang on a CPU without AMX: the published package, and a stand-in for the kernels that PyPI has for CUDA only.

Everything is SGLang's own but what stand_in/sglang/ holds: attention and the bookkeeping of drafting, in plain PyTorch.
Left out of what it requires: the kernels, for that reason, and what only they, audio and other hardware need.

    eyas engines setup sglang
"""

from __future__ import annotations

from .build import Build
from .recipe import Recipe
from .steps import VENV, packages_step, stand_in_step, torch_step

VERSION = "0.5.23"


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
        stand_in_step("sglang", "stand-ins for its CUDA kernels", imported="eyas_sglang_cpu"),
    ),
    check=_check,
    disk_mib=3050,
    minutes=6,
    variables={"SGLANG_USE_CPU_ENGINE": "1"},
    programs={"serve": "stand_in/serve.py"},
)
