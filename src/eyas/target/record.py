"""Recorder: keep the states that tokens leave in the target while it answers, so that nobody computes them again.

    generator = Generator(target, recorder=Recorder(target, taps=(2, 15, 27)))
    for answer in run_all(generator, requests): answer.recording.taps ...

Every token that a Generator feeds passes all blocks; a Recorder looks at the taps meanwhile and keeps them, with the
final state, on a Tape: one a group of slots, one row a slot. Of the rows that chose a token of the answer it also keeps
what the target chose and its logsumexp, which the search for the best token gives almost for free.

The last token of an answer is chosen but never fed, so there is no state of it: its row is zero. Nobody reads that row:
row i of a document stands with the token i+1 and is judged by the tokens after it, and the teacher is read at rows
whose next token is supervised (features/layout.teacher_rows); the last row has no next token.

    pytest tests/test_record.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from eyas.errors import EyasError

STORED = torch.bfloat16  # as in feature shards


@dataclass(frozen=True)
class Recording:
    """What a sequence of L tokens left in the target; on the CPU. The states of its last token are zero, see above."""

    taps: torch.Tensor  # bf16 [L, T*H], ascending taps
    final: torch.Tensor  # bf16 [L, H], what the head reads
    top1: torch.Tensor  # int32 [L], the target's choice for the next token over all V ids, -1 where it was not asked
    logsumexp: torch.Tensor  # float32 [L] of the finished logits over all V ids, 0 where they were not computed

    def __len__(self) -> int:
        return self.top1.shape[0]

    def after(self, earlier: Recording) -> Recording:
        """This one, with what was chosen in an `earlier` sequence, with which this one begins: a turn before."""
        n = len(earlier)
        top1, lse = self.top1.clone(), self.logsumexp.clone()
        asked = top1[:n] >= 0
        top1[:n] = torch.where(asked, top1[:n], earlier.top1)
        lse[:n] = torch.where(asked, lse[:n], earlier.logsumexp)
        return Recording(self.taps, self.final, top1, lse)

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.__dict__.values())


class Tape:
    """What the sequences in one group of slots left behind so far. All writes are copies; shapes as in Recording."""

    def __init__(self, rows: int, capacity: int, width: int, hidden: int, device: torch.device):
        self.hidden = hidden
        self.states = torch.zeros(rows, capacity, width + hidden, dtype=STORED, device=device)  # [rows, L, T*H + H]
        self.top1 = torch.full((rows, capacity), -1, dtype=torch.int32, device=device)
        self.logsumexp = torch.zeros(rows, capacity, device=device)
        self._rows = torch.arange(rows, device=device)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens a row, keeping what is there."""
        extra = capacity - self.states.shape[1]
        if extra > 0:
            self.states = F.pad(self.states, (0, 0, 0, extra))
            self.top1 = F.pad(self.top1, (0, extra), value=-1)
            self.logsumexp = F.pad(self.logsumexp, (0, extra))

    def begin(self, row: int, source: Tape | None = None, length: int = 0) -> None:
        """A new sequence in `row`; its first `length` tokens are those of the only row of `source`."""
        self.top1[row] = -1
        self.logsumexp[row] = 0.0
        if source is not None:
            self.states[row, :length] = source.states[0, :length]

    def keep(self, positions: torch.Tensor, states: torch.Tensor) -> None:
        """One token of every row: positions int64 [rows], states [rows, T*H + H]."""
        self.states[self._rows, positions] = states

    def keep_run(self, row: int, start: int, states: torch.Tensor) -> None:
        """Consecutive tokens of one row: states [n, T*H + H]."""
        self.states[row, start : start + len(states)] = states

    def keep_choice(self, rows: torch.Tensor, positions: torch.Tensor, top1: torch.Tensor, lse: torch.Tensor) -> None:
        """What was chosen after `positions` of `rows`, and the logsumexp there: all [n]."""
        self.top1[rows, positions] = top1.to(torch.int32)
        self.logsumexp[rows, positions] = lse

    def take(self, row: int, length: int) -> Recording:
        """Copy the first `length` tokens of a row, the last of which was never fed."""
        taps, final = self.states[row, :length].split([self.states.shape[2] - self.hidden, self.hidden], -1)
        taps, final = (x.to("cpu", copy=True).contiguous() for x in (taps, final))
        taps[-1], final[-1] = 0, 0
        top1, lse = (x[row, :length].to("cpu", copy=True) for x in (self.top1, self.logsumexp))
        return Recording(taps, final, top1, lse)


class Recorder:
    """Looks at `taps` of an eyas Target while a Generator runs it. Raises BadInput for taps that the target lacks."""

    def __init__(self, target: Any, taps: Sequence[int] | None = None):
        self.target = target
        self.taps = target.facts.check_taps(target.facts.default_taps if taps is None else list(taps))
        self._seen: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """`states` works while this is open."""
        with self.target.recording(self.taps) as self._seen:
            yield
        self._seen = {}

    def tape(self, rows: int, capacity: int) -> Tape:
        hidden = self.target.facts.hidden_size
        return Tape(rows, capacity, len(self.taps) * hidden, hidden, self.target.device)

    def states(self, final: torch.Tensor) -> torch.Tensor:
        """What the last pass left at the taps, and its final states [B, q, H], as on a tape: [B, q, T*H + H]."""
        seen = [self._seen.get(t) for t in self.taps]
        if any(s is None or s.shape != final.shape for s in seen):
            raise EyasError(
                f"{self.target.dir}: a {self.target.facts.model_type} does not show its residual stream at taps "
                f"{list(self.taps)} as one tensor [B, L, H], so its states cannot be recorded while it answers; "
                "leave --record-states out"
            )
        return torch.cat([x.to(self.target.device, STORED) for x in (*seen, final) if x is not None], -1)
