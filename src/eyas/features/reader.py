"""FeatureSet: documents of features, mapped from disk without a copy, and refused where they belong to another target.

    features = FeatureSet.open("runs/demo/features"); features.check(target=fingerprint); features.document(0)["taps"]

Exercise it:  pytest tests/test_features_layout.py
"""

from __future__ import annotations

import bisect
import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from eyas.artifacts import read_manifest
from eyas.conventions import Conventions
from eyas.digests import sha256_file
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.features.layout import INDEX, METADATA, NOT_READ, ROW_DTYPES, SCHEMA, FeatureMeta, ShardEntry, read_index
from eyas.headers import read_header
from eyas.untrusted import content, parse_json

_DTYPES = {
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
}  # fmt: skip
REMEDY = "run `eyas extract` again with the same arguments: it redoes only the shards that are damaged"


def map_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Map a safetensors file: ({name: tensor over the page cache}, metadata). Nothing is read before it is touched.

    The mapping is private (copy on write), so the tensors can be changed without changing the file.
    Raises EyasError naming the file when it is missing, truncated or not safetensors.
    """
    try:
        header = read_header(path)
        unknown = sorted({e.dtype for e in header.entries.values()} - _DTYPES.keys())
        if unknown:
            raise ValueError(f"it holds tensors of {', '.join(unknown)}")
        storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
        tensors = {}
        for name, entry in header.entries.items():
            dtype, shape = _DTYPES[entry.dtype], list(entry.shape)
            if entry.start % dtype.itemsize:
                raise ValueError(f"tensor {name!r} is not aligned to its dtype")
            stride = list(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]
            flat = torch.empty(0, dtype=dtype)
            tensors[name] = flat.set_(storage, entry.start // dtype.itemsize, shape, stride[-len(shape) :])
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise EyasError(f"{path}: the feature shard cannot be read ({error}); {REMEDY}") from error
    except BadInput as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        said = f"{path}: the feature shard is missing" if missing else str(error)
        raise EyasError(f"{said}; {REMEDY}") from error
    return tensors, dict(header.metadata)


class FeatureSet:
    """Documents of features in one folder. `document(i)` touches only the pages of document i."""

    def __init__(self, folder: Path, manifest: dict[str, Any], entries: list[ShardEntry], meta: FeatureMeta):
        self.dir = folder
        self.manifest = manifest
        self.entries = entries
        self.meta = meta
        self.doc_lengths = torch.tensor([n for e in entries for n in e.lengths], dtype=torch.int64)  # [docs]
        self._first = [0, *accumulate(len(e.lengths) for e in entries)]  # document number where each shard begins
        self._maps: dict[int, tuple[dict[str, torch.Tensor], list[str]]] = {}

    @classmethod
    def open(cls, folder: str | Path, verify: bool = False) -> FeatureSet:
        """Open a finished folder; each shard's size is compared with the index, its content too if `verify`.

        Raises EyasError naming the shard that is missing, truncated or altered, BadInput for a folder that holds no
        finished features.
        """
        folder = Path(folder)
        manifest = read_manifest(folder) if (folder / "manifest.json").is_file() else None
        if manifest is None or not (folder / INDEX).is_file():
            state = "its extraction has not finished" if (folder / INDEX).is_file() else "no features lie there"
            raise BadInput(f"{folder}: {state}; run `eyas extract CONVERSATIONS.jsonl --out {folder}`")
        meta, index = read_index(_index_text(folder / INDEX), str(folder / INDEX))
        entries = [index[name] for name in sorted(index)]
        for entry in entries:
            check_shard(folder, entry, content=verify)
        if not entries:
            raise BadInput(
                f"{folder}: the features hold no document; see its manifest for what was set aside; extract other "
                "conversations"
            )
        return cls(folder, manifest, entries, meta)

    @property
    def conventions(self) -> Conventions:
        """Conventions under which the states were recorded."""
        return self.meta.conventions

    @property
    def num_docs(self) -> int:
        """Documents in the folder."""
        return len(self.doc_lengths)

    def __len__(self) -> int:
        return self.num_docs

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, prompts included."""
        return int(self.doc_lengths.sum())

    @property
    def supervised_tokens(self) -> int:
        """Tokens under the loss mask."""
        return sum(e.supervised for e in self.entries)

    @property
    def shards(self) -> list[Path]:
        """Paths of the shards in document order."""
        return [self.dir / e.name for e in self.entries]

    def shard(self, index: int) -> dict[str, torch.Tensor]:
        """All tensors of shard `index` (layout.ROW_DTYPES and `offsets` int64 [docs+1]), mapped, not copied."""
        return self._map(index)[0]

    def document(self, i: int) -> dict[str, torch.Tensor]:
        """Views of document i: ids [L], mask [L], taps [L, T*H], final [L, H], top1 [L], logsumexp [L]."""
        if not 0 <= i < self.num_docs:
            raise IndexError(f"document {i} of {self.num_docs}")
        index = bisect.bisect_right(self._first, i) - 1
        tensors = self.shard(index)
        start, end = tensors["offsets"][i - self._first[index] : i - self._first[index] + 2].tolist()
        return {name: tensors[name][start:end] for name in ROW_DTYPES}

    def doc_id(self, i: int) -> str:
        """The id that the conversation file gave document i."""
        index = bisect.bisect_right(self._first, i) - 1
        return self._map(index)[1][i - self._first[index]]

    @property
    def doc_ids(self) -> list[str]:
        """Ids of all documents (reads every shard's header)."""
        return [name for k in range(len(self.entries)) for name in self._map(k)[1]]

    def _map(self, index: int) -> tuple[dict[str, torch.Tensor], list[str]]:
        if index not in self._maps:
            path = self.dir / self.entries[index].name
            tensors, metadata = map_safetensors(path)
            names = _documents(path, metadata, len(self.entries[index].lengths))
            missing = {*ROW_DTYPES, "offsets"} - set(tensors)
            if missing:
                raise EyasError(f"{path}: the tensors {sorted(missing)} are missing; {REMEDY}")
            _check_rows(path, tensors, self.entries[index], self.meta)
            self._maps[index] = (tensors, names)
        return self._maps[index]

    def check(
        self,
        target: str | os.PathLike[str] | None = None,
        tokenizer: str | None = None,
        template: str | None = None,
        taps: tuple[int, ...] | list[int] | None = None,
    ) -> None:
        """Refuse features of another target, tokenizer, template or tap choice.

        `target` is a fingerprint, or the folder of a target (then its tokenizer and template are compared as well).
        Raises Mismatch naming both sides; a side that is not known (None or "") is not compared.
        """
        mine = self.meta.target
        if isinstance(target, os.PathLike):
            from eyas.target import source

            folder = Path(target)
            mine, target = source.other_target(self.meta.target, self.meta.ends, folder) or (mine, None)
            tokenizer = tokenizer or source.tokenizer_fingerprint(folder)
            template = template or source.template_fingerprint(folder)
        pairs: list[tuple[str, Any, Any, str]] = [
            ("target", mine, target, "use the target they were made with, or extract again"),
            ("tokenizer", self.meta.tokenizer, tokenizer, "use the tokenizer they were made with, or extract again"),
            ("chat template", self.meta.template, template, "restore the template, or extract again"),
            ("taps", list(self.meta.taps), list(taps) if taps else None, "ask for the same taps, or extract again"),
        ]
        for what, mine, theirs, remedy in pairs:
            if mine and theirs and mine != theirs:
                raise Mismatch(
                    f"{self.dir}: these features were made with {what} {_short(mine)}, but {what} {_short(theirs)} was "
                    f"asked for; {remedy}"
                )


