"""What a training step costs on this machine: CPU-seconds per 1,000 supervised rows, and rows per second.

    python benchmarks/train_step.py runs/demo --dtype float32 bfloat16 --threads 1 2

RUN is the folder of a run, whose features and vocabulary are used. All settings in one process, in turn, on the same
batches; medians over steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from eyas.features.reader import FeatureSet
from eyas.machine import reuse_large_allocations
from eyas.target.source import resolve_target
from eyas.train.batches import plan_steps
from eyas.train.inputs import prepare
from eyas.train.loop import Run
from eyas.train.settings import TrainSettings
from eyas.vocab import VocabMap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--target", help="as everywhere; default smollm2")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    parser.add_argument("--size", type=int, help="draft vocabulary; default: the run's")
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument("--ttt-steps", type=int, default=4)
    parser.add_argument("--train-head", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    a = parser.parse_args()
    reuse_large_allocations()
    features, target = FeatureSet.open(a.run / "extract"), resolve_target(a.target)
    vocab = VocabMap.load(a.run / "vocab")
    vocab = vocab.recut(a.size) if a.size else vocab
    runs = {}
    for dtype in a.dtype:
        settings = TrainSettings(
            steps=1000, batch_tokens=a.batch_tokens, micro_tokens=a.batch_tokens, ttt_steps=a.ttt_steps, dtype=dtype,
            train_head=a.train_head,
        )  # fmt: skip
        given = prepare(features, target, vocab, None, settings, 0)
        given.initialise()
        runs[dtype] = Run(given, settings, 0, torch.device("cpu"))
    plan = plan_steps(features.doc_lengths.numpy(), a.batch_tokens, a.batch_tokens, 0)
    found = defaultdict(list)
    for number, batch in enumerate(itertools.islice(plan, a.steps + 1)):
        for dtype, threads in itertools.product(a.dtype, a.threads):
            torch.set_num_threads(threads)
            run = runs[dtype]
            rows, wall, cpu = run.rows, time.perf_counter(), time.process_time()
            run.optimize(batch)
            rows = run.rows - rows
            if number:  # the first step allocates
                found[dtype, threads].append(
                    (rows / (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu) / rows)
                )
    print(f"{'dtype':10} {'threads':>7} {'rows/s':>8} {'CPU-s/1000':>11}")
    for (dtype, threads), values in found.items():
        rate, cpu = (statistics.median(v) for v in zip(*values, strict=True))
        print(f"{dtype:10} {threads:7} {rate:8.0f} {cpu:11.2f}")


if __name__ == "__main__":
    main()
