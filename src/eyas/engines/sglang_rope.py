"""SGLang: the rotary positions that its Llama draft builds, where they are not those of transformers.

Sources: models/llama.py:199, layers/rotary_embedding/factory.py:289-330, rope_variant.py:880, yarn.py:106.
tests/real/test_against_engines.py holds each rule against the class itself.   pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .hf_config import HfConfig


def rope(config: HfConfig) -> dict[str, Any]:
    """The fields of `HfConfig.rope`: what SGLang computes, said in transformers' words."""
    read = config.rope()
    # The one in the table of RoPE parameters is not looked at.
    partial = read["partial_rotary_factor"] = float(config.get("partial_rotary_factor", 1.0))
    table, rotated = read["rope_scaling"], int(partial * config.heads[2])
    if read["rope_type"] == "yarn":
        read["rope_scaling"] = _yarn(table)
    elif read["rope_type"] == "dynamic" and "alpha" not in table:
        # The longest sequence that it can stretch to is assumed for every one, which is plain RoPE of a larger base.
        factor = float(table.get("factor", 1.0))
        grown = (factor**2 - (factor - 1)) ** (rotated / (rotated - 2))
        read |= {"rope_type": "default", "rope_scaling": {}, "rope_theta": read["rope_theta"] * grown}
    return read


def _yarn(table: Mapping[str, Any]) -> dict[str, Any]:
    """`attention_factor` is not read; `attn_factor`, which nobody else reads, multiplies what is there instead."""
    factor, first, second = table.get("factor", 1.0), table.get("mscale"), table.get("mscale_all_dim")
    usual = _magnitude(factor, 1.0)
    if first and second:
        usual = _magnitude(factor, first) / _magnitude(factor, second)
    used, meant = usual * table.get("attn_factor", 1.0), table.get("attention_factor")
    if math.isclose(used, usual if meant is None else meant, rel_tol=1e-6):
        return dict(table)
    return {**{name: value for name, value in table.items() if name != "attn_factor"}, "attention_factor": used}


def _magnitude(factor: float, scale: float) -> float:
    """YaRN's factor on queries and keys (arXiv:2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
