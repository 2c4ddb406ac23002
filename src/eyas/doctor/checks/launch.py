"""The flags of a launch: against each other, against the draft, and against what the engines make of them.

What is of one engine is in `launch_sglang` and `launch_vllm`. Each rule names the engine's file (SGLang 0.5.23 below
sglang/srt, vLLM 0.32 below vllm) or the report that it rests on.   pytest tests/test_doctor_launch.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..case import Case
from ..finding import Finding, Severity
from . import launch_sglang, launch_vllm

ROTATED = re.compile(r"quarot|spinquant|hadamard|rotat", re.IGNORECASE)
UNITS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}


def check(case: Case) -> Iterator[Finding]:
    """All findings about the launch; without one, only what the target's own config says."""
    launch = {name: value for name, value in case.launch.items() if value is not None}
    yield from _rotated(case, launch)
    yield from _dummy(launch)
    if launch_sglang.is_meant(launch):
        yield from launch_sglang.check(case, launch)
        yield from _other(case, launch_sglang.said(launch, launch_sglang.DRAFT), f"--{launch_sglang.DRAFT}")
        yield from _trained(case, launch_sglang.said(launch, launch_sglang.STEPS), f"--{launch_sglang.STEPS}")
    if launch_vllm.is_meant(launch):
        yield from launch_vllm.check(launch)
        config = launch_vllm.speculative(launch) or {}
        yield from _other(case, config.get("model"), '"model" of --speculative-config')
        yield from _trained(case, config.get("num_speculative_tokens"), "num_speculative_tokens")
    if any(name in launch for name in ("spec-type", "model-draft", "spec-draft-model")):
        yield from launch_vllm.check_llamacpp(launch)
        yield from _trained(case, launch.get("spec-draft-n-max"), "--spec-draft-n-max")
    yield from _context(case, launch)
    yield from _half(case, launch)


def _other(case: Case, path: Any, flag: str) -> Iterator[Finding]:
    """Another draft than the one examined, by the last part of its name."""
    if not isinstance(path, str) or not path.strip("/"):
        return
    here = case.folder.path.absolute()
    there = Path(os.path.expanduser(path))
    try:
        if there.exists() and there.resolve() == here.resolve():
            return
        known = {here.name, here.resolve().name}
    except (OSError, ValueError):  # no path at all
        known = {here.name}
    known |= {part.rpartition("--")[2] for part in here.parts if part.startswith("models--")}  # the hub's cache
    if there.name.lower() not in {name.lower() for name in known}:
        yield Finding(
            "EY-LAUNCH-OTHER-DRAFT",
            Severity.WARNING,
            f"{flag} is {path}, the draft examined is {here.name}",
            "What is found here need not hold for what is served",
            "Examine the directory that is served",
        )


def _trained(case: Case, drafted: Any, flag: str) -> Iterator[Finding]:
    """More tokens drafted than the draft was unrolled in training, as far as its own files tell."""
    settings = ((case.folder.eyas or {}).get("provenance") or {}).get("settings")
    steps = settings.get("ttt_steps") if isinstance(settings, Mapping) else None
    if type(steps) is int and type(drafted) is int and drafted > steps:
        yield Finding(
            "EY-LAUNCH-BEYOND-TRAINING",
            Severity.INFO,
            f"{flag} is {drafted}, the draft was trained on {steps} steps of its own",
            "Later positions work, accepted less and less: they cost a forward each",
            f"Compare with {steps}",
        )


