"""What the tests of repair's operations share: a healthy draft on the disk, faults put into a copy, bytes compared.

from mending import healthy, broken, contents, logits
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafts import make_draft, with_embedding, write_flat, write_speculators
from eyas.doctor.specimen import Cast, Specimen, declared
from eyas.draft.checkpoint import save_draft
from eyas.draft.model import Draft
from eyas.repair.overlay import Overlay
from eyas.repair.refs import digest
from eyas.target.facts import TargetFacts
from eyas.vocab import VocabMap

V, D, H = 300, 120, 32
Tensors, Config = dict[str, torch.Tensor], dict[str, Any]
FACTS = TargetFacts(
    hidden_size=H, vocab_size=V, num_layers=8, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64,
    rms_norm_eps=1e-5, rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position=512, tied=True, model_type="llama",
)  # fmt: skip


def right_map() -> VocabMap:
    """Ids that begin with the target's own, as real maps do."""
    return VocabMap.from_absolute(torch.cat([torch.arange(20), torch.arange(20, D) + 7]), V)


def healthy(folder: Path, style: str = "eyas", sizes: dict[str, int] | None = None, **conventions: Any) -> Path:
    """A draft in one of the styles: eyas | flat | layers0 | prefixed | fused | sharded | bin | speculators."""
    draft, _ = make_draft(0, sizes, **conventions)
    c = draft.conventions
    said = {name: getattr(c, name) for name in ("norm_before_fc", "norm_output", "norm_before_residual", "fc_norm")}
    said |= {
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [t - 1 for t in c.taps], "use_aux_hidden_state": True},
    }
    if style == "eyas":
        return save_draft(draft, right_map(), folder, facts=FACTS)
    if style == "speculators":
        return write_speculators(folder, draft, right_map())
    container = style if style in ("sharded", "bin") else "safetensors"
    scheme = {"flat": "midlayer", "sharded": "midlayer", "bin": "midlayer"}.get(style, style)
    return write_flat(folder, draft, right_map(), scheme, container, **said)


def change(folder: Path, what: Callable[[Tensors, Config], Any]) -> Path:
    """`what` of tensors (by stored name) and config of a draft with one file, as somebody's script would do it."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    what(tensors, config)
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def small_target(folder: Path) -> Path:
    """Both ends and the config of a target, without the blocks between them."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    ends = {name: torch.randn(V, H, generator=generator) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file({**ends, "model.norm.weight": torch.ones(H)}, folder / "model.safetensors")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": H, "vocab_size": V,
        "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def contents(overlay: Overlay) -> dict[str, Any]:
    """All that a draft is: digests of tensors by stored name, and both configs."""
    tensors = {name: (ref.dtype, ref.shape, digest(ref)) for name, ref in overlay.tensors.items()}
    assert all(name == ref.name for name, ref in overlay.tensors.items())
    return {"tensors": tensors, "config": overlay.config, "eyas": overlay.eyas}


def same_tensors(overlay: Overlay, other: Overlay) -> bool:
    """Bit for bit, under the same stored names."""
    return contents(overlay)["tensors"] == contents(other)["tensors"]


def specimen(overlay: Overlay) -> Specimen:
    """As declared, with an embedding that all tests share."""
    assert overlay.reading is not None, overlay.refusal
    return declared(overlay.reading, with_embedding(make_draft()[0]))


def logits(overlay: Overlay) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [2, 3, D], target ids [D]): all that a draft says."""
    s = specimen(overlay)
    return logits_of(s), s.ids


@torch.inference_mode()
def logits_of(s: Specimen) -> torch.Tensor:
    """[2, 3, D]: three steps of two rows."""
    draft: Draft = s.module(Cast(torch.float32))
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(2, 9, H, generator=generator)  # of taps 0 to 8
    tokens = torch.randint(V, (2, 3), generator=generator)
    g = draft.fuse(states[:, list(s.slices)].flatten(1))[:, None]
    cache, out = draft.new_cache(), []
    for k in range(3):
        h = draft.step(draft.embed(tokens[:, k : k + 1]), g, torch.tensor([k]), cache)
        out.append(draft.logits(h))
        g = draft.feedback(h)
    return torch.cat(out, 1)


def says_the_same(overlay: Overlay, other: Overlay) -> bool:
    """Do two drafts say the same under the same states?"""
    (a, ids), (b, others) = logits(overlay), logits(other)
    return torch.equal(ids, others) and torch.allclose(a, b, atol=1e-5)
