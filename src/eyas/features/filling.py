"""A shard is filled: by the target in this process, or by an engine; what was recorded before is copied.

    with Filler(how) as fill:
        entry = make_shard(how.out, how.meta, piece, fill, advance)

`Filling` is all that decides the numbers in a shard beside its documents; it is small and can be sent to another
machine. A Filler loads what it needs with the first shard that needs it.   pytest tests/test_features_extract.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.errors import EyasError
from eyas.features.conversations import Document
from eyas.features.layout import FeatureMeta, ShardEntry
from eyas.features.passes import fill_shard
from eyas.features.recorded import Recordings, StatesMeta
from eyas.features.states import Engine, fill_from_states, layers_of
from eyas.features.writer import ShardBuffer, write_shard
from eyas.target.facts import read_facts
from eyas.target.model import Target
from eyas.target.weights import load_ends
from eyas.writes import scratch_dir

Advance = Callable[[int], Any]


@dataclass(frozen=True)
class Filling:
    """How shards are filled."""

    folder: Path
    """Of the target."""
    out: Path
    meta: FeatureMeta
    longest: int
    """Tokens of the longest conversation of all shards."""
    batch_tokens: int = 2048
    device: str = "cpu"
    dtype: str = "float32"
    trust_remote_code: bool = False
    recorded: Path | None = None
    engine: Engine | None = None
    """None: the target runs in this process."""


@dataclass(frozen=True)
class Piece:
    """One shard that is to be made: which documents it must hold is settled before anybody begins."""

    index: int
    documents: list[Document]
    plan: str
    """writer.plan_digest"""

    @property
    def tokens(self) -> int:
        return sum(len(d) for d in self.documents)


class Filler:
    """Computes the states of the documents of a shard, or copies recorded ones. A context manager."""

    def __init__(self, how: Filling, target: Target | None = None, sample: Sequence[Document] | None = None):
        """target: already loaded. sample: documents to audit recorded states with; None: those of the first shard."""
        self.how = how
        self._sample = sample
        self._stack = contextlib.ExitStack()
        self._run: Callable[..., None] | None = None
        self._target = target
        self._recordings: Recordings | None = None
        self._opened = how.recorded is None

    def __enter__(self) -> Filler:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, documents: Sequence[Document], buffer: ShardBuffer, advance: Advance = lambda n: None) -> None:
        """Store every row of these documents."""
        if not self._opened:
            self._open_recordings(documents)
        missing = self._recordings.fill(documents, buffer, advance) if self._recordings else range(len(documents))
        buffer.recorded = len(documents) - len(missing)
        if missing:
            self._compute(documents, buffer, advance, list(missing))

    def _open_recordings(self, documents: Sequence[Document]) -> None:
        """Recorded states are used only where a sample of them is what is computed now."""
        how = self.how
        assert how.recorded is not None
        found = Recordings(how.recorded, StatesMeta(how.meta.target, how.meta.taps, how.meta.hidden_size, how.dtype))

        def again(chosen: Sequence[Document]) -> ShardBuffer:
            buffer = ShardBuffer(how.meta, [len(d) for d in chosen])
            self._compute(chosen, buffer, lambda n: None, list(range(len(chosen))))
            return buffer

        self._recordings = found if found.audit(self._sample or documents, again) else None
        self._opened = True

    def _compute(
        self, documents: Sequence[Document], buffer: ShardBuffer, advance: Advance, places: Sequence[int]
    ) -> None:
        if self._run is None:
            self._run = self._in_process() if self.how.engine is None else self._by(self.how.engine)
        self._run(documents, buffer, advance, places)

    def _in_process(self) -> Callable[..., None]:
        how = self.how
        target = self._target or Target.load(how.folder, how.device, getattr(torch, how.dtype), how.trust_remote_code)

        def run(documents: Sequence[Document], buffer: ShardBuffer, advance: Advance, places: Sequence[int]) -> None:
            fill_shard(target, documents, buffer, how.meta.taps, how.batch_tokens, advance, places)

        return run

    def _by(self, engine: Engine) -> Callable[..., None]:
        how = self.how
        ends = load_ends(how.folder, read_facts(how.folder)).computing("cuda" if how.device == "auto" else how.device)
        layers = layers_of(how.meta.taps, ends.facts.num_layers)
        scratch = self._stack.enter_context(scratch_dir(how.out))
        states = self._stack.enter_context(
            engine.open(how.folder, layers, how.longest, how.batch_tokens, how.dtype, scratch, how.trust_remote_code)
        )

        def run(documents: Sequence[Document], buffer: ShardBuffer, advance: Advance, places: Sequence[int]) -> None:
            fill_from_states(states, ends, documents, buffer, how.meta.taps, advance, places)

        return run


def make_shard(folder: Path, meta: FeatureMeta, piece: Piece, compute: Any, advance: Advance) -> ShardEntry:
    """Compute one shard and write it atomically into `folder`; compute(documents, buffer, advance), as a Filler."""
    buffer = ShardBuffer(meta, [len(d) for d in piece.documents])
    compute(piece.documents, buffer, advance)
    return write_shard(folder, meta, piece.index, [d.id for d in piece.documents], buffer, piece.plan)


class ShardWorker:
    """Makes one shard after the other on some machine: a piece in, what the index must list of it out."""

    def __init__(self, how: Filling):
        self.how = how
        self.fill = Filler(how)

    def __call__(self, piece: Piece) -> ShardEntry:
        """Raises EyasError where this machine does not see the folders that all workers share."""
        for what, folder in (("the target", self.how.folder), ("--out", self.how.out)):
            if not folder.is_dir():
                raise EyasError(f"{what} {folder} is no folder here; workers need a file system that all of them share")
        return make_shard(self.how.out, self.how.meta, piece, self.fill, lambda n: None)
