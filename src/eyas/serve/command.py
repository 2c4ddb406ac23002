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

from ..engines.environment import SCRIPTS, Environment
from ..target.facts import TargetFacts
from .launch import Launch

Flags = list[tuple[str, str | None]]
MOST_CACHE = 4 << 30  # bytes, where more would only serve more requests at once
OPENVINO_SERVER = SCRIPTS / "openvino_server.py"
# Long and short names of options of llama-server that are set here.
SAME = {
    "model": "m", "model-draft": "md", "spec-draft-model": "md", "ctx-size": "c", "parallel": "np",
    "flash-attn": "fa", "alias": "a", "threads": "t", "spec-draft-threads": "td", "threads-draft": "td",
    "cache-type-k": "ctk", "cache-type-v": "ctv", "cache-type-k-draft": "ctkd", "cache-type-v-draft": "ctvd",
    "spec-draft-type-k": "ctkd", "spec-draft-type-v": "ctvd",
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Target and draft as the engine reads them: the folders themselves, or what `prepare` made of them."""

    target: Path
    draft: Path | None
    notes: tuple[str, ...] = ()
    """What was changed on the way, in sentences."""


def here(
    launch: Launch, inputs: Inputs, environment: Environment, port: int, threads: int = 1, gib: int = 1
) -> list[str]:
    """The command line, to be run with `environment.environ() | variables(launch)`. gib: of keys and values."""
    make = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llamacpp, "openvino": _openvino}[launch.engine]
    program, flags = make(launch, inputs, environment)
    if launch.engine in ("llamacpp", "openvino"):
        flags += threaded(launch, inputs, threads)
    if launch.engine == "openvino":
        flags += [("--cache-size", str(gib))]
    flags += [("--host", launch.host), ("--port", str(port))]
    return [*program, *joined(flags, launch.extra)]


def variables(launch: Launch, gib: int = 1) -> dict[str, str]:
    """Environment variables beside those that the engine's environment has."""
    if launch.engine == "vllm":  # its own choice of threads binds every server to the same core
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": str(gib)}
    return {}


def cache_gib(launch: Launch, facts: TargetFacts | None) -> int:
    """GiB for keys and values of as many whole sequences as fit into 4 GiB, of one at least; 1 where that suffices."""
    if facts is None:
        return 1
    width = 2 if launch.dtype == "bfloat16" else 4
    token = 2 * (facts.num_layers + 1) * facts.num_kv_heads * facts.head_dim * width  # a draft's layer with them
    one = token * (launch.context + launch.k + 1)
    return -(-max(one, min(one * launch.requests, MOST_CACHE)) // (1 << 30))


def joined(flags: Flags, extra: Sequence[str]) -> list[str]:
    """Flags as words, without those that `extra` names again, and `extra` behind them."""
    said = {name(word) for word in extra if word.startswith("-")}
    kept = [(flag, value) for flag, value in flags if name(flag) not in said]
    return [word for flag, value in kept for word in ((flag,) if value is None else (flag, value))] + list(extra)


def name(flag: str) -> str:
    """What the spellings of one option have in common: without dashes, `no-` and value."""
    bare = flag.split("=", 1)[0].lstrip("-").replace("_", "-").removeprefix("no-")
    return SAME.get(bare, bare)


def vllm_drafting(draft: str, k: int) -> str:
    """The value of --speculative-config."""
    return json.dumps({"method": "eagle3", "model": draft, "num_speculative_tokens": k})


def sglang_drafting(draft: str, k: int, topk: int) -> Flags:
    """A chain of k, or a tree k deep: SGLang keeps the best k * topk nodes of it, and verifies one token more."""
    return [
        ("--speculative-algorithm", "EAGLE3"), ("--speculative-draft-model-path", draft),
        ("--speculative-num-steps", str(k)), ("--speculative-eagle-topk", str(topk)),
        ("--speculative-num-draft-tokens", str(k * topk + 1)),
    ]  # fmt: skip


def llamacpp_drafting(draft: str, k: int) -> Flags:
    """Flags for a converted draft."""
    return [("-md", draft), ("--spec-type", "draft-eagle3"), ("--spec-draft-n-max", str(k))]


def _vllm(launch: Launch, inputs: Inputs, environment: Environment) -> tuple[list[str], Flags]:
    flags: Flags = [
        ("--model", str(inputs.target)), ("--served-model-name", launch.model), ("--dtype", launch.dtype),
        ("--max-model-len", str(launch.context)), ("--max-num-seqs", str(launch.requests)),
        ("--enforce-eager", None), ("--no-enable-prefix-caching", None), ("--disable-uvicorn-access-log", None),
    ]  # fmt: skip
    if inputs.draft is not None:
        flags += [
            ("--speculative-config", vllm_drafting(str(inputs.draft), launch.k)),
            ("--per-request-spec-decode-metrics", "detailed"),
        ]
    return [str(environment.python), "-m", "vllm.entrypoints.openai.api_server"], flags


def _sglang(launch: Launch, inputs: Inputs, environment: Environment) -> tuple[list[str], Flags]:
    """Through the environment's own launcher, which puts stand-ins for CUDA kernels under SGLang's server."""
    room = launch.requests * (launch.context + launch.k * launch.topk + 1)
    flags: Flags = [
        ("--model-path", str(inputs.target)), ("--served-model-name", launch.model), ("--dtype", launch.dtype),
        ("--context-length", str(launch.context)), ("--max-running-requests", str(launch.requests)),
        ("--max-total-tokens", str(room)), ("--enable-metrics", None), ("--stream-interval", "1"),
        ("--decode-log-interval", "10"),
    ]  # fmt: skip
    if inputs.draft is not None:
        flags += sglang_drafting(str(inputs.draft), launch.k, launch.topk)
    return [str(environment.python), str(environment.programs["serve"])], flags


def _llamacpp(launch: Launch, inputs: Inputs, environment: Environment) -> tuple[list[str], Flags]:
    """One slot, others wait: of several, all but the first accept less (b11434; the answers are the same). Flash
    attention would compute in half precision, as its cache does by default."""
    flags: Flags = [
        ("-m", str(inputs.target)), ("--alias", launch.model), ("-c", str(launch.context)), ("-np", "1"),
        ("-fa", "off"), ("--no-cache-prompt", None), ("--cache-ram", "0"), ("--metrics", None), ("--no-webui", None),
        ("--offline", None),
    ]  # fmt: skip
    exact = {"float32": "f32", "bfloat16": "bf16"}.get(launch.dtype)
    if exact is not None:
        flags += [("-ctk", exact), ("-ctv", exact)]
    if inputs.draft is not None:
        flags += llamacpp_drafting(str(inputs.draft), launch.k)
        if exact is not None:
            flags += [("-ctkd", exact), ("-ctvd", exact)]
    return [str(environment.programs["llama-server"])], flags


def _openvino(launch: Launch, inputs: Inputs, environment: Environment) -> tuple[list[str], Flags]:
    precision = {"float32": "f32", "bfloat16": "bf16"}.get(launch.dtype, "default")
    flags: Flags = [
        ("--target", str(inputs.target)), ("--draft", str(inputs.draft or "none")), ("--k", str(launch.k)),
        ("--alias", launch.model), ("--precision", precision), ("--context", str(launch.context)),
    ]  # fmt: skip
    return [str(environment.python), str(OPENVINO_SERVER)], flags


def threaded(launch: Launch, inputs: Inputs, threads: int) -> Flags:
    """For engines that do not go by OMP_NUM_THREADS."""
    if launch.engine == "openvino":
        return [("--threads", str(threads))]
    drafting: Flags = [] if inputs.draft is None else [("-td", str(threads))]
    return [("-t", str(threads)), *drafting]
