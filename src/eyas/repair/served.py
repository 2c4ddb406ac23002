"""The last proof of a repair: the real engine serves the draft, and counts what the replay said that it would.

    served("mended", "path/to/target", "vllm")        eyas repair broken --auto --target T --out mended --serve vllm

Needs the engine's environment (`eyas engines setup`).   make test-engines (tests/real/test_repaired.py)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import BadInput

ENGINES = ("vllm", "sglang")
PROMPTS, TOKENS, K = 16, 48, 4


def served(
    draft: str | Path, target: str | Path, engine: str, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """{"engine", "tau", "rounds", "accepted", "predicted"}: counted by the engine (CPU, float32, greedy), and replayed
    as that engine reads the directory, over the same prompts and rounds; predicted: None where it would not start.

    Raises BadInput for an engine that is not set up here, EyasError where it fails.
    """
    import torch

    from ..chat import render
    from ..decode.acceptance import Acceptance
    from ..doctor.prompts import PROMPTS as TEXTS
    from ..doctor.readings import Readings
    from ..doctor.record import answers
    from ..doctor.trial import Bench
    from ..engines import serving
    from ..target.facts import read_facts
    from ..target.model import Target

    draft, target = Path(draft), Path(target)
    check_engine(engine)
    facts = read_facts(target)
    tokenizer = Target.load(target).tokenizer
    asked = [render(tokenizer, [{"role": "user", "content": t}], add_generation_prompt=True) for t in TEXTS[:PROMPTS]]
    tell("replaying it as the engine reads it")
    # An engine counts every round that it begins before the last token: the text must go on until that one's end.
    text = answers(target, asked, range(facts.num_layers + 1), tokens=TOKENS + K - 1, ends=False, dtype="float32")
    read = Readings.open(draft, target, [engine], {}).as_read.get(engine)
    predicted = None if read is None else Acceptance.merged(Bench(text, torch.float32).acceptance(read, K), K).tau
    tell(f"serving it with {engine}")
    with TemporaryDirectory(prefix="eyas-") as scratch:
        said = serving.answers(engine, target, draft, asked, Path(scratch), K, TOKENS)
    tau = 1 + said["accepted"] / said["rounds"]
    return {"engine": engine, "tau": round(tau, 4), "rounds": int(said["rounds"]), "accepted": int(said["accepted"]),
            "predicted": None if predicted is None else round(predicted, 4)}  # fmt: skip


def check_engine(engine: str) -> None:
    """Raise BadInput where the engine cannot be asked here: before minutes of trials."""
    from ..engines import serving

    if engine not in ENGINES:
        raise BadInput(f"--serve {engine}: Eyas serves a directory with {' or '.join(ENGINES)}")
    serving.environment(engine)
