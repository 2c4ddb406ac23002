"""`eyas ask`: the target writes requests itself, so that there is no end of prompts to learn from.

An instruction-tuned model has learnt what users say. Given its chat template up to where a user's message begins, it
goes on with one (Xu et al. 2024, "Magpie", arXiv 2406.08464). `openings` steer it: the first words of a message, in
turn; an empty one leaves the choice to the target. Sampled with a seed a message, from the likeliest `top_k` tokens.

    eyas ask --count 5000 --out runs/asked          pytest tests/test_ask.py

A message that does not end in time is shortened to its last whole sentence or line. Left out, and counted: those that
have none, that repeat themselves, that are too short, that another one equals.
Killed at any moment, the same command goes on; a message depends on its number and the settings only.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.artifacts import MANIFEST, check_out, is_current, read_manifest, write_manifest
from eyas.dialogue import answer_seed
from eyas.errors import BadInput
from eyas.journal import Journal
from eyas.locks import inside
from eyas.prompt import Prompt
from eyas.writes import atomic_write, remove_leftovers

STAGE = "ask"
SCHEMA = "eyas-ask/1"
PROMPTS = "prompts.jsonl"
JOURNAL = "asked.partial.jsonl"
WHOLE = re.compile(r"(.*([.!?](?=\s)|\n))?", re.DOTALL)  # up to the last end of a sentence or line
SHORTEST = 12  # characters: below that it is a greeting or a torn word
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Asking:
    """How the target is asked. All but `slots` and `trust_remote_code` decide what it says."""

    openings: Sequence[str] = ("",)
    max_new_tokens: int = 48
    temperature: float = 1.0
    top_k: int = 50
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    slots: int = 96
    trust_remote_code: bool = False


def ask(
    target_dir: Path, out_dir: Path, count: int, how: Asking | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Let the target begin `count` conversations; write the usable ones to out_dir/prompts.jsonl; return the counts.

    progress: called with the number of messages finished since. A finished `out_dir` with the same settings is left as
    it is. Raises BadInput for a target whose chat template has no place for a user's message.
    """
    from eyas.target.source import identify

    how = how or Asking()
    if count < 1 or not how.openings:
        raise BadInput(
            f"count = {count}, {len(how.openings)} openings: at least one of each is needed; raise the one that is 0"
        )
    check_out(out_dir, STAGE)
    inputs = identify(target_dir)
    settings = {k: v for k, v in asdict(how).items() if k not in ("slots", "trust_remote_code")}
    settings["openings"] = list(how.openings)
    config = settings | {"count": count}
    if is_current(out_dir, STAGE, inputs, config, SCHEMA):
        return dict(read_manifest(out_dir)["counts"])
    with inside(out_dir):
        started = time.monotonic()
        remove_leftovers(out_dir)
        (out_dir / MANIFEST).unlink(missing_ok=True)
        journal = Journal(out_dir / JOURNAL, {"schema": SCHEMA, **inputs, **settings}, FIELDS)
        found: dict[int, tuple[str, str]] = {r["number"]: (r["text"], r["finish"]) for r in journal.records}
        missing = [number for number in range(count) if number not in found]
        try:
            if missing:
                for number, text, finish in _messages(target_dir, missing, how):
                    found[number] = (text, finish)
                    journal.append({"number": number, "text": text, "finish": finish})
                    if progress:
                        progress(1)
        finally:
            journal.close()
        prompts, counts = usable([found[number] for number in range(count)])
        atomic_write(
            out_dir / PROMPTS, "".join(json.dumps(p.to_row(), ensure_ascii=False) + "\n" for p in prompts)
        )  # fmt: skip
        write_manifest(
            out_dir, STAGE, inputs=inputs, config=config, counts=counts, duration_s=time.monotonic() - started,
            files=[PROMPTS], seed=how.seed, schema=SCHEMA,
        )  # fmt: skip
        journal.path.unlink(missing_ok=True)
        return counts


FIELDS = {"number": int, "text": str, "finish": str}  # of a line of the journal


def usable(messages: Sequence[tuple[str, str]]) -> tuple[list[Prompt], dict[str, int]]:
    """(text, how it ended) -> prompts in that order, and how many were shortened, or left out for which reason."""
    prompts: dict[str, Prompt] = {}
    found = {"shortened": 0, "endless": 0, "repetition": 0, "too_short": 0, "duplicates": 0}
    for text, finish in messages:
        if finish == "length":
            text = WHOLE.match(text)[0]  # type: ignore[index]  # it always matches, if only nothing
        text = text.strip()
        if finish == "loop":
            found["repetition"] += 1
        elif len(text) < SHORTEST:
            found["endless" if finish == "length" else "too_short"] += 1
        else:
            prompt = Prompt.single(text, source="self")
            known = prompts.setdefault(prompt.digest(), prompt) is not prompt
            found["duplicates"] += known
            found["shortened"] += finish == "length" and not known
    return list(prompts.values()), {"prompts": len(prompts)} | {reason: n for reason, n in found.items() if n}


def _messages(target_dir: Path, numbers: Sequence[int], how: Asking) -> Iterator[tuple[int, str, str]]:
    """(number, whole message, finish) as the target ends them."""
    import torch

    from eyas.target.answering import make_generator, run_all
    from eyas.target.model import Target
    from eyas.target.requests import Request

    dtype = getattr(torch, how.dtype)
    target = Target.load(target_dir, device=how.device, dtype=dtype, trust_remote_code=how.trust_remote_code)
    before, ends = place_of_user(target.tokenizer)
    openings = list(how.openings)
    starts = [before + list(target.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in openings]
    generator = make_generator(
        target, slots=how.slots, max_new_tokens=how.max_new_tokens, temperature=how.temperature, top_k=how.top_k,
        eos_ids=sorted({*target.facts.eos_ids, *ends}), prefix=before[:-1],
    )  # fmt: skip
    requests = [Request(n, starts[n % len(starts)], answer_seed(how.seed, f"ask {n}")) for n in numbers]
    for answer in run_all(generator, requests, 2 * how.slots):
        said = answer.ids[:-1] if answer.finish == "stop" else answer.ids
        text = openings[answer.key % len(openings)] + target.tokenizer.decode(said, skip_special_tokens=True)
        yield answer.key, text, answer.finish


def place_of_user(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of the chat template before a user's message, and the id right after it (none where it just ends).

    Raises BadInput where the template shows no such place.
    """
    from eyas.chat import Unusable, common_length, render

    words = ("Apples", "Why 7?")
    try:
        a, b = (render(tokenizer, [{"role": "user", "content": text}]) for text in words)
    except Unusable as error:
        raise BadInput(
            f"the target's chat template takes no lone user message ({error}), so it cannot ask; name another "
            "target, or write the prompts yourself"
        ) from error
    head, tail = common_length(a, b), common_length(a[::-1], b[::-1])
    if not head or a == b:
        raise BadInput(
            "the target's chat template puts nothing before a user's message, so it cannot ask by itself; name an "
            "instruction-tuned target, or write the prompts yourself"
        )
    return a[:head], a[len(a) - tail :][:1]
