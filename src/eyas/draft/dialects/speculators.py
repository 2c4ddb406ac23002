"""The dialect of the speculators library: the model config nested in `transformer_layer_config`, draft flags above it.

Layer ids are taps as they stand. Absent `norm_before_residual`: vLLM reads True (configs/speculators/algos.py:33), the
library's own class says False, and its trainer's default is True, so it is guessed.   pytest tests/test_checkpoint.py
"""

from __future__ import annotations

from ...conventions import Known
from ...errors import BadInput
from ..files import DraftFolder
from .common import Reading, Silence, ascending, read_decoder
from .fields import Fields, Found

NAME = "speculators"
LAYER = "transformer_layer_config"


def matches(folder: DraftFolder) -> bool:
    """A config that names its speculators type or nests the layer's config."""
    return "speculators_model_type" in folder.config or LAYER in folder.config


def read(folder: DraftFolder, target_layers: int | None) -> Reading:
    """Interpret the directory. Raises BadInput naming file and field."""
    kind = folder.config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise BadInput(
            f"{folder.config_file}: speculators_model_type = {kind!r}; Eyas reads 'eagle3' drafts; name such a draft"
        )
    layer = folder.config.get(LAYER)
    if not isinstance(layer, dict):
        raise BadInput(
            f"{folder.config_file}: {LAYER} is missing or not an object; copy the config.json that was saved with "
            "the weights"
        )
    draft = Fields.of(folder.config_file, folder.config)
    model = Fields(folder.config_file, [(f"{LAYER}.", layer)])
    silence = Silence(norm_before_residual=Found(True, Known.GUESSED))
    taps = ascending(draft.ids("eagle_aux_hidden_state_layer_ids"))
    producer = f"speculators {folder.config.get('speculators_version') or ''}".strip()
    return read_decoder(NAME, producer, folder, model, draft, taps, silence, target_layers)
