"""How fast the target answers on this machine, by precision, slots and threads; states are recorded as in a run.

    python benchmarks/generate.py --dtype float32 bfloat16 --slots 96 192 --threads 2

All settings in one process, in turn, `--rounds` times; medians. A row is one token fed through the model; the first
steps, in which slots fill, are not counted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections import defaultdict

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from eyas.chat import render, shared_prefix
from eyas.prompt_sets import training_prompts
from eyas.target.answering import make_generator
from eyas.target.model import Target
from eyas.target.record import Recorder
from eyas.target.requests import Request
from eyas.target.source import resolve_target

WARM = 30  # steps


def measure(target: Target, slots: int, new: int, seconds: float) -> tuple[float, float]:
    """(rows per second, CPU-seconds per 1,000 rows) of a Generator whose slots are all busy."""
    tokenizer = target.tokenizer
    asked = [p.messages for p in training_prompts() if len(p.text) <= 300]
    generator = make_generator(
        target, slots=slots, max_new_tokens=new, prefix=shared_prefix(tokenizer), recorder=Recorder(target)
    )
    for key, messages in enumerate(itertools.islice(itertools.cycle(asked), 40 * slots)):
        generator.add(Request(key, render(tokenizer, messages, add_generation_prompt=True)))
    with generator.running():
        for _ in range(WARM):
            generator.step()
        wall, cpu, rows = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - wall < seconds:
            rows += generator.active
            generator.step()
        return rows / (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu) / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="as everywhere; default smollm2")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--slots", nargs="+", type=int, default=[96, 192])
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    folder = resolve_target(a.target)
    targets = {dtype: Target.load(folder, dtype=getattr(torch, dtype)) for dtype in a.dtype}
    found = defaultdict(list)
    for _ in range(a.rounds):
        for dtype, slots, threads in itertools.product(a.dtype, a.slots, a.threads):
            torch.set_num_threads(threads)
            found[dtype, slots, threads].append(measure(targets[dtype], slots, a.max_new_tokens, a.seconds))
    print(f"{'dtype':10} {'slots':>5} {'threads':>7} {'rows/s':>8} {'CPU-s/1000':>11}")
    for (dtype, slots, threads), values in found.items():
        rate, cpu = (statistics.median(v) for v in zip(*values, strict=True))
        print(f"{dtype:10} {slots:5} {threads:7} {rate:8.0f} {cpu:11.2f}")


if __name__ == "__main__":
    main()
