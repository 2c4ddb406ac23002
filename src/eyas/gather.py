"""What a run is fed with: prompts of any source as files of one layout, and conversations dealt into two parts.

    prompts/{train.jsonl, mt_bench.jsonl, ...}      what to answer, what to prove on
    split/{train.jsonl, heldout.jsonl}              what to learn, what to measure the learning on

pytest tests/test_gather.py
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.artifacts import write_manifest
from eyas.config import RunConfig
from eyas.digests import sha256_json
from eyas.errors import BadInput
from eyas.rows import content, is_lines
from eyas.untrusted import parse_json
from eyas.writes import atomic_write

if TYPE_CHECKING:
    from eyas.prompt import Prompt

TRAIN, HELD_OUT = "train.jsonl", "heldout.jsonl"


def collect_prompts(config: RunConfig, out: Path, own: Path | None = None) -> dict[str, Any]:
    """Write train.jsonl, and NAME.jsonl for each set to prove on: one representation, whatever the sources' layout.

    own: a file of prompts that the target wrote itself, one more source. Training prompts are shuffled by the hash of
    their ids; none asks what another one asks, and none shares NGRAM words in a row with a prompt to prove on.
    """
    from eyas.prompt_sets import HELDOUT, heldout_prompts, ngrams
    from eyas.prompts import load_prompts

    sets = {}
    for name, source in set_names(config).items():
        if source in HELDOUT:
            sets[name] = heldout_prompts(source, config.prove.prompts)
        else:
            sets[name] = load_prompts(source, limit=config.prove.prompts).prompts
    forbidden = ngrams(prompt.text for prompts in sets.values() for prompt in prompts)
    training: dict[str, tuple[int, Prompt]] = {}  # digest -> (number of its source, prompt)
    bad = overlapping = too_long = 0
    longest = config.prompts.max_chars or sys.maxsize
    sources = [*_training_sources(config), *([] if own is None else [str(own)])]
    for number, source in enumerate(sources):
        loaded = load_prompts(source, skip_bad=config.prompts.skip_bad)
        bad += len(loaded.bad)
        for prompt in loaded.prompts:
            if len(prompt.text) > longest:
                too_long += 1
            elif forbidden.isdisjoint(ngrams([prompt.text])):
                training.setdefault(prompt.digest(), (number, prompt))
            else:
                overlapping += 1
    order = sorted(training.items(), key=lambda item: hashlib.sha256(f"{config.seed}:{item[0]}".encode()).hexdigest())
    taken = [0] * len(sources)
    rows = []
    for digest, (number, prompt) in order:
        if config.prompts.per_source is None or taken[number] < config.prompts.per_source:
            taken[number] += 1
            rows.append({**prompt.to_row(), "id": prompt.id if len(sources) == 1 else digest[:16]})
    rows = rows[: config.prompts.limit]
    files = {TRAIN: rows, **{f"{name}.jsonl": [p.to_row() for p in prompts] for name, prompts in sets.items()}}
    for name, written in files.items():
        atomic_write(out / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written))
    counts = {"prompts": len(rows), "to_prove_on": sum(map(len, sets.values()))}
    counts |= {name: n for name, n in (("too_long", too_long), ("overlapping", overlapping), ("malformed", bad)) if n}
    write_manifest(
        out, "prompts", inputs=prompt_inputs(config), config=config.prompts, counts=counts, files=list(files),
        seed=config.seed,
    )  # fmt: skip
    return counts


def _training_sources(config: RunConfig) -> list[str]:
    """None are needed where the conversations are given."""
    return [] if config.regenerate.conversations else config.prompts.sources


def set_names(config: RunConfig) -> dict[str, str]:
    """Sets to prove on: name -> source. A prompt file goes by its name without suffix."""
    names: dict[str, str] = {}
    for source in config.prove.sets:
        name = Path(source).name.split(".")[0]
        if name in names or f"{name}.jsonl" == TRAIN:
            raise BadInput(f"prove.sets: the name '{name}' is taken twice, or reserved; rename the file {source}.")
        names[name] = source
    return names


def prompt_inputs(config: RunConfig) -> dict[str, str]:
    """What the prompts are read from: files by content, the built-in ones by the versions of their packages."""
    from eyas.prompt_sets import HELDOUT, VERSIONS

    inputs: dict[str, str] = {}
    for source in (*_training_sources(config), *config.prove.sets):
        if source == "builtin" or source in HELDOUT:
            inputs[source] = sha256_json({name: _installed_version(name) for name in VERSIONS})
        else:
            inputs[source] = content(source) or "by name"
    return inputs


def _installed_version(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _as_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """Rows of a table or a dataset as numbered lines."""
    from eyas.features.conversations import table_rows

    for number, row in enumerate(table_rows(source), 1):
        yield number, json.dumps(row, ensure_ascii=False).encode()


def split_conversations(conversations: Path, heldout: int, seed: int, out: Path) -> dict[str, Any]:
    """Deal conversations into train.jsonl and heldout.jsonl by the hash of their ids, each in its old order.

    Conversations with the same id, such as several answers to one prompt, stay together. At most a fifth is held out.
    """
    from eyas.features.conversations import read_lines

    lines, ranks = [], []
    for number, line in read_lines(conversations) if is_lines(conversations) else _as_lines(conversations):
        lines.append(line.rstrip() + b"\n")
        try:
            name = parse_json(line).get("id", number)
        except (ValueError, AttributeError) as error:
            raise BadInput(f"{conversations}, line {number}: expected a JSON object, one a line ({error}).") from error
        ranks.append(hashlib.sha256(f"{seed}/{name}".encode()).hexdigest())
    if len(set(ranks)) < 5:
        raise BadInput(
            f"{conversations} holds {len(set(ranks))} conversations; at least 5 are needed to hold one out; give "
            "more prompts."
        )
    kept_out = set(sorted(set(ranks))[: min(heldout, len(set(ranks)) // 5)])
    parts: dict[str, list[bytes]] = {TRAIN: [], HELD_OUT: []}
    for rank, line in zip(ranks, lines, strict=True):
        parts[HELD_OUT if rank in kept_out else TRAIN].append(line)
    for name, part in parts.items():
        atomic_write(out / name, b"".join(part))
    counts = {"train": len(parts[TRAIN]), "held_out": len(parts[HELD_OUT])}
    inputs = {"conversations": content(conversations) or "by name"}
    write_manifest(out, "split", inputs=inputs, counts=counts, files=[TRAIN, HELD_OUT], seed=seed)
    return counts
