"""An engine started, measured and stopped, with its draft and without: one part of a measurement.

    with_engine(Launch("vllm", target, draft), questions, How(), levels=(1,))

pytest -m engine tests/real/test_measure.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..engines.setup import recipe
from ..errors import EyasError
from ..serve import Launch, running
from .asking import How, Question
from .lossless import compare
from .server import Passes, numbers, run

Tell = Callable[[str], None]


def with_engine(
    launch: Launch, questions: Sequence[Question], how: How, *, levels: Sequence[int] = (1,), plain: bool = True,
    wait: float = 900.0, tell: Tell = lambda text: None, on_answer: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """The part of one engine, as `server.numbers`, with its command, log and version; what failed is in `errors`.

    Raises EyasError where the server with the draft does not start.
    """
    drafted, without, told = Passes(""), Passes(""), {}
    errors: list[str] = []
    for side, one in ((drafted, launch), (without, dataclasses.replace(launch, draft=None))):
        if side is without and not plain:
            break
        tell(f"starting {launch.engine}" + ("" if side is drafted else " without the draft"))
        try:
            with running(one, tell=tell, wait=wait) as server:
                if side is drafted:
                    told = {"command": server.command, "log": str(server.log), "start_s": round(server.seconds, 1),
                            "notes": list(server.notes)}  # fmt: skip
                tell(f"asking {launch.engine}" + ("" if side is drafted else " without the draft"))
                run(server.url, questions, how, levels=levels, engine=launch.engine, model=server.model, passes=side,
                    on_answer=on_answer)  # fmt: skip
                if side.errors and not server.alive():
                    errors.append(f"the server ended; the end of {server.log}: {server.tail(600).strip()}")
        except EyasError as error:
            if side is drafted and not drafted.first:
                raise
            errors.append(f"without the draft: {error}" if side is without else str(error))
        if drafted.errors:
            break
    out = numbers(drafted, without if without.runs else None, launch.k)
    out["errors"] += errors
    against = f"{launch.engine} without the draft"
    out["lossless"] = compared(drafted, without, against, launch.target, how, out["errors"])
    return {**told, **out, "version": recipe(launch.engine).version, "dtype": launch.dtype}


def compared(
    drafted: Passes, plain: Passes, against: str, target: Path | None, how: How, errors: list[str]
) -> dict[str, Any]:
    """`lossless.compare`, greedy answers only; `lossless` None, and `why`, where there is nothing to compare.

    A target that cannot be loaded costs the logits at a difference, not the measurement: that goes to `errors`.
    """
    if how.temperature:
        return {"lossless": None, "why": "sampled answers differ from run to run"}
    if not plain.first:
        return {"lossless": None, "why": "no answers without the draft"}
    folder = target if target is not None and target.is_dir() else None
    try:
        return compare(drafted.first, plain.first, against, folder)
    except EyasError as error:
        errors.append(f"where answers differ nobody could look up how close it was: {error}")
        return compare(drafted.first, plain.first, against)
