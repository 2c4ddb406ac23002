"""Eyas's own dialect: `eyas.json` declares sizes and conventions, so nothing is inferred or guessed.

The config.json beside it says the same in the flat dialect, for the engines.   pytest tests/test_checkpoint.py
"""

from __future__ import annotations

from ...conventions import Conventions
from ...errors import BadInput
from ..files import EYAS_JSON, DraftFolder
from ..shape import DraftShape
from .common import Reading
from .keys import canonicalise

NAME = "eyas"
SCHEMA = "eyas-draft/1"


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
    try:
        shape = DraftShape.from_dict(declared["shape"])
        conventions = Conventions.from_dict(declared["conventions"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{where}: {type(error).__name__} {error}; export the draft again") from error
    kv, q = shape.num_kv_heads * shape.head_dim, shape.num_heads * shape.head_dim
    rows = {"self_attn.qkv_proj": [q, kv, kv], "mlp.gate_up_proj": [shape.intermediate_size] * 2}
    canonical = canonicalise(folder.tensors, lambda kind, total: rows[kind])
    notes = tuple(f"{name} is not used: {why}" for name, why in canonical.ignored.items())
    return Reading(NAME, folder, shape, conventions, canonical, notes)
