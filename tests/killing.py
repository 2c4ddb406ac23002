"""Runs a recipe again and again, killed by SIGKILL at one place after the other, until nothing is left to kill.

    python tests/killing.py RECIPE.yaml OUT_DIR

A process of its own, since it forks: all modules are imported once, and each attempt is a child that inherits them.
Prints one JSON line an attempt: the place, the signal it died of, the lines it had said. test_pipeline.py reads them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

# (stage, what, n): die just before the n-th such thing happens in that stage. `file`: a file or folder gets its final
# name; `answer`: a finished answer is noted; `step`: an optimizer step; `decode`: a batch is decoded.
PLACES = [
    ("target", "file", 1),
    ("ask", "answer", 5),
    ("ask", "file manifest.json", 1),
    ("prompts", "file", 1),
    ("prompts", "file", 3),
    ("regenerate", "answer", 9),
    ("regenerate", "file manifest.json", 1),
    ("split", "file", 2),
    ("extract", "file", 1),
    ("extract", "file", 2),
    ("heldout", "file manifest.json", 1),
    ("vocab", "file", 1),
    ("vocab", "file manifest.json", 1),
    ("train", "step", 5),
    ("train", "file step-000006", 1),
    ("train", "file state.json", 2),
    ("train", "file draft", 1),
    ("train", "file manifest.json", 1),
    ("export", "file export", 1),
    ("prove", "decode", 2),
    ("prove", "file", 1),
    ("summary.json", "file", 1),
]


def arm(run_dir: Path, stage: str, what: str, nth: int) -> None:
    """Make this process kill itself at a place."""
    seen = 0

    def reached() -> None:
        nonlocal seen
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(owner: Any, name: str, matters: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if matters(*args):
                reached()
            return original(*args, **options)

        setattr(owner, name, watched)

    kind, _, wanted = what.partition(" ")
    if kind == "file":
        inside = run_dir / stage

        def matters(_source: Any, target: Any, *_rest: Any) -> bool:
            path = Path(target)
            named = path.name == wanted if wanted else inside in (path, path.parent)
            return path.is_relative_to(inside) and named

        watch(os, "replace", matters)
        watch(os, "rename", matters)
    elif kind == "answer":
        import eyas.journal

        watch(eyas.journal.Journal, "append")
    elif kind == "step":
        import eyas.train.muon

        watch(eyas.train.muon.Muon, "step")
    else:
        import eyas.decode.prove

        watch(eyas.decode.prove, "decode")


def attempt(recipe: str, run_dir: Path, place: tuple[str, str, int] | None) -> dict[str, Any]:
    """One run in a child, killed at `place`. Returns how it ended and its lines."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            if place is not None:
                arm(run_dir, *place)
            from eyas.config import load_config
            from eyas.pipeline import run

            run(load_config(recipe), run_dir, say=lambda line: os.write(writer, (line + "\n").encode()) and None)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        lines = pipe.read().splitlines()
    status = os.waitpid(child, 0)[1]
    return {"place": place, "signal": os.WTERMSIG(status), "exit": os.WEXITSTATUS(status), "lines": lines}


def import_everything() -> None:
    """What the stages import lazily; none of it may start threads, since threads do not survive a fork."""
    for name in (
        "tokenizers", "torch._dynamo", "torch.utils.tensorboard", "transformers.models.llama.modeling_llama",
        "eyas.decode.prove", "eyas.export.write", "eyas.features.count", "eyas.features.extract", "eyas.pipeline",
        "eyas.target.answering", "eyas.train.loop",
    ):  # fmt: skip
        importlib.import_module(name)


if __name__ == "__main__":
    recipe, out = sys.argv[1], Path(sys.argv[2])
    import_everything()
    for place in (*PLACES, None):
        print(json.dumps(attempt(recipe, out / "killed", place)), flush=True)
    print(json.dumps(attempt(recipe, out / "whole", None)), flush=True)
