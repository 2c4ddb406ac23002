"""How a failure leaves the program: one line that says what to do, and with --verbose where it came from.

eyas --verbose inspect no-such-draft                pytest tests/test_cli.py
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path

from eyas import console
from eyas.errors import EyasError
from eyas.terminal import echo

TRACE = "last-error.txt"


def explain(error: EyasError) -> None:
    """What a user can be told, on one line; with --verbose the traceback, and what caused it, stands above."""
    if console.verbose():
        echo("".join(traceback.format_exception(error)), err=True, nl=False)
    rank = os.environ.get("RANK", "0")  # of the processes of a torchrun
    echo(f"eyas{'' if rank == '0' else f' (process {rank})'}: {error}", err=True)


def apologise(error: Exception) -> None:
    """A bug: one line, and the traceback in a file, since hours of work may stand between it and the next time."""
    trace = "".join(traceback.format_exception(error))
    where = None if console.verbose() else _kept(trace)
    if where is None:
        echo(trace, err=True, nl=False)
        told = "the traceback above"
    else:
        told = f"the traceback in {where}, which --verbose prints"
    said = " ".join(str(error).split())
    echo(
        f"eyas: unexpected {type(error).__name__}{': ' * bool(said)}{said[:300]}. This is a fault of Eyas, not of your "
        f"input: please report it in Eyas's issues, with the command and {told}",
        err=True,
    )


def _kept(trace: str) -> Path | None:
    """Where the traceback was written; None where it could not be."""
    from eyas._version import __version__
    from eyas.cache import cache_dir
    from eyas.writes import atomic_write

    with contextlib.suppress(OSError, EyasError):
        path = cache_dir() / TRACE
        atomic_write(path, f"eyas {__version__}, Python {sys.version.split()[0]}\n{sys.argv}\n\n{trace}")
        return path
    return None