def _context(case: Case, launch: Mapping[str, Any]) -> Iterator[Finding]:
    """The context served against the draft's positions."""
    most = case.number("max_position_embeddings")
    limit = length((launch_vllm.speculative(launch) or {}).get("max_model_len"))
    whole = length(launch.get("max-model-len")) or (case.facts.max_position if case.facts else None)
    if limit is not None and whole is not None and limit < whole:
        yield Finding(
            "EY-LAUNCH-CONTEXT",
            Severity.ERROR,
            f"--speculative-config has max_model_len = {limit:,}, and {whole:,} tokens are served",
            f"Past {limit:,} tokens vLLM drafts nothing and counts zeros as drafts, without a word",
            "Leave max_model_len out of --speculative-config",
            ("vLLM 0.32 config/speculative.py:1556", "vLLM 0.32 v1/worker/gpu_model_runner.py:4288"),
        )
    for flag, engine in (("context-length", "SGLang"), ("max-model-len", "vLLM")):
        served = length(launch.get(flag))
        if served is None or most is None:
            continue
        if served > most:
            stops = engine == "SGLang"
            yield Finding(
                "EY-LAUNCH-CONTEXT",
                Severity.ERROR if stops else Severity.WARNING,
                f"--{flag} {served:,} exceeds the draft's max_position_embeddings = {most:,}",
                "SGLang refuses to start, unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is set" if stops
                else f"Past {most:,} tokens vLLM drafts nothing and counts zeros as drafts; older versions crash there",
                f"Serve {most:,}, or write more positions where RoPE does not depend on them (eyas export does)",
                ("SGLang 0.5.23 configs/model_config.py:1292",) if stops
                else ("vLLM 0.32 v1/worker/gpu_model_runner.py:4288", "vllm-project/vllm#48894"),
            )  # fmt: skip
        elif case.facts is not None and most < case.facts.max_position:
            yield Finding(
                "EY-LAUNCH-CONTEXT",
                Severity.OK,
                f"--{flag} {served:,} is within the draft's {most:,} positions, few as they are",
                "Nothing longer is served, so they suffice",
            )


def length(value: Any) -> int | None:
    """A number of tokens, also as vLLM takes it: 8k is 8,000, 8K is 8,192 (utils/argparse_utils.py:44)."""
    if type(value) is int:
        return value
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kKmM]?)", value) if isinstance(value, str) else None
    return int(float(found.group(1)) * UNITS[found.group(2)]) if found else None


def _half(case: Case, launch: Mapping[str, Any]) -> Iterator[Finding]:
    native = case.facts.dtype if case.facts else str(case.said("torch_dtype") or case.said("dtype") or "")
    if str(launch.get("dtype")) in ("float16", "half") and native in ("bfloat16", "float32"):
        whose = "the target's" if case.facts else "the draft's"
        yield Finding(
            "EY-LAUNCH-DTYPE",
            Severity.WARNING,
            f"--dtype {launch['dtype']}, {whose} own is {native}",
            "States beyond 65,504 become infinite, then NaN: nothing is accepted, or everything; both models run in it",
            f"Serve in {native if native == 'bfloat16' else 'bfloat16'}",
            ("sgl-project/sglang#27883", "SafeAILab/EAGLE#69"),
        )


def _dummy(launch: Mapping[str, Any]) -> Iterator[Finding]:
    for flag in ("speculative-draft-load-format", "load-format"):
        if launch.get(flag) == "dummy":
            yield Finding(
                "EY-LAUNCH-DUMMY",
                Severity.ERROR,
                f"--{flag} dummy",
                "Weights are random numbers, for measuring speed alone",
                "Leave it out",
                ("SGLang 0.5.23 arg_groups/fields/spec.py:54",),
            )
            return


def _rotated(case: Case, launch: Mapping[str, Any]) -> Iterator[Finding]:
    """A target whose quantisation turned its residual stream."""
    config = case.facts.raw.get("quantization_config") if case.facts else None
    named = [str(launch[flag]) for flag in ("model-path", "model", "quantization") if flag in launch]
    for what, text in (("the target's quantization_config", str(config or "")), ("the launch", " ".join(named))):
        found = ROTATED.search(text)
        if found:
            yield Finding(
                "EY-LAUNCH-ROTATED",
                Severity.WARNING,
                f"{what} says {text[max(0, found.start() - 30) : found.end() + 30]!r}",
                "A rotated target has its residual stream in another basis: fc, trained on the unrotated one, reads "
                "nonsense unless the engine turns it, too",
                "Measure on the unrotated target; or train on states of the rotated one",
                ("vllm-project/vllm-ascend#5974", "vllm-project/vllm-ascend#6914"),
            )
            return
