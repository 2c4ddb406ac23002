"""What the log of a failed command says, in a sentence with a remedy.   pytest tests/test_engines_setup.py"""

from __future__ import annotations

import re

# The first that matches wins, so causes stand before the complaints that they lead to.
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"No space left on device|Errno 28|Disk quota exceeded",
        "the disk is full: make room, or name another place with EYAS_CACHE.",
    ),
    (
        r"No matching distribution found for torch==\S*\+cpu",
        "pip finds no CPU build of PyTorch: name PyTorch's own index of CPU builds in PIP_EXTRA_INDEX_URL "
        "(pytorch.org, 'Get Started', shows it).",
    ),
    (
        r"name resolution|Failed to establish a new connection|NewConnectionError|Network is unreachable"
        r"|Connection refused|Connection reset|ReadTimeoutError|ConnectTimeout|Cannot connect to proxy"
        r"|Could not resolve host|IncompleteRead|CERTIFICATE_VERIFY_FAILED",
        "the package index cannot be reached: check the network, and the index, proxy and certificate settings of pip.",
    ),
    (
        r"THESE PACKAGES DO NOT MATCH THE HASHES",
        "a package is not the one that was expected (its hash differs): clear pip's cache (`pip cache purge`).",
    ),
    (
        r"No matching distribution found for (?P<what>[^\s(]+)",
        "pip finds no {what} for this Python and machine: if a mirror or an index of your own is set, it may lack it.",
    ),
    (
        r"Killed signal terminated program|virtual memory exhausted|Cannot allocate memory|MemoryError",
        "memory ran out: close other programs, or compile less at a time with --jobs 1.",
    ),
    (
        r"No CMAKE_C(?:XX)?_COMPILER could be found|is not able to compile a simple test program",
        "cmake finds no working C++ compiler: install one (Debian and Ubuntu: `apt-get install g++`).",
    ),
    (
        r"unable to find a build program|CMAKE_MAKE_PROGRAM is not set",
        "cmake finds no build program: install make or ninja (Debian and Ubuntu: `apt-get install make`).",
    ),
    (
        r"CMake (?P<what>\d[\d.]*) or higher is required",
        "cmake is too old, {what} is needed: `pip install cmake` brings a new one.",
    ),
    (
        r"fatal error: Python\.h: No such file",
        "Python's headers are missing: install them (Debian and Ubuntu: `apt-get install python3-dev`).",
    ),
    (r"Illegal instruction", "this processor lacks instructions that the build uses."),
)


def explain(said: str) -> str | None:
    """The cause and the remedy, or None where the log shows none that is known."""
    for pattern, sentence in _CAUSES:
        found = re.search(pattern, said)
        if found:
            return sentence.format(**found.groupdict())
    return None
