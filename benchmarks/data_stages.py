r"""The stages before training beside the plain work that they cannot avoid: counting, answering, recording states.

    python benchmarks/data_stages.py vocab regenerate extract --threads 1 --rounds 3 \
        --conversations runs/demo/regenerate/conversations.jsonl --json rows.json

vocab       `eyas vocab` counts 100 M tokens, all or 64 % of them supervised, and cuts 163,840 ids to 32,000; beside one
            numpy.bincount of the same int32 ids, which lie in memory. Features are read from shards (page cache) whose
            unread tensors are holes: 100 large ones, and as many as a target of 576 makes of the default size.
regenerate  answers in large batches, beside the same target answering one prompt at a time: with transformers' own
            `generate` and with our Generator. These two answer a few of the same prompts, taken evenly; the faster one
            is the baseline.
extract     `eyas extract` of conversations whose token ids are known, shards written, beside bare forward passes of the
            decoder over the same batches. Those are credited with padding, as if every position were a token, so no
            padding can hide in the ratio. A second row also runs the head where extraction must read the teacher.

All tools of a work run in turn in one process. Times are medians over the rounds, ratios medians of the ratios within
a round: for vocab time by the baseline's time, for the others rate by the baseline's rate. A row: wall and CPU seconds
of one run, units (tokens, answer tokens) a second, the ratio, and what it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from eyas.artifacts import write_manifest
from eyas.chat import render, shared_prefix
from eyas.conventions import Conventions
from eyas.features.conversations import encode_all
from eyas.features.count import make_vocab
from eyas.features.extract import extract
from eyas.features.layout import INDEX, ROW_DTYPES, FeatureMeta, ShardEntry, dump_index, shard_name, teacher_rows
from eyas.features.passes import batches
from eyas.features.reader import FeatureSet
from eyas.features.writer import DEFAULT_SHARD_BYTES, plan_shards
from eyas.machine import reuse_large_allocations
from eyas.prompt_sets import training_prompts
from eyas.target.answering import run_all
from eyas.target.generate import Generator
from eyas.target.model import Target
from eyas.target.requests import Request
from eyas.target.source import resolve_target

V, D = 163_840, 32_000
BLOCK = 1 << 22


@dataclass(frozen=True)
class Row:
    """One tool at one work; see above."""

    work: str
    tool: str
    wall_s: float
    cpu_s: float
    rate: float
    ratio: float | None = None
    goal: str = ""


def compare(work: str, tools: dict[str, Callable[[], int]], rounds: int, goals: dict[str, str]) -> list[Row]:
    """Run all tools in turn; each returns the units it did. Ratios are to the fastest whose goal is `baseline`."""
    runs: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for _ in range(rounds):
        for name, tool in tools.items():
            wall, cpu = time.perf_counter(), time.process_time()
            units = tool()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            runs[name].append((wall, cpu, units / wall))
            print(f"  {work}: {name}: {wall:.2f} s, {units / wall:,.1f}/s", flush=True)
    median = {name: [statistics.median(column) for column in zip(*r, strict=True)] for name, r in runs.items()}
    base = max((n for n in tools if goals.get(n) == "baseline"), key=lambda n: median[n][2])
    rows = []
    for name, (wall, cpu, rate) in median.items():
        shares = [mine[2] / theirs[2] for mine, theirs in zip(runs[name], runs[base], strict=True)]
        ratio = statistics.median(1 / s for s in shares) if work == "vocab" else statistics.median(shares)
        rows.append(Row(work, name, wall, cpu, rate, ratio, goals.get(name, "")))
    return rows


# ---------------------------------------------------------------- vocab


def zipf(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [tokens], frequency of the n-th most frequent id about 1/n; which id is the n-th is random."""
    heights = np.cumsum(1 / np.arange(1, V + 1))
    table = np.searchsorted(heights, (np.arange(BLOCK) + 0.5) / BLOCK * heights[-1])
    table = rng.permutation(V).astype(np.int32)[table]
    return np.concatenate([table[rng.integers(0, BLOCK, min(BLOCK, tokens - s))] for s in range(0, tokens, BLOCK)])


