"""config.json as transformers gives it to an engine: defaults of the model class, RoPE in its one modern form.

Both SGLang and vLLM read drafts through transformers 5, so its defaults are theirs: an absent `rms_norm_eps` is 1e-6,
an absent `rope_theta` 10000, and a `null` is kept where a number was meant.   pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .reading import Stops

# transformers 5.19, models/llama/configuration_llama.py and its like.
LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "head_dim": None,
}  # fmt: skip
QWEN3 = {
    **LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128,
    "max_position_embeddings": 32768,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {"llama": LLAMA, "qwen3": QWEN3}


@dataclass(frozen=True)
class HfConfig:
    """The config as an object with attributes: `get` is getattr with a default, `need` getattr without one."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> HfConfig:
        """With the defaults of its model_type, Llama's for one that is not known here."""
        return cls(values, DEFAULTS.get(str(values.get("model_type")), LLAMA))

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute, which may be None; `default` where there is none at all."""
        return self.values[name] if name in self.values else self.defaults.get(name, default)

    def nested(self, name: str) -> Mapping[str, Any]:
        """An object inside, {} where there is none."""
        value = self.values.get(name)
        return value if isinstance(value, Mapping) else {}

    def has(self, name: str) -> bool:
        """hasattr"""
        return name in self.values or name in self.defaults

    def need(self, name: str, way_out: str) -> Any:
        """The attribute. Raises Stops with an AttributeError where there is none."""
        if not self.has(name):
            raise Stops("configuration", "AttributeError", f"config.json has no {name}", way_out)
        return self.get(name)

    def whole(self, name: str) -> int:
        """A size. Raises Stops where it is no positive whole number."""
        value = self.get(name)
        if type(value) is not int or value < 1:
            raise Stops("configuration", "TypeError", f"{name} = {value!r} is no whole number", f"write {name}")
        return value

    @property
    def heads(self) -> tuple[int, int, int]:
        """(heads, key heads, size of one)"""
        heads = self.whole("num_attention_heads")
        kv = self.get("num_key_value_heads")
        dim = self.get("head_dim")
        return heads, heads if kv is None else kv, dim or self.whole("hidden_size") // heads

    def rope(self) -> dict[str, Any]:
        """`rope_theta`, `rope_type`, `rope_scaling` (further parameters) and `partial_rotary_factor`, as they are used.

        The old `rope_scaling` wins over `rope_parameters` where both are there; the theta beside them is used where
        the table has none (transformers 5.19, modeling_rope_utils.py, convert_rope_params_to_dict).
        """
        table = dict(self.values.get("rope_scaling") or self.values.get("rope_parameters") or {})
        kind = table.get("rope_type") or table.get("type") or "default"
        named = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        theta = table.get("rope_theta", self.values.get("rope_theta") or 10000.0)
        partial = table.get("partial_rotary_factor", self.values.get("partial_rotary_factor") or 1.0)
        return {
            "rope_theta": float(theta),
            "rope_type": kind,
            "rope_scaling": {} if kind == "default" else {k: v for k, v in table.items() if k not in named},
            "partial_rotary_factor": float(partial),
        }

    def common(self) -> dict[str, Any]:
        """The fields of `Conventions` that both engines take from the same places."""
        return {
            "hidden_act": self.get("hidden_act"),
            "rms_norm_eps": float(self.get("rms_norm_eps")),
            "max_position": self.whole("max_position_embeddings"),
            **self.rope(),
        }
