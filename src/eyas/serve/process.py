"""A server as a process: started under a guard, watched until it answers, and stopped with all that it started.

    with guarded(command, environ, log, "http://127.0.0.1:8000") as process: ...

Whatever happens to Eyas, SIGKILL included, nothing of the server is left (guard.py).

    pytest tests/test_serve_process.py
"""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..cache import cache_dir
from ..errors import BadInput, EyasError
from .explain import explained, tail
from .guard import descendants
from .ports import listens

GUARD = Path(__file__).with_name("guard.py")
GRACE = 5.0  # seconds for a server to stop by itself
NEWS = 10.0  # seconds between two lines of progress
KEPT_LOGS = 50
LOOK = 0.25  # seconds between two health checks
TAIL = 4000  # bytes of a log's end that are looked at
Tell = Callable[[str], object]


@dataclass
class Process:
    """A guarded server that was started."""

    command: tuple[str, ...]
    log: Path
    pid: int
    _guard: subprocess.Popen[bytes] = field(repr=False)
    _code: int | None = None

    def family(self) -> list[int]:
        """The server and all that it started, as far as they live."""
        return descendants(self._guard.pid)

    def alive(self) -> bool:
        """Does the server still run?"""
        return self._guard.poll() is None

    def tail(self, n: int = TAIL) -> str:
        """The last `n` bytes of the log, from the beginning of a line on."""
        return tail(self.log, n)

    def exit_code(self) -> int | None:
        """The server's, negative for a signal; None while it runs, or where its guard was killed."""
        if self.alive():
            return None
        if self._code is None and self._guard.stdout is not None:
            for line in self._guard.stdout.read().decode().splitlines():
                if line.startswith("EXIT "):
                    self._code = int(line[5:])
        return self._code

    def stop(self) -> None:
        """End it, and all that it started. Returns when nothing is left; the second time at once."""
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
        self._guard.wait()
        self.exit_code()
        if self._guard.stdout is not None:
            self._guard.stdout.close()


@contextlib.contextmanager
def guarded(command: Sequence[str], environ: Mapping[str, str], log: Path, grace: float = GRACE) -> Iterator[Process]:
    """Start `command` with its output in `log` (kept, begun anew), and stop it at the end however that comes.

    Raises EyasError where it cannot be started.
    """
    _begin(log)
    words = [sys.executable, "-I", str(GUARD), str(os.getpid()), str(log), str(grace), *command]
    guard = subprocess.Popen(
        words, env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert guard.stdin is not None and guard.stdout is not None
    try:
        said = guard.stdout.readline().decode(errors="replace").strip()
        if not said.startswith("PID "):
            why = said.removeprefix("FAILED ") or "its guard ended at once"
            raise EyasError(f"the server cannot be started ({why}); run `eyas engines setup ENGINE --force`")
        process = Process(tuple(command), log, int(said[4:]), guard)
    except BaseException:
        guard.stdin.close()
        guard.wait()
        guard.stdout.close()
        raise
    try:
        yield process
    finally:
        process.stop()


def _begin(log: Path) -> None:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
    except OSError as error:
        raise BadInput(f"--log {log} cannot be written ({error.strerror}); name another file") from error


def default_log(engine: str) -> Path:
    """A new file in the cache; only the newest fifty are kept there."""
    folder = cache_dir() / "serve" / "logs"
    old = sorted(folder.glob("*.log")) if folder.is_dir() else []
    for path in old[: max(0, len(old) - KEPT_LOGS + 1)]:
        path.unlink(missing_ok=True)
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return folder / f"{now}-{engine}-{os.getpid()}.log"


# ---------------------------------------------------------------- until it answers


def until_ready(
    process: Process, url: str, wait: float, tell: Tell, name: str = "the server", port: int | None = None
) -> float:
    """Seconds until `url`/health answers with 200, by this server and not by another program at that `port`.

    Raises EyasError, with the end of the log and its path, where the server ends before or `wait` seconds are over.
    """
    began = time.monotonic()
    news = began + NEWS
    heard = ""
    while True:
        answers = _healthy(f"{url}/health")
        foreign = answers and port is not None and listens(process.family(), port) is False
        now = time.monotonic()
        if not process.alive():
            code = process.exit_code()
            how = "was killed from outside" if code is None else f"left with exit code {code}"
            raise EyasError(f"{name} {how} after {now - began:.0f} s. {explained(process.log)}")
        if answers and not foreign:
            return now - began
        if now - began > wait:
            what = f"{name} did not answer at {url}/health within {wait:g} s and was stopped"
            what += "; another program answers there" if foreign else ""
            raise EyasError(f"{what}. {explained(process.log)}")
        if now > news:
            news = now + NEWS
            line = _last_line(process.tail())
            tell(f"{name}: {now - began:.0f} s{'' if line == heard else ': ' + line}")
            heard = line
        time.sleep(LOOK)


def _healthy(page: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business here
    try:
        with opener.open(page, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "nothing in its log yet"
