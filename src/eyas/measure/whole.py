"""A measurement from beginning to end: every engine in turn, or one server that runs, and where each falls.

    measure(Plan(draft, target, engines=("vllm",)), questions, How())["engines"][0]["acceptance"]["tau"]

What is done is handed to `keep` after each step, so that nothing is lost; Ctrl-C ends it with what there is.
    eyas measure DRAFT --target T --engine vllm          pytest tests/test_measure_cli.py
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import EyasError
from ..serve import Launch
from ..serve.check import check
from ..target.source import fingerprint
from .asking import How, Question
from .engine import with_engine
from .measured import DEFINITION, FORMAT
from .running import with_url

Tell = Callable[[str], None]
SEVERAL = 8
"""Requests that a server takes at once, also where one asks alone."""
ONE_SLOT = ("llamacpp",)
"""Engines that accept less with several slots (docs/facts/serving.md): they get as many as are asked for."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and what for."""

    draft: Path | None
    target: Path
    engines: tuple[str, ...] = ()
    """Started here one after the other; with `url` what runs there, where it does not say so."""
    url: str | None = None
    baseline_url: str | None = None
    model: str | None = None
    k: int = 4
    levels: tuple[int, ...] = (1,)
    """Requests at once; each level is a pass over all prompts."""
    dtype: str = "float32"
    context: int = 1024
    plain: bool = True
    """Without the draft, too."""
    locate: bool = True
    capture: bool = False
    force: bool = False
    wait: float = 900.0
    command: tuple[str, ...] = ()
    """The command line that started `url`."""
    training: Path | None = None

    @property
    def passes(self) -> int:
        """Over all prompts, all engines together."""
        return len(self.levels) * (2 if self.plain else 1) * max(1, len(self.engines))


def measure(
    plan: Plan, questions: Sequence[Question], how: How, *, given: str = "", tell: Tell = lambda text: None,
    on_answer: Callable[[], None] = lambda: None, keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:  # fmt: skip
    """Plain JSON values, as docs/engines.md describes them. given: the target as the user named it.

    Raises EyasError where the only engine does not start or does not answer; of several, those that fail are in
    `failed`. Raises KeyboardInterrupt where there is nothing to keep yet.
    """
    result: dict[str, Any] = {
        "eyas": __version__, "format": FORMAT,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "draft": str(plan.draft) if plan.draft else None, "target": str(plan.target),
        "target_as_given": given or str(plan.target), "target_fingerprint": fingerprint(plan.target),
        "settings": {"k": plan.k, "max_new_tokens": how.max_tokens, "temperature": how.temperature,
                     "ignore_eos": how.ignore_eos, "concurrency": list(plan.levels), "dtype": plan.dtype,
                     "context_length": plan.context, "timeout_s": how.timeout,
                     "prompts": {name: sum(q.set == name for q in questions)
                                 for name in dict.fromkeys(q.set for q in questions)}},
        "definition": DEFINITION,
        "questions": [{"set": q.set, "prompt": q.index, "ids": list(q.ids)} for q in questions],
        "engines": [], "failed": {}, "interrupted": False, "complete": False,
    }  # fmt: skip
    try:
        for name in plan.engines if plan.url is None else plan.engines or ("",):
            try:
                part = _asked(plan, name, questions, how, tell, on_answer)
            except EyasError as error:
                if len(plan.engines) < 2:
                    raise
                result["failed"][name] = str(error)
                continue
            result["engines"].append(part)
            keep(result)
            if part["interrupted"]:
                raise KeyboardInterrupt
            _looked(plan, part, questions, how, tell)
            keep(result)
    except KeyboardInterrupt:
        if not result["engines"]:
            raise
        result["interrupted"] = True
    broken = result["interrupted"] or result["failed"] or any(part["errors"] for part in result["engines"])
    result["complete"] = not broken
    keep(result)
    return result


def _asked(
    plan: Plan, engine: str, questions: Sequence[Question], how: How, tell: Tell, on_answer: Callable[[], None]
) -> dict[str, Any]:
    """One engine's part: what it answered."""
    if plan.url is not None:
        part = with_url(
            plan.url, plan.baseline_url, questions, how, levels=plan.levels, engine=engine or None, model=plan.model,
            k=plan.k, target=plan.target if plan.dtype == "float32" else None, on_answer=on_answer,
        )  # fmt: skip
        return part | {"command": list(plan.command) or None}
    most = max(plan.levels) if engine in ONE_SLOT else max(SEVERAL, *plan.levels)
    launch = Launch(engine, plan.target, plan.draft, plan.k, dtype=plan.dtype, context=plan.context, requests=most)
    warnings = check(launch, force=plan.force)
    if engine in ONE_SLOT and most > 1:
        warnings.append(f"{engine} accepts less with {most} slots than with one: acceptance is that of the first pass")
    part = with_engine(launch, questions, how, levels=plan.levels, plain=plan.plain, wait=plan.wait, tell=tell,
                       on_answer=on_answer)  # fmt: skip
    return part | {"warnings": warnings}


def _looked(plan: Plan, part: dict[str, Any], questions: Sequence[Question], how: How, tell: Tell) -> None:
    """Add to a part where it falls, over the prompts that were answered, and what was captured. What cannot be had is
    among its `errors`: what was measured is not lost for it."""
    from ..engines.launch import options
    from .locate import locate

    answered = {(a["set"], a["prompt"]) for a in part["answers"] if not a["error"]}
    asked = [q for q in questions if (q.set, q.index) in answered]
    if plan.draft is not None and plan.locate and asked:
        try:
            part["locate"] = locate(
                plan.draft, plan.target, part["engine"], asked, how, part["k"], part["acceptance"],
                training=plan.training, launch=options(shlex.join(part["command"] or [])), dtype=plan.dtype, tell=tell,
            )  # fmt: skip
        except EyasError as error:
            part["errors"].append(f"where it falls could not be looked up: {error}")
    if plan.capture:
        part["capture"] = _captured(plan, part, questions, tell)


def _captured(plan: Plan, part: dict[str, Any], questions: Sequence[Question], tell: Tell) -> dict[str, Any]:
    """The states that the engine feeds the draft; `says` alone, and why, where they cannot be had."""
    from ..draft.directory import read_draft
    from .capture import PROMPTS, captured, compare

    if part["engine"] != "vllm" or plan.draft is None:
        return {"right": None, "slices": [], "says": "Only vLLM's states of a draft directory can be captured"}
    tell("capturing the states that vLLM feeds the draft")
    try:
        taps = read_draft(plan.draft, plan.target).conventions.taps
        pairs = captured(plan.target, plan.draft, [q.ids for q in questions[:PROMPTS]], part["command"] or ())
        return compare(pairs, plan.target, taps)
    except EyasError as error:
        return {"right": None, "slices": [], "says": f"No states could be captured: {error}"}
