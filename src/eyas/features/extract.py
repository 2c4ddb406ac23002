"""extract(): run a target once over its conversations and keep what a draft learns from.

    eyas extract conversations.jsonl --target smollm2 --out runs/demo/features

Conversations are cut into shards in their order, and each shard is filled by filling.py. States are computed in the
target's dtype and stored in bf16. A killed extraction keeps its finished shards.
Exercise it:  pytest tests/test_features_extract.py
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.answers import template_arguments
from eyas.artifacts import check_out, is_current, read_manifest
from eyas.console import bar
from eyas.conventions import Conventions, Known
from eyas.digests import sha256_file, sha256_json
from eyas.errors import EyasError, Mismatch
from eyas.features.conversations import Collection, encode_all, load_tokenizer, table_rows
from eyas.features.filling import Advance, Filler, Filling, Piece, ShardWorker, make_shard
from eyas.features.layout import INDEX, NOT_READ, SCHEMA, STAGE, FeatureMeta, ShardEntry, read_index, shard_name
from eyas.features.reader import check_shard, map_safetensors
from eyas.features.states import Engine
from eyas.features.writer import DEFAULT_SHARD_BYTES, ShardWriter, plan_digest, plan_shards
from eyas.locks import inside
from eyas.machine import check_device
from eyas.rows import is_lines
from eyas.target.facts import TargetFacts, read_facts
from eyas.target.model import Target
from eyas.target.source import ends_fingerprint, identify
from eyas.writes import atomic_write, remove_leftovers

SET_ASIDE = "set-aside.jsonl"


def extract(
    target: Target | str | Path,
    conversations: str | Path | Iterable[Mapping[str, Any]],
    out_dir: str | Path,
    taps: Sequence[int] | None = None,
    *,
    max_length: int | None = None,
    batch_tokens: int = 2048,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    supervise: str = "answers",
    skip_bad: bool = False,
    limit: int | None = None,
    replace: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    recorded: str | Path | None = None,
    engine: Engine | None = None,
    spread: Spread | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Write the features of `conversations` to `out_dir` and return the counts of its manifest.

    target: a loaded Target, or its folder (then it is loaded only if a shard is missing). conversations: a JSONL file,
    another source of rows (rows.py), or rows. taps: default `facts.default_taps`. max_length: tokens; default the
    target's context. batch_tokens: of one forward pass, padding included. supervise: `answers`, or `all`
    (conversations.encode_all). recorded: a folder of states that `regenerate` recorded; what is found there is copied
    instead of computed, equal within features/recorded.TOLERANCE. engine: what computes the states instead of the
    target in this process (states.py); dtype is then its own, device that of the head. template_kwargs: for the chat
    template; None: what `regenerate` wrote beside the file, if it did. spread: has the shards made by workers, which
    see the same folders. progress: None shows a bar on a terminal only.
    Finished, unchanged features are kept as they are; features of another target or other taps are refused unless
    `replace`.
    Raises BadInput (conversations), Mismatch (out_dir), EyasError (disk full, target).
    """
    began = time.monotonic()
    out = Path(out_dir)
    check_out(out, STAGE)
    if not isinstance(target, Target) and spread is None and device != "auto":
        check_device(device)
    folder = target.dir if isinstance(target, Target) else Path(target)
    facts = target.facts if isinstance(target, Target) else read_facts(folder)
    meta = feature_meta(folder, facts, taps)
    max_length = max_length or facts.max_position or None
    if engine is not None and facts.max_position:  # it says one token more, which must fit its context, too
        max_length = min(max_length or facts.max_position, facts.max_position - engine.spare)
    if isinstance(target, Target):
        dtype = str(next(target.decoder.parameters()).dtype).removeprefix("torch.")
    if isinstance(conversations, str | Path):
        template_kwargs = template_arguments(Path(conversations), template_kwargs)
    config: dict[str, Any] = {
        "taps": list(meta.taps), "max_length": max_length, "batch_tokens": batch_tokens, "shard_bytes": shard_bytes,
        "skip_bad": skip_bad, "limit": limit, "dtype": dtype, "template_kwargs": dict(template_kwargs or {}),
    }  # fmt: skip
    if supervise != "answers":  # features of before this choice stay current
        config["supervise"] = supervise
    if engine is not None:
        config["engine"] = engine.told()
    if not isinstance(conversations, str | Path):
        conversations = list(conversations)
    elif not is_lines(conversations):
        conversations = table_rows(conversations)
    told = sha256_file(conversations) if isinstance(conversations, str | Path) else sha256_json(conversations)
    inputs = {"conversations": told, "target": meta.target, "tokenizer": meta.tokenizer, "template": meta.template}
    if not replace:
        refuse_others(out, meta)
    if is_current(out, STAGE, inputs, config, SCHEMA) and shards_whole(out):
        return read_manifest(out)["counts"]

    tokenizer = target.tokenizer if isinstance(target, Target) else load_tokenizer(folder, trust_remote_code)
    collection = encode_all(
        conversations, tokenizer, skip_bad=skip_bad, limit=limit, vocab_size=facts.vocab_size, max_length=max_length,
        eos_ids=facts.eos_ids, template_kwargs=template_kwargs, supervise=supervise,
    )  # fmt: skip
    how = Filling(
        folder.absolute(), out.absolute(), meta, max(map(len, collection.documents)), batch_tokens, device, dtype,
        trust_remote_code, Path(recorded).absolute() if recorded is not None else None, engine,
    )  # fmt: skip
    rest: dict[str, Any] = {
        "inputs": inputs, "config": config, "began": began, "progress": progress, "shard_bytes": shard_bytes,
        "salt": f"{dtype}/{batch_tokens}" + (sha256_json(engine.told()) if engine else ""),
    }  # fmt: skip
    with inside(out):
        if spread is not None:
            return write_features(out, meta, collection, _by_workers(spread, how), **rest)
        with Filler(how, target if isinstance(target, Target) else None, collection.documents) as fill:
            return write_features(out, meta, collection, in_turn(out, meta, fill), **rest)


