"""Draft directories: load any readable draft, write the canonical one.

    draft, vocab_map, conventions = load_draft("path/to/draft", target_dir="path/to/target")
    save_draft(draft, vocab_map, "out", facts=read_facts("path/to/target"), provenance={"steps": 1000})

A directory appears whole or not at all. Beside config.json and model.safetensors, which the engines read, Eyas writes
eyas.json: declared conventions, fingerprints, a digest of each tensor.   pytest tests/test_checkpoint.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..conventions import Conventions, Known
from ..errors import BadInput, EyasError
from ..target.facts import TargetFacts
from ..target.weights import Ends, load_ends
from ..vocab import VocabMap
from ..writes import atomic_save_safetensors, atomic_write_json
from .dialects import Reading, native
from .dialects.canonical import canonical_config
from .directory import WEIGHTS, check_target, check_tensors, declaration, fresh_directory, read_draft
from .files import CONFIG, EYAS_JSON
from .model import Draft

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# ---------------------------------------------------------------- reading


def load_draft(
    path: str | Path,
    target_dir: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
) -> tuple[Draft, VocabMap, Conventions]:
    """Any readable draft as (module, vocabulary map, conventions), in eval mode.

    The embedding is the target's unless the draft owns one that differs from it; without `target_dir` a draft that owns
    none has `embed_tokens is None`. dtype None keeps that of `fc.weight`. Raises BadInput naming every missing, unknown
    and misshapen tensor, Mismatch where draft and target disagree on V or H.
    """
    reading = read_draft(path, target_dir)
    ends = load_ends(target_dir) if target_dir is not None else None
    if ends is not None:
        check_target(reading, ends.embedding.shape[0], ends.embedding.shape[1], target_dir)
    head = _head(reading, ends)
    check_tensors(reading, skip={"lm_head.weight"} if head is not None else set())
    vocab_map = read_vocab_map(reading)
    try:
        draft = Draft(reading.shape, reading.conventions)
    except Exception as error:  # a RoPE kind or parameter that transformers or torch refuses, each in its own way
        raise BadInput(
            f"{reading.folder.config_file}: no draft can be built from it ({error}); correct the config"
        ) from error
    state = {
        name: reading.canonical.sources[name].load() for name in draft.state_dict() if name in reading.canonical.sources
    }
    if head is not None:
        state["lm_head.weight"] = head
    _check_values(reading, {name: tensor for name, tensor in state.items() if name in reading.canonical.sources})
    draft.load_state_dict(state, assign=True)
    embedding, owned = _embedding(reading, ends)
    changes: dict[str, Any] = {"embedding": "own" if owned else "target"}
    if head is not None:
        changes["head"] = "target"
    known = {k: v for k, v in changes.items() if getattr(draft.conventions, k) != v}
    if known:
        draft.conventions = draft.conventions.with_(Known.INFERRED, **known)
    draft = draft.to(device=device, dtype=dtype or draft.fc.weight.dtype)
    for parameter in draft.parameters():
        parameter.requires_grad_(True)
    if embedding is not None:  # stays as stored: rows are converted when they are looked up
        draft.set_embedding(embedding.to(device))
    return draft.eval(), vocab_map, draft.conventions


def _check_values(reading: Reading, state: Mapping[str, torch.Tensor]) -> None:
    """Weights are floating point, and every one a number: a single NaN makes every answer of a draft NaN."""
    refs = {name: reading.canonical.sources[name].ref for name in state}
    for name, tensor in state.items():
        if tensor.dtype not in FLOATS:
            ref = refs[name]
            raise BadInput(f"{ref.file}: {ref.name} is stored as {tensor.dtype}, expected floating point weights")
    # Extremes carry NaN and infinity along, and need no memory.
    broken = [name for name, t in state.items() if t.numel() and not torch.stack(t.aminmax()).isfinite().all()]
    if broken:
        counted = ", ".join(f"{refs[name].name} ({int((~state[name].isfinite()).sum()):,})" for name in broken)
        files = ", ".join(sorted({str(refs[name].file) for name in broken}))
        raise BadInput(f"{files}: NaN or infinite values in {counted}; take the weights of an earlier checkpoint")


def read_vocab_map(reading: Reading) -> VocabMap:
    """The vocabulary map, from `d2t`, else from `t2d`, else the identity of a full vocabulary."""
    sources, size, target = reading.canonical.sources, reading.shape.draft_vocab_size, reading.shape.vocab_size
    where = reading.folder.path
    mask = sources["t2d"].load().bool() if "t2d" in sources else None
    if mask is not None and tuple(mask.shape) != (target,):
        raise BadInput(f"{where}: t2d is {list(mask.shape)}, expected [{target}], one entry a target id")
    if "d2t" in sources:
        if sources["d2t"].shape != (size,):
            raise BadInput(f"{where}: d2t is {list(sources['d2t'].shape)}, expected [{size}], one entry a draft id")
        try:
            # With t2d beside it, which is compared below, or in Eyas's own files, no numbers are suspicious.
            sure = mask is not None or reading.dialect == native.NAME
            vocab_map = VocabMap.from_offsets(sources["d2t"].load(), target, sure=sure)
        except (EyasError, ValueError) as error:
            raise BadInput(f"{sources['d2t'].ref.file}: {error}") from error
    elif mask is not None:
        vocab_map = VocabMap.from_t2d(mask)
        if vocab_map.size != size:
            raise BadInput(
                f"{where}: t2d marks {vocab_map.size} ids, the draft vocabulary has {size}, and there is no d2t; "
                "restore both from one training run"
            )
    elif size == target:
        return VocabMap.identity(target)
    else:
        raise BadInput(
            f"{where}: d2t is missing, though the draft vocabulary ({size}) is smaller than the target's "
            f"({target}); without it nobody can say which token a head row means; restore it from the training run "
            "(`eyas repair` rebuilds it from t2d)"
        )
    if mask is not None and not torch.equal(mask, vocab_map.t2d):
        first = int((mask != vocab_map.t2d).nonzero()[0])
        raise BadInput(f"{where}: d2t and t2d disagree, first at target id {first}; restore them from one training run")
    return vocab_map


def _head(reading: Reading, ends: Ends | None) -> torch.Tensor | None:
    """The target's head, for a draft over the full vocabulary that stores none; None where the draft has its own."""
    shape = reading.shape
    if "lm_head.weight" in reading.canonical.sources or shape.draft_vocab_size != shape.vocab_size:
        return None
    return ends.head if ends is not None and shape.hidden_size == shape.target_hidden_size else None


