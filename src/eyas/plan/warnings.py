"""What surprises people: each rule looks at a plan and says, with its numbers, what will happen and what else there is.

Exercise it:  pytest tests/test_plan.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .formula import amount

if TYPE_CHECKING:
    from .whole import Plan

LARGE_FEATURES = 1e12  # bytes: more than one disk of most machines
LARGE_START = 8e9
SMALL_FIT = 0.9  # of the memory of all devices; the rest is for what frameworks take and for fragments


def warnings_of(plan: Plan) -> list[str]:
    """All of them, in the order of RULES."""
    return [text for rule in RULES for text in rule(plan)]


def _features(plan: Plan) -> Iterator[str]:
    job, section = plan.job, plan["Features on disk"]
    size, token = section["features"].result, section["one token"].result
    if size < LARGE_FEATURES:
        return
    tap = 2 * job.target.facts.hidden_size
    yield (
        f"The features take {amount(size, 'B')}: {amount(token, 'B')} for each of {job.tokens:,} tokens, prompts "
        f"included, of which the final state is {amount(tap, 'B')} and each of {job.taps} taps as much. Fewer tokens "
        f"help most (1 TB holds {1e12 / token:,.0f}); two taps save {tap / token:.0%}; or work in pieces: "
        f"extract a part, train on it with --init-from the draft so far, delete it, extract the next."
    )


def _memory_of_extraction(plan: Plan) -> Iterator[str]:
    need = plan["Memory of extraction"]["at most"].result
    have = plan.hardware.memory * plan.hardware.devices
    if need > SMALL_FIT * have:
        yield (
            f"The target needs {amount(need, 'B')} with its forward pass and {plan.hardware.devices} x "
            f"{plan.hardware.name} have {amount(have, 'B')}: it does not fit. More devices "
            f"({-(-need // (SMALL_FIT * plan.hardware.memory)):.0f} would do), a quantised target, or an engine "
            f"that spreads it over machines (eyas extract --engine vllm)."
        )


def _memory_of_training(plan: Plan) -> Iterator[str]:
    need, have = plan["Memory of training"]["at most"].result, plan.hardware.memory
    if need > SMALL_FIT * have:
        fewer = " a frozen head (--set train_head=false)," if plan.job.settings.train_head else ""
        yield (
            f"Training needs {amount(need, 'B')} on one device, which has {amount(have, 'B')}:{fewer} fewer "
            f"micro_tokens, --set recompute=true, Muon instead of AdamW or a narrower MLP make it smaller; --set "
            f"parallel=fsdp under torchrun deals weights and optimizer out to several devices."
        )


def _vocabulary(plan: Plan) -> Iterator[str]:
    job = plan.job
    supervised = job.tokens * job.supervised
    if job.observed is not None and job.draft_vocab > job.observed:
        yield (
            f"The draft vocabulary has {job.draft_vocab:,} ids, but only {job.observed:,} distinct ones are "
            f"supervised: the rest never learn anything. Choose at most that many, or more text."
        )
    elif job.draft_vocab > supervised / 10:
        yield (
            f"The draft vocabulary has {job.draft_vocab:,} ids and {supervised:,.0f} tokens are supervised: most ids "
            f"occur a few times at best. A smaller vocabulary costs less in every step."
        )


def _unrolled(plan: Plan) -> Iterator[str]:
    steps, served = plan.job.settings.ttt_steps, plan.job.served
    if served is not None and steps < served:
        yield (
            f"The draft is unrolled for {steps} steps and served with {served} drafted tokens: it never learns from "
            f"its own states beyond step {steps}, so the last tokens are accepted less. --set ttt_steps={served}, or "
            f"serve with {steps}."
        )


def _optimizer(plan: Plan) -> Iterator[str]:
    section = plan["Operations of training"]
    whole, own = section["all tokens seen"].result, section["all steps of the optimizer"].result
    if own > whole:
        s = plan.job.settings
        more = s.batch_tokens * 2 ** max(1, (own / whole).__ceil__().bit_length())
        yield (
            f"The optimizer works {own / whole:.1f} times as much as the steps themselves: Muon orthogonalises every "
            f"matrix each step, and a step of {s.batch_tokens} tokens is small for a draft this wide. --set "
            f"batch_tokens={more} (with lr in proportion to its root), or --set optimizer=adamw."
        )


def _start(plan: Plan) -> Iterator[str]:
    from ..train.ridge import fit_bytes

    job = plan.job
    if job.settings.start != "regression" or job.settings.init_from:
        return
    h = job.target.facts.hidden_size
    rows = min(job.settings.start_rows, round(job.tokens * job.supervised))
    size = fit_bytes((job.taps + 1) * h, h, rows)
    if size > LARGE_START:
        yield (
            f"The linear start solves for {(job.taps + 1) * h:,} unknowns in float64 on the CPU: {amount(size, 'B')} "
            f"of the host's memory, for minutes, before the first step. --set start_rows=10000 needs "
            f"{amount(fit_bytes((job.taps + 1) * h, h, 10_000), 'B')}; --set start=target none."
        )


def _notes(plan: Plan) -> Iterator[str]:
    yield from plan.job.target.notes


RULES: tuple[Callable[[Plan], Iterator[str]], ...] = (
    _features, _memory_of_extraction, _memory_of_training, _optimizer, _start, _vocabulary, _unrolled, _notes,
)  # fmt: skip
