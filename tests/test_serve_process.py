"""Servers as processes: nothing of them is ever left, whatever ends first.   pytest -q tests/test_serve_process.py

The servers here are small programs, started as real ones are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.errors import BadInput, EyasError
from eyas.serve.explain import explained, tail
from eyas.serve.ports import free_port, listens, reachable
from eyas.serve.process import guarded, until_ready
from eyas.serve.server import at_a_port

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are found by /proc")

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *words): pass
print("loading", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# A child in a session of its own, and an orphan of a child, both deaf to what can be ignored.
FAMILY = """
import os, subprocess, sys, time
def start(text):
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, start_new_session=True)
    return child, int(child.stdout.readline())
deaf = "import os, signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; "
deaf += "print(os.getpid(), flush=True); time.sleep(300)"
child, pid = start(deaf)
forker, orphan = start(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}])")
forker.wait()
open(sys.argv[1], "w").write(f"{os.getpid()} {pid} {orphan}")
os.rename(sys.argv[1], sys.argv[1] + ".all")
time.sleep(300)
"""
EYAS = """
import sys, time
from pathlib import Path
from eyas.serve.process import guarded
with guarded(sys.argv[2:], {}, Path(sys.argv[1]), grace=0.3) as process:
    print(process.pid, flush=True)
    time.sleep(300)
"""


def program(folder: Path, text: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(text)
    return [sys.executable, str(folder / "program.py")]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def soon(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.02)
    return true()


def family(file: Path) -> list[int]:
    whole = Path(f"{file}.all")
    assert soon(whole.is_file)
    return [int(word) for word in whole.read_text().split()]


def test_a_server_answers_and_is_gone_afterwards(tmp_path: Path):
    port = free_port("127.0.0.1", None)
    url = f"http://127.0.0.1:{port}"
    with guarded([*program(tmp_path, SERVER), str(port)], {}, tmp_path / "log") as process:
        assert until_ready(process, url, 20, print, port=port) < 20
        assert process.alive() and lives(process.pid) and process.exit_code() is None
        assert listens(process.family(), port) and listens([os.getpid()], port) is False
        with pytest.raises(BadInput, match=rf"--port {port} .*cannot be used .*end what listens there"):
            free_port("127.0.0.1", port)
    assert not process.alive() and not lives(process.pid)
    assert process.tail().startswith("loading")
    assert process.exit_code() is not None
    assert free_port("127.0.0.1", port) == port


def test_one_that_dies_says_why(tmp_path: Path):
    text = "import sys\nprint('x' * 9000)\nprint('error: unrecognized arguments: --foo')\nsys.exit(3)"
    log = tmp_path / "log"
    with guarded(program(tmp_path, text), {}, log) as process, pytest.raises(EyasError) as caught:
        until_ready(process, "http://127.0.0.1:1", 20, print, "vllm 0")
    assert "vllm 0 left with exit code 3" in str(caught.value)
    assert "The engine does not know an option given after `--`" in str(caught.value)
    assert "unrecognized arguments: --foo" in str(caught.value) and str(log) in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_one_that_never_answers_is_stopped(tmp_path: Path):
    heard: list[str] = []
    with (
        guarded(
            program(tmp_path, "import time\nprint('thinking', flush=True)\ntime.sleep(300)"), {}, tmp_path / "log"
        ) as p,
        pytest.raises(EyasError, match=r"did not answer at .* within 1 s and was stopped"),
    ):
        until_ready(p, "http://127.0.0.1:1", 1, heard.append)
    assert not lives(p.pid)


def test_another_program_at_the_port_is_not_taken_for_the_server(tmp_path: Path):
    port = free_port("127.0.0.1", None)
    other = subprocess.Popen([*program(tmp_path / "other", SERVER), str(port)], stdout=subprocess.DEVNULL)
    try:
        assert soon(lambda: bool(listens([other.pid], port)))
        with (
            guarded(program(tmp_path, "import time\ntime.sleep(300)"), {}, tmp_path / "log") as process,
            pytest.raises(EyasError, match="another program answers there"),
        ):
            until_ready(process, f"http://127.0.0.1:{port}", 0.5, print, port=port)
    finally:
        other.kill()
        other.wait()


def test_a_port_that_is_taken_meanwhile_is_left(tmp_path: Path):
    marker = str(tmp_path / "tried")
    once = f"import os, sys\nif not os.path.exists({marker!r}):\n    open({marker!r}, 'w')\n"
    once += "    print('[Errno 98] error while attempting to bind: address already in use')\n    sys.exit(1)\n"
    words = program(tmp_path, once + SERVER)
    heard: list[str] = []
    arguments = ({}, "127.0.0.1", None, tmp_path / "log", 20.0, heard.append, "sglang 0")
    with contextlib.ExitStack() as stack:
        process, url, _ = at_a_port(lambda port: [*words, str(port)], *arguments, stack)
        assert process.alive() and url.rpartition(":")[2] == process.command[-1]
    assert not lives(process.pid)
    assert any("was taken meanwhile; trying another" in line for line in heard)


def test_a_port_that_was_asked_for_is_not_changed(tmp_path: Path):
    words = program(tmp_path, "import sys\nprint('Address already in use')\nsys.exit(1)")
    port = free_port("127.0.0.1", None)
    arguments = ({}, "127.0.0.1", port, tmp_path / "log", 20.0, print, "sglang 0")
    with contextlib.ExitStack() as stack, pytest.raises(EyasError, match="name another --port"):
        at_a_port(lambda _: words, *arguments, stack)


def test_children_that_left_the_group_end_too(tmp_path: Path):
    with guarded([*program(tmp_path, FAMILY), str(tmp_path / "pids")], {}, tmp_path / "log", grace=0.3) as process:
        pids = family(tmp_path / "pids")
        assert len(pids) == 3 and all(map(lives, pids)) and set(pids) <= set(process.family())
    assert not any(map(lives, pids))


def test_what_a_server_that_died_left_behind_ends(tmp_path: Path):
    words = [*program(tmp_path, FAMILY.replace("time.sleep(300)\n", "sys.exit(7)\n")), str(tmp_path / "pids")]
    with guarded(words, {}, tmp_path / "log", grace=0.3) as process:
        pids = family(tmp_path / "pids")
        assert soon(lambda: not process.alive())
        assert not any(map(lives, pids))
        assert process.exit_code() == 7


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_eyas_is_killed(tmp_path: Path, how: signal.Signals):
    words = [*program(tmp_path, FAMILY), str(tmp_path / "pids")]
    main = [*program(tmp_path / "eyas", EYAS), str(tmp_path / "log"), *words]
    eyas = subprocess.Popen(main, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        pids = family(tmp_path / "pids")
        assert all(map(lives, pids))
    finally:
        eyas.send_signal(how)
        eyas.communicate(timeout=30)
    assert soon(lambda: not any(map(lives, pids)))


def test_the_server_ends_when_its_guard_is_killed(tmp_path: Path):
    port = free_port("127.0.0.1", None)
    with guarded([*program(tmp_path, SERVER), str(port)], {}, tmp_path / "log") as process:
        until_ready(process, f"http://127.0.0.1:{port}", 20, print)
        process._guard.kill()
        assert soon(lambda: not process.alive() and not lives(process.pid))
        assert process.exit_code() is None


def test_sigint_reaches_a_server_started_in_the_background(tmp_path: Path):
    """A shell's `&` ignores SIGINT in what it starts, and that is inherited."""
    text = (
        "import signal, sys, time\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)\n"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with guarded(program(tmp_path, text + "time.sleep(300)"), {}, tmp_path / "log") as process:
            assert soon(lambda: process.tail().strip() == "True")
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_cannot_be_started_or_logged(tmp_path: Path):
    with pytest.raises(EyasError, match=r"cannot be started \(/no/such/python: No such file"):
        guarded(["/no/such/python"], {}, tmp_path / "log").__enter__()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"--log .* cannot be written"):
        guarded(["true"], {}, tmp_path / "file" / "log").__enter__()


