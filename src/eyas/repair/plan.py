"""A repair as data: the steps, what they are against, and the bytes for which they were decided.

    plan = make_plan(overlay, steps, findings); write_plan(plan, "plan.json")
    done = apply_plan(Overlay.of("draft"), read_plan("plan.json"))      # reviewed, on another day or another machine

A plan is replayed only on the bytes that it was made for: the digests of exactly the tensors that it looks at or
changes, and of the configs.   pytest tests/test_repair_plan.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._version import __version__
from ..draft.files import CONFIG, EYAS_JSON, read_json
from ..errors import BadInput
from ..writes import atomic_write_json
from .operations import Done, concerned, find, inverse_of, perform
from .overlay import Overlay, config_digest, digests
from .step import Step

SCHEMA = "eyas-repair-plan/1"
SHOWN = 4


@dataclass(frozen=True)
class Bytes:
    """What of a draft a plan concerns, by digests."""

    tensors: Mapping[str, str | None] = field(default_factory=dict)
    """Stored name -> SHA-256 of its bytes; None: it is not there."""
    config: str | None = None
    """SHA-256 of config.json as canonical JSON."""
    eyas: str | None = None
    """The same of the conventions and sizes in eyas.json; None where there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"tensors": dict(self.tensors), CONFIG: self.config, EYAS_JSON: self.eyas}

    @classmethod
    def from_dict(cls, values: Any, where: str) -> Bytes:
        """The inverse of `to_dict`. Raises BadInput for what gives no digests."""
        tensors = values.get("tensors") if isinstance(values, Mapping) else None
        if not isinstance(tensors, Mapping) or not all(isinstance(v, str | None) for v in tensors.values()):
            raise BadInput(
                f"{where}: `made_for` and `makes` must give the SHA-256, or null, of each tensor in `tensors`"
            )
        return cls(dict(tensors), values.get(CONFIG), values.get(EYAS_JSON))


