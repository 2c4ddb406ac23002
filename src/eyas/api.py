"""Eyas from Python: the verbs that look at drafts, as functions that return what `--json` prints.

docs/api.md has examples, which are run by a test.

    import eyas; eyas.diagnose("draft", target="target", static=True)["verdict"]          pytest tests/test_api.py

Drafts and targets are named as on the command line: a folder, a hub id, for targets also a .gguf file or `smollm2`.
Every function raises the errors of errors.py, whose message says what to do. What is listed in __all__ is kept stable;
the modules below are not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from eyas.errors import BadInput, EyasError, Mismatch

if TYPE_CHECKING:
    from eyas.conventions import Conventions
    from eyas.decode.cases import Asked
    from eyas.draft.model import Draft
    from eyas.export.check import CheckReport
    from eyas.export.write import ExportReport
    from eyas.features.reader import FeatureSet
    from eyas.target.model import Target
    from eyas.vocab import VocabMap

__all__ = [
    "BadInput", "EyasError", "LoadedDraft", "Mismatch", "diagnose", "export_draft", "inspect", "load_draft",
    "load_target", "prove", "verify",
]  # fmt: skip

Named = str | os.PathLike[str]
Dtype = Literal["float32", "bfloat16", "float16"]


class LoadedDraft(NamedTuple):
    """A draft ready to run, in evaluation mode."""

    model: Draft
    """The module. Its embedding is the target's, where it owns none; without a target it then has none."""
    vocab_map: VocabMap
    """Draft ids and target ids."""
    conventions: Conventions
    """How it is to be run, each with how that is known."""


def load_target(target: Named | None = None, *, device: str = "cpu", dtype: Dtype = "float32",
                trust_remote_code: bool = False) -> Target:  # fmt: skip
    """The frozen target: its model, tokenizer and facts; `.states(ids)` are its residual streams [B, L, T*H].

    target: a folder, a .gguf file, a hub id, None for SmolLM2-135M-Instruct. device: cpu, cuda, cuda:1, or auto, which
    spreads it over all accelerators. Raises BadInput for what is no target, EyasError where it cannot be had or loaded.
    """
    import torch

    from eyas.target.model import Target
    from eyas.target.source import resolve_target

    return Target.load(resolve_target(target), device, getattr(torch, dtype), trust_remote_code)


def load_draft(draft: Named, target: Named | None = None, *, device: str = "cpu",
               dtype: Dtype | None = "float32") -> LoadedDraft:  # fmt: skip
    """Any draft that Eyas reads, whoever wrote it, as one kind of module.

    target: lends embedding, and taps where the draft leaves them out. dtype None keeps the stored one. Raises BadInput
    naming every missing, unknown and misshapen tensor, Mismatch where draft and target do not belong together.
    """
    import torch

    from eyas.draft.checkpoint import load_draft as load

    kind = None if dtype is None else getattr(torch, dtype)
    return LoadedDraft(*load(_draft(draft), _target(target, "ends"), device, kind))


def inspect(draft: Named, target: Named | None = None, *, stats: bool = False, launch: str = "") -> dict[str, Any]:
    """What a draft is: dialect, shape, conventions, map, tensors, and what each engine would run. Reads headers only.

    stats: read every tensor, too. launch: the command line that serves it. The keys are those of `eyas inspect --json`.
    Raises BadInput for what is no readable draft.
    """
    from eyas.describe import inspect_draft

    return {**inspect_draft(_draft(draft), _target(target, "ends"), stats, launch), "path": os.fspath(draft)}