Make = Callable[[Sequence[Piece], Advance], Iterable[ShardEntry]]
"""Makes shards, in any order: (pieces, advance(tokens)) -> their entries in the index, each once it is written."""
Spread = Callable[[Any, Any, Sequence[Any]], Iterable[Any]]
"""Has pieces done by workers elsewhere: (worker class, settings, pieces) -> results, in any order (on_ray.py)."""


def in_turn(out: Path, meta: FeatureMeta, compute: Any) -> Make:
    """compute(documents, buffer, advance) of one shard after the other, here."""
    return lambda pieces, advance: (make_shard(out, meta, piece, compute, advance) for piece in pieces)


def _by_workers(spread: Spread, how: Filling) -> Make:
    def make(pieces: Sequence[Piece], advance: Advance) -> Iterator[ShardEntry]:
        for entry in spread(ShardWorker, how, pieces):
            check_shard(how.out, entry, content=False)  # it is here, too
            advance(sum(entry.lengths))
            yield entry
        remove_leftovers(how.out)

    return make


def feature_meta(folder: Path, facts: TargetFacts, taps: Sequence[int] | None = None) -> FeatureMeta:
    """What features of this target say of themselves. Raises BadInput for impossible taps."""
    chosen = facts.check_taps(facts.default_taps if taps is None else list(taps))
    told = ("taps", "num_target_layers", "final_state", "logit_scale")
    conventions = Conventions(
        taps=chosen,
        num_target_layers=facts.num_layers,
        final_state="post_norm",
        logit_scale=facts.logit_scale,
        how=dict.fromkeys(told, Known.DECLARED),
    )
    return FeatureMeta(
        facts.hidden_size, facts.vocab_size, conventions, **identify(folder), ends=ends_fingerprint(folder)
    )


