"""What a run tells while it works: `metrics.jsonl`, trackers (TensorBoard and others), and the bar on stderr.

A record is one step: loss, accuracy and chain accuracy per unrolled step, gradient norm, tokens and rows seen, seconds.
    Exercise it:  pytest tests/test_train_loop.py
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import console
from ..digests import canonical_json
from ..terminal import harmless
from ..untrusted import parse_json
from ..writes import atomic_write, disk_errors
from .trackers import Trackers

METRICS = "metrics.jsonl"


class Recorder:
    """Goes on from `step` in the files of `out`: lines of later steps, which will be done again, are dropped.

    Writes nothing where `out` is None. track: names of trackers, who hear what the run is (`told`).
    Raises EyasError where one of them cannot be opened.
    """

    def __init__(
        self, out: Path | None, step: int, total: int, show: bool, track: Sequence[str] = (),
        told: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.path = out / METRICS if out else Path(os.devnull)
        self.kept = out is not None
        cut_metrics(self.path, step)
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.log = self.path.open("a", encoding="utf-8", buffering=1)  # a line at a time, for `tail -f`
        self.trackers = Trackers(track, out, step, told or {}, self.warn)
        self.bar = console.bar(total=total, initial=step, desc="train", unit="step", dynamic_ncols=True, show=show)
        self.accept_length: float | None = None
        self._tokens, self._began = 0, time.monotonic()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        with disk_errors(self.path):
            self.log.close()
        self.trackers.close()

    def say(self, text: str) -> None:
        """A line above the bar; nothing where there is no bar."""
        if not self.bar.disable:
            self.bar.write(harmless(f"eyas: {text}"), file=sys.stderr)

    def warn(self, text: str) -> None:
        """A line on stderr, above the bar where there is one."""
        self.bar.clear()
        console.say(f"eyas: {text}")
        self.bar.refresh()

    def evaluating(self) -> None:
        """Say that the bar stands still because held-out features are being measured."""
        self.bar.set_description("measure")

    def step(self, record: Mapping[str, Any], tokens: int) -> None:
        """Write one record; `tokens` went through this step. Raises EyasError where the disk is full."""
        with disk_errors(self.path):
            self.log.write(canonical_json(record) + "\n")
        if predicted := record.get("predicted"):
            self.accept_length = predicted["accept_length"]
        self._tokens += tokens
        shown = {"loss": f"{record['loss'][0]:.3f}", "acc": f"{record['accuracy'][0]:.3f}"}
        if self.accept_length is not None:
            shown["tau"] = f"{self.accept_length:.3f}"
        shown["tok/s"] = f"{self._tokens / max(1e-9, time.monotonic() - self._began):.0f}"
        self.bar.set_description("train", refresh=False)
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        self.trackers.log(record["step"], scalars(record))

    def flush(self) -> None:
        """All records so far are on the disk: called before a checkpoint that says that they are."""
        if self.kept:
            with disk_errors(self.path):
                os.fsync(self.log.fileno())


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """A record as flat names and numbers: `loss/0`, ..., `gradient_norm`, `accept_length/predicted`."""
    out = {f"{name}/{k}": value for name in ("loss", "accuracy", "chain_accuracy") for k, value in
           enumerate(record[name])}  # fmt: skip
    out["gradient_norm"] = record["gradient_norm"]
    if "predicted" in record:
        out["accept_length/predicted"] = record["predicted"]["accept_length"]
    return out


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and lines that are torn."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if parse_json(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    atomic_write(path, "".join(line + "\n" for line in kept))
