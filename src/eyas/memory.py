"""Memory that does not suffice: how it is told from other errors, and said with what was being done.

    with spending("a step over 2,048 tokens", "lower train.micro_tokens"): ...        pytest tests/test_failures.py

Whoever allocates knows what it was for and which setting makes it less, so the words stand there. What passes without
is explained at the top (cli/failures.py), where only the verb is known.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

from eyas.errors import OutOfMemory

# What allocators say in errors of a general kind: torch's for CPUs, its C++ half, oneDNN, CUDA's libraries.
SAYS = re.compile(
    r"DefaultCPUAllocator|can(?:'|no)t allocate memory|not enough memory|out of memory|std::bad_alloc|"
    r"CUBLAS_STATUS_ALLOC_FAILED|unable to mmap",
    re.IGNORECASE,
)
ASKED = re.compile(r"allocate (?P<bytes>\d+) bytes|allocate (?P<said>[\d.]+ [KMGTPE]iB)", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Did an allocation fail? By class, or by what torch's own errors say; torch is not imported for it."""
    if isinstance(error, MemoryError) or any(c.__name__ == "OutOfMemoryError" for c in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and SAYS.search(str(error)) is not None


def wanted(error: BaseException) -> str:
    """How much was asked for, as a clause with a blank before it; '' where the allocator does not say."""
    found = ASKED.search(str(error))
    if found is None:
        return ""
    return f" ({found['said'] or size_of(int(found['bytes']))} more were asked for)"


def size_of(number: float) -> str:
    """Bytes with the unit in which they have one to four digits before the point."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if number < 1024:
            return f"{number:,.0f} bytes" if unit == "bytes" else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} EiB"


@contextlib.contextmanager
def spending(doing: str, remedy: str) -> Iterator[None]:
    """Within, a failed allocation becomes OutOfMemory: what was being done, how much was asked for, what to do."""
    try:
        yield
    except OutOfMemory:
        raise
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory in {doing}{wanted(error)}: {remedy}") from error
