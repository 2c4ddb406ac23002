"""Repair a draft: into a new directory or in place, by a plan, against one finding, or everything that measures wrong.

    repair("broken", out="mended", target="path/to/target")        eyas repair broken --auto --target T --out mended

Nothing is written before it was tried on an overlay in memory and found better; what was written is read back and
compared. The journal (below .eyas/) says why, from which bytes to which, and what was tried in vain.
    pytest tests/test_repair.py
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..doctor.examine import examine
from ..doctor.finding import Severity
from ..draft.files import DraftFolder
from ..errors import BadInput, EyasError
from ..target.facts import read_facts
from .auto import Mended, mend
from .change import Change
from .guards import check_given, check_own_files, check_places, check_unchanged, stamps
from .history import revert
from .in_place import repair_in_place
from .journal import records
from .maps import KEEPS
from .operations import Done, perform
from .overlay import Overlay
from .plan import SHOWN, Plan, apply_plan, departures, plan_of
from .recover import recover
from .refs import digest
from .remedies import candidates, refusal
from .served import check_engine, served
from .step import Step
from .store import Store
from .trials import Trials
from .write_new import write_new

RAW = {"absolute-to-offset": "subtract-arange", "add-arange": "offset-to-absolute"}
"""What is left of an operation when its precondition is passed over: the arithmetic alone."""


@dataclass
class Repaired:
    """What was done, and what the doctor says of the result."""

    source: Path
    out: Path | None = None
    """Where it was written; None where nothing was."""
    number: int | None = None
    """Of the change in the journal of `out`."""
    plan: Plan | None = None
    told: list[str] = field(default_factory=list)
    """What each operation found, writes and reads back."""
    ledger: list[dict[str, Any]] = field(default_factory=list)
    """What was tried, kept or not (auto.py)."""
    left: list[dict[str, str]] = field(default_factory=list)
    """{"finding", "why", "evidence"}: errors that remain; after a plan or by force, where nothing is diagnosed again,
    those of static checks alone."""
    tau: tuple[float | None, float | None] = (None, None)
    """Replayed accept length as declared, before and after; None where nothing was replayed."""
    forced: list[str] = field(default_factory=list)
    """What was passed over because somebody said so."""
    served: list[dict[str, Any]] = field(default_factory=list)
    """What real engines counted (served.py)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "draft": str(self.source), "out": None if self.out is None else str(self.out), "change": self.number,
            "plan": None if self.plan is None else self.plan.to_dict(), "told": self.told, "ledger": self.ledger,
            "left": self.left, "tau": list(self.tau), "forced": self.forced, "served": self.served,
        }  # fmt: skip


