"""A whole plan: sections of lines, time and cost, and what to be warned of.

    plan = make_plan(Job(target=plan_target("kimi-k2.5"), tokens=600_000_000, ...), hardware("h200", devices=8))

Exercise it:  pytest tests/test_plan.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..draft.shape import DraftShape
from ..errors import BadInput
from ..features.writer import DEFAULT_SHARD_BYTES
from ..train.settings import TrainSettings
from ..train.start import draft_shape
from .calibrate import Calibration
from .counts import draft_parameters, extraction_flops, feature_bytes, start_flops, training_flops
from .formula import Line, Section, line
from .hardware import Hardware
from .memory import extraction_memory, training_memory
from .target import PlannedTarget
from .warnings import warnings_of


@dataclass(frozen=True)
class Job:
    """What is to be made. length: mean tokens of a conversation; supervised: share of tokens to learn from."""

    target: PlannedTarget
    tokens: int
    length: int = 512
    supervised: float = 0.5
    taps: int = 3
    draft_vocab: int = 32_000
    settings: TrainSettings = field(default_factory=TrainSettings)
    batch_tokens: int = 2048
    """Of one forward of the target."""
    dtype: str = "bfloat16"
    """In which the target computes."""
    served: int | None = None
    """Tokens that the server is to draft a round."""
    documents: int | None = None
    observed: int | None = None
    """Distinct supervised ids, where they were counted."""
    shard_bytes: int = DEFAULT_SHARD_BYTES

    @property
    def shape(self) -> DraftShape:
        """Sizes of the draft. Raises BadInput for impossible ones."""
        try:
            return draft_shape(self.settings, self.target.facts, self.draft_vocab, self.taps)
        except ValueError as error:
            raise BadInput(str(error)) from error

    @property
    def steps(self) -> int:
        """Optimizer steps, if batches were full."""
        s = self.settings
        return s.steps or max(1, math.ceil(s.epochs * self.tokens / s.batch_tokens))


@dataclass(frozen=True)
class Plan:
    """Sections in the order of the work; warnings, most serious first."""

    job: Job
    hardware: Hardware
    sections: tuple[Section, ...]
    warnings: tuple[str, ...]
    calibration: Calibration | None = None

    def __getitem__(self, title: str) -> Section:
        return next(section for section in self.sections if section.title == title)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        target = self.job.target
        return {
            "target": {"name": target.name, "parameters": target.parameters, "active": target.active,
                       "stored_bytes": target.stored_bytes, "stored_how": target.stored_how,
                       **{k: getattr(target.facts, k) for k in ("hidden_size", "vocab_size", "num_layers")}},
            "draft": self.job.shape.to_dict(),
            "tokens": self.job.tokens, "length": self.job.length, "supervised": self.job.supervised,
            "steps": self.job.steps, "hardware": dict(self.hardware.__dict__),
            "sections": [section.to_dict() for section in self.sections],
            "warnings": list(self.warnings),
            "calibration": self.calibration and self.calibration.to_dict(),
        }  # fmt: skip


def make_plan(job: Job, hardware: Hardware, calibration: Calibration | None = None) -> Plan:
    """All of it from sizes; times from a calibration where there is one, else from the hardware's rate."""
    shape, settings = job.shape, job.settings
    features = feature_bytes(job.target.facts.hidden_size, job.taps, job.tokens)
    size, on_cpu = features["features"].result, hardware.on_cpu
    extraction = extraction_flops(job.target, job.length, job.supervised, job.tokens)
    training = training_flops(shape, settings, job.length, job.supervised, job.tokens, job.steps)
    item = {"float32": 4}.get(job.dtype, 2)
    sections = [
        draft_parameters(shape, settings),
        features,
        extraction_memory(job.target, job.taps, job.batch_tokens, item, size, on_cpu, job.shard_bytes),
        training_memory(job.target, shape, settings, job.supervised, job.length, size, job.tokens, on_cpu),
        extraction,
        training,
        _time(job, hardware, extraction["extraction"].result, training["training"].result, calibration),
    ]
    plan = Plan(job, hardware, tuple(sections), (), calibration)
    return Plan(job, hardware, plan.sections, tuple(warnings_of(plan)), calibration)


def _time(job: Job, hardware: Hardware, extraction: float, training: float, calibration: Calibration | None) -> Section:
    if calibration is None:
        rate = {"rate": hardware.flops, "u": hardware.utilisation}
        spent = [
            line("extraction", "s", "flop/(devices*rate*u)", flop=extraction, devices=hardware.devices, **rate),
            line("training, on one device", "s", "flop/(rate*u)", flop=training, **rate),
        ]
        notes = [f"rate: {hardware.source}; u, the share of it that is reached, is an assumption: calibrate"]
        if hardware.utilisation == 1.0:
            notes = [f"rate: {hardware.source}"]
    else:
        spent, notes = _measured(job, hardware, calibration)
    lines: list[Line] = [*spent, line("time", "s", "extraction + training", extraction=spent[0].result,
                                      training=spent[1].result)]  # fmt: skip
    if hardware.price_per_hour is not None:
        lines.append(line("cost", "$", "(extraction*devices + training)/3600*price", extraction=spent[0].result,
                          training=spent[1].result, devices=hardware.devices,
                          price=hardware.price_per_hour))  # fmt: skip
    return Section("Time and cost", tuple(lines), tuple(notes))


def _measured(job: Job, hardware: Hardware, c: Calibration) -> tuple[list[Line], list[str]]:
    start = start_flops(job.shape, job.settings, job.tokens * job.supervised) / hardware.flops
    seen = job.settings.epochs * job.tokens if job.settings.steps is None else job.steps * c.step_tokens
    lines = []
    for kind, suffix in (("wall", ""), ("cpu", ", CPU time")):
        begin, load, token, prepare, step = (getattr(t, kind) for t in (c.begin, c.load, c.token, c.prepare, c.step))
        lines += [
            line(f"extraction{suffix}", "s", "begin + load + tokens*token", begin=begin, load=load, tokens=job.tokens,
                 token=token),
            line(f"training{suffix}", "s", "begin + prepare + start + seen/step_tokens*step", begin=begin,
                 prepare=prepare, start=start, seen=seen, step_tokens=c.step_tokens, step=step),
        ]  # fmt: skip
    run = f"measured here: {c.tokens_run:,} tokens of extraction and {c.steps_run} steps, {c.threads} threads"
    return lines, [run]
