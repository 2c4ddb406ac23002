"""The file that `eyas measure --out` writes, and what others make of it.

write("measured.json", result)          of_file("measured.json").served

pytest tests/test_measure_file.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..doctor.located import Located
from ..engines.served import Served, from_number
from ..errors import BadInput
from ..untrusted import content, parse_json
from ..writes import atomic_write_json

FORMAT = 1
DEFINITION = (
    "tau = 1 + accepted / rounds, prefill's token in no round; unconditional: share of all rounds whose first j drafts "
    "were all accepted; rule whole: rounds count in full, fitting: near the end only what fits; strict: rounds whose k "
    "drafts all fall within the answer"
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredFile:
    """One engine of a measurement."""

    path: Path
    engine: str
    served: Served | None
    """None where the server did not say what it accepted."""
    command: tuple[str, ...] = ()
    located: Located | None = None
    """Where it falls; None where nobody looked."""


def write(path: str | Path, result: Mapping[str, Any]) -> None:
    """Atomically. Raises BadInput where it cannot be written."""
    try:
        atomic_write_json(Path(path), result)
    except OSError as error:
        raise BadInput(
            f"--out {path} cannot be written ({error.strerror}); name a file in a folder that you may write to"
        ) from error


def of_file(path: str | Path, engine: str | None = None) -> MeasuredFile:
    """One engine's part; `engine` is needed where the file holds several. Raises BadInput, naming the file."""
    path = Path(path)
    try:
        values = parse_json(content(path))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as what `eyas measure --out` writes ({error}); measure again") from error
    parts = values.get("engines") if isinstance(values, Mapping) else None
    if not isinstance(parts, list) or not parts or not all(isinstance(p, Mapping) for p in parts):
        raise BadInput(f"{path} holds no measurement: expected what `eyas measure --out` writes, with `engines`")
    names = [str(p.get("engine")) for p in parts]
    chosen = [p for p in parts if engine is None or p.get("engine") == engine.partition("@")[0]]
    if len(chosen) != 1:
        raise BadInput(f"{path} holds measurements of {', '.join(names)}: choose one with --engine")
    return _part(path, chosen[0])


def _part(path: Path, part: Mapping[str, Any]) -> MeasuredFile:
    command = part.get("command")
    engine = str(part.get("engine"))
    return MeasuredFile(
        path,
        engine,
        _served(path, part),
        tuple(map(str, command)) if isinstance(command, list) else (),
        _located(engine, part.get("locate"), part.get("capture")),
    )


def _located(engine: str, said: Any, capture: Any) -> Located | None:
    if not isinstance(said, Mapping):
        return None
    rows = said.get("rows")
    taus = {str(row.get("row")): float(row["tau"]) for row in (rows if isinstance(rows, list) else ())
            if isinstance(row, Mapping) and _number(row.get("tau")) and row["tau"] >= 1}  # fmt: skip
    seen = dict(capture) if isinstance(capture, Mapping) else {}
    return Located(engine, taus, str(said.get("falls") or ""), str(said.get("says") or ""), seen)


def _served(path: Path, part: Mapping[str, Any]) -> Served | None:
    said = part.get("acceptance")
    if not isinstance(said, Mapping) or not _number(said.get("tau")):
        return None
    rates = said.get("unconditional")
    whole = isinstance(rates, list) and all(_number(x) and 0 <= x <= 1 for x in rates)
    counts = [said.get("rounds"), said.get("accepted"), part.get("k")]
    rounds, accepted, k = (n if type(n) is int and 0 <= n < 1 << 40 else None for n in counts)
    own = dict(said["own"]) if isinstance(said.get("own"), Mapping) else {}
    try:
        base = from_number(said["tau"])  # checks it
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    return Served(
        str(part.get("engine")), str(part.get("version") or ""), base.tau, own,
        tuple(float(x) for x in rates) if whole and rates else (), rounds, None, accepted, k,
        notes=(f"Measured: {path.name}.",),
    )  # fmt: skip


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e15 < value < 1e15
