"""How engines number the target's layers: ids of a config -> taps, and back.

vLLM and llama.cpp take ids as taps. SGLang's ids name the *outputs* of layers, with exceptions among its target
classes (SGLang 0.5.23: llama.py:929, deepseek_v2.py:3467, gpt_oss.py:1347, minimax_m3_vl.py:246, glm4_moe_lite.py).

    pytest tests/test_export.py
"""

from __future__ import annotations

from collections.abc import Sequence

from ...conventions import default_taps

# Target classes of SGLang that take ids as they are, unless the first is 1.
SGLANG_AS_GIVEN = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite")


def sglang_taps(ids: Sequence[int] | None, family: str = "llama", layers: int | None = None) -> tuple[int, ...] | None:
    """Taps that SGLang captures for `ids` of eagle_config on a target of model_type `family`.

    `ids` None: its default, which is None here where the number of `layers` is not known (or too small for one).
    """
    if not ids:
        if layers is None or layers < 7:
            return None
        return tuple(t + (family == "minimax_m3_vl") for t in default_taps(layers))
    if family in SGLANG_AS_GIVEN:
        shift = 1 if ids[0] == 1 else 0
    elif family == "gpt_oss":
        shift = 0 if max(ids) == layers else 1
    else:
        shift = 1
    return tuple(sorted({i + shift for i in ids}))


def sglang_ids(taps: tuple[int, ...], family: str = "llama", layers: int | None = None) -> list[int] | None:
    """Ids that SGLang reads as `taps`; None where there are none.

    -1 would be the embedding output on Llama-like classes; nobody promises it, so tap 0 has no id.
    """
    for shift in (1, 0):
        ids = [t - shift for t in taps]
        if min(ids) >= 0 and sglang_taps(ids, family, layers) == taps:
            return ids
    return None
