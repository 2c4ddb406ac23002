"""What the loader reports share: a process for each draft, numbered tensors, the fate of each key. See README.md.

Imported by the load_report_*.py beside it, under the Python of an engine's environment; needs only torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

MAPS = ("d2t", "t2d")  # keep their values: engines compute with them
_FIRST = 2  # the number of the first tensor: 0 is padding that loaders add, 1 is what norms are created with
_UNTOUCHED = -(2**61)  # for parameters of integers, which have no NaN


class Report:
    """What is known of one draft so far; `stage` says where an exception belongs."""

    def __init__(self, engine: str, version: str, draft: str) -> None:
        self.stage = "config"
        self.fields: dict[str, Any] = {
            "engine": engine, "version": version, "draft": draft, "raises": None, "architecture": None,
            "parameters": {}, "ignored": [], "taps": None, "captured": None, "flags": {},
        }  # fmt: skip
        self.keys: list[str] = []  # stored names in the order in which the engine's reader gave them
        self.maps: dict[str, torch.Tensor] = {}  # those of them that kept their values
        self._created: dict[str, str] = {}
        self._used: set[str] = set()

    # -------------------------------------------------------------- around the engine's load_weights

    def blank(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note what each parameter holds as created and overwrite it. From here on errors are those of the weights."""
        self.stage = "weights"
        for name, parameter in parameters:
            self._created[name] = _as_created(parameter.data)
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else _UNTOUCHED)

    def numbered(
        self, weights: Iterable[tuple[str, torch.Tensor]], other: Callable[[], Any] = lambda: None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The engine's stream of weights, each tensor filled with its own number.

        `other` looks at what a key may change that is no parameter; one that changed it counts as used.
        """
        for name, tensor in weights:
            self.keys.append(name)
            before = other()
            is_map = any(part in name for part in MAPS)
            if is_map:
                self.maps[name] = tensor
            yield name, tensor if is_map else torch.full_like(tensor, _FIRST + len(self.keys) - 1)
            if other() is not before:
                self._used.add(name)

    def numbered_copy(self, draft: Path, copy: Path) -> None:
        """For a converter, which reads files itself: the draft with its tensors numbered, all else as it was."""
        from safetensors.torch import load_file, save_file

        shutil.copytree(draft, copy)
        for path in [*sorted(copy.glob("*.safetensors")), *sorted(copy.glob("*.bin"))]:
            stored = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
            filled = dict(self.numbered(stored.items()))
            if path.suffix == ".safetensors":
                save_file(filled, path)
            else:
                torch.save(filled, path)

    def collect(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Read from the parameters what became of each key."""
        seen = set(self._used)
        for name, parameter in parameters:
            data = parameter.data
            if data.is_floating_point():
                untouched = torch.isnan(data)
                keys = self.named(torch.unique(data[~untouched].float()).tolist())
            else:
                untouched = data == _UNTOUCHED
                keys = [] if bool(untouched.all()) else [key for key in self.keys if "d2t" in key]
            left = int(untouched.sum())
            seen.update(keys)
            self.fields["parameters"][name] = {
                "shape": list(data.shape),
                "keys": keys,
                "filled": "whole" if left == 0 else "not" if left == data.numel() else "partly",
                "created": self._created.get(name, "other"),
            }
        self.fields["ignored"] = [key for key in self.keys if key not in seen]

    def named(self, numbers: Iterable[float]) -> list[str]:
        """The stored names of those numbers that are one's, in the order of the file."""
        known = range(_FIRST, _FIRST + len(self.keys))
        return [self.keys[int(number) - _FIRST] for number in sorted(numbers) if number in known]

    def flags(self, module: Any, names: Iterable[str]) -> None:
        """Plain attributes of a module, of those names that it has."""
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, bool | int | float | str):
                self.fields["flags"][name] = value
            elif isinstance(value, torch.nn.ModuleList):
                self.fields["flags"][name] = len(value)
            elif isinstance(value, torch.nn.Module):
                self.fields["flags"][name] = True


def _as_created(data: torch.Tensor) -> str:
    if data.is_floating_point() and bool(torch.isnan(data).any()):
        return "uninitialised"
    first = data.flatten()[:1]
    if data.numel() and bool((data == first).all()):
        return {0.0: "zeros", 1.0: "ones"}.get(float(first), "other")
    return "other"


def mark_uninitialised_memory() -> None:
    """Let torch fill what `torch.empty` returns with NaN, so that memory never written can be told from zeros."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


# -------------------------------------------------------------------- a process for each draft


def main(engine: str, version: str, load: Callable[[Report, Path, Path], None]) -> None:
    """Parse the command line and report every draft, each in a fork of this process (all is imported already)."""
    parser = argparse.ArgumentParser(description=f"What {engine} {version} makes of EAGLE-3 drafts; see README.md.")
    parser.add_argument("drafts", nargs="+", metavar="DRAFT")
    parser.add_argument("--target", required=True)
    arguments = parser.parse_args()
    for draft in arguments.drafts:
        report = Report(engine, version, draft)
        sys.stdout.write("\nREPORT " + json.dumps(_forked(report, load, Path(draft), Path(arguments.target))) + "\n")
        sys.stdout.flush()


def _forked(report: Report, load: Callable[[Report, Path, Path], None], draft: Path, target: Path) -> dict[str, Any]:
    """Load in a child and return what it found out; a child that dies leaves the stage that it had reached."""
    receive, send = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(receive)
        _load(report, load, draft, target, send)
        os._exit(0)  # no clean-up of the engine's: it belongs to the parent, or does not matter
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        lines = pipe.read().decode().splitlines()
    _, status = os.waitpid(child, 0)
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if "fields" in last:
        return last["fields"]
    code = os.waitstatus_to_exitcode(status)
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
    return report.fields | {"raises": {"type": "Crash", "stage": last.get("stage", "config"), "message": how}}


def _load(report: Report, load: Callable[[Report, Path, Path], None], draft: Path, target: Path, send: int) -> None:
    """The child's work: every stage is written to the pipe when it begins, the report when all is done."""

    class Told(Report):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "stage":
                os.write(send, json.dumps({"stage": value}).encode() + b"\n")

    report.__class__ = Told
    try:
        load(report, draft, target)
    except BaseException as error:  # SystemExit too: some engines leave with sys.exit
        traceback.print_exc()
        report.fields["raises"] = {
            "type": type(error).__name__,
            "stage": report.stage,
            "message": str(error)[:2000],
        }
    data = json.dumps({"fields": report.fields}).encode() + b"\n"
    while data:
        data = data[os.write(send, data) :]