def write_features(
    out: Path,
    meta: FeatureMeta,
    collection: Collection,
    make: Make,
    *,
    inputs: Mapping[str, str],
    config: Mapping[str, Any],
    began: float,
    progress: bool | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    salt: str = "",
) -> dict[str, Any]:
    """Plan the shards of `collection`, `make` those that are missing, finish the folder.

    Returns the counts. `salt` names what else decides the numbers (dtype, batch size). The `agreement` among the counts
    is the share of supervised tokens that are the target's own first choice: 1 for its own greedy answers, about a half
    for text that others wrote, and a few percent where states and tokens do not belong together.
    """
    documents = collection.documents
    writer = ShardWriter(out, meta)
    remove_leftovers(out)
    plan = plan_shards([len(d) for d in documents], meta.bytes_per_token(), shard_bytes)
    told = [(d.id + d.origin, d.ids, d.mask) for d in documents]
    digests = [plan_digest(meta, (told[i] for i in part), salt) for part in plan]
    kept = [writer.kept(k, digest) for k, digest in enumerate(digests)]
    sizes = [sum(len(documents[i]) for i in part) for part in plan]
    _check_room(out, sum(n for n, k in zip(sizes, kept, strict=True) if not k) * meta.bytes_per_token())
    counts = {**collection.counts(), "shards": len(plan), "bytes": sum(sizes) * meta.bytes_per_token()}
    with bar(total=sum(sizes), unit="token", unit_scale=True, desc="extract", show=progress is not False) as shown:
        shown.update(sum(n for n, k in zip(sizes, kept, strict=True) if k))
        pieces = [Piece(k, [documents[i] for i in part], digests[k]) for k, part in enumerate(plan) if not kept[k]]
        if pieces:
            writer.begin()
        for entry in make(pieces, shown.update) if pieces else ():
            writer.add(entry)
    recorded = writer.recorded(len(plan))
    if recorded is not None:
        counts |= {"recorded": recorded, "computed": len(documents) - recorded}
    counts["agreement"] = round(_agreement(writer, len(plan)), 4)
    extra = {}
    if collection.set_aside:
        atomic_write(out / SET_ASIDE, collection.set_aside_text())
        extra[SET_ASIDE] = sha256_file(out / SET_ASIDE)
    else:
        (out / SET_ASIDE).unlink(missing_ok=True)
    writer.finish(len(plan), inputs, config, counts, time.monotonic() - began, extra)
    return counts


def refuse_others(out: Path, meta: FeatureMeta) -> None:
    """Raise Mismatch when `out` already holds finished features of another target, tokenizer, template or taps."""
    if not (out / "manifest.json").is_file() or not (out / INDEX).is_file():
        return
    try:
        there = read_index((out / INDEX).read_text(), str(out / INDEX))[0]
    except EyasError:
        return  # of another version; they would not be read either
    pairs = [(n, getattr(there, n), getattr(meta, n)) for n in ("target", "tokenizer", "template", "taps")]
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise Mismatch(
                f"{out} holds features made with {name} {str(mine)[:16]}, now {name} {str(theirs)[:16]} is asked for; "
                "choose another --out, or overwrite them with --replace"
            )


def shards_whole(out: Path) -> bool:
    """Do all shards still have the recorded content?"""
    try:
        entries = read_index((out / INDEX).read_text(), str(out / INDEX))[1]
        for entry in entries.values():
            check_shard(out, entry)
    except (EyasError, OSError):
        return False
    return True


def _agreement(writer: ShardWriter, num_shards: int) -> float:
    """Share of supervised tokens that are the target's own first choice."""
    same = read = 0
    for index in range(num_shards):
        tensors, _ = map_safetensors(writer.dir / shard_name(index))
        top1, following = tensors["top1"][:-1], tensors["ids"][1:]  # a stored row's next token is in its own document
        stored = top1 != NOT_READ
        read += int(stored.sum())
        same += int((stored & (top1 == following)).sum())
    return same / max(1, read)


def _check_room(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise EyasError(
            f"{out}: these features take {needed / 1e6:,.1f} MB, the disk has {free / 1e6:,.1f} MB left; free some "
            "space, choose another --out, or extract fewer conversations"
        )
