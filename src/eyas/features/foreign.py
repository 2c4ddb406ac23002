"""Feature files of other trainers become the same documents: users of huge targets already have those.

    eyas extract --from-speculators DATA --target T --out features      # hidden_states/hs_*.safetensors + arrow dataset
    eyas extract --from-specforge CACHE/hidden_states --target T --out features      # rows_*/data_*.ckpt[.gz]

speculators 0.9 stores `hidden_states` [L, T+1, H] and `token_ids` [L]; the last slot is the residual stream after the
last block, BEFORE the final norm, which is applied here; loss masks lie in the dataset of the same row. SpecForge 0.2
stores `input_ids` [L], `loss_mask` [L], `hidden_state` [1, L, H] (after the final norm) and `aux_hidden_state`
[1, L, T*H]; it also supervises the newline after the end of a turn, which is taken out. Neither says which taps, which
model and which template it was: name them, and look at the `agreement` that is reported.
The teacher is recomputed with the target's head.   Exercise it:  pytest tests/test_features_foreign.py
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from eyas.artifacts import check_out, is_current, read_manifest
from eyas.chat import Unusable, checked
from eyas.digests import sha256_json
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.features.conversations import Collection, Document, SetAside, read_lines
from eyas.features.extract import feature_meta, in_turn, refuse_others, shards_whole, write_features
from eyas.features.layout import SCHEMA, STAGE, FeatureMeta
from eyas.features.passes import store
from eyas.features.writer import DEFAULT_SHARD_BYTES, ShardBuffer
from eyas.locks import inside
from eyas.target.facts import read_facts
from eyas.target.weights import Ends, load_ends
from eyas.untrusted import content, load_tensors, parse_json

Kind = Literal["speculators", "specforge"]


@dataclass(frozen=True)
class Foreign:
    """One file of another trainer, as it lies there."""

    ids: torch.Tensor  # int [L]
    mask: torch.Tensor | None  # int [L]; None where the file has none
    taps: torch.Tensor  # [L, T*H]
    final: torch.Tensor  # [L, H]
    final_is_normed: bool


def import_foreign(
    kind: Kind,
    source: str | Path,
    target_dir: str | Path,
    out_dir: str | Path,
    taps: Sequence[int] | None = None,
    *,
    masks: str | Path | None = None,
    max_length: int | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    skip_bad: bool = False,
    limit: int | None = None,
    replace: bool = False,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Write the feature files under `source` as Eyas features to `out_dir` and return the counts of its manifest.

    taps: what was recorded, in Eyas's numbering (speculators' and vLLM's ids are taps; SpecForge's and SGLang's are one
    less); default (2, n//2, n-3), which is the default of both. masks: for speculators, the dataset folder (arrow) or
    a JSONL file with `input_ids` and `loss_mask`; default the folder above. The counts hold `agreement`, the share of
    supervised tokens that are the target's own first choice: a few percent mean another target, or other states.
    Raises BadInput for files that cannot be read, Mismatch where sizes do not fit the target or the taps.
    """
    began = time.monotonic()
    source, out, folder = Path(source), Path(out_dir), Path(target_dir)
    check_out(out, STAGE)
    facts = read_facts(folder)
    meta = feature_meta(folder, facts, taps)
    files = _files(kind, source)
    rows = _masks(Path(masks) if masks else source) if kind == "speculators" else {}
    read: Callable[[Path], Foreign] = read_speculators if kind == "speculators" else read_specforge
    max_length = max_length or facts.max_position or None

    config = {
        "kind": kind, "taps": list(meta.taps), "max_length": max_length, "shard_bytes": shard_bytes,
        "skip_bad": skip_bad, "limit": limit,
    }  # fmt: skip
    origins = {name: _origin(file) for name, file in files.items()}
    told = sha256_json([origins, {k: [v[0].tolist(), v[1].tolist()] for k, v in rows.items()}])
    inputs = {"states": told, "target": meta.target, "tokenizer": meta.tokenizer, "template": meta.template}
    if not replace:
        refuse_others(out, meta)
    if is_current(out, STAGE, inputs, config, SCHEMA) and shards_whole(out):
        return read_manifest(out)["counts"]

    collection = Collection()
    for number, (name, file) in enumerate(files.items()):
        if limit is not None and len(collection.documents) >= limit:
            break
        try:
            row = read(file)
            _fits(file, row, meta)
            ids, mask = _ids_and_mask(
                kind, row, rows, number if kind == "specforge" else _index(name), meta, facts.eos_ids
            )
            collection.documents.append(Document(name, checked(ids, mask, max_length), origins[name]))
        except Unusable as error:
            if error.reason == "malformed" and not skip_bad:
                raise BadInput(f"{file}: {error}. Remove it, or set such files aside with --skip-bad") from error
            collection.set_aside.append(SetAside(name, number + 1, error.reason, str(error)))
    if not collection.documents:
        raise BadInput(
            f"{source}: no file can be used ({collection.reasons()}); {collection.set_aside[0].detail}; name the "
            "folder that the trainer wrote, with its --masks"
        )

    ends = load_ends(folder, facts).computing()

    def compute(documents: Sequence[Document], buffer: ShardBuffer, advance: Any) -> None:
        for d, document in enumerate(documents):
            _store(read(files[document.id]), files[document.id], ends, document, buffer, d)
            advance(len(document))

    with inside(out):
        return write_features(
            out, meta, collection, in_turn(out, meta, compute), inputs=inputs, config=config, began=began,
            progress=progress, shard_bytes=shard_bytes, salt=kind,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the two formats


def read_speculators(file: Path) -> Foreign:
    """One `hs_*.safetensors` of speculators or vLLM. Raises Unusable("malformed") naming what is wrong."""
    from safetensors import safe_open

    try:
        with safe_open(file, "pt") as handle:
            names = set(handle.keys())
            if not {"hidden_states", "token_ids"} <= names:
                raise Unusable("malformed", f"it holds {sorted(names)}; expected `hidden_states` and `token_ids`")
            states, ids = handle.get_tensor("hidden_states"), handle.get_tensor("token_ids")
            mask = handle.get_tensor("loss_mask") if "loss_mask" in names else None
    except Unusable:
        raise
    except Exception as error:  # safetensors raises its own type for a truncated file
        raise Unusable("malformed", f"not a readable safetensors file ({error})") from error
    if states.ndim != 3 or not states.is_floating_point() or states.dtype.itemsize < 2:
        raise Unusable(
            "malformed",
            f"`hidden_states` is {states.dtype} {list(states.shape)}; expected bfloat16, float16 or float32 "
            "[tokens, taps + 1, H] (write FP8 stores out in bf16 first)",
        )
    return Foreign(ids.flatten(), mask, states[:, :-1].flatten(1), states[:, -1], final_is_normed=False)


def read_specforge(file: Path) -> Foreign:
    """One `data_*.ckpt`, gzip or not, of SpecForge; only tensors are unpickled. Raises Unusable("malformed")."""
    try:
        state = load_tensors(file)
    except Exception as error:  # torch raises a dozen types
        raise Unusable("malformed", f"not a readable checkpoint of tensors ({error})") from error
    wanted = ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")
    if not isinstance(state, Mapping) or not all(isinstance(state.get(k), torch.Tensor) for k in wanted):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise Unusable("malformed", f"it holds {found}; expected the tensors {', '.join(wanted)}")
    ids, mask = state["input_ids"].flatten(), state["loss_mask"].flatten()
    flat = {k: state[k].squeeze(0) if state[k].ndim == 3 and state[k].shape[0] == 1 else state[k] for k in wanted[2:]}
    if any(t.ndim != 2 for t in flat.values()):
        shapes = {k: list(state[k].shape) for k in wanted[2:]}
        raise Unusable("malformed", f"states of shapes {shapes}; expected [1, tokens, H] and [1, tokens, 3*H]")
    return Foreign(ids, mask, flat["aux_hidden_state"], flat["hidden_state"], final_is_normed=True)


def without_tail(ids: torch.Tensor, mask: torch.Tensor, eos_ids: Sequence[int]) -> torch.Tensor:
    """The mask without what follows the last end-of-turn token of each run (SpecForge's newline). ids, mask [L].

    A run without such a token, an answer cut at its length, stays whole.
    """
    mask = mask.clone()
    padded = torch.cat([mask.new_zeros(1), mask, mask.new_zeros(1)])
    starts = ((padded[1:] == 1) & (padded[:-1] == 0)).nonzero().flatten().tolist()
    stops = ((padded[1:] == 0) & (padded[:-1] == 1)).nonzero().flatten().tolist()
    ends = torch.isin(ids, torch.tensor(list(eos_ids), dtype=ids.dtype))
    for start, stop in zip(starts, stops, strict=True):  # turns, not tokens
        last = ends[start:stop].nonzero().flatten()
        if len(last):
            mask[start + int(last[-1]) + 1 : stop] = 0
    return mask


# ------------------------------------------------------------------------------------------------ putting together


def _store(row: Foreign, file: Path, ends: Ends, document: Document, buffer: ShardBuffer, d: int) -> None:
    if not bool(torch.isfinite(row.final).all() and torch.isfinite(row.taps).all()):
        raise EyasError(f"{file}: its states are not finite (NaN or infinite); remove the file and run again")
    final = row.final.float() if row.final_is_normed else ends.normed(row.final)  # [L, H]
    store(document, row.taps, final, ends, buffer, d)


def _fits(file: Path, row: Foreign, meta: FeatureMeta) -> None:
    width = len(meta.taps) * meta.hidden_size
    if row.final.shape[-1] != meta.hidden_size:
        raise Mismatch(
            f"{file}: its states are {row.final.shape[-1]} wide, the target's {meta.hidden_size}; name the target that "
            "made them"
        )
    if row.taps.shape[-1] != width:
        there = row.taps.shape[-1] / meta.hidden_size
        raise Mismatch(
            f"{file}: it holds {there:g} taps, but the {len(meta.taps)} taps {list(meta.taps)} were asked for; name "
            "the recorded ones with --taps"
        )
    if not len(row.ids) == len(row.taps) == len(row.final):
        raise Unusable("malformed", f"{len(row.ids)} ids, but states of {len(row.taps)} tokens")


def _ids_and_mask(
    kind: Kind, row: Foreign, rows: Mapping[int, Any], index: int, meta: FeatureMeta, eos_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = row.ids.to(torch.int32), row.mask
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= meta.vocab_size:
        raise Unusable("malformed", f"its ids do not lie in 0 to {meta.vocab_size - 1}")
    if mask is None:
        if index not in rows:
            raise Unusable("no_mask", f"the dataset has no row {index}, so nothing says what is supervised")
        listed, mask = rows[index]
        if not torch.equal(listed[: len(ids)].to(torch.int32), ids):
            raise Unusable("malformed", f"its ids differ from those of row {index} of the dataset")
        mask = mask[: len(ids)]
    if len(mask) != len(ids):
        raise Unusable("malformed", f"{len(ids)} ids, but a loss mask of {len(mask)}")
    mask = (mask.flatten() != 0).to(torch.uint8)
    return ids, without_tail(ids, mask, eos_ids) if kind == "specforge" else mask


def _files(kind: Kind, source: Path) -> dict[str, Path]:
    """{document id: file} in the order of their numbers."""
    patterns = ["*hs_*.safetensors"] if kind == "speculators" else ["*.ckpt", "*.ckpt.gz"]
    found = [f for pattern in patterns for f in source.rglob(pattern)] if source.is_dir() else []
    if not found:
        raise BadInput(f"{source}: no {' or '.join(patterns)} lies there; name the folder that {kind} wrote")
    named = {str(f.relative_to(source)).removesuffix(".gz").rsplit(".", 1)[0]: f for f in found}
    return dict(sorted(named.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])] + [0]))


