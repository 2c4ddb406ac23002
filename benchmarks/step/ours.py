"""One measurement of Eyas in a process of its own: prints one JSON object; benchmarks/train_step.py starts it.

    python benchmarks/step/ours.py FOLDER --dtype float32 --threads 1 --steps 3

FOLDER is a work's (see step/features.py). A step is `Run.optimize` as `eyas train` calls it: the batch is made from the
mapped files, then forward, backward, clipping and the optimizer. Memory is the highest resident size during the steps,
warm-up included, less that before the first. Then the machine's own product of the head's shape is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from eyas.features.reader import FeatureSet
from eyas.machine import no_denormals, return_free_memory, reuse_large_allocations
from eyas.target.source import resolve_target
from eyas.train.inputs import prepare
from eyas.train.loop import Run
from eyas.train.settings import TrainSettings
from eyas.vocab import VocabMap

GEMM = (512, 576, 8192)  # rows of a chunk, hidden size, draft vocabulary
GEMM_SECONDS = 1.5


def status_mib(name: str) -> float:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def forget_peak() -> bool:
    """Let VmHWM begin anew from here; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return status_mib("VmHWM") <= status_mib("VmRSS") + 1


def gemm_rate(dtype: torch.dtype) -> float:
    """FLOP a CPU-second of [512 x 576] @ [576 x 8192] on one thread: median of several, after one that is not counted.

    The head lies as nn.Linear keeps it, and the result's memory is used again.
    """
    torch.set_num_threads(1)
    rows, inner, columns = GEMM
    x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    torch.mm(x, weight.T, out=out)
    seconds: list[float] = []
    while len(seconds) < 5 or sum(seconds) < GEMM_SECONDS:
        began = time.process_time()
        torch.mm(x, weight.T, out=out)
        seconds.append(time.process_time() - began)
    return 2 * rows * inner * columns / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", help="as everywhere; default smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", action="store_true", help="train.recompute: less memory, more work")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    reuse_large_allocations()
    features, vocab = FeatureSet.open(a.folder / "features"), VocabMap.load(a.folder / "vocab.safetensors")
    plan = json.loads((a.folder / "batches.json").read_text())
    tokens = max(int(features.doc_lengths[docs].sum()) for docs in plan)
    settings = TrainSettings(
        steps=1000, batch_tokens=tokens, micro_tokens=tokens, ttt_steps=a.ttt_steps, dtype=a.dtype, optimizer="adamw",
        recompute=a.recompute,
    )  # fmt: skip
    given = prepare(features, resolve_target(a.target), vocab, None, settings, 0)
    given.initialise()
    run = Run(given, settings, 0, torch.device("cpu"))
    gc.collect()
    return_free_memory()  # what the start has freed would otherwise serve the steps, and not be counted
    fresh, before = forget_peak(), status_mib("VmRSS")
    walls, cpus, rows, losses = [], [], [], []
    for number in range(a.warmup + a.steps):
        seen, wall, cpu = run.rows, time.perf_counter(), time.process_time()
        with no_denormals():
            sums, _ = run.optimize([plan[number % len(plan)]])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        losses.append(float(sums.loss[0] / sums.rows[0].clamp(min=1)))
        if number >= a.warmup:
            walls.append(wall)
            cpus.append(cpu)
            rows.append(run.rows - seen)
    peak = status_mib("VmHWM") if fresh else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told = {
        "wall_s": walls, "cpu_s": cpus, "supervised_rows": rows, "tokens": tokens, "rss_before_mib": before,
        "peak_rss_mib": peak, "loss": losses, "torch": torch.__version__,
        "gemm_flop_s": gemm_rate(getattr(torch, a.dtype)),
    }  # fmt: skip
    print(json.dumps(told))


if __name__ == "__main__":
    main()
