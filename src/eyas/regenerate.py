"""`eyas regenerate`: the target answers the prompts itself; those answers are what a draft learns from.

    eyas regenerate prompts.jsonl --out runs/answers
    pytest tests/test_regenerate.py

Writes, in the order of the prompts, conversations.jsonl (what is kept) and set_aside.jsonl (id, reason, detail,
answer): an answer that repeats itself endlessly, an empty one, a prompt too long for the target, an error. Nothing is
dropped silently. While it works, finished answers go to a journal, so that a killed run continues; an answer depends
neither on what was generated beside it nor on when, so both end in the same bytes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.answers import CONVERSATIONS, FIELDS, JOURNAL, SCHEMA, SET_ASIDE, STAGE, STATES
from eyas.artifacts import MANIFEST, check_out, is_current, read_manifest, write_manifest
from eyas.dialogue import REASONS, Outcome
from eyas.digests import sha256_json
from eyas.errors import BadInput
from eyas.journal import Journal
from eyas.locks import inside
from eyas.prompts import BadRow, Prompt, Prompts
from eyas.work import Ledger, Progress, Work
from eyas.writes import atomic_path, remove_leftovers

if TYPE_CHECKING:
    from eyas.answer import Answering

Spread = Callable[[Any, Any, Sequence[Any]], Iterable[Any]]
"""Has pieces done by workers elsewhere: (worker class, settings, pieces) -> results, in any order (on_ray.py)."""
PIECE = 64  # prompts that a worker is given at a time


def regenerate(
    prompts: Prompts | Sequence[Prompt],
    target_dir: Path | None,
    out_dir: Path,
    *,
    max_new_tokens: int = 192,
    temperature: float = 0.0,
    seed: int = 0,
    slots: int = 96,
    max_supervised_tokens: int | None = None,
    server: Any = None,
    device: str = "cpu",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    record_states: bool = False,
    taps: Sequence[int] | None = None,
    spread: Spread | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Answer `prompts` into `out_dir`; returns the counts, which are in its manifest, too.

    server: ServerOptions of an OpenAI-compatible server that answers instead of the model in `target_dir`, which may
    then be None. max_supervised_tokens: stop with the prompt, in their order, that brings so many tokens together.
    record_states: keep what each kept answer left in the local target at `taps` (default: the target's) in
    `out_dir/states`, so that extract(recorded=...) need not compute it; that folder is no part of the result.
    template_kwargs: for the chat template, here or on the server; the manifest says them, and extract goes by it.
    spread: has the prompts answered by workers, which see the target's folder; it records no states.
    progress: called after each outcome with counts so far. A finished `out_dir` with the same inputs is left alone.
    Raises BadInput where `out_dir` holds answers of other settings, and what target and server raise.
    """
    given = prompts if isinstance(prompts, Prompts) else Prompts(list(prompts))
    if not given.prompts:
        raise BadInput("there is no prompt to answer; give at least one.")
    if target_dir is None and server is None:
        raise BadInput("regenerate needs a target to load or the address of a server (--base-url).")
    if spread is not None and (record_states or server is not None):
        raise BadInput("workers answer with the target itself and record no states: leave out the server, the states.")
    check_out(out_dir, STAGE)
    started = time.monotonic()
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    if server is not None:
        settings |= {"base_url": server.base_url, "model": server.model}
    else:
        settings |= {"device": device, "dtype": dtype}
    if template_kwargs:  # answers of before this choice stay current
        settings["template_kwargs"] = dict(template_kwargs)
    identity: dict[str, str] = {}
    if server is None and target_dir is not None:
        from eyas.target.source import identify

        identity = identify(target_dir)
    config = settings | {"max_supervised_tokens": max_supervised_tokens}
    inputs = identity | {"prompts": sha256_json([[p.id, p.digest()] for p in given.prompts])}
    if is_current(out_dir, STAGE, inputs, config, SCHEMA):
        return dict(read_manifest(out_dir)["counts"])
    with inside(out_dir):
        remove_leftovers(out_dir)
        (out_dir / MANIFEST).unlink(missing_ok=True)

        journal = Journal(out_dir / JOURNAL, {"schema": SCHEMA, **identity, **settings}, FIELDS)
        ledger = Ledger(len(given.prompts), max_supervised_tokens)
        resumed = _replay(journal, given.prompts, ledger)
        work = Work(given.prompts, ledger, journal, None if temperature == 0 else seed, max_new_tokens, progress)
        try:
            if ledger.complete:
                generated = 0
            elif server is None:
                assert target_dir is not None
                from eyas.answer import Answering, answer_locally

                how = Answering(
                    target_dir.absolute(), max_new_tokens, temperature, seed, slots, device, dtype, trust_remote_code,
                    dict(template_kwargs or {}),
                )  # fmt: skip
                if spread is not None:
                    generated = _by_workers(work, spread, how)
                else:
                    record = (out_dir / STATES, identity["target"], taps) if record_states else None
                    generated = answer_locally(work, how.load(), how, record)
            else:
                from eyas.target.server import Server

                asking = Server(
                    server, max_new_tokens=max_new_tokens, temperature=temperature, template_kwargs=template_kwargs
                )
                asking.answer_all(work.start, work.done)
                generated = work.generated
        finally:
            journal.close()

        counts = _write(given, ledger, out_dir)
        seconds = time.monotonic() - started
        write_manifest(
            out_dir,
            STAGE,
            inputs=inputs,
            config=config,
            counts=counts,
            duration_s=seconds,
            files=[CONVERSATIONS, SET_ASIDE],
            seed=seed,
            schema=SCHEMA,
        )
        journal.path.unlink(missing_ok=True)
        return counts | {"resumed": resumed, "generated_tokens": generated, "seconds": round(seconds, 1)}


