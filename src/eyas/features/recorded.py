"""States recorded while the target answered: chunk files on disk, found again by the token ids of a conversation.

    writer.add(ids, recording, then)        # regenerate: chunks states/00000.safetensors and so on
    recordings.fill(documents, buffer)      # extract: copies what is there, names what must be computed

They save time and change nothing else: whatever is missing, damaged, of another target, of other taps or not what the
target computes when asked again (`audit`) is computed by extract as if it had never been recorded. A chunk appears
whole or not at all, and only then are its answers noted as finished; so a killed run records its last few answers
again, and ends with the same states as one that was not killed.   Exercise it:  pytest tests/test_record.py
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from eyas.errors import EyasError
from eyas.features.conversations import Document
from eyas.features.layout import METADATA, NOT_READ, teacher_rows
from eyas.features.likeness import relative
from eyas.features.reader import map_safetensors
from eyas.features.writer import ShardBuffer
from eyas.target.record import Recording
from eyas.writes import atomic_save_safetensors, remove_leftovers

FOLDER = "states"
SCHEMA = "eyas-states/1"
PARTS = ("taps", "final", "top1", "logsumexp")
CHUNK_BYTES = 32 << 20
CHUNK_SECONDS = 5.0
"""A kill costs at most so many seconds of answers, or so many bytes of states."""

# What two computations of the same states may differ by (float32, low precision): each row of a tap and of the final
# state in parts of its norm, where rounding to bf16 alone makes 0.002; the logsumexp in parts of max(1, itself); the
# share of rows whose best token differs, as it may where two are nearly tied.
TOLERANCE = {"float32": (0.01, 0.005, 0.02)}
LOOSE = (0.15, 0.05, 0.10)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StatesMeta:
    """Whose states these are. Recordings are used only where all of it is what extract would compute."""

    target: str
    """Fingerprint of the target's weights and config."""
    taps: tuple[int, ...]
    hidden_size: int
    dtype: str
    """In which the target computed; they are stored in bf16."""


def key_of(ids: Sequence[int] | torch.Tensor) -> str:
    """What a conversation is found by: SHA-256 of its ids as little-endian int32."""
    return hashlib.sha256(torch.as_tensor(ids, dtype=torch.int32).numpy().astype("<i4").tobytes()).hexdigest()


def _checksum(parts: dict[str, torch.Tensor]) -> int:
    total = 0
    for name in PARTS:
        total = zlib.crc32(parts[name].contiguous().view(torch.uint8).numpy().data, total)
    return total


