"""What a run tells while it works: `metrics.jsonl`, TensorBoard, and the bar on stderr.

A record is one step: loss, accuracy and chain accuracy per unrolled step, gradient norm, tokens and rows seen, seconds.
    Exercise it:  pytest tests/test_train_loop.py
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..artifacts import atomic_write, canonical_json, disk_errors
from ..terminal import harmless
from ..untrusted import parse_json

METRICS = "metrics.jsonl"
BOARD = "tensorboard"


class Recorder:
    """Goes on from `step` in the files of `out`: lines of later steps, which will be done again, are dropped.

    Writes nothing where `out` is None.
    """

    def __init__(self, out: Path | None, step: int, total: int, show: bool) -> None:
        self.path = out / METRICS if out else Path(os.devnull)
        self.kept = out is not None
        cut_metrics(self.path, step)
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.log = self.path.open("a", encoding="utf-8", buffering=1)  # a line at a time, for `tail -f`
        self.board = _tensorboard(out / BOARD, step) if out else None
        # disable=None: a bar on a terminal only.
        self.bar = tqdm(
            total=total, initial=step, desc="train", unit="step", dynamic_ncols=True, disable=None if show else True
        )
        self.accept_length: float | None = None
        self._tokens, self._began = 0, time.monotonic()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        with disk_errors(self.path):
            self.log.close()
        if self.board is not None:
            with contextlib.suppress(OSError):
                self.board.close()

    def say(self, text: str) -> None:
        """A line above the bar; nothing where there is no bar."""
        if not self.bar.disable:
            self.bar.write(harmless(f"eyas: {text}"))

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
        self._scalars(record)

    def flush(self) -> None:
        """All records so far are on the disk: called before a checkpoint that says that they are."""
        if self.kept:
            with disk_errors(self.path):
                os.fsync(self.log.fileno())

    def _scalars(self, record: Mapping[str, Any]) -> None:
        if self.board is None:
            return
        try:
            for name in ("loss", "accuracy", "chain_accuracy"):
                for k, value in enumerate(record[name]):
                    self.board.add_scalar(f"{name}/{k}", value, record["step"])
            self.board.add_scalar("gradient_norm", record["gradient_norm"], record["step"])
            if "predicted" in record:
                value = record["predicted"]["accept_length"]
                self.board.add_scalar("accept_length/predicted", value, record["step"])
        except OSError:  # the same numbers are in metrics.jsonl, whose errors are told
            self.board = None


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


def _tensorboard(folder: Path, step: int) -> Any:
    """A SummaryWriter, or None where tensorboard is not installed or cannot write."""
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=step + 1)
    except (ImportError, OSError):
        return None
