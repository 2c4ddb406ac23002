"""The features of each work, written once below the cache: as Eyas has them, and the same ones as the peers read them.

    python benchmarks/train_step.py --conversations conversations.jsonl

A work's folder holds `features/` (a FeatureSet), `vocab.safetensors` (the map), `batches.json` (documents of each
step), `specforge/` (a `*.ckpt` a step, and the map) and `speculators/hs_0.safetensors` (the tokens of the first step).
Where conversations are packed, documents are chosen so that they add up to exactly the length: SpecForge's script cuts
its batches to one length, and so all three see the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from eyas.cache import cache_dir
from eyas.digests import sha256_file, sha256_json
from eyas.errors import BadInput
from eyas.features.count import count_supervised
from eyas.features.extract import extract, feature_meta
from eyas.features.layout import SCHEMA, teacher_rows
from eyas.features.passes import teacher_of_ends
from eyas.features.reader import FeatureSet
from eyas.features.writer import ShardBuffer, ShardWriter
from eyas.target.facts import read_facts
from eyas.target.weights import load_ends
from eyas.vocab import VocabMap
from eyas.writes import atomic_dir, atomic_save_safetensors, atomic_write_json

from .works import DRAFT_VOCAB, Work

VERSION = 1  # of what lies in a work's folder
WINDOW = 32  # documents that are looked through for those of one batch


def synthetic(out: Path, target: Path, lengths: Sequence[int], seed: int = 0) -> FeatureSet:
    """Write documents of random tokens and states, all supervised; the teacher is the target's head on those states."""
    facts = read_facts(target)
    ends, meta = load_ends(target, facts), feature_meta(target, facts)
    generator = torch.Generator().manual_seed(seed)
    buffer = ShardBuffer(meta, lengths)
    for d, n in enumerate(lengths):
        mask = torch.ones(n, dtype=torch.uint8)
        final = torch.randn(n, facts.hidden_size, generator=generator)
        read = teacher_rows(mask)
        top1, logsumexp = torch.full((n,), -1, dtype=torch.int32), torch.zeros(n)
        with torch.no_grad():
            top1[read], logsumexp[read] = teacher_of_ends(ends, final[read])
        taps = torch.randn(n, len(meta.taps) * facts.hidden_size, generator=generator)
        ids = torch.randint(facts.vocab_size, (n,), generator=generator)
        buffer.put(d, ids=ids, mask=mask, taps=taps, final=final, top1=top1, logsumexp=logsumexp)
    writer = ShardWriter(out, meta)
    writer.write(0, [f"random-{d}" for d in range(len(lengths))], buffer, f"random {seed}")
    inputs = {"target": meta.target, "tokenizer": meta.tokenizer, "template": meta.template}
    counts = {"documents": len(lengths), "tokens": sum(lengths), "supervised_tokens": sum(lengths)}
    writer.finish(1, inputs, {"random": seed}, counts, 0.0)
    return FeatureSet.open(out)


def subset(lengths: Sequence[int], total: int) -> list[int] | None:
    """Places in `lengths` of entries that add up to exactly `total`, the earliest found; None where there are none."""
    reached: dict[int, list[int]] = {0: []}
    for place, length in enumerate(lengths):
        for size, places in sorted(reached.items(), reverse=True):
            if size + length <= total and size + length not in reached:
                reached[size + length] = [*places, place]
        if total in reached:
            return reached[total]
    return None


def packs(lengths: Sequence[int], total: int, wanted: int) -> list[list[int]]:
    """Up to `wanted` batches of documents of exactly `total` tokens each; every document is used at most once."""
    left, out = list(range(len(lengths))), list[list[int]]()
    while len(out) < wanted:
        window = left[:WINDOW]
        chosen = subset([lengths[d] for d in window], total)
        if chosen is None and len(window) < len(left):
            del left[0]  # another window
            continue
        if chosen is None:
            break
        out.append([window[i] for i in chosen])
        left = [d for d in left if d not in out[-1]]
    return out