def diagnose(
    draft: Named,
    target: Named | None = None,
    *,
    static: bool = False,
    engines: Sequence[str] = (),
    features: Named | None = None,
    reference: Named | None = None,
    served_accept_length: float | None = None,
    prompts: Sequence[str] | None = None,
    k: int = 4,
    budget: float = 60.0,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Why a draft is not accepted; the keys are those of `eyas doctor --json` (docs/doctor.md), `verdict` the first.

    static: files alone, in a second. engines: as they read it, for example ["vllm"]. features: recorded ones, instead
    of recording here. reference: a copy to compare with. served_accept_length: what a server reports, bonus token
    included. prompts: texts to record on. k: tokens drafted a round. budget: seconds after which no round of trials
    begins. Findings are no errors; raises BadInput where not even the files can be read.
    """
    from eyas.doctor.diagnosis import diagnose as examine
    from eyas.engines.profiles import profile
    from eyas.engines.served import from_number
    from eyas.repair.next_step import next_step

    for name in engines:
        profile(name)
    served = None if served_accept_length is None else from_number(served_accept_length)
    found = examine(
        _draft(draft), target=_target(target), static=static, engines=engines,
        features=None if features is None else Path(features), served=served, prompts=prompts, k=k, budget=budget,
        reference=None if reference is None else Path(reference), device=device, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    found["draft"] = os.fspath(draft)
    return {**found, "next": next_step(found, None if target is None else os.fspath(target))}


def prove(
    draft: Named,
    target: Named | None,
    prompts: Sequence[Asked] | Mapping[str, Sequence[Asked]],
    *,
    k: int = 4,
    topk: int | None = None,
    nodes: int | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 24,
    timed: int = 1,
    ignore_eos: bool = False,
    device: str = "cpu",
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Decode with and without the draft: `tau_mean`, `lossless`, and the other keys of `eyas prove --json`.

    prompts: texts, messages or token ids; or several sets by name. k tokens are drafted a round, with topk or nodes a
    tree. temperature 0 is greedy, which alone can be compared token by token. timed: prompts of each set decoded one at
    a time, for the speed-up. template_kwargs: for the chat template. Raises Mismatch where draft and target do not
    belong together, BadInput for prompts that cannot be decoded.
    """
    from eyas.decode.prove import prove as measure
    from eyas.target.source import resolve_target

    sets = prompts if isinstance(prompts, Mapping) else {"prompts": prompts}
    return measure(
        _draft(draft), resolve_target(target), sets, k=k, topk=topk, nodes=nodes, max_new_tokens=max_new_tokens,
        temperature=temperature, seed=seed, batch=batch, timed=timed, ignore_eos=ignore_eos, device=device,
        trust_remote_code=trust_remote_code, template_kwargs=template_kwargs,
    )  # fmt: skip


def export_draft(
    source: Named,
    out: Named,
    *,
    target: Named | None = None,
    to: str | None = None,
    dtype: str = "auto",
    engines: Sequence[str] = (),
    features: FeatureSet | None = None,
    verify: bool = True,
) -> ExportReport:
    """Write a draft, a run or a training stage as a directory that engines, or another trainer, read as it was trained.

    to: sglang, vllm, llamacpp, openvino, speculators, specforge, eagle; None is the canonical directory. dtype: auto,
    keep, bfloat16, float16, float32. engines: refuse (Mismatch) what one of these would run otherwise. features: of
    which the probe is made. `out` is replaced only if Eyas wrote all of it, and appears whole or not at all.
    """
    from eyas.export import export_draft as write

    return write(
        _draft(source), Path(out), to=to, dtype=dtype, engines=tuple(engines), target_dir=_target(target, "ends"),
        features=features, verify=verify,
    )  # fmt: skip


def verify(draft: Named) -> CheckReport:
    """Is a copy still what Eyas wrote? `.ok`, `.problems`; digests of all tensors, map, config and probe are compared.

    Raises BadInput where nothing says what it should hold.
    """
    from eyas.repair.verify import verify_draft

    return verify_draft(_draft(draft))


def _draft(draft: Named) -> Path:
    from eyas.draft.source import resolve_draft

    return resolve_draft(draft)


def _target(target: Named | None, part: Literal["all", "ends"] = "all") -> Path | None:
    """The folder of a target, None where none is named: for looking at a draft none is needed."""
    from eyas.target.source import resolve_target

    return None if target is None else resolve_target(target, part=part)
