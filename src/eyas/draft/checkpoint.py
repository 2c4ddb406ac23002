"""Draft directories: load any readable draft, write the canonical one.

    draft, vocab_map, conventions = load_draft("path/to/draft", target_dir="path/to/target")
    save_draft(draft, vocab_map, "out", facts=read_facts("path/to/target"), provenance={"steps": 1000})

A directory appears whole or not at all. Beside config.json and model.safetensors, which the engines read, Eyas writes
eyas.json: declared conventions, fingerprints, a digest of each tensor.   pytest tests/test_checkpoint.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..artifacts import atomic_dir, atomic_save_safetensors, atomic_write_json
from ..conventions import Conventions, Known
from ..errors import BadInput, EyasError, Mismatch
from ..target.facts import TargetFacts, read_facts
from ..target.weights import Ends, load_ends
from ..vocab import VocabMap
from .dialects import Reading, interpret, native
from .dialects.canonical import canonical_config
from .expected import Inventory
from .files import CONFIG, EYAS_JSON, open_folder
from .model import Draft

WEIGHTS = "model.safetensors"
PROBE = "eyas/probe.safetensors"
# All that may lie in a directory for Eyas to replace it.
OURS = {CONFIG, WEIGHTS, EYAS_JSON, PROBE, "eyas", "manifest.json", "README.md"}
MOST_TAPS = 64  # far beyond any draft
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# ---------------------------------------------------------------- reading


def read_draft(path: str | Path, target_dir: str | Path | None = None) -> Reading:
    """Interpret a draft directory without reading its weights: dialect, shape, conventions, where each tensor lies.

    `target_dir` is needed where the draft leaves the taps to its target. Raises BadInput naming file and field.
    """
    layers = read_facts(target_dir).num_layers if target_dir is not None else None
    return interpret(open_folder(path), layers)


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
        _check_target(reading, ends, target_dir)
    head = _head(reading, ends)
    _check_tensors(reading, skip={"lm_head.weight"} if head is not None else set())
    vocab_map = _vocab_map(reading)
    try:
        draft = Draft(reading.shape, reading.conventions)
    except Exception as error:  # a RoPE kind or parameter that transformers or torch refuses, each in its own way
        raise BadInput(f"{reading.folder.config_file}: no draft can be built from it ({error})") from error
    state = {
        name: reading.canonical.sources[name].load() for name in draft.state_dict() if name in reading.canonical.sources
    }
    if head is not None:
        state["lm_head.weight"] = head
    draft.load_state_dict({name: _finite_dtype(reading, name, tensor) for name, tensor in state.items()}, assign=True)
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


def _check_target(reading: Reading, ends: Ends, target_dir: str | Path | None) -> None:
    shape = reading.shape
    mine = {"vocab_size": shape.vocab_size, "hidden size": shape.target_hidden_size}
    theirs = {"vocab_size": ends.embedding.shape[0], "hidden size": ends.embedding.shape[1]}
    for name, value in mine.items():
        if value != theirs[name]:
            raise Mismatch(
                f"{reading.folder.path} was made for a target with {name} {value}, but {target_dir} has "
                f"{theirs[name]}; name the draft's own target"
            )


def _check_tensors(reading: Reading, skip: set[str]) -> None:
    """Compare what the module needs with what the files hold; one error for everything.

    Nothing is allocated: a config may name any size.
    """
    shape, held = reading.shape, reading.canonical.num_layers()
    if shape.num_layers > held or shape.num_taps > MOST_TAPS:
        raise BadInput(
            f"{reading.folder.path}: the config asks for {shape.num_layers} layers and {shape.num_taps} taps, the "
            f"tensors make {held} layers (and at most {MOST_TAPS} taps are read); repair the config"
        )
    found, sources = Inventory.of(reading), reading.canonical.sources
    problems = [f"{name} {list(wanted)} is missing" for name, wanted in found.missing.items() if name not in skip]
    for name in found.unknown:
        ref = sources[name].ref
        problems.append(f"{ref.name} {list(ref.shape)} in {ref.file.name} is unknown")
    for name, (held_shape, wanted) in found.misshapen.items():
        ref = sources[name].ref
        problems.append(f"{ref.name} in {ref.file.name} is {list(held_shape)}, expected {list(wanted)}")
    if problems:
        files = ", ".join(file.name for file in reading.folder.files)
        raise BadInput(
            f"{reading.folder.path} ({reading.dialect} dialect, {files}): tensors and config do not make one draft: "
            f"{'; '.join(problems)}. Engines would skip or leave these in silence; repair the file or its config"
        )


def _finite_dtype(reading: Reading, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in FLOATS:
        ref = reading.canonical.sources[name].ref
        raise BadInput(f"{ref.file}: {ref.name} is stored as {tensor.dtype}, expected floating point weights")
    return tensor


def _vocab_map(reading: Reading) -> VocabMap:
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
                f"{where}: t2d marks {vocab_map.size} ids, the draft vocabulary has {size}, and there is no d2t"
            )
    elif size == target:
        return VocabMap.identity(target)
    else:
        raise BadInput(
            f"{where}: d2t is missing, though the draft vocabulary ({size}) is smaller than the target's ({target}); "
            f"without it nobody can say which token a head row means"
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
    with fresh_directory(out_dir) as folder:
        write_draft(draft, vocab_map, folder, facts=facts, provenance=provenance, fingerprints=fingerprints,
                    predicted=predicted, dtype=dtype, extra=extra)  # fmt: skip
    return Path(out_dir)


def write_draft(
    draft: Draft,
    vocab_map: VocabMap,
    folder: Path,
    *,
    facts: TargetFacts | None,
    provenance: Mapping[str, Any] | None,
    fingerprints: Mapping[str, str] | None,
    predicted: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    extra: Mapping[str, Any] | None,
) -> None:
    """`save_draft` into a folder that is already private to the caller (of `fresh_directory`)."""
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
    atomic_save_safetensors(tensors, folder / WEIGHTS, {"format": "pt"})
    atomic_write_json(folder / CONFIG, canonical_config(shape, conventions, facts, stored))
    eyas = {
        "schema": native.SCHEMA,
        "eyas_version": __version__,
        "shape": shape.to_dict(),
        "conventions": conventions.to_dict(),
        "target": {**dict(fingerprints or {}), "facts": facts.to_dict() if facts else None,
                   "special_ids": _special_ids(facts)},
        "vocab_map": vocab_map.digest(),
        "tensors": {name: describe_tensor(tensor) for name, tensor in tensors.items()},
        "predicted": dict(predicted) if predicted else None,
        "provenance": dict(provenance or {}),
        **dict(extra or {}),
    }  # fmt: skip
    atomic_write_json(folder / EYAS_JSON, eyas)


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


def _special_ids(facts: TargetFacts | None) -> dict[str, Any]:
    return {key: facts.raw.get(key) for key in ("bos_token_id", "pad_token_id")} if facts else {}


def facts_of(eyas: Mapping[str, Any] | None) -> TargetFacts | None:
    """The target's facts as eyas.json keeps them, None where it has none."""
    target = (eyas or {}).get("target") or {}
    values = target.get("facts")
    if not isinstance(values, dict):
        return None
    names = {f.name for f in dataclasses.fields(TargetFacts)} - {"raw"}
    kept: dict[str, Any] = {k: tuple(v) if k == "eos_ids" else v for k, v in values.items() if k in names}
    return TargetFacts(**kept, raw=dict(target.get("special_ids") or {}))


