"""Dialects: how a draft is spelled on disk -> shape, conventions and canonical tensors. One module each.

A dialect module has `NAME`, `matches(folder) -> bool` and `read(folder, target_layers) -> Reading`; they are tried in
the order of `DIALECTS`. `keys` knows tensor names, `fields` config values, `common` what Llama-like dialects share.
"""

from __future__ import annotations

from ...errors import BadInput
from ..files import DraftFolder
from . import flat, native, speculators
from .common import Reading
from .kinds import refuse_other_kinds

DIALECTS = (native, speculators, flat)

__all__ = ["DIALECTS", "Reading", "interpret"]


def interpret(folder: DraftFolder, target_layers: int | None = None) -> Reading:
    """Read a folder in the first dialect that recognises it. Raises BadInput where none does, naming what it is."""
    refuse_other_kinds(folder)
    for dialect in DIALECTS:
        if dialect.matches(folder):
            return dialect.read(folder, target_layers)
    raise BadInput(
        f"{folder.config_file}: neither hidden_size nor transformer_layer_config nor an eyas.json beside it; "
        f"Eyas reads the dialects {', '.join(d.NAME for d in DIALECTS)}"
    )