def repair(
    source: str | Path,
    *,
    out: str | Path | None = None,
    in_place: bool = False,
    plan: Plan | None = None,
    finding: str | None = None,
    target: str | Path | None = None,
    reference: str | Path | None = None,
    features: str | Path | None = None,
    engines: Sequence[str] = (),
    force: bool = False,
    first: Mapping[str, Any] | None = None,
    serve: Sequence[str] = (),
    budget: float = 60.0,
    device: str = "cpu",
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Repaired:
    """Mend `source` by a plan, or against one finding, or (neither given) all that is wrong.

    out: a directory that does not exist yet; in_place: `source` itself; neither: only try. Raises BadInput where the
    finding does not hold for these bytes, where the plan is for others, or where a precondition does not hold;
    EyasError where the result is no better. Nothing has been written then. force: pass over evidence, over the bytes
    that a plan is for and over a worse result; the journal says so. first: a diagnosis of these very
    bytes, where one was just made. serve: engines that must serve the result as the replay of it says.
    """
    source = Path(source)
    folder, known, recorded = (Path(x) if x is not None else None for x in (target, reference, features))
    if (plan is not None and finding is not None) or (force and plan is None and finding is None):
        raise BadInput("give a plan or a finding, not both; force goes with one of them")
    check_places(source, out, in_place)
    check_given(known, recorded)
    for engine in serve:
        check_engine(engine)
    if serve and (folder is None or (out is None and not in_place)):
        raise BadInput("an engine serves what was written, with its target: give --target, and --out or --in-place")
    facts = read_facts(folder) if folder is not None else None
    if in_place:
        recover(source)
    files = stamps(source)
    overlay = Overlay.of(source, facts)
    if in_place:
        check_own_files(overlay)
    done = Repaired(source)
    if plan is not None or (finding is not None and force):
        trials = Trials(target=folder, facts=facts, features=recorded, engines=engines, device=device,
                        trust_remote_code=trust_remote_code, tell=tell)  # fmt: skip
        if plan is not None:
            steps = _planned(done, overlay, plan, force)
        else:
            steps = _forced(done, overlay, finding or "", folder, known, trials.names)
        _judged(done, trials, steps, force)
        done.plan = plan or plan_of(steps)
    else:
        mended = mend(overlay, target=folder, reference=known, features=recorded, engines=engines, only=finding,
                      first=first, budget=budget, device=device, trust_remote_code=trust_remote_code,
                      tell=tell)  # fmt: skip
        steps = mended.done
        done.ledger, done.left, done.tau = mended.ledger, mended.left, mended.tau
        if not steps:
            return _nothing(done, finding, mended)
        done.plan = plan_of(steps, mended.findings)
    done.told = [text for step in steps for text in step.told] + _recorded(overlay, steps)
    check_unchanged(source, files)
    if out is not None or in_place:
        _write(done, Path(out) if out is not None else source, steps, in_place, files)
        done.served = [served(done.out or source, folder or "", engine, tell) for engine in serve]
    return done


def _planned(done: Repaired, overlay: Overlay, plan: Plan, force: bool) -> list[Done]:
    applied = apply_plan(overlay, plan, force)
    done.forced += applied.forced
    other = departures(applied.after, Plan((), made_for=plan.makes)) if not applied.forced else []
    if other and not force:
        raise BadInput(
            f"{overlay.path}: the steps of the plan make something else than it says in `makes` "
            f"({'; '.join(other[:SHOWN])}): it was edited, or another Eyas made it. Diagnose the draft again, or "
            f"--force the plan where you mean it so"
        )
    done.forced += [f"other than the plan says: {text}" for text in other]
    return list(applied.done)


def _forced(
    done: Repaired,
    overlay: Overlay,
    finding: str,
    target: Path | None,
    reference: Path | None,
    engines: tuple[str, ...],
) -> list[Done]:
    """The first remedy that can be done at all for a finding that perhaps nobody has seen in these bytes."""
    asked: dict[str, Any] = {"id": finding, "status": "static", "severity": "error", "convention": None, "best": None}
    steps = candidates(asked, overlay, target=target, reference=reference)
    if not steps:
        raise BadInput(
            f"{overlay.path}: no operation mends {finding}, not even by force; its page in the catalogue says what "
            "to do"
        )
    if all(f.id != finding for f in examine(overlay.folder, overlay.facts, engines)):
        done.forced.append(f"{finding} was not found in these bytes")
    for step in steps:
        if not refusal(overlay, step):
            return [perform(overlay, step)]
    for step in steps:
        raw = Step(RAW.get(step.operation, step.operation), step.arguments, step.why, sure=False)
        if not refusal(overlay, raw):
            done.forced.append(
                f"done although {step.operation} refused: {refusal(overlay, step)}".removesuffix(KEEPS).rstrip()
            )
            return [perform(overlay, raw)]
    raise BadInput(refusal(overlay, steps[0]))


def _judged(done: Repaired, trials: Trials, steps: Sequence[Done], force: bool) -> None:
    """Keep what a plan or a forced step makes only where it is no worse."""
    before, after = trials.of(steps[0].before), trials.of(steps[-1].after)
    done.tau = before.tau, after.tau
    if why := trials.worse(before, after):
        if not force:
            raise EyasError(
                f"{done.source}: the plan makes the draft worse ({why}), so nothing was written; diagnose it again "
                f"(eyas doctor), or --force the plan"
            )
        done.forced.append(f"worse: {why}")
    done.left = [{"finding": s.id, "why": "nothing was done against it", "evidence": s.evidence}
                 for s in after.seen if s.severity is Severity.ERROR]  # fmt: skip


def _nothing(done: Repaired, finding: str | None, mended: Mended) -> Repaired:
    if finding is None:
        return done
    why = next((x["why"] for x in mended.left if x["finding"] == finding), "no operation mends it")
    raise BadInput(f"{done.source}: {finding} was not mended: {why}; `eyas doctor` tells what remains")


def _recorded(overlay: Overlay, steps: Sequence[Done]) -> list[str]:
    """What eyas.json, which training wrote, says to the new bytes of each tensor. Of one that an earlier change wrote
    eyas.json says what that made of it, and the journal what it was before."""
    held: Mapping[str, Any] = (overlay.eyas or {}).get("tensors") or {}
    earlier: dict[str, tuple[int, str | None]] = {}
    for record in records(Store(overlay.path)):
        for name, said in record.get("tensors", {}).items():
            earlier.setdefault(name, (record["number"], (said["before"] or {}).get("sha256")))
    after, out = steps[-1].after.tensors, []
    for name in sorted({name for step in steps for name in step.tensors} & after.keys()):
        recorded = held[name].get("sha256") if isinstance(held.get(name), Mapping) else None
        if name in earlier:
            number, before = earlier[name]
            if before is not None and before == digest(after[name]):
                out.append(f"{name}: bit for bit what it was before change {number}, by the journal")
        elif recorded is not None:
            same = recorded == digest(after[name])
            out.append(f"{name}: {'bit for bit what training wrote' if same else 'not what training wrote'}, "
                       "by eyas.json")  # fmt: skip
    return out


def _write(
    done: Repaired, out: Path, steps: Sequence[Done], in_place: bool, files: Mapping[str, tuple[int, ...] | None]
) -> None:
    assert done.plan is not None
    entry = {
        "finding": ", ".join(dict.fromkeys(s.step.why for s in steps if s.step.why)),
        "operation": ", ".join(s.step.operation for s in steps),
        "told": done.told, "plan": done.plan.to_dict(), "ledger": done.ledger, "tau": list(done.tau),
        "forced": done.forced,
    }  # fmt: skip
    makes = plan_of(list(steps)).makes

    def change(draft: DraftFolder) -> Change:
        """Asked once nobody else changes the draft any more."""
        check_unchanged(draft.path, files)
        return steps[-1].after.change()

    if in_place:
        done.number = repair_in_place(out, change, entry)
    else:
        write_new(done.source, out, change, entry)
        done.number = 1
    try:
        odd = departures(Overlay.of(out), Plan((), made_for=makes))
    except EyasError as error:
        odd = [str(error)]
    if odd:
        if in_place:
            revert(out, done.number)
        else:
            shutil.rmtree(out)
        raise EyasError(
            f"{out}: what was read back is not what was written ({'; '.join(odd)}); it was taken back; check the "
            "disk and run the same command again"
        )
    done.out = out