def _embedding(reading: Reading, ends: Ends | None) -> tuple[torch.Tensor | None, bool]:
    """(embedding table or None, is it the draft's own). A stored copy of the target's is not the draft's own."""
    source, shape = reading.canonical.sources.get("embed_tokens.weight"), reading.shape
    if source is None:
        if shape.hidden_size != shape.target_hidden_size:
            raise BadInput(
                f"{reading.folder.path}: the draft is {shape.hidden_size} wide and its target "
                f"{shape.target_hidden_size}, so it must own an embedding, but embed_tokens.weight is missing"
            )
        return (None if ends is None else ends.embedding), False
    if source.shape != (shape.vocab_size, shape.hidden_size):
        expected = [shape.vocab_size, shape.hidden_size]
        raise BadInput(f"{source.ref.file}: {source.ref.name} is {list(source.shape)}, expected {expected}")
    own = source.load()
    _check_values(reading, {"embed_tokens.weight": own})
    same = ends is not None and own.shape == ends.embedding.shape and torch.equal(own, ends.embedding.to(own.dtype))
    return (ends.embedding, False) if same and ends is not None else (own, True)


# ---------------------------------------------------------------- writing


def save_draft(
    draft: Draft,
    vocab_map: VocabMap,
    out_dir: str | Path,
    *,
    facts: TargetFacts | None = None,
    provenance: Mapping[str, Any] | None = None,
    fingerprints: Mapping[str, str] | None = None,
    predicted: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write the canonical directory: config.json, model.safetensors, eyas.json. Returns `out_dir`.

    dtype None stores tensors as the module holds them (float32 masters of a training run); an export rounds to it.
    facts, fingerprints ("target", "tokenizer", "template"): the draft's target. predicted: accept length on held-out
    features and how it was measured. provenance: features, training config, tokens seen. extra: further entries of
    eyas.json. Raises BadInput where map and draft disagree, or `out_dir` holds something that Eyas did not write.
    """
    shape = draft.shape
    if (vocab_map.size, vocab_map.target_size) != (shape.draft_vocab_size, shape.vocab_size):
        raise BadInput(
            f"the vocabulary map is {vocab_map.size} of {vocab_map.target_size} ids, the draft "
            f"{shape.draft_vocab_size} of {shape.vocab_size}; save the map it was trained with"
        )
    tensors = canonical_tensors(draft, vocab_map, dtype)
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        narrow = dtype is torch.float16 and all(torch.isfinite(p).all() for p in draft.parameters())
        remedy = "choose bfloat16" if narrow else "train again from an earlier checkpoint with a lower learning rate"
        raise EyasError(f"{', '.join(broken)}: NaN or infinite values, so the draft cannot be saved; {remedy}")
    conventions = draft.conventions.with_(
        draft.conventions.known("d2t"), d2t="offset" if "d2t" in tensors else "none", head="own"
    )
    stored = dtype or draft.fc.weight.dtype
    eyas = declaration(
        shape, conventions, vocab_map.digest(), facts=facts, fingerprints=fingerprints, predicted=predicted,
        provenance=provenance, tensors={name: describe_tensor(t) for name, t in tensors.items()}, extra=extra,
    )  # fmt: skip
    config = canonical_config(shape, conventions, facts, str(stored).removeprefix("torch."))
    with fresh_directory(out_dir) as folder:
        atomic_save_safetensors(tensors, folder / WEIGHTS, {"format": "pt"})
        atomic_write_json(folder / CONFIG, config)
        atomic_write_json(folder / EYAS_JSON, eyas)
    return Path(out_dir)


def canonical_tensors(draft: Draft, vocab_map: VocabMap, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Tensors of the canonical file, on the CPU: weights in `dtype`; `d2t` int64 and `t2d` bool.

    A full vocabulary has neither map (vLLM refuses them there). Layers >= 1 store their stream norm under both names,
    as dialects/keys.py reads them.
    """
    tensors = {
        name: tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
        for name, tensor in draft.owned_state_dict().items()
    }
    for name in [n for n in tensors if n.startswith("layers.") and n.endswith(".hidden_norm.weight")]:
        tensors[name.replace("hidden_norm", "input_layernorm")] = tensors[name].clone()
    if vocab_map.size < vocab_map.target_size:
        tensors |= {"d2t": vocab_map.d2t.cpu().contiguous(), "t2d": vocab_map.t2d.cpu().contiguous()}
    return tensors


def describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """{"sha256": of its raw bytes, "dtype", "shape"}; the bytes are those of safetensors (row-major, little-endian)."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    name = str(tensor.dtype).removeprefix("torch.")
    return {"sha256": hashlib.sha256(raw.data).hexdigest(), "dtype": name, "shape": list(tensor.shape)}
