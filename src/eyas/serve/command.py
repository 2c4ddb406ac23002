"""Launch -> the command line that serves it here, on the CPU, in an engine's own environment.

Everything is set so that a draft can be judged: float32 unless asked otherwise, no prefix cache (which would skip
rounds), acceptance in every response. `printed.py` has the command for a machine with GPUs.

    pytest tests/test_serve_command.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engines.environment import Environment
from .launch import Launch

Flags = list[tuple[str, str | None]]


@dataclass(frozen=True)
class Inputs:
    """Target and draft as the engine reads them: the folders themselves, or what `prepare` made of them."""

    target: Path
    draft: Path | None


def here(launch: Launch, inputs: Inputs, environment: Environment, port: int) -> list[str]:
    """The command line, to be run with `environment.environ() | variables(launch)`."""
    make = {"vllm": _vllm}[launch.engine]
    program, flags = make(launch, inputs, environment, port)
    return [*program, *joined(flags, launch.extra)]


def variables(launch: Launch) -> dict[str, str]:
    """Environment variables beside those that the engine's environment has."""
    if launch.engine == "vllm":
        # Its own choice pins every server to the same core.
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {}


def joined(flags: Flags, extra: Sequence[str]) -> list[str]:
    """Flags as words, without those that `extra` names again, and `extra` behind them."""
    said = {name(word) for word in extra if word.startswith("-")}
    kept = [(flag, value) for flag, value in flags if name(flag) not in said]
    return [word for flag, value in kept for word in ((flag,) if value is None else (flag, value))] + list(extra)


def name(flag: str) -> str:
    """A flag without its value, `--no-` and the like: what two spellings of one option have in common."""
    return flag.split("=", 1)[0].lstrip("-").replace("_", "-").removeprefix("no-")


def vllm_drafting(draft: str, k: int) -> str:
    """The value of --speculative-config."""
    return json.dumps({"method": "eagle3", "model": draft, "num_speculative_tokens": k})


def _vllm(launch: Launch, inputs: Inputs, environment: Environment, port: int) -> tuple[list[str], Flags]:
    flags: Flags = [
        ("--model", str(inputs.target)), ("--served-model-name", launch.model), ("--dtype", launch.dtype),
        ("--max-model-len", str(launch.context)), ("--max-num-seqs", str(launch.requests)),
        ("--host", launch.host), ("--port", str(port)),
        ("--enforce-eager", None), ("--no-enable-prefix-caching", None), ("--disable-uvicorn-access-log", None),
    ]  # fmt: skip
    if inputs.draft is not None:
        flags += [
            ("--speculative-config", vllm_drafting(str(inputs.draft), launch.k)),
            ("--per-request-spec-decode-metrics", "detailed"),
        ]
    return [str(environment.python), "-m", "vllm.entrypoints.openai.api_server"], flags