def test_ends_of_logs(tmp_path: Path):
    log = tmp_path / "log"
    assert tail(log, 9) == ""
    log.write_text("first line\n" + "second\n" * 3)
    assert tail(log, 9) == "second\n"
    assert tail(log, 900) == log.read_text()
    log.write_text("a line longer than that\n")
    assert tail(log, 6) == " that\n"
    log.write_text("")
    assert explained(log) == f"It printed nothing. Its log: {log}"
    log.write_text("RuntimeError: Model does not support EAGLE3 interface")
    assert explained(log).startswith("This engine's class of the target cannot hand out the states")


def test_the_root_cause_is_quoted(tmp_path: Path):
    """Of vLLM's log: a worker's traceback, its parent's, its parent's."""
    log = tmp_path / "log"
    log.write_text(
        "(Worker pid=7) ERROR 11-30 16:21:50 [multiproc_executor.py:1] Traceback (most recent call last):\n"
        '(Worker pid=7) ERROR 11-30 16:21:50 [multiproc_executor.py:1]   File "a.py", line 1, in load\n'
        "(Worker pid=7) ERROR 11-30 16:21:50 [multiproc_executor.py:1] ValueError: There is no module or parameter "
        "named 'model.extra' in Eagle3LlamaForCausalLM\n"
        "(EngineCore pid=6) ERROR 11-30 16:21:51 [core.py:2] Exception: WorkerProc initialization failed due to an\n"
        "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    said = explained(log)
    assert said.startswith(
        "The file has a tensor that the engine's class does not know; vLLM stops. It says:\n  ValueErr"
    )
    assert len(said.splitlines()) == 3 and said.endswith(f"The whole log: {log}")


def test_hosts():
    assert [reachable(host) for host in ("127.0.0.1", "0.0.0.0", "::", "::1")] == [
        "127.0.0.1", "127.0.0.1", "[::1]", "[::1]",
    ]  # fmt: skip
    with pytest.raises(BadInput, match=r"--host 192\.0\.2\.1: nothing can listen there"):
        free_port("192.0.2.1", None)
