"""A server that somebody else started, measured; with a second one that runs without the draft, where there is one.

pytest tests/test_measure_server.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import EyasError
from .asking import How, Question
from .engine import compared
from .server import Passes, numbers, run


def with_url(
    url: str, baseline: str | None, questions: Sequence[Question], how: How, *, levels: Sequence[int] = (1,),
    k: int = 4, engine: str | None = None, model: str | None = None, target: Path | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """One engine's part, as `engine.with_engine`; `engine`: what runs there, where it does not say so itself.

    Raises EyasError where nobody answers at `url`.
    """
    drafted, plain, errors = Passes(url), Passes(baseline or ""), []
    run(url, questions, how, levels=levels, engine=engine, model=model, passes=drafted, on_answer=on_answer)
    if baseline is not None and not drafted.errors:
        try:
            run(baseline, questions, how, levels=levels, passes=plain, on_answer=on_answer)
        except EyasError as error:
            errors.append(f"--baseline-url {baseline}: {error}")
    out = numbers(drafted, plain if plain.runs else None, k)
    out["errors"] += errors
    out["lossless"] = compared(drafted, plain, baseline or "", target, how, out["errors"])
    return {**out, "version": "", "warnings": []}
