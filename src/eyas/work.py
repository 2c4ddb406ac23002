"""Prompts that are being answered: handed out in their order, and what became of each, until there is enough.

work = Work(prompts, Ledger(len(prompts), limit), journal, seed, max_new_tokens, progress)
while (dialogue := work.start()) is not None: work.done(dialogue, outcome)
pytest tests/test_regenerate.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from eyas.dialogue import Dialogue, Outcome, answer_seed
from eyas.prompt import Prompt

if TYPE_CHECKING:
    from eyas.features.recorded import RecordingWriter
    from eyas.target.record import Recording

Progress = Callable[[Mapping[str, int]], None]


class Ledger:
    """Outcomes by prompt, and what they add up to in the order of the prompts."""

    def __init__(self, count: int, max_supervised_tokens: int | None):
        self.outcomes: list[Outcome | None] = [None] * count
        self.limit = max_supervised_tokens
        self.end = 0
        """All prompts before this one have an outcome."""
        self.tokens = 0
        """Kept tokens of those."""
        self.finished = 0
        self.kept_anywhere = 0

    def put(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.finished += 1
        self.kept_anywhere += outcome.tokens
        while not self.complete and (next_one := self.outcomes[self.end]) is not None:
            self.tokens += next_one.tokens
            self.end += 1

    @property
    def complete(self) -> bool:
        """Is nothing more needed? True once the limit is reached by prompts in their order, or all have an outcome."""
        return self.end == len(self.outcomes) or (self.limit is not None and self.tokens >= self.limit)

    def worth_starting(self, in_flight: int, guess: int) -> bool:
        """Is another prompt likely to be needed, given how many are being answered? Decides about time, not results."""
        if self.limit is None:
            return True
        mean = self.kept_anywhere / self.finished if self.finished >= 32 else guess
        return self.kept_anywhere + in_flight * mean < self.limit or in_flight == 0


class Work:
    """Hands out dialogues in the order of the prompts and takes their outcomes."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        ledger: Ledger,
        journal: Any,
        seed: int | None,
        max_new_tokens: int,
        progress: Progress | None,
    ):
        self.prompts = prompts
        self.ledger = ledger
        self.journal = journal
        self.seed = seed
        self.guess = max(1, max_new_tokens // 2)
        self.progress = progress
        self.generated = 0
        self.states: RecordingWriter | None = None
        self.set_aside: Counter[str] = Counter()
        self._cursor = 0
        self._in_flight = 0

    def start(self) -> Dialogue | None:
        """The next prompt that has no outcome, while more are needed."""
        while self._cursor < len(self.prompts) and self.ledger.outcomes[self._cursor] is not None:
            self._cursor += 1
        if self._cursor >= len(self.prompts) or not self.ledger.worth_starting(self._in_flight, self.guess):
            return None
        index = self._cursor
        self._cursor += 1
        self._in_flight += 1
        prompt = self.prompts[index]
        return Dialogue(index, prompt, None if self.seed is None else answer_seed(self.seed, prompt.id))

    def done(self, dialogue: Dialogue, outcome: Outcome, recording: Recording | None = None) -> bool:
        """Note an outcome, and the states of its conversation. True: no more are needed.

        An answer whose states are kept is in the journal only once they are on the disk: after a kill it has both or is
        generated again, so that the states do not depend on kills.
        """
        entry = {"id": dialogue.prompt.id, "asked": dialogue.prompt.digest(), "outcome": _plain(outcome)}
        said = outcome.conversation or {}
        if self.states is not None and recording is not None and said.get("response_token_ids"):
            ids = [*said["prompt_token_ids"], *said["response_token_ids"]]
            self.states.add(ids, recording, partial(self.journal.append, entry))
        else:
            self.journal.append(entry)
        return self.note(dialogue.index, outcome)

    def note(self, index: int, outcome: Outcome) -> bool:
        """Count what became of a prompt that `start` has handed out. True: no more are needed."""
        self._in_flight -= 1
        self.generated += outcome.tokens
        self.ledger.put(index, outcome)
        if outcome.reason:
            self.set_aside[outcome.reason] += 1
        self.tell(0)
        return self.ledger.complete

    def tell(self, underway: int) -> None:
        """Say how far it is; underway: tokens of answers that have not ended yet."""
        if self.progress:
            kept = self.ledger.finished - self.set_aside.total()
            tokens = self.ledger.kept_anywhere
            self.progress({"finished": self.ledger.finished, "kept": kept, "tokens": tokens, "underway": underway})


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {k: v for k, v in outcome.__dict__.items() if v not in (None, "", 0)}
