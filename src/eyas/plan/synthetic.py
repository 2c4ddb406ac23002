"""A target of which only both ends exist, and features that nobody computed: a dry run at a real target's full width.

    eyas plan --target kimi-k2.5 --synthetic DRY          # DRY/target, DRY/features, DRY/heldout
    eyas vocab DRY/features --size 32000 --target DRY/target --out DRY/vocab
    eyas train DRY/features --vocab DRY/vocab --target DRY/target --out DRY/run

Vocabulary, widths, layout and the nesting of the config are the real ones; weights and states are random, so a draft
that learns from them is worth nothing. What each state says is consistent with the head: `top1` and `logsumexp` are
computed, and the token that follows is mostly the target's choice. The target's tokenizer knows its end of text alone.
    Exercise it:  pytest tests/test_plan_synthetic.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..artifacts import is_current
from ..chat import Encoded
from ..digests import canonical_json, sha256_json
from ..draft.assemble import Piece, assemble
from ..draft.directory import WEIGHTS
from ..errors import BadInput, Mismatch
from ..features.conversations import Collection, Document
from ..features.extract import feature_meta, in_turn, shards_whole, write_features
from ..features.layout import NOT_READ, SCHEMA, STAGE, teacher_rows
from ..features.passes import teacher_of_ends
from ..features.reader import FeatureSet
from ..features.writer import ShardBuffer
from ..target.facts import TargetFacts, read_facts
from ..target.weights import Ends, load_ends
from ..untrusted import content, parse_json
from ..writes import atomic_write_json

MARK = "eyas_synthetic"
"""In the config of a target that Eyas made up: how it was made."""
STD, UNEVEN = (
    0.02,
    0.3,
)  # of weights, as most families begin with, and of the logarithm of their rows' and columns' scale
CERTAINTY = 12.0  # logits by which the next token stands out: enough to be chosen among 163,840
PART_BYTES = 64 << 20  # of a tensor that are made and written at once
ZIPF_SHIFT = 2.7  # Mandelbrot's: the share of the r-th most frequent id is as 1 / (r + 2.7)


def synthetic_target(out: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """Write config.json, a tokenizer and random embedding, final norm and head (bfloat16) to `out`; returns it.

    config: a target's config.json as it is, nested or not. A finished target of the same config and seed is kept.
    Raises BadInput where the config cannot be read, Mismatch where `out` holds something else.
    """
    told = {**config, MARK: {"seed": seed, "config": sha256_json(dict(config))}}
    there = out / "config.json"
    if there.is_file():
        if parse_json(content(there)) == told:
            return out
        raise Mismatch(f"{out} holds another target; choose another folder for the dry run")
    out.mkdir(parents=True, exist_ok=True)
    draft_config = out / "incomplete"
    draft_config.mkdir(exist_ok=True)
    atomic_write_json(draft_config / "config.json", told)
    facts = read_facts(draft_config)
    _write_ends(out, facts, nested="text_config" in config, seed=seed)
    _write_tokenizer(out, facts)
    (draft_config / "config.json").rename(there)  # last: the target is whole
    draft_config.rmdir()
    return out


def synthetic_features(
    out: Path,
    target: Path,
    *,
    documents: int,
    length: int,
    supervised: float = 0.5,
    taps: Sequence[int] | None = None,
    seed: int = 0,
    progress: bool | None = False,
) -> FeatureSet:
    """Write `documents` of about `length` tokens, of which the last share `supervised` is the answer.

    Ids follow Zipf's law; taps are noise; a final state is what makes the following token the target's choice, with
    noise. target: any target's folder, of which both ends are read. Finished, unchanged features are kept.
    Raises BadInput as `documents_of`.
    """
    began = time.monotonic()
    facts = read_facts(target)
    meta = feature_meta(target, facts, taps)
    made = {"documents": documents, "length": length, "supervised": supervised, "seed": seed}
    inputs = {"target": meta.target, "tokenizer": meta.tokenizer, "template": meta.template}
    config = {"synthetic": made, "taps": list(meta.taps)}
    if is_current(out, STAGE, inputs, config, SCHEMA) and shards_whole(out):
        return FeatureSet.open(out)
    ends = load_ends(target, facts)
    collection = Collection(list(documents_of(facts.vocab_size, documents, length, supervised, seed)))

    def compute(chosen: Sequence[Document], buffer: ShardBuffer, advance: Any) -> None:
        _fill(chosen, buffer, ends, meta.taps, advance)

    write_features(
        out, meta, collection, in_turn(out, meta, compute), inputs=inputs, config=config, began=began,
        progress=progress, salt=canonical_json(made),
    )  # fmt: skip
    return FeatureSet.open(out)


# ------------------------------------------------------------------------------------------------ features


def documents_of(vocab_size: int, count: int, length: int, supervised: float, seed: int = 0) -> Iterator[Document]:
    """Documents of about `length` tokens by Zipf's law, the last share `supervised` of each under the loss mask.

    Raises BadInput for lengths that leave no prompt or no answer.
    """
    answer = round(length * supervised)
    if count < 1 or answer < 2 or answer >= length:
        raise BadInput(
            f"{count} documents of {length} tokens, {supervised:g} of them supervised: a document needs a prompt and "
            f"an answer of at least two tokens; choose other --documents, --length or --supervised"
        )
    rng = np.random.default_rng(seed)
    weights = np.cumsum(1 / (np.arange(vocab_size) + ZIPF_SHIFT))
    order = np.random.default_rng(0).permutation(vocab_size)  # which ids are frequent is the same for every seed
    for d in range(count):
        size = int(length * (0.75 + 0.5 * rng.random()))  # documents differ in length, as real ones do
        ids = order[np.searchsorted(weights, rng.random(size) * weights[-1])]
        mask = torch.zeros(size, dtype=torch.uint8)
        mask[-max(2, round(size * answer / length)) :] = 1
        yield Document(f"synthetic-{d}", Encoded(torch.from_numpy(ids.astype(np.int32)), mask))


def _fill(documents: Sequence[Document], buffer: ShardBuffer, ends: Ends, taps: Sequence[int], advance: Any) -> None:
    """States of the documents of one shard. The teacher of all of them is made at once: the head is read once."""
    size = ends.facts.hidden_size
    finals, reads = [], []
    for document in documents:
        generator = _generator("final", document.id, document.ids.tolist())
        following = torch.cat([document.ids[1:], document.ids[-1:]]).long()
        toward = ends.head[following].float()  # [L, H]
        square = toward.square().sum(-1, keepdim=True).clamp(min=1e-12)
        noise = torch.randn(len(document), size, generator=generator) / square.mean().sqrt()  # about 1 in a logit
        finals.append((toward * (CERTAINTY / square) + noise).bfloat16())
        reads.append(teacher_rows(document.mask))
    wanted = torch.cat([final[read] for final, read in zip(finals, reads, strict=True)])
    best, total = teacher_of_ends(ends, wanted)
    counts = [int(read.sum()) for read in reads]
    for d, (read, top1, logsumexp) in enumerate(zip(reads, best.split(counts), total.split(counts), strict=True)):
        document, n = documents[d], len(documents[d])
        generator = _generator("taps", document.id, document.ids.tolist())
        buffer.put(
            d,
            ids=document.ids,
            mask=document.mask,
            taps=torch.randn(n, len(taps) * size, generator=generator),
            final=finals[d],
            top1=torch.full((n,), NOT_READ, dtype=torch.int32).masked_scatter(read, top1),
            logsumexp=torch.zeros(n).masked_scatter(read, logsumexp),
        )
        advance(n)


# ------------------------------------------------------------------------------------------------ target


def _write_ends(out: Path, facts: TargetFacts, nested: bool, seed: int) -> None:
    """model.safetensors with the names that a nested or a plain checkpoint gives its ends."""
    v, h = facts.vocab_size, facts.hidden_size
    body, head = ("language_model.model.", "language_model.lm_head.") if nested else ("model.", "lm_head.")
    norm = torch.randn(h, generator=_generator(seed, "norm")).mul_(0.1) + (0 if facts.norm_offset else 1)
    pieces = [
        Piece(f"{body}embed_tokens.weight", "BF16", (v, h), tuple(_random(v, h, seed, 0))),
        Piece(f"{body}norm.weight", "BF16", (h,), (norm.bfloat16().view(torch.uint16).numpy(),)),
    ]
    if not facts.tied:
        pieces.append(Piece(f"{head}weight", "BF16", (v, h), tuple(_random(v, h, seed, 1))))
    (out / WEIGHTS).unlink(missing_ok=True)  # what a killed writer left
    assemble(out / WEIGHTS, pieces, {"format": "pt"})


def _random(rows: int, columns: int, seed: int, which: int) -> Iterator[Any]:
    """Functions that make a tensor part by part, as bfloat16 bits.

    Rows and columns are uneven, as training leaves them: `eyas doctor` takes even ones for weights never trained.
    """
    scale = torch.randn(columns, generator=_generator(seed, which, "columns")).mul_(UNEVEN).exp_() * STD

    def part(start: int, count: int) -> np.ndarray[Any, Any]:
        generator = _generator(seed, which, start)
        rows_scale = torch.randn(count, 1, generator=generator).mul_(UNEVEN).exp_()
        made = torch.randn(count, columns, generator=generator).mul_(scale).mul_(rows_scale)
        return made.bfloat16().view(torch.uint16).numpy()

    step = max(1, PART_BYTES // (4 * columns))
    for start in range(0, rows, step):
        yield partial(part, start, min(step, rows - start))


def _generator(*told: Any) -> torch.Generator:
    """Random numbers that depend on all that is told. Of a seed torch reads 32 bits, so it must be mixed before."""
    return torch.Generator().manual_seed(int(sha256_json(list(told))[:8], 16))


def _write_tokenizer(out: Path, facts: TargetFacts) -> None:
    """A tokenizer with the end of text at its true place, and one word for everything else."""
    end = facts.eos_ids[0] if facts.eos_ids else facts.vocab_size - 1
    special = {"id": end, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}  # fmt: skip
    model = {"type": "WordLevel", "vocab": {"<|any|>": 0 if end else 1}, "unk_token": "<|any|>"}
    atomic_write_json(out / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model,
    })  # fmt: skip
    atomic_write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "unk_token": "<|any|>",
    })  # fmt: skip
