"""running(launch): a real engine that serves target and draft, for as long as a `with` block lasts.

    with running(Launch("vllm", target, draft), tell=print) as server:
        requests to server.url

Engines run in the environments of `eyas engines setup`.          make test-engines (tests/real/test_serve.py)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..engines.environment import required
from ..errors import EyasError
from .check import target_facts
from .command import cache_gib, here, variables
from .explain import TAKEN
from .launch import Launch
from .ports import free_port, reachable
from .prepare import prepared
from .process import Process, Tell, default_log, guarded, until_ready

ATTEMPTS = 3  # at a free port, which another program may take before the server does


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    engine: str
    url: str
    model: str
    """The name that OpenAI-style requests give."""
    log: Path
    """Kept when it ends."""
    command: list[str]
    pid: int
    seconds: float
    """From its start until it answered."""
    notes: tuple[str, ...]
    """What was changed of target and draft on the way, in sentences."""
    _process: Process = field(repr=False)

    def alive(self) -> bool:
        """Does it still run?"""
        return self._process.alive()

    def tail(self, n: int = 4000) -> str:
        """The last `n` bytes of its log."""
        return self._process.tail(n)


@contextlib.contextmanager
def running(launch: Launch, tell: Tell = lambda _: None, wait: float = 900.0) -> Iterator[Server]:
    """Start the server, yield it when it answers, and stop it, whole, at the end.

    tell: hears a line now and then. wait: seconds until it must answer. Raises BadInput where the engine is not set up
    or the port is taken, EyasError, with the end of the log, where it ends or takes too long. Whether draft and engine
    go together is not asked here (`check`).
    """
    with contextlib.ExitStack() as stack:
        yield _start(launch, tell, wait, stack)


def _start(launch: Launch, tell: Tell, wait: float, stack: contextlib.ExitStack) -> Server:
    found = required(launch.engine)
    free_port(launch.host, launch.port)  # before anything is converted
    inputs = prepared(launch, tell)
    gib = cache_gib(launch, target_facts(launch))
    environ = found.environ() | variables(launch, gib)
    threads = int(environ.get("OMP_NUM_THREADS") or 1)
    process, url, seconds = at_a_port(
        lambda port: here(launch, inputs, found, port, threads, gib), environ, launch.host, launch.port,
        (launch.log or default_log(launch.engine)).absolute(), wait, tell, f"{found.engine} {found.version}", stack,
    )  # fmt: skip
    command = list(process.command)
    return Server(launch.engine, url, launch.model, process.log, command, process.pid, seconds, inputs.notes, process)


def at_a_port(
    command: Callable[[int], list[str]], environ: Mapping[str, str], host: str, port: int | None, log: Path,
    wait: float, tell: Tell, name: str, stack: contextlib.ExitStack,
) -> tuple[Process, str, float]:  # fmt: skip
    """Start `command(port)` and wait until it answers: (process, url, seconds). `stack` stops it.

    port: None takes a free one, and another where that is taken before the server has it.
    """
    tell(f"{name}: starting; its log is {log}")
    for last in [False] * (ATTEMPTS - 1 if port is None else 0) + [True]:
        chosen = free_port(host, port)
        url = f"http://{reachable(host)}:{chosen}"
        with contextlib.ExitStack() as mine:
            process = mine.enter_context(guarded(command(chosen), environ, log))
            try:
                seconds = until_ready(process, url, wait, tell, name, chosen)
            except EyasError:
                if last or process.alive() or not TAKEN.search(process.tail()):
                    raise
                tell(f"{name}: port {chosen} was taken meanwhile; trying another")
                continue
            stack.enter_context(mine.pop_all())
            return process, url, seconds
    raise AssertionError("the last attempt returns or raises")