class AnswerWorker:
    """Answers pieces of the prompts on some machine: what the journal must list of each comes back."""

    def __init__(self, how: Answering):
        self.how = how
        self.target = how.load()

    def __call__(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        from eyas.answer import answer_locally

        how = self.how
        seed = None if how.temperature == 0 else how.seed
        noted: list[dict[str, Any]] = []
        work = Work(prompts, Ledger(len(prompts), None), noted, seed, how.max_new_tokens, None)
        answer_locally(work, self.target, how)
        return noted


def _by_workers(work: Work, spread: Spread, how: Answering) -> int:
    """Have the prompts answered that `work` hands out. Returns the number of kept tokens that came back."""
    complete = False
    while not complete:  # once, unless --max-supervised-tokens turns out to need more prompts than it seemed
        asked: dict[tuple[str, str], int] = {}
        waiting: list[Prompt] = []
        while (dialogue := work.start()) is not None:
            asked[dialogue.prompt.id, dialogue.prompt.digest()] = dialogue.index
            waiting.append(dialogue.prompt)
        if not waiting:
            break
        pieces = [waiting[i : i + PIECE] for i in range(0, len(waiting), PIECE)]
        for entries in spread(AnswerWorker, how, pieces):
            for entry in entries:
                work.journal.append(entry)
                complete = work.note(asked[entry["id"], entry["asked"]], Outcome(**entry["outcome"]))
            work.journal.flush()
            if complete:
                break
    return work.generated


# ------------------------------------------------------------------------------------------------ on disk


def _replay(journal: Journal, prompts: Sequence[Prompt], ledger: Ledger) -> int:
    """Put what earlier runs finished into the ledger; how many. Errors are asked again."""
    places = {(p.id, p.digest()): i for i, p in enumerate(prompts)}
    count = 0
    for record in journal.records:
        index = places.get((record["id"], record["asked"]))
        outcome = Outcome(**record["outcome"])
        if index is not None and outcome.reason != "error" and ledger.outcomes[index] is None and not ledger.complete:
            ledger.put(index, outcome)
            count += 1
    return count


def _write(given: Prompts, ledger: Ledger, out_dir: Path) -> dict[str, Any]:
    """The two files, in the order of the prompts, and the counts."""
    reasons = Counter(dict.fromkeys(REASONS, 0))
    finishes: Counter[str] = Counter()
    tokens = 0
    with (
        atomic_path(out_dir / CONVERSATIONS) as kept_path,
        atomic_path(out_dir / SET_ASIDE) as aside_path,
        open(kept_path, "w", encoding="utf-8") as kept,
        open(aside_path, "w", encoding="utf-8") as aside,
    ):
        for row in given.bad:
            aside.write(_line(_bad(row)))
        for prompt, outcome in zip(given.prompts[: ledger.end], ledger.outcomes[: ledger.end], strict=True):
            assert outcome is not None
            if outcome.conversation is not None:
                kept.write(_line(outcome.conversation))
                finishes[outcome.conversation["finish"]] += 1
                tokens += outcome.tokens
            else:
                reasons[outcome.reason] += 1
                aside.write(
                    _line(
                        {
                            "id": prompt.id,
                            "source": prompt.source,
                            "reason": outcome.reason,
                            "detail": outcome.detail,
                            "answer": outcome.answer,
                        }
                    )
                )
    return {
        "prompts": ledger.end,
        "kept": finishes.total(),
        "supervised_tokens": tokens,
        "finish": dict(sorted(finishes.items())),
        "set_aside": {k: v for k, v in reasons.items() if v},
        "malformed": len(given.bad),
        "duplicates": given.duplicates,
        "renamed": given.renamed,
    }


def _bad(row: BadRow) -> dict[str, Any]:
    return {"id": None, "source": f"{row.file}:{row.line}", "reason": "malformed", "detail": row.expected, "answer": "",
            "text": row.text}  # fmt: skip


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
