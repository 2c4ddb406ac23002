"""`eyas doctor` as a user runs it: seconds, CPU seconds and peak memory of whole processes.

    python benchmarks/diagnose.py path/to/draft [--target smollm2]

Static on the draft, static on a draft of Kimi-K2's sizes (2.47 GB of random weights, written for it), and the whole
diagnosis with the target's answers recorded before. Medians of separate processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kimi import kimi_shaped

ROUNDS = 3


def run(*args: str, rounds: int = ROUNDS) -> str:
    """Wall seconds, CPU seconds and peak MiB of `eyas doctor ARGS`; the medians."""
    rows = []
    for _ in range(rounds):
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "eyas", "doctor", *args], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        if os.waitstatus_to_exitcode(status) not in (0, 1):
            raise SystemExit(f"eyas doctor {' '.join(args)} could not run")
        rows.append((time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))
    wall, cpu, memory = (statistics.median(column) for column in zip(*rows, strict=True))
    return f"{wall:6.2f} s  {cpu:6.2f} CPU-s  {memory:7.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("draft")
    parser.add_argument("--target", default="smollm2")
    args = parser.parse_args()
    print("static             ", run(args.draft, "--static"))
    print("static with target ", run(args.draft, "--static", "--target", args.target))
    with tempfile.TemporaryDirectory() as folder:
        size = kimi_shaped(Path(folder), holes=False)
        print(f"static, {size / 1e9:.2f} GB    ", run(folder, "--static"))
    run(args.draft, "--target", args.target, rounds=1)  # records, once
    print("whole diagnosis    ", run(args.draft, "--target", args.target))


if __name__ == "__main__":
    main()
