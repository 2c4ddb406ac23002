"""Two tiny runs with names and prompts that try to be markup, for the tests of pages: made once a session.

from tiny_runs import HOSTILE, two_runs
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

HOSTILE = "</script><img src=x onerror=alert(1)><b onclick='x'>&amp;"
SET = "held <b>out"
WORDS = "field glove hawk France sum young four plus sits looks".split()
PROMPTS = [f"who flies over the {word} {HOSTILE}" for word in WORDS]
_made: dict[Path, tuple[Path, Path]] = {}


def two_runs(target: Path, factory: Any) -> tuple[Path, Path]:
    """A finished run, and another of fewer training steps and a smaller draft vocabulary. Do not write into them."""
    if target not in _made:
        from eyas.config import validate
        from eyas.pipeline import run

        folder = factory.mktemp("reporting")
        for name, texts in (("train", PROMPTS), (SET, PROMPTS[:2])):
            lines = [json.dumps({"id": f"<i>{i}", "prompt": text}) for i, text in enumerate(texts)]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        recipe: dict[str, Any] = {
            "name": f"tiny {HOSTILE}",
            "target": {"source": str(target)},
            "prompts": {"sources": [str(folder / "train.jsonl")]},
            "regenerate": {"max_new_tokens": 12, "slots": 8},
            "extract": {"heldout": 2, "batch_tokens": 512},
            "vocab": {"size": 60},
            "train": {"steps": 6, "batch_tokens": 256, "eval_every": 2, "ttt_steps": 2, "eval_draft_tokens": 2},
            "prove": {"sets": [str(folder / f"{SET}.jsonl")], "prompts": 2, "max_new_tokens": 12, "draft_tokens": 2},
        }
        first, second = folder / "first", folder / "second"
        run(validate(recipe), first, say=lambda line: None)
        shutil.copytree(first, second)
        recipe["train"]["steps"], recipe["vocab"]["size"] = 4, 40
        run(validate(recipe), second, say=lambda line: None)
        _made[target] = first, second
    return _made[target]
