"""Rows of a file, a folder, a saved dataset or a dataset id, whatever their format; what they mean is not asked.

    for file, line, row in read_rows("data@test"): ...    # a line of JSON as text, or a parsed row
    pytest tests/test_rows.py

JSONL (plain, gzip) and JSON arrays, Parquet, Arrow, and what `Dataset.save_to_disk` and `DatasetDict.save_to_disk`
write are read here; for an id the package `datasets` is asked, which goes by HF_HOME and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eyas import console
from eyas.digests import sha256_file, sha256_json
from eyas.errors import BadInput, EyasError
from eyas.untrusted import content as whole
from eyas.untrusted import lines, opened, parse_json

SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".parquet", ".arrow")
TABLES = (".parquet", ".arrow")
STATE, SPLITS = "state.json", "dataset_dict.json"  # of a saved dataset, of several saved together
FORM = "The form is id, id:config, id@split or id:config@split."


def read_rows(source: str | Path) -> Iterator[tuple[str, int, Any]]:
    """(file, line number from 1, text of a line or parsed row) of everything in a source, blank lines left out.

    Raises BadInput for what cannot be read, EyasError where an id needs a package that is missing.
    """
    place = local(source)
    if place is None:
        if str(source).endswith(SUFFIXES) or str(source).startswith((".", "/", "~")):
            raise BadInput(f"{source}: no such file. Name a JSONL or Parquet file, a `datasets` id, or `builtin`.")
        for number, row in enumerate(_from_hub(str(source)), 1):
            yield str(source), number, row
        return
    for file in _files(*place):
        reader = _parquet if file.suffix == ".parquet" else _arrow if file.suffix == ".arrow" else _json_lines
        for number, row in enumerate(reader(file), 1):
            if not (isinstance(row, str) and not row.strip()):
                yield str(file), number, row


def local(source: str | Path) -> tuple[Path, str | None] | None:
    """(path, split) of a source that lies here, None where its name can only be an id. `data@test` is a path, too."""
    path = Path(source)
    if path.exists():
        return path, None
    text, at, split = str(source).rpartition("@")
    return (Path(text), split) if at and Path(text).is_dir() else None


def is_lines(source: str | Path) -> bool:
    """Is it one file of lines of JSON, which can be read, and whose faults can be told, line by line?"""
    return Path(source).is_file() and Path(source).suffix not in TABLES


def is_saved(path: str | Path) -> bool:
    """Is it a dataset, or several, that the package `datasets` saved to disk?"""
    found = local(path)
    return found is not None and any((found[0] / name).is_file() for name in (STATE, SPLITS))


def content(source: str | Path) -> str | None:
    """Digest of what lies here: of a file its bytes, of a folder all its files. None for an id, whose name must do."""
    found = local(source)
    if found is None:
        return None
    path, split = found
    if path.is_file():
        return sha256_file(path)
    told = {f.relative_to(path).as_posix(): sha256_file(f) for f in sorted(path.rglob("*")) if f.is_file()}
    return sha256_json(told if split is None else [told, split])


def without_nulls(value: Any) -> Any:
    """Without the nulls that tables put where one row has a field and another has not."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


# ---------------------------------------------------------------- which files


def _files(path: Path, split: str | None) -> list[Path]:
    """The files of a source, in their order."""
    if path.is_file():
        return [path]
    if (path / SPLITS).is_file():
        names = _listed(path / SPLITS, "splits")
        chosen = split or ("train" if "train" in names else names[0] if len(names) == 1 else None)
        if chosen not in names:
            wanted = f"no split {split!r}" if split else "no split `train`"
            raise BadInput(f"{path} has {wanted}; choose one of {', '.join(names)}: {path}@SPLIT.")
        return _files(path / str(chosen), None)
    if split is not None:
        raise BadInput(f"{path}@{split}: {path} has no splits to choose from; leave @{split} out.")
    if (path / STATE).is_file():
        return [path / Path(entry["filename"]).name for entry in _listed(path / STATE, "_data_files")]
    files = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES))
    if not files:
        raise BadInput(f"{path} holds no prompt file. Expected names that end in {', '.join(SUFFIXES)}.")
    return files


def _listed(file: Path, key: str) -> list[Any]:
    try:
        listed = parse_json(whole(file))[key]
        if not isinstance(listed, list) or not listed:
            raise ValueError(f"`{key}` is {listed!r}")
        return listed
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{file}: not what `datasets` saves ({error}); save the dataset again.") from error


# ---------------------------------------------------------------- each format


def _json_lines(path: Path) -> Iterator[Any]:
    """Lines as text, so that a malformed one is one bad row; a .json file may also be one array of rows."""
    try:
        with opened(path) as file:
            array = path.suffix == ".json" and file.read(64).lstrip()[:1] == b"["
        if array:
            try:
                yield from parse_json(whole(path))
            except ValueError as error:
                raise BadInput(
                    f"{path}: begins as a JSON array, but is none ({error}); write one object a line, or close "
                    "the array."
                ) from error
            return
        for line in lines(path):
            yield line.decode("utf-8", errors="replace")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read ({error}). Name a JSONL file, plain or gzip.") from error


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as parquet
    from pyarrow.lib import ArrowException

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise BadInput(f"{path} cannot be read as Parquet ({error}); copy it again, or name a JSONL file.") from error


def _arrow(path: Path) -> Iterator[Any]:
    """A stream of record batches, as `datasets` writes them, or a file of them (Feather)."""
    import pyarrow as arrow

    try:
        with arrow.memory_map(str(path)) as handle:
            feather = handle.read(6) == b"ARROW1"
            handle.seek(0)
            if feather:
                file = arrow.ipc.open_file(handle)
                for index in range(file.num_record_batches):
                    yield from file.get_batch(index).to_pylist()
            else:
                for batch in arrow.ipc.open_stream(handle):
                    yield from batch.to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise BadInput(f"{path} cannot be read as Arrow ({error}); copy it again, or name a JSONL file.") from error


def _from_hub(spec: str) -> Iterable[Any]:
    try:
        import datasets
    except ImportError:
        raise EyasError(
            f"'{spec}' is no file here, so it must be a dataset id, and reading those needs the package `datasets`: "
            f"pip install 'eyas[datasets]' (or pip install datasets). Or name a JSONL or Parquet file."
        ) from None
    name, _, split = spec.partition("@")
    name, _, config = name.partition(":")
    if not console.watched():
        getattr(datasets, "disable_progress_bars", lambda: None)()
    try:
        return datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # the package raises what its many backends raise
        raise BadInput(f"dataset '{spec}' cannot be loaded ({error}). {FORM}") from error
