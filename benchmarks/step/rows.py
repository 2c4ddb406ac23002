"""From measurements to rows: medians, memory above the start, and the share of what the machine's products allow.

    pytest tests/test_benchmark_rows.py

A row: {work, tool, setting, dtype, threads, cpu_s, wall_s, peak_mib, tokens, supervised_rows, tokens_per_cpu_s,
limit_ratio, rounds, steps, gemm_gflop_s, machine, torch, date, commit, idle}. Seconds are those of one training step.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLOP_PER_ROW = 375e6
"""Products that one supervised row cannot do without, at SmolLM2's sizes with 8,192 draft ids and seven unrolled steps:
the head forward and its two gradients in each step, the draft's layer likewise, `fc` and the teacher once."""


@dataclass
class Measured:
    """What one process told: seconds of each step, supervised rows of each, memory in MiB."""

    cpu_s: list[float]
    wall_s: list[float]
    tokens: int
    before_mib: float
    peak_mib: float
    supervised_rows: list[int] = field(default_factory=list)
    gemm_flop_s: float | None = None
    torch: str = ""


def of_eyas(told: Mapping[str, Any]) -> Measured:
    """What step/ours.py prints."""
    return Measured(
        told["cpu_s"], told["wall_s"], told["tokens"], told["rss_before_mib"], told["peak_rss_mib"],
        told["supervised_rows"], told["gemm_flop_s"], told["torch"],
    )  # fmt: skip


def of_specforge(told: Mapping[str, Any]) -> Measured:
    """What specforge_step.py prints: medians, and wall seconds of each step."""
    return Measured(
        [told["cpu_s_median"]], [told["step_s_median"]], told["seq"] * told["batch"], told["rss_before_mib"],
        told["peak_rss_mib"], torch=told["torch"],
    )  # fmt: skip


def of_speculators(told: Mapping[str, Any]) -> Measured:
    """What speculators_step.py prints. Its memory before the steps is the highest until then, not what is held."""
    return Measured(
        [told["step_cpu_s_median"]], [told["step_s_median"]], told["seq"], told["rss_before_mib"],
        told["rss_peak_mib"], torch=told["torch"],
    )  # fmt: skip


READ = {"eyas": of_eyas, "specforge": of_specforge, "speculators": of_speculators}


def limit_ratio(rows: float, cpu_s: float, gemm_flop_s: float) -> float:
    """Share of the speed at which the products alone would run: 1 is a step that does nothing else."""
    return FLOP_PER_ROW * rows / cpu_s / gemm_flop_s


def row(
    work: str, tool: str, setting: str, dtype: str, threads: int, rounds: Sequence[Measured],
    *, rows: float | None = None, gemm_flop_s: float | None = None, about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One row of the median round. rows, gemm_flop_s: supervised rows of this work, and the rate of the run, for tools
    that do not tell; `limit_ratio` is None without them, and where several threads share the work."""
    cpu_s = statistics.median(statistics.median(m.cpu_s) for m in rounds)
    supervised = [statistics.median(m.supervised_rows) for m in rounds if m.supervised_rows]
    rates = [m.gemm_flop_s for m in rounds if m.gemm_flop_s]
    ratios = [
        limit_ratio(statistics.median(m.supervised_rows), statistics.median(m.cpu_s), m.gemm_flop_s)
        for m in rounds
        if m.gemm_flop_s and m.supervised_rows
    ]
    rows = statistics.median(supervised) if supervised else rows
    if not ratios and rows and gemm_flop_s:
        ratios = [limit_ratio(rows, cpu_s, gemm_flop_s)]
    rate = statistics.median(rates) if rates else gemm_flop_s
    return {
        "work": work, "tool": tool, "setting": setting, "dtype": dtype, "threads": threads,
        "cpu_s": round(cpu_s, 4),
        "wall_s": round(statistics.median(statistics.median(m.wall_s) for m in rounds), 4),
        "peak_mib": round(statistics.median(m.peak_mib - m.before_mib for m in rounds), 1),
        "tokens": rounds[0].tokens,
        "supervised_rows": rows,
        "tokens_per_cpu_s": round(rounds[0].tokens / cpu_s, 2),
        "limit_ratio": round(statistics.median(ratios), 4) if ratios and threads == 1 else None,
        "rounds": len(rounds),
        "gemm_gflop_s": round(rate / 1e9, 2) if rate else None,
        "torch": rounds[0].torch,
        **(about or {}),
    }  # fmt: skip


# ---------------------------------------------------------------- the machine, and what ran on it


def machine() -> dict[str, Any]:
    """{"cpu": model, "cores": usable ones, "bf16": instructions for it?}"""
    from eyas.machine import native_bfloat16

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        named = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = named[0].split(":", 1)[1].strip() if named else model
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": model, "cores": usable, "bf16": native_bfloat16()}


def commit() -> str:
    """The working copy's commit, with `+` where tracked files differ from it; "" outside of one."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=10", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no") else "")


def last_object(text: str) -> dict[str, Any]:
    """The JSON object at the end of what a process printed, on one line or on several."""
    lines = text.strip().splitlines()
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("{"):
            try:
                return json.loads("\n".join(lines[start:]))
            except ValueError:
                continue
    raise ValueError("no JSON object was printed")
