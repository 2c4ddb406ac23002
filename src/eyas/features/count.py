"""The vocab stage: count the supervised tokens of features, cut a draft vocabulary, say how much of the text it covers.

    eyas vocab runs/demo/features --size 8192 --held-out runs/demo/heldout --out runs/demo/vocab
    eyas vocab runs/demo/vocab --size 4096 --out smaller        # re-cut from the counts kept in the map
    eyas vocab conversations.jsonl --size 8192 --target smollm2 --out vocab        # answers, before any extraction

Exercise it:  pytest tests/test_vocab_stage.py
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.artifacts import check_out, is_current, read_manifest, write_manifest
from eyas.digests import sha256_json
from eyas.errors import BadInput, Mismatch
from eyas.features.conversations import encode_all, load_tokenizer
from eyas.features.extract import feature_meta
from eyas.features.reader import FeatureSet
from eyas.locks import inside
from eyas.rows import content, is_saved
from eyas.target.facts import read_facts
from eyas.target.source import tokenizer_fingerprint
from eyas.vocab import FILE, SCHEMA, VocabMap

STAGE = "vocab"
COUNTED = 1 << 19  # tokens of one bincount


@dataclass(frozen=True)
class VocabReport:
    """What the stage did. Coverage: share of supervised tokens that lie in the draft vocabulary."""

    out: str
    size: int
    target_size: int
    always: int
    """Ids that are in whatever their counts."""
    observed: int
    """Distinct target ids in the counted text."""
    filled: int
    """Ids of the map that the counted text does not have: the always ones, and the lowest ids that were not yet in."""
    supervised_tokens: int
    coverage: float
    held_out_coverage: float | None
    digest: str
    set_aside: dict[str, int] = field(default_factory=dict)
    """Conversations that were not counted, by reason."""
    skipped: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def make_vocab(
    source: str | Path,
    out: str | Path,
    size: int,
    *,
    always: Iterable[int] = (),
    held_out: str | Path | None = None,
    target_dir: str | Path | None = None,
    skip_bad: bool = False,
) -> VocabReport:
    """Cut a map of `size` ids from `source` and write vocab.safetensors and a manifest into the folder `out`.

    source: a folder of features, conversations in a file or a saved dataset (whose answers are counted, with
    target_dir's tokenizer), or a vocabulary map that keeps its counts (a file or its folder). held_out: a folder of
    features for a second coverage. skip_bad: pass over malformed conversations, counted in `set_aside`. A finished,
    unchanged `out` is left as it is. Raises BadInput for a size that does not fit, for conversations without a target
    and for malformed ones; Mismatch when features or a map belong to another target than `target_dir`, or held-out
    features to another one than those.
    """
    started = time.monotonic()
    source, out = Path(source), Path(out)
    check_out(out, STAGE)
    wanted = sorted({int(i) for i in always})
    talks = (source.is_file() and source.suffix != Path(FILE).suffix) or is_saved(source)
    features = None if talks or _is_map(source) else FeatureSet.open(source)
    inputs = _conversation_inputs(source, target_dir) if talks else {"source": _digest(source)}
    held = None if held_out is None else FeatureSet.open(held_out)
    if held is not None:
        inputs["held_out"] = _digest(Path(str(held_out)))
        if features is not None:
            held.check(target=features.meta.target, tokenizer=features.meta.tokenizer)
    if not talks:
        _check_target(source, features, target_dir)
    config: dict[str, Any] = {"size": size, "always": wanted}
    if skip_bad:  # maps of before this choice stay current
        config["skip_bad"] = True
    if is_current(out, STAGE, inputs, config, SCHEMA):
        done = VocabMap.load(out)  # also says so if the file has been damaged since
        told = {**read_manifest(out)["counts"], "out": str(out), "digest": done.digest(), "skipped": True}
        return VocabReport(**told)

    set_aside: dict[str, int] = {}
    with inside(out):
        if features is not None or talks:
            if features is not None:
                counts = count_supervised(features)  # int64 [V]
            else:
                counts, set_aside = _count_answers(source, target_dir, skip_bad)
            made = VocabMap.from_counts(counts, size, wanted)
        else:
            made = VocabMap.load(source).recut(size, wanted)
            assert made.counts is not None
            counts = made.counts
        held_counts = None if held is None else count_supervised(held)
        if held_counts is not None and held_counts.numel() != counts.numel():
            raise Mismatch(
                f"{held_out}: held-out features of a target with {held_counts.numel()} ids, {source} has "
                f"{counts.numel()}; extract both with the same target"
            )
        report = VocabReport(
            out=str(out),
            size=made.size,
            target_size=made.target_size,
            always=len(made.always),
            observed=int((counts > 0).sum()),
            filled=int((counts[made.ids] == 0).sum()),
            supervised_tokens=int(counts.sum()),
            coverage=made.coverage(counts),
            held_out_coverage=None if held_counts is None else made.coverage(held_counts),
            digest=made.digest(),
            set_aside=set_aside,
        )
        made.save(out / FILE)
        numbers = {k: v for k, v in report.to_dict().items() if k not in ("out", "digest", "skipped")}
        write_manifest(
            out,
            STAGE,
            inputs=inputs,
            config=config,
            counts=numbers,
            duration_s=time.monotonic() - started,
            files=[FILE],
            schema=SCHEMA,
        )
        return report


def count_supervised(features: Any) -> torch.Tensor:
    """How often each target id is supervised in a FeatureSet: int64 [V].

    Small shards are gathered and large ones cut, so that one bincount has about COUNTED tokens: enough to be worth its
    V counters, few enough to stay in the cache. Tokens that are not supervised count as id 0 and are taken off at the
    end; picking the others out would cost more than counting them.
    Raises BadInput when nothing is supervised, or an id lies outside the target's vocabulary.
    """
    size = features.meta.vocab_size
    counts = torch.zeros(size, dtype=torch.int64)  # [V]
    gathered, filled, tokens, supervised = torch.empty(COUNTED, dtype=torch.int32), 0, 0, 0
    for index, path in enumerate(features.shards):
        shard = features.shard(index)
        for start in range(0, len(shard["ids"]), COUNTED):
            ids, mask = (shard[name][start : start + COUNTED] for name in ("ids", "mask"))
            if filled + len(ids) > COUNTED:
                counts += torch.bincount(gathered[:filled], minlength=size)
                filled = 0
            used = mask.bool()
            part = torch.mul(ids, used, out=gathered[filled : filled + len(ids)])
            low, high = part.aminmax()
            if low < 0 or high >= size:
                wrong = shard["ids"][shard["mask"].bool()]
                raise BadInput(
                    f"{path}: ids run from {int(wrong.min())} to {int(wrong.max())}, the target's end at "
                    f"{size - 1}; use the target that made them, or extract again"
                )
            filled += len(ids)
            tokens += len(ids)
            supervised += int(used.count_nonzero())
    counts += torch.bincount(gathered[:filled], minlength=size)
    counts[0] -= tokens - supervised
    if supervised == 0:
        raise BadInput(
            f"{features.dir}: no token is supervised, there is nothing to count; look at `eyas extract --show`"
        )
    return counts


def _conversation_inputs(source: Path, target_dir: str | Path | None) -> dict[str, str]:
    """What the counts of a file of conversations depend on."""
    if target_dir is None:
        raise BadInput(f"{source}: conversations are counted as their target's tokens; name it with --target")
    meta = feature_meta(Path(target_dir), read_facts(target_dir))
    return {"source": str(content(source)), "tokenizer": meta.tokenizer, "template": meta.template}


def _check_target(source: Path, features: FeatureSet | None, target_dir: str | Path | None) -> None:
    """Raise Mismatch where ids of `source` are not ids of the target whose special ones are to be in the map."""
    if target_dir is None:
        return
    if features is not None:
        features.check(tokenizer=tokenizer_fingerprint(target_dir))
        mine = features.meta.vocab_size
    else:
        mine = VocabMap.load(source).target_size
    if mine != (theirs := read_facts(target_dir).vocab_size):
        raise Mismatch(
            f"{source} is of a target with {mine:,} ids, {target_dir} has {theirs:,}; name the target of both"
        )


def _count_answers(source: Path, target_dir: Any, skip_bad: bool) -> tuple[torch.Tensor, dict[str, int]]:
    """How often each id is in the answers of a file of conversations, int64 [V]: in all that `extract` could use, under
    the same rules; and how many conversations were set aside, by reason."""
    facts = read_facts(target_dir)
    collection = encode_all(
        source, load_tokenizer(target_dir), skip_bad=skip_bad, vocab_size=facts.vocab_size, eos_ids=facts.eos_ids,
        max_length=facts.max_position or None,
    )  # fmt: skip
    ids = torch.cat([document.ids[document.mask.bool()] for document in collection.documents])
    return torch.bincount(ids, minlength=facts.vocab_size), collection.reasons()


def _is_map(source: Path) -> bool:
    if source.is_dir():
        return (source / FILE).is_file()
    if not source.is_file():
        raise BadInput(
            f"{source} is missing; expected a folder of features (`eyas extract`), a file of conversations or a "
            f"vocabulary map"
        )
    return True


def _digest(source: Path) -> str:
    """Content of what is read: of a folder, its files as its manifest lists them; of a map, offsets and counts."""
    if not _is_map(source):
        return sha256_json(read_manifest(source)["files"])
    loaded = VocabMap.load(source)
    counts = None if loaded.counts is None else loaded.counts.tolist()
    return sha256_json({"map": loaded.digest(), "counts": counts, "always": list(loaded.always)})
