"""What depends on the machine.   pytest -q tests/test_machine.py"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas import machine


@pytest.mark.parametrize(("running", "wanted"), [("1/77", 0), ("3/77", 2), ("nothing", 0)])
def test_who_else_wants_a_core(tmp_path: Path, running: str, wanted: int):
    (tmp_path / "loadavg").write_text(f"1.50 1.63 2.28 {running} 19929\n")
    assert machine.others_running(str(tmp_path / "loadavg")) == wanted
    assert machine.others_running(str(tmp_path / "none")) == 0


@pytest.mark.parametrize(
    ("given", "others", "policy"),
    [
        ({}, 1, "PASSIVE"),
        ({}, 0, None),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 3, "ACTIVE"),
        ({"GOMP_SPINCOUNT": "7"}, 3, None),
    ],
)
def test_threads_sleep_where_others_work(given: dict[str, str], others: int, policy: str | None, monkeypatch):
    monkeypatch.setattr(machine, "others_running", lambda: others)
    machine.wait_politely(given)
    assert given.get("OMP_WAIT_POLICY") == policy


@pytest.mark.skipif(not Path("/proc/loadavg").exists(), reason="only Linux tells")
def test_a_busy_machine_is_seen():
    """Two programs that never pause, and the system's own count of them."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        deadline = time.monotonic() + 20
        while machine.others_running() < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert machine.others_running() >= 1
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_the_command_line_decides_before_torch_is_there():
    code = (
        "import sys; from eyas import machine; machine.others_running = lambda: 2\n"
        "from eyas.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: import os; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in machine.WAITING}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert said.stdout.splitlines()[-1] == "PASSIVE False"
