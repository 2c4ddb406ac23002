"""The last proof of a repair: the real engine serves the draft, and counts what the replay said that it would.

    served("mended", "path/to/target", "vllm")        eyas repair broken --auto --target T --out mended --serve vllm

Needs the engine's environment (`eyas engines setup`).   make test-engines (tests/real/test_repaired.py)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import EyasError

PROMPTS, TOKENS, K = 16, 48, 4


def served(
    draft: str | Path, target: str | Path, engine: str, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """{"engine", "tau", "rounds", "accepted", "predicted"}: counted by the engine (CPU, float32, greedy), and replayed
    as that engine reads the directory, over the same prompts and rounds; predicted: None where it would not start.

    Raises BadInput for an engine that is not set up here, EyasError where it fails.
    """
    from ..doctor.prompts import PROMPTS as TEXTS
    from ..measure.asking import How
    from ..measure.engine import with_engine
    from ..measure.locate import locate
    from ..measure.questions import questions_of
    from ..prompt import Prompt
    from ..serve import Launch

    draft, target, how = Path(draft), Path(target), How(TOKENS)
    asked = [Prompt(str(n), (({"role": "user", "content": text},),)) for n, text in enumerate(TEXTS[:PROMPTS])]
    launch = Launch(engine, target, draft, K)
    questions = questions_of(target, {"doctor": asked}, launch.context - TOKENS - K - 1)
    part = with_engine(launch, questions, how, plain=False, tell=tell)
    if part["interrupted"]:
        raise KeyboardInterrupt
    said = part["acceptance"]
    if part["errors"] or said is None:
        raise EyasError(
            f"{engine} could not be measured: {'; '.join(part['errors']) or 'it did not say what it accepted'}; "
            "mend that, or leave --engine out"
        )
    rows = locate(draft, target, engine, questions, how, K, said, reference=False, tell=tell)["rows"]
    predicted = next(row["tau"] for row in rows if row["row"] == "as_read")
    return {"engine": engine, "tau": said["tau"], "rounds": said["rounds"], "accepted": said["accepted"],
            "predicted": predicted}  # fmt: skip


def check_engine(engine: str) -> None:
    """Raise BadInput where the engine cannot be asked here: before minutes of trials."""
    from ..engines.environment import required

    required(engine)