def turns(tokens: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """uint8 [tokens], a loss mask: answers of 100 to 300 tokens, between them as many others as the share says."""
    if share == 1:
        return np.ones(tokens, np.uint8)
    answers = rng.integers(100, 300, tokens // 100)
    prompts = (answers * (1 / share - 1)).astype(np.int64)
    lengths = np.stack([prompts, answers], 1).ravel()
    return np.repeat(np.tile(np.array([0, 1], np.uint8), len(answers)), lengths)[:tokens]


def sparse_features(folder: Path, ids: np.ndarray, mask: np.ndarray, hidden: int, shard_bytes: int) -> Path:
    """Features as `eyas extract` leaves them, of which only ids and mask take room on the disk."""
    meta = FeatureMeta(hidden, V, Conventions(taps=(1, 2, 4), num_target_layers=6), "a" * 64, "b" * 64, "c" * 64)
    folder.mkdir()
    shapes, entries = meta.row_shapes(), []
    documents = [1000] * (len(ids) // 1000)
    start = 0
    for k, part in enumerate(plan_shards(documents, meta.bytes_per_token(), shard_bytes)):
        rows = 1000 * len(part)
        header: dict[str, Any] = {"__metadata__": meta.to_metadata([f"d{i}" for i in part], "plan")}
        place, at = 8 * (len(part) + 1), {}
        header["offsets"] = {"dtype": "I64", "shape": [len(part) + 1], "data_offsets": [0, place]}
        spelled = {torch.int32: "I32", torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32"}
        for name in sorted(ROW_DTYPES, key=lambda n: -ROW_DTYPES[n].itemsize):
            at[name], dtype = place, ROW_DTYPES[name]
            place += rows * dtype.itemsize * int(np.prod(shapes[name], dtype=np.int64))
            header[name] = {"dtype": spelled[dtype], "shape": [rows, *shapes[name]], "data_offsets": [at[name], place]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = folder / shard_name(k)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.write(np.arange(0, rows + 1, 1000, dtype=np.int64).tobytes())
            for name, values in (("ids", ids), ("mask", mask)):
                file.seek(8 + len(text) + at[name])
                file.write(values[start : start + rows].tobytes())
            file.truncate(8 + len(text) + place)
        supervised = int(mask[start : start + rows].sum())
        entries.append(ShardEntry(path.name, path.stat().st_size, "", "plan", (1000,) * len(part), supervised))
        start += rows
    (folder / INDEX).write_text(dump_index(meta, entries))
    write_manifest(
        folder, stage="extract", inputs={}, conventions=meta.conventions, config={}, counts={}, duration_s=0.0,
        files={INDEX: "0" * 64}, schema="eyas-features/1",
    )  # fmt: skip
    return folder


def vocab(a: argparse.Namespace, scratch: Path) -> list[Row]:
    rng = np.random.default_rng(0)
    tokens = a.tokens // 1000 * 1000
    ids = zipf(tokens, rng)
    number = iter(range(1000))

    def stage(features: Path) -> Callable[[], int]:
        return lambda: make_vocab(features, scratch / f"map{next(number)}", D) and tokens

    tools: dict[str, Callable[[], int]] = {"numpy.bincount, int32 in memory": lambda: len(np.bincount(ids)) and tokens}
    goals = {next(iter(tools)): "baseline"}
    for share in (1.0, 0.64):
        mask = turns(tokens, share, rng)
        for kind, hidden, size in (("1 M tokens", 16, 141_000_000), ("64 MiB", 576, DEFAULT_SHARD_BYTES)):
            features = sparse_features(scratch / f"{share}-{hidden}", ids, mask, hidden, size)
            name = f"eyas vocab, {share:.0%} supervised, shards of {kind}, {len(FeatureSet.open(features).shards):,}"
            tools[name], goals[name] = stage(features), "<= 2"
    return compare("vocab", tools, a.rounds, goals)


# ---------------------------------------------------------------- regenerate


def regenerate(a: argparse.Namespace, scratch: Path) -> list[Row]:
    target = Target.load(resolve_target(a.target), dtype=torch.float32)
    asked = [p.messages for p in training_prompts() if len(p.text) <= 300][: a.prompts]
    prompts = [render(target.tokenizer, messages, add_generation_prompt=True) for messages in asked]
    requests = [Request(k, ids) for k, ids in enumerate(prompts)]
    settings: dict[str, Any] = {"max_new_tokens": a.max_new_tokens, "prefix": shared_prefix(target.tokenizer)}
    few = requests[:: max(1, len(requests) // a.alone)][: a.alone]

    def transformers() -> int:
        made = 0
        with torch.inference_mode():
            for request in few:
                ids = torch.tensor([list(request.ids)])
                out = target.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=a.max_new_tokens, do_sample=False,
                    repetition_penalty=1.0, eos_token_id=sorted(target.facts.eos_ids), pad_token_id=0,
                )  # fmt: skip
                made += out.shape[1] - ids.shape[1]
        return made

    def alone() -> int:
        generator = Generator(target, slots=1, **settings)
        return sum(len(answer.ids) for request in few for answer in run_all(generator, [request]))

    def batched() -> int:
        generator = Generator(target, slots=a.slots, **settings)
        return sum(len(answer.ids) for answer in run_all(generator, requests))

    names = (
        f"transformers, {len(few)} prompts one at a time",
        f"our Generator, {len(few)} prompts one at a time",
        f"our Generator, {len(requests)} prompts, {a.slots} slots",
    )
    tools = dict(zip(names, (transformers, alone, batched), strict=True))
    return compare("regenerate", tools, a.rounds, dict(zip(names, ("baseline", "baseline", ">= 5"), strict=True)))


# ---------------------------------------------------------------- extract


def extraction(a: argparse.Namespace, scratch: Path) -> list[Row]:
    target = Target.load(resolve_target(a.target), dtype=torch.float32)
    reuse_large_allocations()  # as extract does, for all
    rows = [json.loads(line) for line in a.conversations.read_text().splitlines()[: a.documents]]
    documents = encode_all(rows, target.tokenizer, vocab_size=target.facts.vocab_size).documents
    lengths = [len(d) for d in documents]
    tokens, number = sum(lengths), iter(range(1000))

    def plan() -> Iterator[tuple[list[int], torch.Tensor]]:
        for group in batches(lengths, 2048):
            ids = torch.zeros(len(group), lengths[group[0]], dtype=torch.long)
            for row, i in enumerate(group):
                ids[row, : lengths[i]] = documents[i].ids
            yield group, ids

    @torch.inference_mode()
    def forward(head: bool = False) -> int:
        positions = 0
        for group, ids in plan():
            final = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
            positions += ids.numel()
            if head:
                for row, i in enumerate(group):
                    target.head(final[row, : lengths[i]][teacher_rows(documents[i].mask)])
        return positions

    def stage() -> int:
        counts = extract(target, rows, scratch / f"features{next(number)}", progress=False)
        assert counts["tokens"] == tokens
        return tokens

    positions = sum(ids.numel() for _, ids in plan())
    read = sum(int(teacher_rows(d.mask).sum()) for d in documents)
    print(f"  extract: {tokens:,} tokens, {positions / tokens - 1:.1%} padding, {read / tokens:.1%} read the teacher")
    tools = {"decoder alone": forward, "decoder, and head where read": lambda: forward(True), "eyas extract": stage}
    return compare("extract", tools, a.rounds, {"decoder alone": "baseline", "eyas extract": ">= 0.8"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", choices=["vocab", "regenerate", "extract"])
    parser.add_argument("--target", help="as everywhere; default smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100_000_000, help="vocab: tokens to count")
    parser.add_argument("--prompts", type=int, default=192, help="regenerate: prompts answered in batches")
    parser.add_argument("--alone", type=int, default=6, help="regenerate: of these, answered one at a time")
    parser.add_argument("--slots", type=int, default=96)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--conversations", type=Path, default=Path("runs/demo/regenerate/conversations.jsonl"),
        help="extract: what `eyas regenerate` wrote",
    )  # fmt: skip
    parser.add_argument("--documents", type=int, default=150, help="extract: how many of them")
    parser.add_argument("--json", type=Path, help="write the rows there")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    rows = []
    for work in a.works:
        with tempfile.TemporaryDirectory() as scratch:
            rows += {"vocab": vocab, "regenerate": regenerate, "extract": extraction}[work](a, Path(scratch))
    print(f"{'work':10} {'tool':56} {'wall s':>8} {'CPU s':>8} {'rate':>14} {'ratio':>7}  goal")
    for r in rows:
        print(f"{r.work:10} {r.tool:56} {r.wall_s:8.2f} {r.cpu_s:8.2f} {r.rate:14,.1f} {r.ratio or 1:7.2f}  {r.goal}")
    if a.json:
        a.json.write_text(json.dumps([asdict(r) for r in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