@dataclass(frozen=True)
class Plan:
    """Steps to be done one after the other."""

    steps: tuple[Step, ...]
    made_for: Bytes = field(default_factory=Bytes)
    """The bytes on which it was decided."""
    makes: Bytes = field(default_factory=Bytes)
    """What becomes of them."""
    findings: tuple[Mapping[str, Any], ...] = ()
    """Those of the diagnosis that it is against, as it gave them."""
    eyas_version: str = __version__
    draft: str = ""
    """Where the draft lay, for people; a copy elsewhere does as well."""
    inverse: tuple[Step, ...] | None = None
    """The steps that undo it bit for bit; None where only the journal does."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the content of plan.json."""
        return {
            "schema": SCHEMA,
            "eyas_version": self.eyas_version,
            "draft": self.draft,
            "steps": [step.to_dict() for step in self.steps],
            "made_for": self.made_for.to_dict(),
            "makes": self.makes.to_dict(),
            "findings": [dict(finding) for finding in self.findings],
            "inverse": None if self.inverse is None else [step.to_dict() for step in self.inverse],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the plan") -> Plan:
        """The inverse of `to_dict`. Raises BadInput naming what is wrong, an unknown operation among it."""
        if values.get("schema") != SCHEMA:
            raise BadInput(
                f"{where}: schema = {values.get('schema')!r}, expected {SCHEMA!r}; make the plan again with this Eyas"
            )
        steps, findings, back = values.get("steps"), values.get("findings") or [], values.get("inverse")
        if not isinstance(steps, list) or not steps or not isinstance(back, list | None):
            raise BadInput(f"{where}: `steps` must be a non-empty list, `inverse` a list or null")
        if not isinstance(findings, list) or not all(isinstance(f, Mapping) for f in findings):
            raise BadInput(f"{where}: `findings` must be a list of objects")
        made_for, makes = (Bytes.from_dict(values.get(name), where) for name in ("made_for", "makes"))
        try:
            parsed = tuple(Step.from_dict(step) for step in steps)
            inverse = None if back is None else tuple(Step.from_dict(step) for step in back)
            for step in (*parsed, *(inverse or ())):
                find(step.operation)
        except (BadInput, TypeError) as error:
            raise BadInput(f"{where}: {error}") from error
        version, draft = str(values.get("eyas_version", "")), str(values.get("draft", ""))
        return cls(parsed, made_for, makes, tuple(findings), version, draft, inverse)


@dataclass(frozen=True)
class Applied:
    """A plan that was performed on an overlay; nothing has been written."""

    plan: Plan
    done: tuple[Done, ...]
    before: Overlay
    forced: tuple[str, ...] = ()
    """What was otherwise than the plan says, and passed over because somebody said so."""

    @property
    def after(self) -> Overlay:
        """The draft with all of it."""
        return self.done[-1].after if self.done else self.before

    @property
    def told(self) -> list[str]:
        """What each step found and writes."""
        return [text for done in self.done for text in done.told]

    def entry(self) -> dict[str, Any]:
        """For the journal: plain JSON values."""
        return {
            "plan": self.plan.to_dict(), "told": self.told, "forced": list(self.forced),
        }  # fmt: skip


def make_plan(overlay: Overlay, steps: Sequence[Step], findings: Sequence[Mapping[str, Any]] = ()) -> Plan:
    """A plan of steps for this draft, each of which is tried on an overlay. Raises BadInput where one is refused."""
    if not steps:
        raise BadInput(f"{overlay.path}: a plan needs at least one step")
    done: list[Done] = []
    for step in steps:
        done.append(perform(done[-1].after if done else overlay, step))
    return plan_of(done, findings)


def plan_of(done: Sequence[Done], findings: Sequence[Mapping[str, Any]] = ()) -> Plan:
    """The plan of steps that were performed one after the other. Reads the bytes of the tensors that they concern."""
    names, first, last = _concerned(done), done[0].before, done[-1].after
    steps = tuple(d.step for d in done)
    return Plan(steps, _bytes(first, names), _bytes(last, names), tuple(findings), __version__, str(first.path),
                _inverse(done))  # fmt: skip


def read_plan(path: str | Path) -> Plan:
    """A plan.json. Raises BadInput naming the file and what is wrong with it."""
    path = Path(path)
    return Plan.from_dict(read_json(path), str(path))


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write plan.json, whole or not at all."""
    atomic_write_json(Path(path), plan.to_dict())


def departures(overlay: Overlay, plan: Plan) -> list[str]:
    """Where the draft is not what the plan was made for, one sentence each; [] where it is."""
    wanted = plan.made_for
    held = digests(overlay, list(wanted.tensors))
    out = []
    for name, digest in wanted.tensors.items():
        if held[name] != digest:
            out.append(
                f"{name} is there, and was not" if digest is None else f"{name} is missing" if held[name] is None
                else f"{name} has other bytes (SHA-256 {str(held[name])[:12]}, the plan is for {digest[:12]})"
            )  # fmt: skip
    pairs = ((CONFIG, wanted.config, config_digest(overlay.config)), (EYAS_JSON, wanted.eyas, _declared(overlay)))
    out += [f"{file} is another one" for file, digest, now in pairs if digest != now]
    return out


def apply_plan(overlay: Overlay, plan: Plan, force: bool = False) -> Applied:
    """Perform a plan on a draft. Raises BadInput where its bytes are not those that the plan was made for, or where the
    precondition of a step does not hold; `force` passes over the first, never over the second, and is recorded."""
    other = departures(overlay, plan)
    if other and not force:
        more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
        raise BadInput(
            f"{overlay.path} is not what the plan was made for: {'; '.join(other[:SHOWN])}{more}. Diagnose it again, "
            f"or --force the plan where you know that this does not matter"
        )
    done: list[Done] = []
    for number, step in enumerate(plan.steps, 1):
        try:
            done.append(perform(done[-1].after if done else overlay, step))
        except BadInput as error:
            raise BadInput(f"step {number} of {len(plan.steps)}, {step.operation}: {error}") from error
    return Applied(plan, tuple(done), overlay, tuple(other))


def inverse(plan: Plan) -> Plan | None:
    """The plan that undoes `plan` bit for bit, for the draft that `plan` makes; None where a step has no inverse.

    Then only the journal brings the draft back.
    """
    if plan.inverse is None:
        return None
    return Plan(plan.inverse, plan.makes, plan.made_for, (), plan.eyas_version, plan.draft, plan.steps)


def _bytes(overlay: Overlay, names: Sequence[str]) -> Bytes:
    return Bytes(digests(overlay, names), config_digest(overlay.config), _declared(overlay))


def _concerned(done: Sequence[Done]) -> list[str]:
    """Tensors of the first or the last overlay that any step looks at or changes."""
    first, last = done[0].before.tensors, done[-1].after.tensors
    return [name for name in dict.fromkeys(n for d in done for n in concerned(d)) if name in first or name in last]


def _declared(overlay: Overlay) -> str | None:
    """Digest of what eyas.json declares: not of its record of digests, which follow the tensors by themselves."""
    if overlay.eyas is None:
        return None
    return config_digest({name: overlay.eyas.get(name) for name in ("conventions", "shape")})


def _inverse(done: Sequence[Done]) -> tuple[Step, ...] | None:
    steps: list[Step] = []
    for d in reversed(done):
        back = inverse_of(d.step, d.before, d.after)
        if back is None:
            return None
        steps += back
    return tuple(steps)
