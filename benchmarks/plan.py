"""What `eyas plan` predicts beside what is measured here: bytes, resident memory, time of extraction and of training.

    python benchmarks/plan.py conversations.jsonl --limit 80 --set steps=30
    python benchmarks/plan.py conversations.jsonl --limit 60 --batch-tokens 512 --set batch_tokens=2048 --set steps=8 \\
        --set optimizer=adamw --set train_head=false --draft-vocab 4096

Each stage runs as a process of its own, whose highest resident size the kernel tells. The plan is calibrated for
20 seconds, on the same threads. CPU time is compared as well as wall time: other jobs change the latter at will.
Aims: bytes and memory within 10 %, time within 30 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def run(*args: str) -> dict[str, Any]:
    """One command of Eyas: its JSON, seconds of wall and of CPU, bytes at most."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([sys.executable, "-m", "eyas", *args, "--json"], stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        if status:
            raise SystemExit(f"eyas {' '.join(args)} failed")
        out.seek(0)
        told = json.loads(out.read().strip().splitlines()[-1])
    cpu = usage.ru_utime + usage.ru_stime
    return {"told": told, "wall": wall, "cpu": cpu, "bytes": usage.ru_maxrss * 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--limit", default="80")
    parser.add_argument("--batch-tokens", default="2048")
    parser.add_argument("--draft-vocab", default="8192")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--json", type=Path, help="Write the rows here, too.")
    given = parser.parse_args()
    settings = [part for each in given.settings for part in ("--set", each)]
    with tempfile.TemporaryDirectory() as name:
        features, vocab, out = (f"{name}/{x}" for x in ("features", "vocab", "run"))
        extract = run("extract", given.conversations, "--target", given.target, "--limit", given.limit,
                      "--batch-tokens", given.batch_tokens, "--out", features)  # fmt: skip
        run("vocab", features, "--size", given.draft_vocab, "--target", given.target, "--out", vocab)
        plan = run("plan", "--target", given.target, "--features", features, "--draft-vocab", given.draft_vocab,
                   "--batch-tokens", given.batch_tokens, "--dtype", "float32", "--calibrate", *settings)  # fmt: skip
        train = run("train", features, "--vocab", vocab, "--target", given.target, "--out", out, *settings)
        written = sum(path.stat().st_size for path in Path(features).glob("*.safetensors"))
    lines = {(s["title"], line["name"]): line["result"] for s in plan["told"]["sections"] for line in s["lines"]}
    rows = [
        ("features", "MB", lines["Features on disk", "features"] / 1e6, written / 1e6),
        ("memory of extraction", "MiB", lines["Memory of extraction", "at most"] / 2**20, extract["bytes"] / 2**20),
        ("memory of training", "MiB", lines["Memory of training", "at most"] / 2**20, train["bytes"] / 2**20),
        ("extraction", "CPU-s", lines["Time and cost", "extraction, CPU time"], extract["cpu"]),
        ("training", "CPU-s", lines["Time and cost", "training, CPU time"], train["cpu"]),
        ("extraction", "s", lines["Time and cost", "extraction"], extract["wall"]),
        ("training", "s", lines["Time and cost", "training"], train["wall"]),
    ]
    print(f"{given.target}, {extract['told']['tokens']:,} tokens; {' '.join(given.settings)}; load {os.getloadavg()}")
    print("| what | predicted | measured | ratio |\n|---|---|---|---|")
    for what, unit, predicted, measured in rows:
        print(f"| {what}, {unit} | {predicted:,.1f} | {measured:,.1f} | {predicted / measured:.2f} |")
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "calibration": plan["told"]["calibration"]}, indent=1))


if __name__ == "__main__":
    main()
