"""One text for one value, and the SHA-256 of values and files: what decides whether a stage is current.

sha256_json({"lr": 1e-3})          pytest tests/test_artifacts.py
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from typing import Any

from eyas.errors import BadInput


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hex SHA-256 of a file's bytes. Raises BadInput where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error


def plain(value: Any) -> Any:
    """For `default=` of json.dumps: paths, enums, dataclasses, pydantic models, sets, numpy scalars as plain values."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    for method in ("model_dump", "to_dict", "tolist"):  # pydantic; Conventions and facts; numpy and torch
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def canonical_json(value: Any) -> str:
    """One text for one value, whatever the order of its keys: what digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=plain)


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
