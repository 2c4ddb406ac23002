"""Answering with the model itself: many dialogues at a time, turn by turn, on one Generator.

The work is handed out and noted by work.Work; here it is rendered, generated, decoded, and its states are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.chat import Unusable, render, shared_prefix
from eyas.dialogue import Dialogue, Outcome, Reply
from eyas.features.recorded import RecordingWriter, StatesMeta
from eyas.target.answering import make_generator, stepped
from eyas.target.model import Target
from eyas.target.record import Recorder, Recording
from eyas.target.requests import Generated, Request
from eyas.work import Work


@dataclass(frozen=True)
class Answering:
    """How the target answers: small, and the same on every machine."""

    folder: Path
    """Of the target."""
    max_new_tokens: int
    temperature: float
    seed: int
    slots: int
    device: str
    dtype: str
    trust_remote_code: bool
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For the chat template, for example enable_thinking."""

    def load(self) -> Target:
        """The target. Raises EyasError where it is not to be had."""
        return Target.load(self.folder, self.device, getattr(torch, self.dtype), self.trust_remote_code)


def answer_locally(
    work: Work, target: Target, how: Answering, record: tuple[Path, str, Sequence[int] | None] | None = None
) -> int:
    """Answer with the model itself, many prompts at a time. Returns the number of generated tokens.

    record: where the states go, the target's fingerprint, and the taps.
    """
    tokenizer, max_new_tokens, slots = target.tokenizer, how.max_new_tokens, how.slots
    recorder = None
    if record is not None:
        folder, fingerprint, taps = record
        recorder = Recorder(target, taps)
        meta = StatesMeta(fingerprint, recorder.taps, target.facts.hidden_size, how.dtype)
        work.states = RecordingWriter(folder, meta)
    generator = make_generator(
        target,
        slots=slots,
        max_new_tokens=max_new_tokens,
        temperature=how.temperature,
        prefix=shared_prefix(tokenizer, **how.template_kwargs),
        recorder=recorder,
    )
    asked: dict[int, tuple[Dialogue, list[int]]] = {}
    earlier: dict[int, tuple[list[int], Recording]] = {}  # the last turn of dialogues that go on

    def ask(dialogue: Dialogue) -> Outcome | None:
        """Queue the next turn of a dialogue, or say why that cannot be."""
        try:
            ids = render(tokenizer, dialogue.messages, dialogue.prompt.tools, True, **how.template_kwargs)
        except Unusable as error:
            return dialogue.set_aside("error", str(error))
        if len(ids) + max_new_tokens > target.facts.max_position:
            return dialogue.set_aside(
                "too_long",
                f"{len(ids)} prompt tokens and {max_new_tokens} new ones exceed the target's "
                f"{target.facts.max_position} positions",
            )
        asked[dialogue.index] = (dialogue, ids)
        generator.add(Request(dialogue.index, ids, dialogue.seed or 0))
        return None

    def advance(answer: Generated) -> bool:
        dialogue, prompt_ids = asked.pop(answer.key)
        text_ids = answer.ids[:-1] if answer.finish == "stop" else answer.ids
        reply = Reply(tokenizer.decode(text_ids, skip_special_tokens=True), answer.finish, answer.ids, prompt_ids)
        outcome = dialogue.take(reply)
        sequence, recording = [*prompt_ids, *answer.ids], answer.recording
        before, so_far = earlier.pop(dialogue.index, ([], None))
        if recording is not None and so_far is not None and sequence[: len(before)] == before:
            recording = recording.after(so_far)
        if outcome is None:
            outcome = ask(dialogue)
            if outcome is None and recording is not None:
                earlier[dialogue.index] = (sequence, recording)
        return outcome is not None and work.done(dialogue, outcome, recording)

    lookahead = 2 * slots
    with generator.running(), work.states or contextlib.nullcontext():
        while True:
            while len(generator.waiting) < lookahead and (dialogue := work.start()) is not None:
                refused = ask(dialogue)
                if refused is not None and work.done(dialogue, refused):
                    return generator.generated_tokens
            if not generator.waiting and not generator.active:
                return generator.generated_tokens
            # Every answer of a step is noted, though the first may complete the work.
            complete = [advance(answer) for answer in stepped(generator)]
            work.tell(generator.underway)
            if any(complete):
                return generator.generated_tokens
