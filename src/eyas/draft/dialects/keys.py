"""Foreign tensor names -> canonical ones, and where each canonical tensor comes from.   pytest tests/test_checkpoint.py

Canonical: bare `midlayer.*` for the first layer, `layers.N.*` after it, q/k/v and gate/up apart, `hidden_norm` as the
norm on the stream of every layer. Seen in the wild: prefixes, `layers.0.*`, fused projections, `aux_norm_low|mid|high`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import BadInput
from ..files import TensorRef
from ..shape import MlaShape

if TYPE_CHECKING:
    import torch

PREFIXES = ("module.", "draft_model.", "model.")
# Old names of the three fc_norm slices (SGLang 0.5.23, models/llama_eagle3.py:337-343).
LEGACY = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
# Tensors that no draft of this kind reads, and why.
IGNORED = {
    r"(^|\.)rotary_emb\.": "RoPE tables follow from the config",
    r"^verifier_norm\.": "the target's final norm, used in training only",
    r"^verifier_lm_head\.": "the target's head, used in training only",
    r"^(mask_hidden$|parallel_draft_heads\.)": "read in parallel drafting only",
}
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.fused_qkv_a_proj_with_mqa": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
MAPS = ("d2t", "t2d")
LATENT = re.compile(r"self_attn\.(fused_qkv_a_proj_with_mqa|q_a_proj|kv_a_proj_with_mqa|kv_b_proj)\.")
"""Names that only latent attention (MLA) has."""


@dataclass(frozen=True)
class Source:
    """Where a canonical tensor lies: a foreign tensor, or the rows `start:stop` of a fused one."""

    ref: TensorRef
    start: int = 0
    stop: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        rows, *rest = self.ref.shape or (0,)
        return (len(range(rows)[self.start : self.stop]), *rest) if self.ref.shape else ()

    @property
    def dtype(self) -> str:
        """As stored."""
        return self.ref.dtype

    def load(self) -> torch.Tensor:
        """Read it, as stored."""
        tensor = self.ref.load()
        return tensor if self.start == 0 and self.stop is None else tensor[self.start : self.stop]


@dataclass
class Canonical:
    """Canonical name -> source, and what was left aside with the reason."""

    sources: dict[str, Source] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, None where it is absent."""
        return self.sources[name].shape if name in self.sources else None

    def any(self, pattern: str) -> bool:
        """Does any canonical name match the regular expression?"""
        return any(re.search(pattern, name) for name in self.sources)

    def num_layers(self) -> int:
        """Layers that have a tensor."""
        found = [int(m[1]) for name in self.sources if (m := re.match(r"layers\.(\d{1,9})\.", name))]
        return 1 + max(found, default=0)


def has_latent_attention(names: Iterable[str]) -> bool:
    """Do these (foreign) names belong to a draft with MLA?"""
    return any(LATENT.search(name) for name in names)


def canonical_name(name: str) -> str:
    """One foreign name in canonical spelling; fused projections keep their fused name."""
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    for old, new in LEGACY.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def fused_rows(q: int, kv: int, mla: MlaShape | None) -> Callable[[str, int], list[int]]:
    """(kind, its rows) -> rows of its parts, for the kinds of `FUSED`; `q`, `kv`: rows of q_proj and of k_proj."""
    latent = [mla.q_lora_rank or 0, mla.kv_lora_rank + mla.qk_rope_head_dim] if mla else [0, 0]
    rows = {"self_attn.qkv_proj": [q, kv, kv], "self_attn.fused_qkv_a_proj_with_mqa": latent}
    return lambda kind, total: rows.get(kind) or [total // 2, total - total // 2]


def canonicalise(tensors: Mapping[str, TensorRef], rows_of: Callable[[str, int], list[int]]) -> Canonical:
    """Canonical view of the tensors of a folder; `rows_of` as `fused_rows` makes it.

    Raises BadInput when two tensors mean the same one.
    """
    out = Canonical()

    def put(name: str, source: Source) -> None:
        if name in out.sources:
            other = out.sources[name].ref
            raise BadInput(
                f"{source.ref.name} ({source.ref.file}) and {other.name} ({other.file}) are both {name}; remove one"
            )
        out.sources[name] = source

    for foreign, ref in tensors.items():
        name = canonical_name(foreign)
        reason = next((why for pattern, why in IGNORED.items() if re.search(pattern, name)), None)
        kind = next((k for k in FUSED if f".{k}." in name), None)
        if reason is not None:
            out.ignored[foreign] = reason
        elif kind is None or not ref.shape:
            put(name, Source(ref))
        else:
            rows = rows_of(kind, ref.shape[0])
            if sum(rows) != ref.shape[0]:
                raise BadInput(
                    f"{ref.file}: {foreign} has {ref.shape[0]} rows, the config asks for "
                    f"{' + '.join(map(str, rows))}; correct the sizes in the config, or split the tensor"
                )
            start = 0
            for part, count in zip(FUSED[kind], rows, strict=True):
                put(name.replace(kind, part), Source(ref, start, start + count))
                start += count
    _one_stream_norm(out)
    return out


def _one_stream_norm(out: Canonical) -> None:
    """Layers >= 1 have one norm on the stream: vLLM reads it as input_layernorm, SGLang as hidden_norm."""
    for name in [n for n in out.sources if re.match(r"layers\.\d+\.input_layernorm\.weight$", n)]:
        twin = name.replace("input_layernorm", "hidden_norm")
        source = out.sources.pop(name)
        if twin not in out.sources:
            out.sources[twin] = source
        elif not _equal(source.load(), out.sources[twin].load()):
            raise BadInput(
                f"{source.ref.file}: {name} and {twin} differ. vLLM reads the first and SGLang the second, so the file "
                f"does not say which was trained; make them equal"
            )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return torch.equal(a, b)
