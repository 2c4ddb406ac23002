"""Dialects: how a draft is spelled on disk -> shape, conventions and canonical tensors. One module each.

A dialect module has `NAME`, `matches(folder) -> bool` and `read(folder, target_layers) -> Reading`; they are tried in
the order of `DIALECTS`. `keys` knows tensor names, `fields` config values, `common` what the dialects share,
`producers` what a field means to whom, `kinds` what is no EAGLE-3 draft at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import BadInput
from ..files import DraftFolder
from ..shape import MOST_LAYERS, MOST_TAPS, MOST_TOKENS
from . import flat, native, speculators
from .common import Reading
from .kinds import refuse_other_kinds

DIALECTS = (native, speculators, flat)
# What whoever reads config.json, Eyas's models of the engines among them, makes lists of.
MOST = {
    "num_hidden_layers": MOST_LAYERS,
    "num_aux_hidden_states": MOST_TAPS,
    "vocab_size": MOST_TOKENS,
    "draft_vocab_size": MOST_TOKENS,
}

__all__ = ["DIALECTS", "Reading", "interpret"]


def interpret(folder: DraftFolder, target_layers: int | None = None) -> Reading:
    """Read a folder in the first dialect that recognises it. Raises BadInput where none does, naming what it is."""
    refuse_other_kinds(folder)
    _refuse_impossible_sizes(folder)
    for dialect in DIALECTS:
        if dialect.matches(folder):
            return dialect.read(folder, target_layers)
    raise BadInput(
        f"{folder.config_file}: neither hidden_size nor transformer_layer_config nor an eyas.json beside it; Eyas "
        f"reads the dialects {', '.join(d.NAME for d in DIALECTS)}; copy the config.json that was saved with the "
        "weights"
    )


def _refuse_impossible_sizes(folder: DraftFolder) -> None:
    nested = {f"{key}.": value for key, value in folder.config.items() if isinstance(value, Mapping)}
    for prefix, place in {"": folder.config, **nested}.items():
        for name, most in MOST.items():
            value = place.get(name)
            if isinstance(value, int) and value > most:
                said = f"{prefix}{name} = {str(value)[:20]}"
                raise BadInput(f"{folder.config_file}: {said}; at most {most:,} is believed; correct the config")
