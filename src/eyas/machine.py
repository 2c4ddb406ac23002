"""What depends on the machine rather than on the model."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import time
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Literal

from eyas.errors import BadInput

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "float32", "bfloat16", "float16"]


def reuse_large_allocations() -> None:
    """Let glibc keep large freed blocks instead of returning them to the kernel after each tensor.

    Buffers of tens of megabytes are otherwise mapped and page-faulted anew in every step. Does nothing where there
    is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has no mallopt
        return
    # malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX. The mmap threshold stops at 32 MiB, so mmap is not used at all.
    mallopt(-1, (1 << 31) - 1)
    mallopt(-4, 0)


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_politely(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads that wait for each other sleep instead of spinning, where other programs want the cores now, too.

    For before torch is imported: OpenMP reads the variables once. A thread that spins keeps the core that the thread
    it waits for needs: beside one other program two threads took seven times the CPU time of one (docs/experiments.md).
    On an idle machine spinning is quicker, so that is left as it is, and so is what the user chose.
    """
    if not any(name in environment for name in WAITING) and others_running() >= 1:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"


def others_running(path: str = "/proc/loadavg") -> int:
    """Threads of other programs that want a core at this moment; 0 where the system does not tell."""
    found = []
    for wait in (0.0, 0.004, 0.008):  # one look may hit what only blinks
        time.sleep(wait)
        try:
            with open(path, encoding="ascii") as file:
                found.append(int(file.read().split()[3].split("/")[0]) - 1)  # proc(5): runnable now, and we are
        except (OSError, ValueError, IndexError):
            return 0
    return max(0, sorted(found)[1])


@contextlib.contextmanager
def no_denormals() -> Iterator[None]:
    """Within, this thread and threads it starts compute numbers below 1e-38 as zero, on CPUs that can.

    A softmax far from its largest logit is full of them, and a product with one costs some CPUs a hundred times as
    much: a step of training took up to four times as long (docs/experiments.md). Afterwards all is as before, since
    others rely on them.
    """
    import torch

    before = bool(torch.tensor([1e-30]).mul_(1e-10).eq_(0))
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def return_free_memory() -> None:
    """Give freed blocks back to the kernel, which `reuse_large_allocations` keeps: between stages, not within one."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def native_bfloat16(device: str = "cpu") -> bool:
    """Does `device` multiply in bfloat16 by instructions of its own? Without them it is slower than float32."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu":
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def check_device(device: str | torch.device) -> torch.device:
    """The device of that name. Raises BadInput where this machine has none, before anything is loaded for it."""
    import torch

    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise BadInput(
            f"device {str(device)!r} cannot be used here: expected cpu, cuda, or one of several such as cuda:1"
        ) from error
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0]
        raise BadInput(
            f"device {str(device)!r} cannot be used here: {said}; give --device cpu, or mend that"
        ) from error
    return found


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


def row_multiple(dtype: str, device: str = "cpu") -> int:
    """To which multiple numbers of rows are best padded. `dtype` is that of the products.

    oneDNN, which multiplies bfloat16 on CPUs, compiles a kernel for each new shape: with AMX 3 ms each, which at rows
    that differ in every batch was as much as a third to a half of a training step (docs/experiments.md).
    """
    return 32 if device == "cpu" and dtype == "bfloat16" else 1


def choose_precision(wanted: str, device: str = "cpu") -> str:
    """`auto` as a dtype's name: the one in which `device` computes fastest; any other name as it is."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if native_bfloat16(device) else "float32"