def _index_text(path: Path) -> str:
    try:
        return content(path).decode()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read ({error}); {REMEDY}") from error


def check_shard(folder: Path, entry: ShardEntry, content: bool = True) -> None:
    """Compare a shard with its index entry: size, and SHA-256 if `content`. Raises EyasError naming the file."""
    path = folder / entry.name
    if not path.is_file():
        raise EyasError(f"{path}: the feature shard is missing; {REMEDY}")
    size = path.stat().st_size
    if size != entry.bytes:
        raise EyasError(f"{path}: the index lists {entry.bytes} bytes, the file has {size}; {REMEDY}")
    if content and sha256_file(path) != entry.sha256:
        raise EyasError(f"{path}: its content no longer has the recorded checksum {entry.sha256[:12]}; {REMEDY}")


def _documents(path: Path, metadata: dict[str, str], count: int) -> list[str]:
    """The ids of a shard's documents, as its metadata lists them."""
    try:
        told = parse_json(metadata.get(METADATA, "{}"))
        schema, names = told.get("schema"), told.get("documents")
    except (ValueError, AttributeError) as error:
        raise EyasError(f"{path}: its metadata cannot be read ({error}); {REMEDY}") from error
    if schema != SCHEMA:
        raise EyasError(f"{path}: schema {schema!r}, this Eyas reads {SCHEMA!r}; {REMEDY}")
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise EyasError(f"{path}: its metadata does not name its {count} documents; {REMEDY}")
    return names


def _check_rows(path: Path, tensors: dict[str, torch.Tensor], entry: ShardEntry, meta: FeatureMeta) -> None:
    """Raise EyasError where the rows of a shard are not what its index and metadata promise: whoever reads them trusts
    shapes, bounds and ids. Of the numbers only ids and choices are read."""
    bounds = [0, *accumulate(entry.lengths)]
    shapes = {name: (bounds[-1], *shape) for name, shape in meta.row_shapes().items()} | {"offsets": (len(bounds),)}
    dtypes = {**ROW_DTYPES, "offsets": torch.int64}
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape or tensors[name].dtype != dtypes[name]:
            found = f"{str(tensors[name].dtype).removeprefix('torch.')} {list(tensors[name].shape)}"
            wanted = f"{str(dtypes[name]).removeprefix('torch.')} {list(shape)}"
            raise EyasError(f"{path}: {name} is {found}, expected {wanted}; {REMEDY}")
    if tensors["offsets"].tolist() != bounds:
        raise EyasError(f"{path}: its offsets are not those of the documents that {INDEX} lists; {REMEDY}")
    for name, least in (("ids", 0), ("top1", NOT_READ)):
        if bounds[-1]:
            low, high = (int(x) for x in tensors[name].aminmax())
            if low < least or high >= meta.vocab_size:
                raise EyasError(
                    f"{path}: {name} run from {low} to {high}, the target's end at {meta.vocab_size - 1}; {REMEDY}"
                )


def _short(value: Any) -> str:
    return value[:16] if isinstance(value, str) else str(value)
