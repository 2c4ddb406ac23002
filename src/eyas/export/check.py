"""Does a draft directory still hold what Eyas wrote? Tensors, map, config as it is spelled, recorded choices.

eyas export --check DIR          pytest tests/test_export.py
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..draft.checkpoint import canonical_tensors, describe_tensor, load_draft
from ..draft.dialects.canonical import max_position
from ..draft.directory import PROBE, facts_of
from ..draft.files import EYAS_JSON, DraftFolder, open_folder
from ..draft.probe import ProbeReport, verify_probe
from ..errors import BadInput
from .plan import spelled_otherwise


@dataclass(frozen=True)
class CheckReport:
    """Does a draft directory still hold what Eyas wrote? `problems` is empty if so."""

    path: str
    tensors: int
    problems: list[str]
    probe: ProbeReport | None

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "ok": self.ok}


def check_draft(path: str | Path, device: str = "cpu") -> CheckReport:
    """Compare an exported directory with its eyas.json and probe: tensors, map, config as engines read it, choices.

    Raises BadInput where it cannot be read at all.
    """
    folder = open_folder(path)
    if folder.eyas is None:
        raise BadInput(
            f"{folder.path} has no {EYAS_JSON}, so nothing says what it should hold; export it with Eyas first"
        )
    draft, vocab_map, conventions = load_draft(path)
    problems = []
    declared = folder.eyas.get("tensors") or {}
    # Compared under canonical names, so that a copy with renamed or fused tensors is checked as well.
    now = canonical_tensors(draft, vocab_map, None)
    for name in sorted(declared.keys() | now.keys()) if declared else ():  # --no-verify records none
        if name not in now or name not in declared:
            problems.append(f"{name} is {'missing' if name in declared else 'not declared'}")
            continue
        dtype = getattr(torch, str(declared[name].get("dtype")), None)
        if not isinstance(dtype, torch.dtype) or describe_tensor(now[name].to(dtype)) != dict(declared[name]):
            problems.append(f"{name} is not what {EYAS_JSON} recorded (SHA-256 differs)")
    if folder.eyas.get("vocab_map") != vocab_map.digest():
        problems.append("the vocabulary map is not the recorded one")
    problems += _spelled(folder, conventions)
    probe = verify_probe(path, device) if (folder.path / PROBE).is_file() else None
    if probe is not None and not probe.ok:
        problems.append(
            f"the probe: {probe.changed} of {probe.choices} choices changed, margins differ by up to "
            f"{probe.largest_margin_difference:.3g}"
        )
    return CheckReport(str(path), len(now), problems, probe)


def _spelled(folder: DraftFolder, conventions: Any) -> list[str]:
    """Fields where config.json, read without eyas.json, says something else than was declared."""
    from dataclasses import replace

    from ..draft.dialects import interpret

    layers = conventions.num_target_layers
    out = [
        f"config.json makes {name} = {theirs}, declared is {mine}"
        for name, mine, theirs in spelled_otherwise(folder, conventions, layers)
    ]
    position = interpret(replace(folder, eyas=None), layers).conventions.max_position
    if position not in (conventions.max_position, max_position(conventions, facts_of(folder.eyas))):
        out.append(f"config.json makes max_position = {position}, declared is {conventions.max_position}")
    return out