@contextlib.contextmanager
def fresh_directory(out_dir: str | Path) -> Iterator[Path]:
    """Yield an empty private folder beside `out_dir`; on success it becomes `out_dir`, on any error it is removed.

    An existing `out_dir` is replaced only if Eyas wrote everything in it. Raises BadInput otherwise.
    """
    out = Path(out_dir)
    _remove_stale(out)
    check_replaceable(out)
    with atomic_dir(out) as temporary:
        yield temporary
        if (temporary / CONFIG).is_file():
            # safetensors makes its files private to their owner; servers often run as somebody else.
            mode = (temporary / CONFIG).stat().st_mode
            for path in temporary.rglob("*"):
                if path.is_file():
                    path.chmod(mode)


def _remove_stale(out: Path) -> None:
    """Clear what a killed writer of `out` left beside it; put an old version back that it had moved aside."""
    for path in sorted(out.parent.glob(f".eyas-tmp-*-{out.name}*")):
        pid = path.name.removeprefix(".eyas-tmp-").split("-", 1)[0]
        if not path.is_dir() or (pid.isdigit() and int(pid) != os.getpid() and Path(f"/proc/{pid}").exists()):
            continue
        if path.name.endswith(f"-{out.name}-old") and not out.exists():
            path.rename(out)
        elif path.name.endswith((f"-{out.name}-old", f"-{out.name}")):
            shutil.rmtree(path, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raise BadInput unless `out` is free, empty, or a draft directory in which everything is Eyas's own."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise BadInput(f"{out} exists and is not a plain directory; choose another --out")
    held = {str(path.relative_to(out)) for path in out.rglob("*")}
    if held and (EYAS_JSON not in held or held - OURS):
        other = sorted(held - OURS) or sorted(held)
        raise BadInput(f"{out} holds files that Eyas did not write ({', '.join(other[:4])}); choose another --out")
