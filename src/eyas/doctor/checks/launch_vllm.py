"""The launches of vLLM 0.32 (sources below vllm) and llama.cpp b11434: method, draft, drafted tokens.

pytest tests/test_doctor_launch.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..finding import Finding, Severity

DOTTED = "speculative-config."


def is_meant(launch: Mapping[str, Any]) -> bool:
    """Are these vLLM's flags?"""
    names = ("speculative-config", "spec-method", "spec-model", "spec-tokens")
    return any(name in names or name.startswith(DOTTED) for name in launch)


def speculative(launch: Mapping[str, Any]) -> dict[str, Any] | None:
    """The speculative config with the flags that add to it (engine/arg_utils.py:2068, utils/argparse_utils.py:439).

    None where it is no object.
    """
    config = launch.get("speculative-config", {})
    if not isinstance(config, Mapping):
        return None
    out = {str(name).replace("-", "_"): value for name, value in config.items()}
    out |= {flag.removeprefix(DOTTED).replace("-", "_"): launch[flag] for flag in launch if flag.startswith(DOTTED)}
    for flag, name in (("spec-method", "method"), ("spec-model", "model"), ("spec-tokens", "num_speculative_tokens")):
        if flag in launch:
            out.setdefault(name, launch[flag])
    return out


def check(launch: Mapping[str, Any]) -> Iterator[Finding]:
    """All findings about flags of vLLM."""
    config = speculative(launch)
    if config is None:
        yield Finding(
            "EY-LAUNCH-JSON",
            Severity.ERROR,
            f"--speculative-config is {str(launch['speculative-config'])[:120]!r}: no JSON object",
            "vLLM stops; a shell takes the quotes of unquoted JSON away",
            """Put it in single quotes: '{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 4}'""",
            ("vLLM 0.32 engine/arg_utils.py:1826",),
        )
        return
    method, model = config.get("method"), config.get("model")
    path = str(model or "").lower()
    implied = "eagle" if "eagle-" in path else "eagle3" if "eagle3" in path else "draft_model"
    if model is not None and (method or implied) != "eagle3":
        told = f'"method": "{method}"' if method else f"no method, and the path {model!r} does not say eagle3,"
        yield Finding(
            "EY-LAUNCH-ALGORITHM",
            Severity.ERROR,
            f"--speculative-config has {told} for an EAGLE-3 draft",
            f"vLLM takes it for {method or implied}: it stops, or reads it as another kind of draft",
            'Write "method": "eagle3"',
            ("vLLM 0.32 config/speculative.py:1332", "vllm-project/recipes#347"),
        )
    if model is None and method == "eagle3":
        yield Finding(
            "EY-LAUNCH-NO-DRAFT",
            Severity.ERROR,
            '--speculative-config has "method": "eagle3", but no model',
            "vLLM stops: num_speculative_tokens was provided but without speculative model",
            'Add "model": this draft',
            ("vLLM 0.32 config/speculative.py:1189",),
        )
    tokens = config.get("num_speculative_tokens")
    if model is not None and (type(tokens) is not int or tokens < 1):
        yield Finding(
            "EY-LAUNCH-STEPS",
            Severity.ERROR,
            f"--speculative-config has num_speculative_tokens = {tokens!r}",
            "vLLM stops: an EAGLE-3 draft's config does not say how many tokens to draft",
            'Write "num_speculative_tokens": 3 or so',
            ("vLLM 0.32 config/speculative.py:1821",),
        )
    if config.get("rejection_sample_method") == "synthetic":
        yield Finding(
            "EY-LAUNCH-DUMMY",
            Severity.ERROR,
            'rejection_sample_method is "synthetic"',
            "Acceptance is drawn at random for a benchmark: it says nothing of the draft, and the text is not valid",
            "Leave it out",
            ("vLLM 0.32 config/speculative.py:532",),
        )


def check_llamacpp(launch: Mapping[str, Any]) -> Iterator[Finding]:
    """All findings about flags of llama.cpp."""
    kind = launch.get("spec-type")
    if kind is None or "draft-eagle3" not in str(kind).split(","):
        yield Finding(
            "EY-LAUNCH-ALGORITHM",
            Severity.ERROR,
            f"--spec-type {kind} for an EAGLE-3 draft" if kind else "a draft model without --spec-type",
            "llama.cpp does not run it as an EAGLE-3 draft",
            "Write --spec-type draft-eagle3",
            ("llama.cpp b11434 common/arg.cpp:4274",),
        )