def work_folder(
    work: Work, target: Path, batches: int, conversations: Path | None, features: Path | None, limit: int
) -> Path:
    """The folder of a work, made where it is not there yet. Raises BadInput where conversations cannot be packed."""
    told: object = "random"
    if work.conversations and features is not None:
        told = FeatureSet.open(features).manifest["files"]
    elif work.conversations and conversations is not None:
        told = sha256_file(conversations)
    elif work.conversations:
        raise BadInput(f"{work.name}: give --conversations FILE, or --features DIR of extracted ones")
    what = [VERSION, SCHEMA, work.name, work.length, work.documents, batches, told, limit, DRAFT_VOCAB, str(target)]
    out = cache_dir() / "bench" / f"step-{sha256_json(what)[:12]}"
    if out.is_dir():
        return out
    if work.conversations:
        own = features or cache_dir() / "bench" / f"extract-{sha256_json([told, limit, str(target)])[:12]}"
        if features is None and conversations is not None:
            extract(target, conversations, own, limit=limit, max_length=work.length, skip_bad=True)
        held = FeatureSet.open(own)
        plan = packs(held.doc_lengths.tolist(), work.length, batches)
        if not plan:
            raise BadInput(f"{own}: no documents add up to exactly {work.length} tokens; give more of them (--limit)")
        vocab = VocabMap.from_counts(count_supervised(held), DRAFT_VOCAB)
    with atomic_dir(out) as folder:
        if work.conversations:
            (folder / "features").symlink_to(own.resolve())
        else:
            held = synthetic(folder / "features", target, [work.length] * (work.documents * batches))
            plan = [list(range(i, i + work.documents)) for i in range(0, len(held), work.documents)]
            vocab = VocabMap.from_counts(choices(held), DRAFT_VOCAB)
        vocab.save(folder / "vocab.safetensors")
        atomic_write_json(folder / "batches.json", plan)
        if not work.alone:
            for_specforge(held, plan, vocab, folder / "specforge")
            for_speculators(held, plan[0], folder / "speculators" / "hs_0.safetensors")
    return out


def choices(features: FeatureSet) -> torch.Tensor:
    """How often the target chooses each id: int64 [V]. A map of these leaves no row of random states out."""
    top1 = torch.cat([features.document(d)["top1"] for d in range(len(features))])
    return torch.bincount(top1[top1 >= 0], minlength=features.meta.vocab_size)


def batches_of(folder: Path) -> list[list[int]]:
    """Documents of each step."""
    return json.loads((folder / "batches.json").read_text())


def for_specforge(features: FeatureSet, plan: list[list[int]], vocab: VocabMap, out: Path) -> None:
    """One `*.ckpt` a batch in SpecForge's layout, and the map: input_ids [L], loss_mask [L], hidden_state [1, L, H],
    aux_hidden_state [1, L, T*H]."""
    (out / "vocab_mapping").mkdir(parents=True)
    for number, docs in enumerate(plan):
        parts = [features.document(d) for d in docs]
        ids, mask, final, taps = (torch.cat([p[name] for p in parts]) for name in ("ids", "mask", "final", "taps"))
        sample = {"input_ids": ids.long(), "loss_mask": mask.long()}
        sample |= {"hidden_state": final[None].clone(), "aux_hidden_state": taps[None].clone()}
        torch.save(sample, out / f"data_{number:03}.ckpt")
    torch.save({"d2t": vocab.d2t, "t2d": vocab.t2d}, out / "vocab_mapping" / "vocab_mapping.pt")


def for_speculators(features: FeatureSet, docs: list[int], out: Path) -> None:
    """One file in speculators' layout: token_ids [L], hidden_states [L, T+1, H] with the final state last."""
    parts = [features.document(d) for d in docs]
    wide = features.meta.hidden_size
    states = torch.cat([torch.cat([p["taps"], p["final"]], -1) for p in parts]).unflatten(-1, (-1, wide))
    ids = torch.cat([p["ids"] for p in parts]).long()
    out.parent.mkdir(parents=True)
    atomic_save_safetensors({"hidden_states": states.contiguous(), "token_ids": ids}, out)
