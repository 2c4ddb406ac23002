"""Does a draft directory still hold what Eyas wrote? Tensors, map, config as it is spelled, recorded choices.

eyas verify DIR (or eyas export --check DIR)          pytest tests/test_export.py tests/test_verify.py
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..draft.dialects.canonical import max_position
from ..draft.digests import Compared, compare, declared
from ..draft.directory import PROBE, facts_of
from ..draft.files import EYAS_JSON, DraftFolder, open_folder
from ..errors import BadInput
from .plan import spelled_otherwise

if TYPE_CHECKING:
    from ..draft.probe import ProbeReport


@dataclass(frozen=True)
class CheckReport:
    """Does a draft directory still hold what Eyas wrote? `problems` is empty if so."""

    path: str
    tensors: int
    problems: list[str]
    probe: ProbeReport | None
    compared: Compared
    """Tensor by tensor, with the digests of eyas.json."""

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
    # Compared under canonical names, so that a copy with renamed or fused tensors is checked as well.
    compared = compare(folder) if declared(folder.eyas) else Compared(len(folder.tensors))  # --no-verify records none
    problems = [f"{name} is missing" for name in compared.missing]
    problems += [f"{name} is not declared" for name in compared.additional]
    problems += [f"{name} is not what {EYAS_JSON} recorded (SHA-256 differs)" for name in compared.changed]
    from ..draft.checkpoint import load_draft

    try:
        _, vocab_map, conventions = load_draft(path)
    except BadInput as error:  # the recorded bytes may be those of a broken draft: a repair by force keeps them in step
        return CheckReport(str(path), compared.tensors, [*problems, f"it cannot be loaded: {error}"], None, compared)
    if folder.eyas.get("vocab_map") != vocab_map.digest():
        problems.append("the vocabulary map is not the recorded one")
    problems += _spelled(folder, conventions)
    probe = None
    if (folder.path / PROBE).is_file():
        from ..draft.probe import verify_probe

        probe = verify_probe(path, device)
    if probe is not None and not probe.ok:
        problems.append(
            f"the probe: {probe.changed} of {probe.choices} choices changed, margins differ by up to "
            f"{probe.largest_margin_difference:.3g}"
        )
    return CheckReport(str(path), compared.tensors, problems, probe, compared)


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
