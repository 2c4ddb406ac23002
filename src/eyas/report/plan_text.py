"""A plan for people: every number with its formula and the values put in, warnings last.

eyas plan --target kimi-k2.5 --tokens 600e6        pytest tests/test_plan.py
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ..plan.formula import Section, amount

if TYPE_CHECKING:
    from ..plan.whole import Plan

WIDTH = 110


def plan_text(plan: Plan) -> str:
    """All of it, ready to print."""
    job, target, hardware = plan.job, plan.job.target, plan.hardware
    facts, shape = target.facts, job.shape
    blocks = [
        f"{target.name}: {_billions(target.parameters)} parameters, {_billions(target.active)} of them in the blocks "
        f"at work for a token; {facts.num_layers} blocks, {facts.hidden_size:,} wide, {facts.vocab_size:,} ids; "
        f"{amount(target.stored_bytes, 'B')} ({target.stored_how})",
        f"draft: {_billions(plan['Parameters of the draft']['parameters'].result)} parameters; {job.taps} taps, "
        f"{shape.num_heads} heads of {shape.head_dim}, MLP {shape.intermediate_size:,}, {job.draft_vocab:,} ids, "
        f"{shape.num_layers} layer, unrolled for {job.settings.ttt_steps} steps",
        f"{job.tokens:,} tokens in conversations of {job.length:,}, {job.supervised:.0%} of them supervised; "
        f"{job.steps:,} optimizer steps of {job.settings.batch_tokens:,} tokens",
        f"{hardware.devices} x {hardware.name}, each {amount(hardware.flops, 'FLOP')}/s, "
        f"{amount(hardware.memory, 'B')}",
    ]
    out = [textwrap.fill(block, WIDTH, subsequent_indent="  ") for block in blocks]
    out += ["", *(section_text(section) for section in plan.sections)]
    if plan.warnings:
        out.append("Warnings")
        out += [textwrap.fill(text, WIDTH, initial_indent="  - ", subsequent_indent="    ") for text in plan.warnings]
    return "\n".join(out).rstrip()


def section_text(section: Section) -> str:
    """Name, result, formula; below it the formula with its values."""
    names = max(len(line.name) for line in section.lines)
    results = max(len(line.shown) for line in section.lines)
    rows = [section.title]
    for line in section.lines:
        begin = f"  {line.name:<{names}}  {line.shown:>{results}}"
        filled = line.filled
        told = f"{line.formula} = {filled}" if filled != line.formula and len(line.values) > 1 else ""
        if told and len(begin) + 3 + len(told) > WIDTH:
            rows += [f"{begin}   {line.formula}", f"{'':{len(begin) + 3}}= {filled}"]
        else:
            rows.append(f"{begin}   {told}".rstrip())
    rows += [textwrap.fill(f"({note})", WIDTH, initial_indent="  ", subsequent_indent="   ") for note in section.notes]
    return "\n".join(rows) + "\n"


def _billions(value: float) -> str:
    size, name = next(((s, n) for s, n in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if value >= s), (1, ""))
    return f"{value / size:,.{2 if size > 1 else 0}f}{name}"
