"""ShardWriter: a finished shard appears whole under its final name and is recorded at once, so a killed run goes on.

The plan of a shard (which documents, with which ids and masks) is a pure function of the inputs. A shard is kept when
the index lists that very plan and the file still has the recorded checksum; otherwise it is written again.
Exercise it:  pytest tests/test_features_layout.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.artifacts import MANIFEST, write_manifest
from eyas.digests import sha256_file
from eyas.errors import BadInput, EyasError
from eyas.features.layout import (
    INDEX,
    NOT_READ,
    ROW_DTYPES,
    SCHEMA,
    STAGE,
    FeatureMeta,
    ShardEntry,
    dump_index,
    read_index,
    shard_name,
)
from eyas.features.reader import check_shard
from eyas.writes import atomic_save_safetensors, atomic_write

DEFAULT_SHARD_BYTES = 64 << 20


def plan_shards(lengths: Sequence[int], bytes_per_token: int, shard_bytes: int = DEFAULT_SHARD_BYTES) -> list[range]:
    """Cut documents of `lengths` tokens, in order, into shards of at most `shard_bytes` (one document at least)."""
    room = max(1, shard_bytes // bytes_per_token)  # tokens
    plan, start, used = [], 0, 0
    for i, length in enumerate(lengths):
        if i > start and used + length > room:
            plan.append(range(start, i))
            start, used = i, 0
        used += length
    if start < len(lengths):
        plan.append(range(start, len(lengths)))
    return plan


def plan_digest(meta: FeatureMeta, documents: Iterable[tuple[str, torch.Tensor, torch.Tensor]], salt: str = "") -> str:
    """SHA-256 over the metadata, `salt` and each document's (id, ids int32 [L], mask uint8 [L]), lengths included."""
    digest = hashlib.sha256(json.dumps([meta.to_dict(), salt], sort_keys=True).encode())
    for name, ids, mask in documents:
        digest.update(json.dumps([name, len(ids)]).encode())
        digest.update(ids.to(torch.int32).numpy().tobytes())
        digest.update(mask.to(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class ShardBuffer:
    """The tensors of one shard while they are filled, document by document and in any order."""

    def __init__(self, meta: FeatureMeta, lengths: Sequence[int]):
        self.lengths = tuple(lengths)
        self.offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)  # [docs+1]
        rows = int(self.offsets[-1])
        shapes = meta.row_shapes()
        self.tensors = {n: torch.empty((rows, *shapes[n]), dtype=dtype) for n, dtype in ROW_DTYPES.items()}
        self.tensors["top1"].fill_(NOT_READ)
        self.tensors["logsumexp"].zero_()
        self._missing = set(range(len(lengths)))
        self.recorded: int | None = None
        """Documents whose states were recorded while they were generated; see ShardEntry."""

    def put(self, d: int, **rows: torch.Tensor) -> None:
        """Store document d: every tensor of layout.ROW_DTYPES, [L, ...], converted to the dtype on disk."""
        start, end = self.offsets[d : d + 2].tolist()
        if set(rows) != set(ROW_DTYPES):
            raise ValueError(f"document {d} needs the tensors {sorted(ROW_DTYPES)}, got {sorted(rows)}")
        for name, values in rows.items():
            self.tensors[name][start:end].copy_(values)
        self._missing.discard(d)

    def complete(self) -> dict[str, torch.Tensor]:
        """All tensors, offsets included. Raises ValueError while a document is missing."""
        if self._missing:
            raise ValueError(f"documents {sorted(self._missing)[:5]} of the shard were never stored")
        return {**self.tensors, "offsets": self.offsets}


def write_shard(
    folder: Path, meta: FeatureMeta, index: int, doc_ids: list[str], buffer: ShardBuffer, plan: str
) -> ShardEntry:
    """Write shard `index` into `folder` atomically; what the index must list of it (`ShardWriter.add`)."""
    tensors = buffer.complete()
    if len(doc_ids) != len(buffer.lengths):
        raise ValueError(f"shard {index}: {len(doc_ids)} ids for {len(buffer.lengths)} documents")
    path = folder / shard_name(index)
    atomic_save_safetensors(tensors, path, meta.to_metadata(doc_ids, plan))
    supervised = int(tensors["mask"].sum(dtype=torch.int64))
    return ShardEntry(
        path.name, path.stat().st_size, sha256_file(path), plan, buffer.lengths, supervised, buffer.recorded
    )


class ShardWriter:
    """Keeps the index and the manifest of one folder's shards. Raises EyasError when the disk is full (artifacts)."""

    def __init__(self, folder: str | Path, meta: FeatureMeta):
        self.dir = Path(folder)
        self.meta = meta
        self.dir.mkdir(parents=True, exist_ok=True)
        self._entries: dict[str, ShardEntry] = {}
        if (self.dir / INDEX).is_file():
            try:
                self._entries = read_index((self.dir / INDEX).read_text(), INDEX)[1]
            except BadInput:
                self._entries = {}  # an index of another version: every shard is made again

    def kept(self, index: int, plan: str) -> bool:
        """Is shard `index` already on disk, whole, with exactly this plan?"""
        entry = self._entries.get(shard_name(index))
        if entry is None or entry.plan != plan:
            return False
        try:
            check_shard(self.dir, entry)
        except EyasError:
            return False
        return True

    def write(self, index: int, doc_ids: list[str], buffer: ShardBuffer, plan: str) -> None:
        """Write shard `index` atomically and list it."""
        self.begin()
        self.add(write_shard(self.dir, self.meta, index, doc_ids, buffer, plan))

    def add(self, entry: ShardEntry) -> None:
        """List a shard that `write_shard` has written."""
        self._entries[entry.name] = entry
        self._write_index()

    def begin(self) -> None:
        """Shards are about to change: the folder is not finished until `finish`."""
        (self.dir / MANIFEST).unlink(missing_ok=True)

    def recorded(self, num_shards: int) -> int | None:
        """Documents of the first shards whose states were recorded; None where one of them does not say."""
        counts = [self._entries[shard_name(i)].recorded for i in range(num_shards)]
        return None if None in counts else sum(n for n in counts if n is not None)

    def finish(
        self,
        num_shards: int,
        inputs: Mapping[str, str],
        config: Mapping[str, Any],
        counts: Mapping[str, Any],
        duration_s: float,
        extra_files: Mapping[str, str] | None = None,
    ) -> None:
        """Drop shards that an earlier plan left behind and write the manifest: the folder is complete from here on."""
        wanted = {shard_name(i) for i in range(num_shards)}
        missing = wanted - set(self._entries)
        if missing:
            raise ValueError(f"shards {sorted(missing)} were never written")
        stale = sorted(set(self._entries) - wanted)
        if stale:
            self.begin()
        for name in stale:
            del self._entries[name]
        self._write_index()
        for name in stale:
            (self.dir / name).unlink(missing_ok=True)
        files = {**{e.name: e.sha256 for e in self._entries.values()}, **(extra_files or {})}
        files[INDEX] = sha256_file(self.dir / INDEX)
        write_manifest(
            self.dir,
            stage=STAGE,
            inputs=dict(inputs),
            conventions=self.meta.conventions,
            config=dict(config),
            counts=dict(counts),
            duration_s=duration_s,
            files=files,
            schema=SCHEMA,
        )

    def _write_index(self) -> None:
        atomic_write(self.dir / INDEX, dump_index(self.meta, list(self._entries.values())))
