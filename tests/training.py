"""Features, maps and runs for the tests of training: small enough that a run takes a fraction of a second.

from training import material, run
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.features.count import count_supervised
from eyas.features.reader import FeatureSet
from eyas.train.settings import TrainSettings
from eyas.vocab import VocabMap

TRAIN, HELD_OUT = "train", "heldout"
# Every second id of the tiny target: enough ids lie outside the draft vocabulary.
SIZE = 150


@dataclass(frozen=True)
class Material:
    """What a run needs."""

    target: Path
    features: FeatureSet
    held_out: FeatureSet
    vocab_map: VocabMap


def conversations(n: int, seed: int) -> list[dict[str, Any]]:
    """Conversations of random token ids, prompt and answer. The second of them answers with one token only."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        prompt = [1, *(rng.randrange(3, 300) for _ in range(rng.randrange(2, 8)))]
        answer = [*(rng.randrange(3, 300) for _ in range(0 if i == 1 else rng.randrange(3, 16))), 2]
        rows.append({
            "id": f"{seed}-{i}", "source": "test", "finish": "stop", "seed": None,
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
            "prompt_token_ids": prompt, "response_token_ids": answer,
        })  # fmt: skip
    return rows


_made: dict[Path, Material] = {}


def material(target: Path, factory: Any) -> Material:
    """Features of `target` on 12 conversations and 4 held-out ones, extracted once a session."""
    from eyas.features.extract import extract
    from eyas.target.model import Target

    if target not in _made:
        loaded, folder = Target.load(target), factory.mktemp("features")
        for name, n, seed in ((TRAIN, 12, 1), (HELD_OUT, 4, 2)):
            extract(loaded, conversations(n, seed), folder / name, progress=False)
        features = FeatureSet.open(folder / TRAIN)
        vocab_map = VocabMap.from_counts(count_supervised(features), SIZE, always=(0, 1, 2))
        _made[target] = Material(target, features, FeatureSet.open(folder / HELD_OUT), vocab_map)
    return _made[target]


SETTINGS = {
    "steps": 6, "batch_tokens": 80, "micro_tokens": 40, "ttt_steps": 3, "intermediate_size": 16, "save_every": 2,
    "eval_every": 3, "eval_draft_tokens": 2, "warmup": 0.2,
}  # fmt: skip


def run(m: Material, out: Path, **changes: Any) -> dict[str, Any]:
    """Train in `out`. Names in SETTINGS or TrainSettings change settings; the rest goes to `train`."""
    from eyas.train.loop import train

    given: dict[str, Any] = {"vocab_map": m.vocab_map, "held_out": m.held_out, "features": m.features, "seed": 3}
    settings = dict(SETTINGS)
    for name, value in changes.items():
        (settings if name in TrainSettings.model_fields else given)[name] = value
    features = given.pop("features")
    return train(features, out, target_dir=m.target, settings=TrainSettings(**settings), progress=False, **given)


def records(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock measured."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def die() -> None:
    """As abruptly as it gets."""
    os.kill(os.getpid(), signal.SIGKILL)


def exit_code_of(work: Callable[..., Any], *args: Any) -> int:
    """Run `work(*args)` in a process of its own; its exit code, -9 after SIGKILL."""
    # A fork saves importing torch; with CUDA, autograd's threads would not survive it.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    process = context.Process(target=work, args=args)
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode
