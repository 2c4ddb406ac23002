"""The readings of one draft: as declared, as each engine reads it; and what of the target they need.

    readings = Readings.open("path/to/draft", target="path/to/target", engines=["vllm"])

Where config.json contradicts itself so that no reading is possible, it is tried without the fields that contradict.
    pytest tests/test_doctor_diagnosis.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..draft.dialects import Reading, interpret
from ..draft.dialects.keys import canonical_name
from ..draft.files import DraftFolder, TensorRef
from ..engines.compare import differences
from ..engines.profiles import profile
from ..engines.reading import EngineReading, Seen
from ..errors import BadInput
from ..target.facts import TargetFacts, read_facts
from ..target.weights import Ends, load_ends
from .as_read import as_read
from .case import Case
from .checks.config import IDS
from .checks.tensors import fc_transposed
from .specimen import Specimen, declared

SERVERS = ("sglang", "vllm")


@dataclass
class Readings:
    """Everything that can be replayed of one directory."""

    case: Case
    reading: Reading | None
    """As declared; None where it cannot be interpreted."""
    salvaged: str = ""
    """The fields that were left out to make a reading possible."""
    facts: TargetFacts | None = None
    ends: Ends | None = None
    declared: Specimen | None = None
    engines: dict[str, EngineReading] = field(default_factory=dict)
    as_read: dict[str, Specimen] = field(default_factory=dict)
    """Engine -> what it would run; absent where it does not start or cannot be replayed."""
    refusal: str = ""
    named: tuple[str, ...] = ()
    """Engines that the user named: what they do wrong is an error."""

    @classmethod
    def open(
        cls, path: str | Path | DraftFolder, target: Path | None, engines: Sequence[str], launch: Mapping[str, Any],
        embedding: torch.Tensor | None = None,
    ) -> Readings:  # fmt: skip
        """`embedding`: used where there is no target. Raises BadInput where not even the files can be read."""
        facts = read_facts(target) if target is not None else None
        profiles = [profile(name) for name in (engines or SERVERS)]
        case = Case.open(path, facts, launch=launch)
        named = tuple(name.partition("@")[0] for name in engines)
        out = cls(case, case.reading, facts=facts, refusal=case.refusal, named=named)
        if out.reading is None or fc_transposed(case):
            out.reading, out.salvaged = _salvage(case)
        for p in profiles:
            out.engines[p.engine] = p.read(Seen(case.folder, facts, launch))
        if out.reading is None:
            return out
        try:
            out.ends = load_ends(target, facts) if target is not None else None
            fits = out.ends is not None and out.ends.embedding.shape[0] == out.reading.shape.vocab_size
            table, head = (out.ends.embedding, out.ends.head) if fits and out.ends else (embedding, None)
            out.declared = declared(out.reading, table, head)
        except BadInput as error:
            out.refusal = str(error)
            return out
        for name, read in out.engines.items():
            specimen = as_read(out.reading, read, out.declared, table, head)
            if specimen is not None:
                out.as_read[name] = specimen
        return out

    @property
    def differences(self) -> dict[str, list[str]]:
        """Engine -> what it does otherwise than declared, and the way out."""
        if self.reading is None:
            return {}
        return {name: [d.sentence for d in differences(self.reading, read)] for name, read in self.engines.items()}

    def has_target(self) -> bool:
        """Is an embedding at hand, so that anything can be run?"""
        return self.declared is not None and self.declared.embedding is not None


def _salvage(case: Case) -> tuple[Reading | None, str]:
    """A reading without what contradicts itself: fc turned round, the layer ids left out; (None, "") if none helps."""
    folder = case.folder
    turned = _turned(folder) if fc_transposed(case) else folder
    config = {key: value for key, value in folder.config.items() if key != IDS}
    nested = config.get("eagle_config")
    if isinstance(nested, Mapping):
        config["eagle_config"] = {key: value for key, value in nested.items() if key != IDS}
    layers = case.facts.num_layers if case.facts else None
    for other, without in ((turned, ""), (replace(turned, config=config), IDS)):
        try:
            return interpret(other, layers), without or "fc.weight"
        except BadInput:
            continue
    return None, ""


def _turned(folder: DraftFolder) -> DraftFolder:
    """The same with fc.weight transposed."""

    def turn(ref: TensorRef) -> TensorRef:
        load, array = ref.load, ref.array
        return replace(ref, shape=ref.shape[::-1], load=lambda: load().T.contiguous(), array=lambda: array().T)

    tensors = {n: turn(ref) if canonical_name(n) == "fc.weight" else ref for n, ref in folder.tensors.items()}
    return replace(folder, tensors=tensors)
