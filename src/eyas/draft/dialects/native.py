"""Eyas's own dialect: `eyas.json` declares sizes and conventions, so nothing is inferred or guessed.

The config.json beside it says the same in the flat dialect, for the engines.   pytest tests/test_checkpoint.py
"""

from __future__ import annotations

from collections.abc import Mapping

from ...conventions import Conventions
from ...errors import BadInput
from ..files import EYAS_JSON, DraftFolder
from ..shape import DraftShape
from .common import Reading
from .keys import canonicalise, fused_rows

NAME = "eyas"
SCHEMA = "eyas-draft/1"
TABLES = ("target", "tensors", "predicted", "provenance")  # what others read of eyas.json


def matches(folder: DraftFolder) -> bool:
    """A directory with eyas.json."""
    return folder.eyas is not None


def read(folder: DraftFolder, target_layers: int | None) -> Reading:
    """Interpret the directory. Raises BadInput naming eyas.json and what is wrong with it."""
    declared, where = folder.eyas or {}, folder.path / EYAS_JSON
    if declared.get("schema") != SCHEMA:
        raise BadInput(
            f"{where}: expected schema {SCHEMA!r}, found {declared.get('schema')!r}; update Eyas or export again"
        )
    odd = next((name for name in TABLES if not isinstance(declared.get(name) or {}, Mapping)), None)
    if odd is not None:
        raise BadInput(f"{where}: {odd} = {declared[odd]!r:.80}, expected an object; export the draft again")
    try:
        shape = DraftShape.from_dict(declared["shape"])
        conventions = Conventions.from_dict(declared["conventions"])
        if (shape.mla is not None) != (conventions.attention == "mla"):
            raise ValueError("shape.mla and conventions.attention contradict each other")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{where}: {type(error).__name__} {error}; export the draft again") from error
    kv, q = shape.num_kv_heads * shape.head_dim, shape.num_heads * shape.head_dim
    canonical = canonicalise(folder.tensors, fused_rows(q, kv, shape.mla))
    notes = tuple(f"{name} is not used: {why}" for name, why in canonical.ignored.items())
    producer = f"Eyas {declared.get('eyas_version') or ''}".strip()
    return Reading(NAME, folder, shape, conventions, canonical, notes, producer)
