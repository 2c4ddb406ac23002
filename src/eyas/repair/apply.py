"""Repair a draft into a new directory: diagnose, change, read back, examine again; keep it only if it is better.

    repair("broken", "mended", finding="EY-D2T-TWICE")          eyas repair broken --auto --out mended

The source is never written to. The new directory appears whole, or not at all: where the finding is still there
afterwards, or another error has come up, nothing is left.   pytest tests/test_repair.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .._version import __version__
from ..artifacts import atomic_dir, atomic_write_json
from ..doctor.case import Case
from ..doctor.examine import examine
from ..doctor.finding import Finding, Severity
from ..draft.files import CONFIG, EYAS_JSON
from ..draft.headers import read_array, read_header
from ..draft.rewrite import rewrite
from ..errors import BadInput, EyasError
from ..target.facts import TargetFacts
from .operations import Change, Operation, mending

JOURNAL = "repairs.json"
MOST = 8  # repairs in one run: more than there are faults that can be told apart


@dataclass
class Repaired:
    """What was done, and what the doctor says of the result."""

    out: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    """{finding, operation, told, tensors: {name: {before, after}}, config: {...}}"""
    left: list[Finding] = field(default_factory=list)
    """Errors that remain."""


def repair(
    source: str | Path,
    out: str | Path,
    *,
    finding: str | None = None,
    reference: str | Path | None = None,
    facts: TargetFacts | None = None,
    engines: tuple[str, ...] = (),
) -> Repaired:
    """Mend one finding (or, when None, each error that can be mended) into `out`, a directory that does not exist yet.

    Raises BadInput where the doctor does not find it in these bytes, where no operation mends it, or where the
    operation's precondition does not hold; EyasError where the result is no better. Nothing is left at `out` then.
    """
    source, out = Path(source), Path(out)
    if not source.is_dir():
        raise BadInput(f"{source} is not a directory; repair works on draft directories")
    if out.exists():
        raise BadInput(f"{out} exists; name a new directory, since a repair replaces nothing")
    others = Case.open(reference, facts) if reference is not None else None
    done = Repaired(out)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(atomic_dir(out))
        _copy(source, folder)
        now = examine(folder, facts, engines)
        for _ in range(1 if finding else MOST):
            step = _step(source, folder, now, finding, others, facts)
            if step is None:
                break
            before, now = now, examine(folder, facts, engines)
            _must_be_better(step, before, now)
            done.steps.append(step)
        if not done.steps:
            raise BadInput(f"{source}: none of its errors can be mended without knowing more; see eyas doctor {source}")
        done.left = [f for f in now if f.severity is Severity.ERROR]
        _journal(folder, source, done.steps)
    return done


def _step(
    source: Path, folder: Path, now: list[Finding], finding: str | None, reference: Case | None,
    facts: TargetFacts | None,
) -> dict[str, Any] | None:  # fmt: skip
    """Do one repair in `folder`; None where automatic repair (no `finding`) has nothing left to do."""
    automatic = finding is None
    wanted = [f for f in now if (f.id == finding if finding else f.severity is Severity.ERROR)]
    if not wanted and not automatic:
        found = ", ".join(f.id for f in now if f.severity is not Severity.INFO) or "nothing"
        raise BadInput(
            f"{source}: the doctor does not find {finding} in these files (it finds {found}); nothing was done"
        )
    case = Case.open(folder, facts)
    for f in wanted:
        operation = mending(f.id)
        if operation is None:
            if not automatic:
                raise BadInput(f"{source}: no operation mends {f.id} yet. {f.remedy}")
            continue
        try:
            change = operation.plan(case, reference)
        except BadInput:
            if not automatic:
                raise
            continue
        return _apply(folder, case, f, operation, change)
    return None


def _apply(folder: Path, case: Case, finding: Finding, operation: Operation, change: Change) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for name, value in change.tensors.items():
        file = case.folder.tensors[name].file if name in case.folder.tensors else case.folder.files[0]
        if file.suffix != ".safetensors":
            raise BadInput(f"{file} is a pickle; convert it first: eyas export writes safetensors")
        before = _digest(file, name)
        new = file.with_name(file.name + ".new")
        rewrite(file, new, {name: value})
        shutil.copymode(file, new)
        new.replace(file)
        tensors[name] = {"before": before, "after": _digest(file, name)}
        _index(folder, name, file.name, present=value is not None)
    config = dict(case.config)
    fields = {}
    for name, value in change.config.items():
        fields[name] = {"before": config.get(name), "after": value}
        config[name] = value
    if fields:
        atomic_write_json(folder / CONFIG, config)
    told = [*change.told, *(text for n, d in tensors.items() if (text := _recorded(folder, n, d["after"])))]
    return {
        "finding": finding.id, "evidence": finding.evidence, "operation": operation.name, "inverse": operation.inverse,
        "told": told, "tensors": tensors, "config": fields,
    }  # fmt: skip


def _must_be_better(step: dict[str, Any], before: list[Finding], after: list[Finding]) -> None:
    """The finding is gone, and no error has come up that was not there."""
    known = {f.id for f in before}
    fresh = [f for f in after if f.severity is Severity.ERROR and f.id not in known]
    if any(f.id == step["finding"] for f in after) or fresh:
        said = f"it brings up {', '.join(f.id for f in fresh)}" if fresh else f"{step['finding']} is still there"
        raise EyasError(f"{step['operation']} did not mend the draft ({said}), so nothing was kept")


def _copy(source: Path, folder: Path) -> None:
    """All files, symlinks followed: copies, never hard links, since a link shares its bytes with the source."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
            target.chmod(target.stat().st_mode | 0o200)


def _digest(file: Path, name: str) -> str | None:
    """SHA-256 of a tensor's bytes in a safetensors file."""
    entry = read_header(file).entries.get(name)
    return None if entry is None else hashlib.sha256(read_array(file, entry).tobytes()).hexdigest()


def _index(folder: Path, name: str, file: str, present: bool) -> None:
    """Keep the index of a sharded draft in step."""
    path = folder / "model.safetensors.index.json"
    if path.is_file():
        index = json.loads(path.read_text(encoding="utf-8"))
        if present:
            index["weight_map"][name] = file
        else:
            index["weight_map"].pop(name, None)
        atomic_write_json(path, index)


def _recorded(folder: Path, name: str, digest: str | None) -> str | None:
    """What eyas.json, which training wrote, says to a tensor's new bytes."""
    path = folder / EYAS_JSON
    if not path.is_file():
        return None
    recorded = json.loads(path.read_text(encoding="utf-8")).get("tensors", {}).get(name, {}).get("sha256")
    if recorded is None:
        return None
    same = recorded == digest
    return f"{name}: {'bit for bit what training wrote' if same else 'not what training wrote'}, by {EYAS_JSON}"


def _journal(folder: Path, source: Path, steps: list[dict[str, Any]]) -> None:
    """repairs.json: what was done to get here, oldest first."""
    path = folder / JOURNAL
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    now = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"when": now, "eyas_version": __version__, "from": source.name, "steps": steps}
    atomic_write_json(path, [*earlier, entry])
