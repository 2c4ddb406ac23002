"""The flat dialect of SafeAILab/EAGLE, SpecForge, SGLang and vLLM: one Llama config with a few draft fields on top.

Layer ids at the top level are taps as they stand (vLLM, llama.cpp). In `eagle_config` SGLang and SpecForge number the
*outputs* of layers, so tap = id + 1, while vLLM reads the same list as taps: where only that list is there, its meaning
is inferred if it makes the default taps, otherwise guessed. `norm_output` is guessed too: SpecForge writes it for "norm
before the head", the engines read "feed the normed state back" (docs/facts).   pytest tests/test_checkpoint.py
"""

from __future__ import annotations

from ...conventions import Known, default_taps
from ..files import DraftFolder
from .common import Reading, Silence, ascending, read_llama_like
from .fields import Fields, Found

NAME = "flat"
IDS = "eagle_aux_hidden_state_layer_ids"


def matches(folder: DraftFolder) -> bool:
    """Any config with a model_type at the top."""
    return "hidden_size" in folder.config


def read(folder: DraftFolder, target_layers: int | None) -> Reading:
    """Interpret the directory. Raises BadInput naming file and field."""
    fields = Fields.of(folder.config_file, folder.config, "eagle_config")
    silence = Silence(norm_output_how=Known.GUESSED)
    return read_llama_like(NAME, folder, fields, fields, _taps(fields, target_layers), silence, target_layers)


def _taps(fields: Fields, target_layers: int | None) -> Found:
    top = ascending(Fields(fields.file, fields.places[:1]).ids(IDS))
    nested = Fields(fields.file, fields.places[1:]).ids(IDS)
    if top.value is not None or nested.value is None:
        return top
    outputs, inputs = ascending(nested, 1), ascending(nested)
    usual = None if target_layers is None or target_layers < 6 else default_taps(target_layers)
    if usual in (outputs.value, inputs.value):
        return Found(usual, Known.INFERRED, nested.where)
    return Found(outputs.value, Known.GUESSED, nested.where)
