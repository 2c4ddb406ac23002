"""The launch of SGLang 0.5.23: algorithm, draft, and the three numbers that must fit together.

Sources are below sglang/srt.   pytest tests/test_doctor_launch.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..case import Case
from ..finding import Finding, Severity

DRAFT, STEPS = "speculative-draft-model-path", "speculative-num-steps"
SAME = {  # other names that argparse takes (arg_groups/fields/spec.py:40), and the usual beginnings of names
    "speculative-algorithm": ("speculative-algo",),
    DRAFT: ("speculative-draft-model", "speculative-draft"),
}
TREES = ("flashinfer", "fa3", "triton")  # arg_groups/speculative_hook.py:1271


def is_meant(launch: Mapping[str, Any]) -> bool:
    """Are these SGLang's flags?"""
    return any(name.startswith("speculative-") and not name.startswith("speculative-config") for name in launch)


def said(launch: Mapping[str, Any], name: str) -> Any:
    """A flag's value under any of its names, None where it is not given."""
    return next((launch[n] for n in (name, *SAME.get(name, ())) if n in launch), None)


def whole(value: Any) -> int | None:
    """A whole number, None for anything else."""
    return value if type(value) is int else None


def check(case: Case, launch: Mapping[str, Any]) -> Iterator[Finding]:
    """All findings about flags of SGLang."""
    algorithm, draft = said(launch, "speculative-algorithm"), said(launch, DRAFT)
    name = str(algorithm).upper()
    if algorithm is None:
        yield Finding(
            "EY-LAUNCH-ALGORITHM",
            Severity.ERROR,
            "the launch has speculative flags, but no --speculative-algorithm",
            "SGLang serves without a draft",
            "Add --speculative-algorithm EAGLE3",
        )
    elif name != "EAGLE3":
        plain = name in ("EAGLE", "EAGLE2", "NEXTN")
        yield Finding(
            "EY-LAUNCH-ALGORITHM",
            Severity.ERROR,
            f"--speculative-algorithm {algorithm} for an EAGLE-3 draft",
            "No layer is captured, fc is skipped, the target's head chooses and d2t is not used: nothing is accepted, "
            "and nothing is said" if plain else "SGLang runs it as another kind of draft, or stops",
            "Write --speculative-algorithm EAGLE3",
            ("SGLang 0.5.23 speculative/eagle_worker_v2.py:370", "sgl-project/sglang#21272"),
        )  # fmt: skip
    if draft is None and name == "EAGLE3":
        yield Finding(
            "EY-LAUNCH-NO-DRAFT",
            Severity.ERROR,
            "--speculative-algorithm EAGLE3 without --speculative-draft-model-path",
            "SGLang loads the target as its own draft and stops with an unrelated error",
            "Name this draft",
            ("sgl-project/sglang#36528",),
        )
    yield from _numbers(launch)
    yield from _backend(case, launch)
    if "speculative-token-map" in launch and name == "EAGLE3":
        yield Finding(
            "EY-LAUNCH-TOKEN-MAP",
            Severity.WARNING,
            "--speculative-token-map with EAGLE3",
            "It is ignored: an EAGLE-3 draft's own d2t counts",
            "Leave it out; if the draft lacks d2t, write it into the file",
            ("SGLang 0.5.23 speculative/eagle_worker_v2.py:325",),
        )
    for flag in ("speculative-accept-threshold-single", "speculative-accept-threshold-acc"):
        value = launch.get(flag)
        if value is not None and str(value) not in ("1", "1.0"):
            yield Finding(
                "EY-LAUNCH-RELAXED",
                Severity.WARNING,
                f"--{flag} {value}",
                "Drafts are accepted that the target would not have said: the text changes, and the accept length is "
                "no measure of the draft",
                "Leave it at 1.0 while you measure",
                ("SGLang 0.5.23 arg_groups/fields/spec.py:109",),
            )


def _numbers(launch: Mapping[str, Any]) -> Iterator[Finding]:
    """Steps, topk and drafted tokens against each other (arg_groups/speculative_hook.py:1159-1282)."""
    names = (STEPS, "speculative-eagle-topk", "speculative-num-draft-tokens")
    given = {name: said(launch, name) for name in names}
    steps, topk, drafted = (whole(given[name]) for name in names)
    there = [name for name in names if given[name] is not None]
    if there and len(there) < len(names) and "speculative-adaptive" not in launch:
        missing = ", ".join(f"--{name}" for name in names if name not in there)
        yield _contradiction(
            f"{', '.join(f'--{name}' for name in there)} without {missing}",
            "SGLang stops with an error: it chooses all three, or none",
            "Give all three, or none",
            "1159",
        )
        return
    if steps is None or topk is None or drafted is None:
        return
    if topk == 1 and drafted != steps + 1:
        yield _contradiction(
            f"--speculative-eagle-topk 1 drafts a chain of {steps}, --speculative-num-draft-tokens {drafted} is not "
            f"{steps} + 1",
            f"SGLang takes {steps + 1} instead, and says so in one line of the log",
            f"Write {steps + 1}, or other steps",
            "1257",
            ("sgl-project/SpecForge#310",),
            Severity.WARNING,
        )
    most = topk + max(steps - 1, 0) * topk * topk + 1
    if topk > 1 and drafted > most:
        yield _contradiction(
            f"{steps} steps with topk {topk} draft {most - 1} tokens, --speculative-num-draft-tokens asks for "
            f"{drafted}, the target's own among them",
            "There are not so many to choose from",
            f"Write {most} or less",
            "1159",
            ("SGLang 0.5.23 speculative/eagle_utils.py:110",),
        )
    page, backend = whole(launch.get("page-size")), launch.get("attention-backend")
    if topk > 1 and page is not None and page > 1 and backend is not None and backend not in TREES:
        yield _contradiction(
            f"topk {topk} with --page-size {page} on --attention-backend {backend}",
            "SGLang refuses it; older versions wrote gibberish",
            f"Take page size 1, topk 1, or one of {', '.join(TREES)}",
            "1271",
            ("sgl-project/sglang#9784",),
        )


def _contradiction(
    evidence: str, consequence: str, remedy: str, line: str, reports: tuple[str, ...] = (),
    severity: Severity = Severity.ERROR,
) -> Finding:  # fmt: skip
    source = f"SGLang 0.5.23 arg_groups/speculative_hook.py:{line}"
    return Finding("EY-LAUNCH-STEPS", severity, evidence, consequence, remedy, (source, *reports))


def _backend(case: Case, launch: Mapping[str, Any]) -> Iterator[Finding]:
    """A draft with ordinary attention under a target with latent attention."""
    latent = case.facts is not None and bool(case.facts.raw.get("kv_lora_rank"))
    ordinary = not any("kv_a_proj" in name for name in case.tensors)
    backend = str(launch.get("attention-backend", launch.get("decode-attention-backend", "")))
    if latent and ordinary and "speculative-draft-attention-backend" not in launch:
        yield Finding(
            "EY-LAUNCH-MLA",
            Severity.WARNING if "mla" in backend or not backend else Severity.INFO,
            "the target has latent attention (MLA), this draft has not, and --speculative-draft-attention-backend is "
            "not given",
            f"The draft inherits the target's backend{f' {backend}' if backend else ''}; one for MLA alone cannot run "
            "it, and SGLang stops while starting",
            "Add one for ordinary attention, as --speculative-draft-attention-backend trtllm_mha or fa3",
            ("sgl-project/sglang#23490", "SGLang 0.5.23 model_executor/model_runner.py:306"),
        )