class RecordingWriter:
    """Collects recordings and writes them as chunks into `folder`, beside those that are there. A context manager.

    Where a chunk cannot be written, or the disk would have no room left for features of the same size, it says so and
    records no more: answers matter more than their states.
    """

    def __init__(self, folder: Path, meta: StatesMeta, chunk_bytes: int = CHUNK_BYTES, seconds: float = CHUNK_SECONDS):
        self.folder = folder
        self.meta = meta
        self.chunk_bytes, self.seconds = chunk_bytes, seconds
        self.recorded = 0
        self.bytes = 0
        self.stopped = False
        self._pending: list[tuple[str, Recording, Callable[[], None]]] = []
        self._size = 0
        self._since = time.monotonic()
        remove_leftovers(folder)
        self._next = 1 + max((int(p.stem) for p in folder.glob("*.safetensors") if p.stem.isdigit()), default=-1)

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def add(self, ids: Sequence[int], recording: Recording, then: Callable[[], None]) -> None:
        """Keep the recording of a conversation of exactly these ids; `then` is called once it is on the disk."""
        if self.stopped:
            then()
            return
        if len(ids) != len(recording):
            raise ValueError(f"a recording of {len(recording)} tokens for a conversation of {len(ids)}")
        if not self._pending:
            self._since = time.monotonic()
        self._pending.append((key_of(ids), recording, then))
        self._size += recording.bytes
        if self._size >= self.chunk_bytes or time.monotonic() - self._since > self.seconds:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a chunk."""
        pending, self._pending, size, self._size = self._pending, [], self._size, 0
        if pending and not self.stopped:
            try:
                self._write(pending)
                self.recorded += len(pending)
                self.bytes += size
                if shutil.disk_usage(self.folder).free < self.bytes:
                    self._stop("the disk has little room left")
            except EyasError as error:
                self._stop(str(error))
        for _, _, then in pending:
            then()

    def _write(self, pending: Sequence[tuple[str, Recording, Callable[[], None]]]) -> None:
        recordings = [{name: getattr(r, name) for name in PARTS} for _, r, _ in pending]
        tensors = {name: torch.cat([r[name] for r in recordings]) for name in PARTS}
        tensors["offsets"] = torch.tensor([0, *(len(r["top1"]) for r in recordings)], dtype=torch.int64).cumsum(0)
        documents = [[key, _checksum(r)] for (key, _, _), r in zip(pending, recordings, strict=True)]
        told = {"schema": SCHEMA, "meta": asdict(self.meta), "documents": documents}
        path = self.folder / f"{self._next:05d}.safetensors"
        atomic_save_safetensors(tensors, path, {METADATA: json.dumps(told, sort_keys=True)})
        self._next += 1

    def _stop(self, why: str) -> None:
        self.stopped = True
        log.warning("%s: no more states are recorded (%s); extract will compute the rest.", self.folder, why)


class Recordings:
    """The recordings in one folder that fit `meta`."""

    def __init__(self, folder: Path, meta: StatesMeta):
        self.folder = folder
        self.meta = meta
        self._found: dict[str, tuple[dict[str, torch.Tensor], int, int, int]] = {}  # key: tensors, rows, checksum
        for path in sorted(folder.glob("*.safetensors")):
            try:
                self._index(path)
            except (EyasError, ValueError, KeyError, TypeError, IndexError) as error:
                log.warning("%s cannot be used as recorded states (%s); they will be computed.", path, error)

    def __len__(self) -> int:
        return len(self._found)

    def _index(self, path: Path) -> None:
        tensors, metadata = map_safetensors(path)
        told = json.loads(metadata[METADATA])
        if told["schema"] != SCHEMA:
            raise ValueError(f"schema {told['schema']!r}, this Eyas reads {SCHEMA!r}")
        wanted = json.loads(json.dumps(asdict(self.meta)))
        if told["meta"] != wanted:
            differs = [k for k in wanted if told["meta"].get(k) != wanted[k]]
            raise ValueError(f"of another {', '.join(differs)}")
        rows, hidden = tensors["top1"].shape[0], self.meta.hidden_size
        wide = {"taps": (rows, len(self.meta.taps) * hidden), "final": (rows, hidden)}
        shapes = {name: wide.get(name, (rows,)) for name in PARTS}
        for name, shape in shapes.items():
            if tensors[name].shape != shape:
                raise ValueError(f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}")
        bounds = tensors["offsets"].tolist()
        for (key, checksum), (start, end) in zip(told["documents"], pairwise(bounds), strict=True):
            if not 0 <= start < end <= rows:
                raise ValueError(f"rows {start} to {end} of {rows}")
            self._found[key] = (tensors, start, end, checksum)

    def find(self, document: Document) -> dict[str, torch.Tensor] | None:
        """All tensors of a shard for `document`, or None where it was not recorded, or not all that it needs."""
        entry = self._found.get(key_of(document.ids))
        if entry is None:
            return None
        tensors, start, end, checksum = entry
        parts = {name: tensors[name][start:end] for name in PARTS}
        read = teacher_rows(document.mask)
        if end - start != len(document) or bool((parts["top1"][read] < 0).any()):
            return None
        if _checksum(parts) != checksum:
            log.warning("%s: the recorded states of %s are damaged; they will be computed.", self.folder, document.id)
            return None
        return {
            "ids": document.ids,
            "mask": document.mask,
            "taps": parts["taps"],
            "final": parts["final"],
            "top1": torch.where(read, parts["top1"], NOT_READ),
            "logsumexp": torch.where(read, parts["logsumexp"], 0.0),
        }

    def fill(self, documents: Sequence[Document], buffer: ShardBuffer, advance: Callable[[int], Any]) -> list[int]:
        """Store what was recorded of the documents of one shard; the numbers of those that must be computed."""
        missing = []
        for i, document in enumerate(documents):
            rows = self.find(document)
            if rows is None:
                missing.append(i)
            else:
                buffer.put(i, **rows)
                advance(len(document))
        return missing

    def audit(self, documents: Sequence[Document], compute: Callable[[Sequence[Document]], ShardBuffer]) -> bool:
        """Compute a few recorded documents again (1 %, 2 to 16) and compare. False, with a warning: none may be used.

        Which ones is decided by the hash of their ids, so it is the same ones each time.
        """
        recorded = sorted((d for d in documents if key_of(d.ids) in self._found), key=lambda d: key_of(d.ids))
        count = min(16, max(2, math.ceil(len(recorded) / 100)))
        sample = [(d, rows) for d in recorded[:count] if (rows := self.find(d))]
        if not sample:
            return True
        buffer = compute([d for d, _ in sample])
        bounds = buffer.offsets.tolist()
        computed = [
            {name: tensor[start:end] for name, tensor in buffer.tensors.items()} for start, end in pairwise(bounds)
        ]
        why = difference([rows for _, rows in sample], computed, self.meta)
        if why:
            log.warning(
                "%s: the recorded states are not what the target computes now (%s); all states will be computed.",
                self.folder, why,
            )  # fmt: skip
        return why is None


def difference(
    recorded: Sequence[dict[str, torch.Tensor]], computed: Sequence[dict[str, torch.Tensor]], meta: StatesMeta
) -> str | None:
    """Say in what way the same documents differ by more than TOLERANCE, or None. The last row has no recorded state."""
    states, sums, tied = TOLERANCE.get(meta.dtype, LOOSE)
    same = read = 0
    for one, other in zip(recorded, computed, strict=True):
        for name, called in (("taps", "tap"), ("final", "final state")):
            a, b = (x[name][:-1].float().unflatten(-1, (-1, meta.hidden_size)) for x in (one, other))  # [L-1, parts, H]
            worst = float(relative(a, b).amax())
            if worst > states:
                return f"a {called} differs by {worst:.2g} of its norm, {states} is allowed"
        rows = other["top1"] != NOT_READ
        a, b = one["logsumexp"][rows], other["logsumexp"][rows]
        worst = float(((a - b).abs() / b.abs().clamp_min(1.0)).nan_to_num(math.inf).amax()) if len(a) else 0.0
        if worst > sums:
            return f"a logsumexp differs by {worst:.2g} of itself, {sums} is allowed"
        same += int((one["top1"][rows] == other["top1"][rows]).sum())
        read += int(rows.sum())
    if same < (1 - tied) * read - 1:
        return f"the best token differs in {read - same} of {read} rows"
    return None
