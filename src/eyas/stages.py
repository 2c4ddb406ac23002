"""The bookkeeping of a run: which stages of a folder are done, with what, and which must be done (again).

A run's folder holds one subfolder a stage and `stages.json`. For each stage that file keeps a key, the digest of all
that decides its result: content of its inputs, settings, version of its format. A finished stage with the same key
is skipped. A started one with the same key is called again and goes on. A different key empties its folder first.

    pytest tests/test_stages.py
"""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas.artifacts import MANIFEST, read_manifest
from eyas.digests import canonical_json, sha256_json
from eyas.errors import BadInput, EyasError
from eyas.machine import return_free_memory
from eyas.untrusted import content, parse_json
from eyas.writes import atomic_write_json, remove_leftovers

RECORDS = "stages.json"
SCHEMA = "eyas-stages/1"


@dataclass
class StageRecord:
    """What `stages.json` keeps of one stage."""

    key: str
    inputs: dict[str, str]
    config: Any
    finished: bool = False
    output: str = ""
    """Digest of the names and contents of all files it wrote: what the next stages take as their input."""
    counts: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0
    """Seconds of the call that finished it, and of earlier calls that ended in an error (not of killed ones)."""
    peak_memory_gib: float = 0.0
    """Largest resident set of the process, or of a child, up to its end."""


def peak_memory_gib() -> float:
    """The largest resident set (GiB) that this process or one of its finished children has had. Linux counts in KiB."""
    usages = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(usages) / 2**20


class StageRunner:
    """Runs stages in one folder, each at most once per key. `say` gets one line a stage.

    schemas: the version of each stage's result; a stage whose version has changed is done again.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], schemas: Mapping[str, str]):
        self.folder = folder
        self.say = say
        self.schemas = schemas
        self.records: dict[str, StageRecord] = self._read()
        self.done: dict[str, StageRecord] = {}
        """Of the stages that were asked for so far, in their order; `records` may know others from earlier runs."""

    def stage(
        self,
        name: str,
        work: Callable[[Path], Mapping[str, Any]],
        *,
        inputs: Mapping[str, str],
        config: Any = None,
        keep_partial: bool = False,
        began: float | None = None,
    ) -> StageRecord:
        """Do `work(folder/name)` unless it is done with these inputs, this config and schema; return its record.

        work returns counts, and leaves a manifest (written last) in its folder. keep_partial: do not empty the folder
        when the key has changed, since the stage itself knows which of its parts still hold. began: time.monotonic()
        at which work for this stage began, where that was before this call.
        """
        out = self.folder / name
        plain_config = json.loads(canonical_json(config))
        key = sha256_json({"inputs": dict(inputs), "config": plain_config, "schema": self.schemas[name]})
        record = self.records.get(name)
        if record is not None and record.key == key and record.finished and self._intact(out, record):
            self.say(f"{name:<11} unchanged  {describe(record.counts)}")
            self.done[name] = record
            return record

        if record is None and out.exists() and any(out.iterdir()):
            raise BadInput(
                f"{out} is not empty, and {self.folder / RECORDS} knows nothing of it. Choose another --out, or remove "
                f"that folder if it may go."
            )
        if record is None or record.key != key:
            if record is not None and out.exists() and not keep_partial:
                shutil.rmtree(out)
            record = StageRecord(key, dict(inputs), plain_config)
        elif record.finished:  # its files were lost: this is a new start
            record.duration_s = 0.0
        record.finished = False
        self.records[name] = record
        self._write()  # before the work: after a kill, this says whose the parts in the folder are
        out.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out)

        started = time.monotonic() if began is None else began
        try:
            counts = dict(work(out))
        finally:
            record.duration_s = round(record.duration_s + time.monotonic() - started, 2)
            record.peak_memory_gib = round(max(record.peak_memory_gib, peak_memory_gib()), 3)
            gc.collect()  # a model of this stage must not count in the memory of the next
            return_free_memory()
            with contextlib.suppress(EyasError):  # where the disk is full, the stage's own error says so
                self._write()
        record.output = output_digest(out)
        record.counts = json.loads(json.dumps(counts))
        record.finished = True
        self._write()
        self.done[name] = record
        self.say(f"{name:<11} {record.duration_s:7.1f} s  {describe(record.counts)}")
        return record

    def digest(self, name: str, prefix: str = "") -> str:
        """Digest of what a finished stage wrote: names and contents of its files that begin with `prefix`.

        It is what the next stages take as their input; dates, durations and code versions do not enter.
        """
        return output_digest(self.folder / name, prefix)

    def _intact(self, out: Path, record: StageRecord) -> bool:
        """Is what the stage wrote still there, by its manifest? Contents are checked by whoever reads them."""
        try:
            return output_digest(out) == record.output
        except BadInput:
            return False

    def _read(self) -> dict[str, StageRecord]:
        path = self.folder / RECORDS
        if not path.is_file():
            return {}
        try:
            parsed = parse_json(content(path))
            if parsed["schema"] != SCHEMA:
                raise ValueError(f"schema {parsed['schema']!r}, expected {SCHEMA!r}")
            return {name: StageRecord(**record) for name, record in parsed["stages"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{path} is not a record of a run ({error}). Choose another --out or remove it.") from error

    def _write(self) -> None:
        stages = {name: asdict(record) for name, record in self.records.items()}
        atomic_write_json(self.folder / RECORDS, {"schema": SCHEMA, "stages": stages})


def output_digest(stage_dir: Path, prefix: str = "") -> str:
    """Digest of those files of a finished stage whose names begin with `prefix`, by its manifest.

    Raises BadInput where the manifest, a file that it lists, or any file of that prefix is missing.
    """
    files = {name: digest for name, digest in read_manifest(stage_dir)["files"].items() if name.startswith(prefix)}
    if not files:
        raise BadInput(f"{stage_dir / MANIFEST} lists no file {prefix}*. Run its stage again.")
    for name in files:
        if not (stage_dir / name).is_file():
            raise BadInput(f"{stage_dir / name} is listed in {MANIFEST} but missing. Run its stage again.")
    return sha256_json(files)


def describe(counts: Mapping[str, Any]) -> str:
    """Counts as one line: `3,685 prompts, coverage 0.984`."""
    parts = []
    for name, value in counts.items():
        words = name.replace("_", " ")
        if isinstance(value, bool):
            parts.append(f"{words}: {'yes' if value else 'no'}")
        elif isinstance(value, int):
            parts.append(f"{value:,} {words}")
        elif isinstance(value, float):
            parts.append(f"{words} {value:.3f}")
        elif isinstance(value, str):
            parts.append(f"{words} {value}")
        elif isinstance(value, Mapping) and value and all(isinstance(n, int) for n in value.values()):
            parts.append(f"{words}: " + ", ".join(f"{n:,} {reason}" for reason, n in value.items()))
    return ", ".join(parts)
