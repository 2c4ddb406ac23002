"""`eyas export --no-verify` of a draft of the size of Kimi-K2's (1.2B parameters) beside `cp` of the same files.

    python benchmarks/export.py

Both write to the same disk and are synced; whole processes are timed, imports included. Medians of alternating rounds.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kimi import kimi_shaped

ROUNDS = 5


def timed(command: list[str]) -> tuple[float, float, float]:
    """(seconds, CPU-seconds, MiB at most) of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    assert status == 0, command
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, usage.ru_maxrss / 1024


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else ".") as name:
        folder = Path(name)
        (folder / "draft").mkdir()
        size = kimi_shaped(folder / "draft", holes=False)
        eyas = [sys.executable, "-m", "eyas", "export", str(folder / "draft"), str(folder / "out"), "--no-verify"]
        copy = ["sh", "-c", f"cp -r {folder}/draft {folder}/out && sync {folder}/out/*"]
        rows: dict[str, list[tuple[float, float, float]]] = {"cp": [], "eyas": []}
        for _ in range(ROUNDS):
            for kind, command in (("cp", copy), ("eyas", [*eyas, "--to", "vllm"])):
                rows[kind].append(timed(command))
                shutil.rmtree(folder / "out")
        print(f"a draft of {size / 1e9:.2f} GB")
        medians = {k: [statistics.median(column) for column in zip(*v, strict=True)] for k, v in rows.items()}
        for kind, (seconds, cpu, memory) in medians.items():
            print(f"{kind:5} {seconds:6.2f} s  {cpu:6.2f} CPU-s  {size / seconds / 1e6:7.0f} MB/s  {memory:7.0f} MiB")
        print(f"share of cp's speed: {medians['cp'][0] / medians['eyas'][0]:.0%}")


if __name__ == "__main__":
    main()
