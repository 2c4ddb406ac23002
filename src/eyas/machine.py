"""What depends on the machine rather than on the model."""

from __future__ import annotations

import ctypes
import sys


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
