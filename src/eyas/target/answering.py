"""From requests to answers: the generator that fits a target, and a loop that keeps it busy.

generator = make_generator(target, slots=96, max_new_tokens=192)
for answer in run_all(generator, requests): ...          pytest tests/test_generate.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from eyas.memory import is_out_of_memory, spending
from eyas.target.generate import Generator
from eyas.target.plain import PlainGenerator
from eyas.target.record import Recorder
from eyas.target.requests import Generated, Request

FEWER = "lower --slots (answers that are done are kept), or --max-new-tokens"


def make_generator(
    target: Any, *, slots: int = 96, prefix: Sequence[int] = (), recorder: Recorder | None = None, **how: Any
) -> Generator | PlainGenerator:
    """A Generator where the target gives over slots its own states; else a PlainGenerator, which is said."""
    before = target.model.config._attn_implementation
    try:
        generator = Generator(target, slots=slots, prefix=prefix, recorder=recorder, **how)
        if generator.agrees():
            return generator
        why = "its states over slots differ from its own"
    except (NotImplementedError, TypeError, AttributeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {error}"
        if target.model.config._attn_implementation != before:
            target.model.set_attn_implementation(before)
    logging.getLogger(__name__).warning(
        "%s is not answered in large batches (%s); its own, slower generation is used", type(target.model).__name__, why
    )
    return PlainGenerator(target, **how)


def stepped(generator: Generator | PlainGenerator) -> list[Generated]:
    """One `step`; raises OutOfMemory with the options that take less."""
    with spending(f"answering {generator.active} prompts at once", FEWER):
        return generator.step()


def run_all(
    generator: Generator | PlainGenerator, requests: Iterable[Request], lookahead: int = 256
) -> Iterator[Generated]:
    """Answer all requests, in the order in which they finish. At most `lookahead` wait for a place."""
    source = iter(requests)
    with generator.running():
        exhausted = False
        while not exhausted or generator.waiting or generator.active:
            while not exhausted and len(generator.waiting) < lookahead:
                request = next(source, None)
                exhausted = request is None
                if request is not None:
                    generator.add(request)
            yield from stepped(generator)
