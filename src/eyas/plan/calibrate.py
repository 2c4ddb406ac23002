"""Twenty seconds of the real work here: the target's forward as extraction runs it, optimizer steps as training does.

Both run the project's own code (features/passes.fill_shard, train/loop.Run) on documents of the planned length, or on
given features. Wall time and, since other jobs may share the machine, CPU time are kept.
    Exercise it:  python benchmarks/plan.py
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..features.count import count_supervised
from ..features.extract import feature_meta
from ..features.passes import fill_shard
from ..features.reader import FeatureSet
from ..features.writer import ShardBuffer
from ..machine import choose_precision, no_denormals, reuse_large_allocations
from ..target.facts import read_facts
from ..train.settings import TrainSettings
from ..vocab import VocabMap
from .synthetic import documents_of, synthetic_features

SHARE = 0.4  # of the time for each of the two; loading takes the rest


@dataclass(frozen=True)
class Timing:
    """Seconds of wall time and of CPU time."""

    wall: float
    cpu: float

    def __truediv__(self, by: float) -> Timing:
        return Timing(self.wall / by, self.cpu / by)


@dataclass(frozen=True)
class Calibration:
    """What was measured here."""

    begin: Timing
    """From the start of the process: reading libraries."""
    load: Timing
    """Reading the target."""
    token: Timing
    """Of extraction."""
    prepare: Timing
    """Checking inputs and building the draft, without the linear start."""
    step: Timing
    """Of training: one optimizer step of `step_tokens`."""
    step_tokens: float
    tokens_run: int
    steps_run: int
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def calibrate(
    target_dir: Path, settings: TrainSettings, *, length: int, supervised: float, taps: list[int] | None,
    draft_vocab: int, batch_tokens: int, dtype: str = "float32", device: str = "cpu", seconds: float = 20.0,
    features: FeatureSet | None = None,
) -> Calibration:  # fmt: skip
    """Time extraction and training here, each for `SHARE` of `seconds` after a first piece that does not count."""
    begin = Timing(_since_start(), time.process_time())
    clock = _Clock(device)
    wanted = SHARE * seconds
    target_tokens, extracting, load = _extraction(
        target_dir, features, clock, wanted, length=length, supervised=supervised, taps=taps,
        batch_tokens=batch_tokens, dtype=choose_precision(dtype, device), device=device,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        if features is None:
            enough = max(4, 8 * settings.batch_tokens // length)
            features = synthetic_features(
                Path(made) / "features", target_dir, documents=enough, length=length, supervised=supervised, taps=taps
            )
        clock.lap()
        step, seen = _training(features, target_dir, settings, draft_vocab, device)
        prepared = clock.lap()
        steps, stepping = _repeat(step, clock, wanted)
    return Calibration(
        begin=begin, load=load, token=extracting / target_tokens, prepare=prepared, step=stepping / steps,
        step_tokens=seen() / (steps + 1), tokens_run=target_tokens, steps_run=steps, threads=torch.get_num_threads(),
    )  # fmt: skip


def _extraction(
    target_dir: Path, features: FeatureSet | None, clock: _Clock, seconds: float, *, length: int, supervised: float,
    taps: list[int] | None, batch_tokens: int, dtype: str, device: str,
) -> tuple[int, Timing, Timing]:  # fmt: skip
    """(tokens, their time, time of loading). The target is let go of on return."""
    from ..target.model import Target

    target = Target.load(target_dir, device, getattr(torch, dtype))
    load = clock.lap()
    facts = read_facts(target_dir)
    meta = feature_meta(target_dir, facts, taps)
    count = max(2, 2 * batch_tokens // length)
    if features is not None:
        documents = _sample(features, count)
    else:
        documents = list(documents_of(facts.vocab_size, count, length, supervised))
    buffer = ShardBuffer(meta, [len(d) for d in documents])

    def extract() -> int:
        fill_shard(target, documents, buffer, meta.taps, batch_tokens)
        return sum(map(len, documents))

    return *_repeat(extract, clock, seconds), load


def _training(
    features: FeatureSet, target_dir: Path, settings: TrainSettings, draft_vocab: int, device: str
) -> tuple[Callable[[], int], Callable[[], int]]:
    """(one optimizer step -> 1, tokens of all steps so far)."""
    from ..train.batches import plan_steps
    from ..train.inputs import prepare
    from ..train.loop import Run

    dtype = choose_precision(settings.dtype, torch.device(device).type)
    # The linear start is planned by its operations; steps cost the same after any start.
    settings = settings.model_copy(update={"dtype": dtype, "start": "target"})
    vocab_map = VocabMap.from_counts(count_supervised(features), draft_vocab)
    given = prepare(features, target_dir, vocab_map, None, settings, 0)
    given.initialise()
    reuse_large_allocations()
    run = Run(given, settings, 0, torch.device(device))
    batches = plan_steps(run.lengths, settings.batch_tokens, settings.micro_tokens, 0)

    def step() -> int:
        with no_denormals():
            run.optimize(next(batches))
        return 1

    return step, lambda: run.tokens


def _sample(features: FeatureSet, count: int) -> list[Any]:
    """Documents evenly spread over features, as the target reads them."""
    from ..chat import Encoded
    from ..features.conversations import Document

    chosen = torch.linspace(0, features.num_docs - 1, min(count, features.num_docs)).round().long().unique().tolist()
    parts = [(str(i), features.document(i)) for i in chosen]
    return [Document(name, Encoded(part["ids"].clone(), part["mask"].clone())) for name, part in parts]


def _repeat(work: Callable[[], int], clock: _Clock, seconds: float) -> tuple[int, Timing]:
    """Run `work` once uncounted, then until `seconds` are over: (what it counted, time)."""
    work()
    clock.lap()
    done, spent = work(), clock.lap()
    while spent.wall < seconds:
        done += work()
        more = clock.lap()
        spent = Timing(spent.wall + more.wall, spent.cpu + more.cpu)
    return done, spent


def _since_start() -> float:
    """Seconds since this process began; its CPU time where the system does not say."""
    try:
        began = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - began
    except (OSError, ValueError, IndexError):
        return time.process_time()


class _Clock:
    """Laps of wall and CPU time, after the device has finished."""

    def __init__(self, device: str) -> None:
        self._cuda = torch.device("cpu" if device == "auto" else device).type == "cuda"
        self._last = self._now()

    def _now(self) -> Timing:
        if self._cuda:
            torch.cuda.synchronize()
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Timing(time.perf_counter(), used.ru_utime + used.ru_stime)

    def lap(self) -> Timing:
        """Since the last one."""
        last, self._last = self._last, self._now()
        return Timing(self._last.wall - last.wall, self._last.cpu - last.cpu)
