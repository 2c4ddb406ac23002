"""What a training run said of its draft: the accept length that it predicted.   pytest tests/test_doctor_training.py

Eyas: `predicted` in eyas.json, or in the last evaluation of a run. speculators: val_metrics.json, whose
`full_acc_N_epoch` is the share of positions at which the first N+1 steps were right, teacher-forced; 1 + their sum is
what a server would accept if rounds began everywhere alike, a little more than it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import BadInput
from ..untrusted import content, parse_json

STEPS = 4


def predicted_tau(run: str | Path | None, eyas: Mapping[str, Any]) -> float | None:
    """Accept length, None where nothing was predicted. Raises BadInput where `run` holds nothing of the kind."""
    if run is None:
        said = eyas.get("predicted")
        return _number(said.get("accept_length")) if isinstance(said, Mapping) else None
    folder = Path(run)
    if not folder.is_dir():
        raise BadInput(f"{folder} is no directory; --training takes the folder of a training run")
    for file in (folder / "val_metrics.json", folder / "eyas.json", folder / "draft" / "eyas.json",
                 folder / "summary.json"):  # fmt: skip
        if file.is_file():
            values = _read(file)
            found = _speculators(values) if file.name == "val_metrics.json" else _eyas(values)
            if found is not None:
                return found
    raise BadInput(
        f"{folder} holds neither val_metrics.json nor an eyas.json with a prediction; --training takes the folder "
        "of a training run"
    )


def _eyas(values: Mapping[str, Any]) -> float | None:
    said = values.get("predicted")
    if isinstance(said, Mapping):
        return _number(said.get("accept_length"))
    return _number(values.get("tau_mean"))


def _speculators(values: Mapping[str, Any]) -> float | None:
    shares = [_number(values.get(f"full_acc_{step}_epoch")) for step in range(STEPS)]
    known = [s for s in shares if s is not None]
    return round(1 + sum(known), 4) if len(known) == STEPS else None


def _number(value: Any) -> float | None:
    """None for what is no number, and for one that no accept length could be: NaN, infinite, beyond any float."""
    real = isinstance(value, int | float) and not isinstance(value, bool) and -1e100 < value < 1e100
    return float(value) if real else None


def _read(file: Path) -> Mapping[str, Any]:
    try:
        values = parse_json(content(file))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read ({error}); leave --training out, or give the run's own file") from error
    if not isinstance(values, Mapping):
        raise BadInput(f"{file} holds no JSON object; leave --training out, or give the run's own file")
    return values
