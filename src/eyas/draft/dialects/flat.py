"""The flat dialect, in which most projects write: one model config with a few draft fields on top.

SafeAILab/EAGLE, SpecForge, Model Optimizer, AngelSlim, TorchSpec, NeMo Automodel, SGLang and vLLM. `producers` tells
them apart where a field means different things to them. Layer ids at the top level are taps as they stand (vLLM,
llama.cpp). In `eagle_config` SGLang and those who train with it number the *outputs* of layers, so tap = id + 1, while
vLLM reads the same list as taps: where only that list is there and its writer is not known, its meaning is inferred if
it makes the default taps, otherwise guessed.   pytest tests/test_checkpoint.py
"""

from __future__ import annotations

from dataclasses import replace

from ...conventions import Known, default_taps
from ..files import DraftFolder
from .common import Reading, ascending, read_decoder
from .fields import Fields, Found
from .keys import has_latent_attention
from .producers import IDS, Producer, recognise

NAME = "flat"
TEXT, EAGLE = "text_config", "eagle_config"


def matches(folder: DraftFolder) -> bool:
    """Any config that names its width, at the top or in the text part of a multimodal one."""
    inner = folder.config.get(TEXT)
    return "hidden_size" in folder.config or (isinstance(inner, dict) and "hidden_size" in inner)


def read(folder: DraftFolder, target_layers: int | None) -> Reading:
    """Interpret the directory. Raises BadInput naming file and field."""
    fields = Fields.of(folder.config_file, folder.config, TEXT, EAGLE)
    producer = recognise(folder.config)
    taps = _taps(fields, producer, has_latent_attention(folder.tensors), target_layers)
    reading = read_decoder(NAME, producer.name, folder, fields, fields, taps, producer.silence, target_layers)
    remarks = tuple(text for applies, text in producer.remarks if applies(folder.config))
    return replace(reading, notes=reading.notes + remarks)


def _taps(fields: Fields, producer: Producer, latent: bool, target_layers: int | None) -> Found:
    inner = f"{EAGLE}."
    top = ascending(Fields(fields.file, [place for place in fields.places if place[0] != inner]).ids(IDS))
    nested = Fields(fields.file, [place for place in fields.places if place[0] == inner]).ids(IDS)
    if top.value is not None or nested.value is None:
        return top
    outputs, inputs = ascending(nested, 1), ascending(nested)
    if producer.outputs:
        return outputs
    if latent:  # SGLang's classes of their targets add 1 only to ids that begin with 1 (deepseek_v2.py:3467)
        return Found((outputs if nested.value[0] == 1 else inputs).value, Known.INFERRED, nested.where)
    usual = None if target_layers is None or target_layers < 7 else default_taps(target_layers)
    if usual in (outputs.value, inputs.value):
        return Found(usual, Known.INFERRED, nested.where)
    return Found(outputs.value, Known.GUESSED, nested.where)