def _index(name: str) -> int:
    """Row of the dataset that `hs_{i}` belongs to."""
    return int(re.findall(r"\d+", name)[-1])


def _origin(file: Path) -> str:
    """A digest of a file's size and of its first, middle and last 4 KiB: whole stores run to terabytes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as handle:
        for place in (0, max(0, size // 2 - 2048), max(0, size - 4096)):
            handle.seek(place)
            digest.update(handle.read(4096))
    return digest.hexdigest()


def _masks(place: Path) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Row number -> (input_ids, loss_mask), from a JSONL file or an arrow dataset in `place` or the folder above."""
    if place.is_file():
        listed = enumerate(_jsonl_rows(place))
    else:
        folder = next((f for f in (place, place.parent) if sorted(f.glob("*.arrow"))), None)
        listed = enumerate(_arrow_rows(folder)) if folder else enumerate(())
    return {i: (torch.tensor(a, dtype=torch.int32), torch.tensor(b, dtype=torch.uint8)) for i, (a, b) in listed}


def _jsonl_rows(file: Path) -> Iterator[tuple[list[int], list[int]]]:
    for number, line in read_lines(file):
        try:
            row = parse_json(line)
            yield row["input_ids"], row["loss_mask"]
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{file}, line {number}: expected `input_ids` and `loss_mask` ({error})") from error


def _arrow_rows(folder: Path) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of a dataset that `datasets` saved to disk, in the order that its state.json gives."""
    import pyarrow as pa

    state = folder / "state.json"
    names = [f["filename"] for f in parse_json(content(state))["_data_files"]] if state.is_file() else []
    for file in [folder / Path(n).name for n in names] or sorted(folder.glob("*.arrow")):
        try:
            with pa.memory_map(str(file)) as handle:
                table = pa.ipc.open_stream(handle).read_all().select(["input_ids", "loss_mask"])
                yield from zip(*(table.column(i).to_pylist() for i in range(2)), strict=True)
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise BadInput(
                f"{file}: not a dataset with `input_ids` and `loss_mask` ({error}); name the folder that "
                "speculators prepared"
            ) from error
