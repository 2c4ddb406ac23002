"""One training step of Eyas, SpecForge 0.2.0 and speculators 0.9.0, side by side on this machine.

    python benchmarks/train_step.py --conversations conversations.jsonl --json runs/train_step.json
    python benchmarks/train_step.py --list                       # the works
    python benchmarks/train_step.py --tools eyas --dtype float32 --works "full mask, L = 512" --threads 1 2

SmolLM2's shapes (576 wide, 9 heads and 3 of keys, MLP 1,536, 49,152 ids), 8,192 draft ids, seven unrolled steps, AdamW,
a trained head, the same features. Each measurement is a process of its own; all are run in turn, `--rounds` times, so
that noise hits them alike, and medians are told. Peers run through the scripts specforge_step.py and
speculators_step.py in --peer-scripts, in environments that are built once (together 2.7 GB; step/environments.py).
`--json` is written anew after each measurement: a run that is killed leaves what it has. docs/performance.md says how
to read it. Wall seconds, and anything about two threads, mean something only on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from step.environments import RECIPES, environment
from step.features import batches_of, work_folder
from step.rows import READ, Measured, commit, last_object, machine, row
from step.works import CONVERSATIONS, TOOLS, TTT_STEPS, WORKS, Setting, Work, settings

from eyas.engines.setup.build import clean_environment
from eyas.errors import EyasError
from eyas.target.source import resolve_target
from eyas.writes import atomic_write_json

HERE = Path(__file__).resolve().parent
PEER_SCRIPTS = HERE.parent.parent / "shared" / "bench"


def say(text: str) -> None:
    """A line of progress."""
    print(f"{datetime.datetime.now():%H:%M:%S}  {text}", file=sys.stderr, flush=True)


@dataclass
class Job:
    """One work in one setting of one tool, and what its rounds told."""

    work: Work
    setting: Setting
    threads: int
    folder: Path
    told: list[Measured] = field(default_factory=list)

    def __str__(self) -> str:
        threads = "" if self.threads == 1 else f", {self.threads} threads"
        return f"{self.work.name}: {self.setting.tool} ({self.setting.name}{threads})"

    def command(self, a: argparse.Namespace, python: Path, target: Path) -> list[str]:
        """The process to run."""
        tool, length = self.setting.tool, self.work.tokens
        common = ["--threads", self.threads, "--warmup", a.warmup, "--steps", a.steps]
        if tool == "eyas":
            words = [python, HERE / "step" / "ours.py", self.folder, "--target", target]
            words += ["--ttt-steps", TTT_STEPS, "--dtype", self.setting.dtype]
            return [str(w) for w in words + common]
        words = [python, a.peer_scripts / f"{tool}_step.py", "--seq", length, "--ttt", TTT_STEPS]
        words += [*self.setting.arguments, *common]
        if tool == "specforge":
            words += ["--data", self.folder / "specforge"]
            words += ["--target", target] if (target / "model.safetensors").is_file() else []
        else:
            words += ["--hs", self.folder / "speculators" / "hs_0.safetensors"]
            words += ["--docs", len(batches_of(self.folder)[0])]
        return [str(w) for w in words]

    def run(self, command: list[str]) -> Measured:
        """Run it. Raises EyasError with the end of what it printed where it fails."""
        threads = str(self.threads)
        env = {"HF_HUB_OFFLINE": "1", **clean_environment(), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if self.setting.tool == "eyas":
            env["PYTHONPATH"] = str(HERE.parent / "src")
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise EyasError(f"{self} left with {done.returncode}: {(done.stderr or done.stdout)[-1500:].strip()}")
        return READ[self.setting.tool](last_object(done.stdout))


def rows_of(jobs: list[Job], about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of all jobs that have run. What Eyas told of rows and rates holds for the peers too."""
    ours = [j for j in jobs if j.setting.tool == "eyas" and j.told]
    rates: dict[str, list[float]] = {}
    supervised: dict[str, float] = {}
    for job in ours:
        rates.setdefault(job.setting.dtype, []).extend(m.gemm_flop_s for m in job.told if m.gemm_flop_s)
        supervised[job.work.name] = statistics.median(n for m in job.told for n in m.supervised_rows)
    out = []
    for job in jobs:
        if job.told:
            s, held = job.setting, rates.get(job.setting.dtype)
            out.append(row(
                job.work.name, s.tool, s.name, s.dtype, job.threads, job.told, rows=supervised.get(job.work.name),
                gemm_flop_s=statistics.median(held) if held else None, about=about,
            ))  # fmt: skip
    return out


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    A = parser.add_argument
    A("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    A("--works", nargs="+", choices=[w.name for w in WORKS], metavar="WORK", help="default: all; see --list")
    A("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    A("--threads", nargs="+", type=int, default=[1], help="peers run with the first, Eyas with each")
    A("--conversations", type=Path, help="JSONL of answers, whose states are extracted once")
    A("--features", type=Path, help="features that `eyas extract` wrote, instead of --conversations")
    A("--limit", type=int, default=48, help="conversations that are extracted [48]")
    A("--target", help="as everywhere; default smollm2")
    A("--peer-scripts", type=Path, default=PEER_SCRIPTS)
    A("--specforge-default", action="store_true", help="SpecForge also without its compact teacher, which is slower")
    A("--rounds", type=int, default=3)
    A("--warmup", type=int, default=1, help="steps of a process that are not counted [1]")
    A("--steps", type=int, default=3, help="steps of a process that are [3]")
    A("--json", type=Path, help="where the rows are written")
    A("--list", action="store_true", help="name the works and stop")
    return parser.parse_args()


def tools_here(a: argparse.Namespace) -> dict[str, Path]:
    """The Python of each tool that can run. A peer that cannot is told about and left out."""
    pythons = {}
    for tool in a.tools:
        if tool not in RECIPES:
            pythons[tool] = Path(sys.executable)
            continue
        script = a.peer_scripts / f"{tool}_step.py"
        if not script.is_file():
            say(f"{tool} is left out: {script} is missing; name the folder that holds it with --peer-scripts")
            continue
        try:
            pythons[tool] = environment(tool, say)
        except EyasError as error:
            say(f"{tool} is left out: {error}")
    return pythons


def plan(a: argparse.Namespace, pythons: dict[str, Path], target: Path) -> list[Job]:
    """Everything to run, in its order; features are made here."""
    jobs = []
    for work in WORKS:
        if a.works and work.name not in a.works:
            continue
        if work.name == CONVERSATIONS and a.conversations is None and a.features is None:
            say(f"{work.name} is left out: it needs --conversations FILE or --features DIR")
            continue
        say(f"{work.name}: features")
        folder = work_folder(work, target, a.warmup + a.steps, a.conversations, a.features, a.limit)
        for tool in work.tools([t for t in TOOLS if t in pythons]):
            for setting in settings(tool, a.dtype, a.specforge_default):
                threads = a.threads if tool == "eyas" and not work.alone else a.threads[:1]
                jobs += [Job(work, setting, n, folder) for n in threads]
    return jobs


def main() -> None:
    a = arguments()
    if a.list:
        print("\n".join(w.name for w in WORKS))
        return
    pythons = tools_here(a)
    target = resolve_target(a.target)
    jobs = plan(a, pythons, target)
    began = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
    about = {"warmup": a.warmup, "steps": a.steps, "machine": machine(), "date": began, "commit": commit()}
    for number in range(a.rounds):
        for job in jobs:
            started = time.monotonic()
            try:
                told = job.run(job.command(a, pythons[job.setting.tool], target))
            except EyasError as error:
                say(str(error))
                continue
            job.told.append(told)
            say(
                f"round {number + 1}/{a.rounds}  {job}: {statistics.median(told.cpu_s):.2f} CPU-s a step, "
                f"{told.peak_mib - told.before_mib:.0f} MiB above the start ({time.monotonic() - started:.0f} s)"
            )
            if a.json:
                atomic_write_json(a.json, rows_of(jobs, about | {"load": round(os.getloadavg()[0], 1)}))
    heads = ("work", "tool", "setting", "thr", "CPU-s", "wall s", "MiB", "tok/CPU-s", "limit")
    print("{:30} {:12} {:26} {:>3} {:>8} {:>8} {:>7} {:>9} {:>5}".format(*heads))
    for r in rows_of(jobs, about):
        limit = "" if r["limit_ratio"] is None else f"{r['limit_ratio']:.2f}"
        print(
            f"{r['work']:30} {r['tool']:12} {r['setting']:26} {r['threads']:3} {r['cpu_s']:8.3f} {r['wall_s']:8.3f} "
            f"{r['peak_mib']:7.0f} {r['tokens_per_cpu_s']:9.1f} {limit:>5}"
        )


if __name__ == "__main__":
    main()
