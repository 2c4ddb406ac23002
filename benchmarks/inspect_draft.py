"""`eyas inspect` on a draft of the size of Kimi-K2's (1.2B parameters): seconds and memory beside a bare import.

    python benchmarks/inspect_draft.py

The weights are a hole in a file: they take no disk, and nobody should read them. Medians of separate processes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from kimi import kimi_shaped

ROUNDS = 5
MEASURE = """
import resource, time
t = time.perf_counter()
{}
print(time.perf_counter() - t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def run(code: str) -> tuple[float, float]:
    """(seconds, MiB) of a process of its own; the medians."""
    rows = []
    for _ in range(ROUNDS):
        out = subprocess.run([sys.executable, "-c", MEASURE.format(code)], capture_output=True, text=True, check=True)
        rows.append([float(x) for x in out.stdout.split()[-2:]])
    seconds, memory = zip(*rows, strict=True)
    return statistics.median(seconds), statistics.median(memory)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        size = kimi_shaped(Path(folder))
        print(f"a draft of {size / 1e9:.2f} GB")
        bare = run("import safetensors")
        mine = run(f"from eyas.describe import inspect_draft; inspect_draft({folder!r})")
        print(f"import safetensors  {bare[0]:6.3f} s  {bare[1]:6.1f} MiB")
        print(f"inspect_draft       {mine[0]:6.3f} s  {mine[1]:6.1f} MiB  ({mine[1] - bare[1]:+.1f} MiB)")


if __name__ == "__main__":
    main()
