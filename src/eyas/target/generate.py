"""Batched local generation: many prompts answered at once, with token ids, on one model.

    generator = Generator(target, slots=96, max_new_tokens=192)
    for answer in run_all(generator, requests): ...          (answering.py)

Continuous batching: there are so many slots; each step feeds every busy slot its next token, be it of the prompt or the
one just chosen; a slot is refilled as soon as its answer ends, by end-of-turn, length, or because it fell into a loop.
A long prompt is read in one pass of its own, a short one along with everyone's next tokens: that keeps the matrix
products large, which is what counts on a CPU. The beginning that all prompts share is computed once. The head runs only
for rows whose next token is wanted (head.py).

Answers do not depend on what else is generated at the same time (see slots.py), and a sampled answer depends on the
seed of its request only. Exercise it:  pytest tests/test_generate.py
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eyas.errors import BadInput
from eyas.machine import reuse_large_allocations, round_up
from eyas.repetition import RunningPeriods
from eyas.target.head import BlockedHead
from eyas.target.record import Recorder, Tape
from eyas.target.requests import Generated, Request
from eyas.target.sampling import pick, uniform
from eyas.target.slots import COLUMNS, ROWS, Pass, Segment, SlotGroup, slot_attention

LONG = 64  # prompt tokens from which a pass of its own is cheaper than riding along
# Largest difference that counts as rounding, as a share of the largest state. Products of other shapes are summed in
# another order: SmolLM2's 30 blocks make 1e-5 of that in float32 on one CPU, nothing on another; a wrong position 0.1.
ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.5, torch.float16: 0.06}
Step = Callable[[torch.Tensor, Pass], torch.Tensor]


@dataclass
class _Group:
    """The host's side of one group of slots. All arrays have one entry a slot."""

    slots: SlotGroup
    tokens: np.ndarray  # int64 [rows, capacity]: prompt, then answer
    fed: np.ndarray  # int64 [rows]: tokens that are in the cache
    prompt: np.ndarray  # int64 [rows]: length of the prompt
    requests: list[Request | None]
    tape: Tape | None = None
    loops: RunningPeriods = field(init=False)

    def __post_init__(self) -> None:
        self.loops = RunningPeriods(len(self.requests))

    @property
    def busy(self) -> np.ndarray:
        return np.array([r is not None for r in self.requests])


class Generator:
    """Answers requests with `target`, an eyas Target: `add` them, and `step` while it is `running`."""

    def __init__(
        self,
        target: Any,
        *,
        slots: int = 96,
        max_new_tokens: int = 192,
        temperature: float = 0.0,
        top_k: int | None = None,
        eos_ids: Sequence[int] | None = None,
        prefix: Sequence[int] = (),
        stop_loops: bool = True,
        memory_bytes: int = 3 << 29,
        recorder: Recorder | None = None,
    ):
        """top_k: sample from the k likeliest tokens only. prefix: ids with which most prompts begin.

        memory_bytes: what the keys and values of all slots may take. Long sequences use fewer slots then; a single one
        is always allowed. recorder: keep the states of what passes.
        """
        if slots < 1 or max_new_tokens < 1 or temperature < 0 or (top_k is not None and top_k < 1):
            raise BadInput(
                f"slots={slots}, max_new_tokens={max_new_tokens}, temperature={temperature}, top_k={top_k}: slots, new "
                f"tokens and top_k must be at least 1, the temperature at least 0."
            )
        self.model = target.model
        self.facts = target.facts
        self.device = next(self.model.parameters()).device
        self.max_new_tokens = max_new_tokens
        self.temperature, self.top_k = temperature, top_k
        self.eos = np.array(sorted(set(self.facts.eos_ids if eos_ids is None else eos_ids)), dtype=np.int64)
        self.prefix = list(prefix)
        self.stop_loops = stop_loops
        self.recorder = recorder
        self.waiting: deque[Request] = deque()
        self.steps = 0
        self.generated_tokens = 0
        reuse_large_allocations()

        head = self.model.get_output_embeddings()
        self._head = BlockedHead(head.weight, getattr(head, "bias", None), self.facts)
        element = self._head.weight.element_size()
        token_bytes = 2 * self.facts.num_layers * self.facts.num_kv_heads * self.facts.head_dim * element
        count = -(-slots // ROWS)
        self._columns = max(COLUMNS, memory_bytes // (count * token_bytes * ROWS))  # of a full group
        self._groups = [self._group(ROWS) for _ in range(count)]
        self._prefix_slots: SlotGroup | None = None
        self._prefix_tape: Tape | None = None

    # ------------------------------------------------------------------ use

    def add(self, request: Request) -> None:
        """Queue a request. Raises BadInput when prompt and answer cannot fit the target's context."""
        need = len(request.ids) + self.max_new_tokens
        if not request.ids or need > self.facts.max_position:
            raise BadInput(
                f"prompt {request.key!r} has {len(request.ids)} tokens; with {self.max_new_tokens} new ones it must "
                f"fit the target's {self.facts.max_position} positions, and it must not be empty."
            )
        self.waiting.append(request)

    @property
    def active(self) -> int:
        return sum(int(g.busy.sum()) for g in self._groups)

    @property
    def underway(self) -> int:
        """Tokens of the answers that have not ended yet."""
        return sum(int((g.fed - g.prompt + 1).clip(0)[g.busy].sum()) for g in self._groups)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """`step` works while this is open: the model attends over slots."""
        listening = self.recorder.listening() if self.recorder else contextlib.nullcontext()
        with torch.inference_mode(), slot_attention(self.model) as step, listening:
            self._step: Step = step
            if self.prefix and self._prefix_slots is None:
                self._prefix_slots = SlotGroup(1, len(self.prefix))
                self._prefix_tape = self.recorder.tape(1, len(self.prefix)) if self.recorder else None
                self._read(self._prefix_slots, 0, self.prefix, 0, self._prefix_tape)
            yield

    def agrees(self) -> bool:
        """Does the model give over slots the states that it gives by itself? Asked once, before relying on it."""
        known = list(dict.fromkeys(self.prefix)) or list(range(1, min(25, self.facts.vocab_size)))
        ids, split = (known * 24)[:24], 17
        scratch = SlotGroup(1, len(ids))
        with torch.inference_mode():
            own = self.model.get_decoder()(input_ids=self._ids(np.array([ids])), use_cache=False).last_hidden_state
        with self.running():
            self._read(scratch, 0, ids[:split], 0)
            for place in range(split, len(ids)):
                columns = min(round_up(place + 1, COLUMNS), scratch.capacity)
                now = Pass([Segment(scratch, slice(0, 1), slice(0, 1), columns)], self._ids(np.array([[place]])))
                final = self._step(self._ids(np.array([[ids[place]]])), now)[0, 0].float()
                wanted = own[0, place].float()
                if float((final - wanted).abs().max()) > ROUNDING[own.dtype] * float(wanted.abs().max()):
                    return False
        return True

    def step(self) -> list[Generated]:
        """Fill free slots, feed one token to each busy one, return the answers that ended."""
        self._admit()
        groups = [g for g in self._groups if g.busy.any()]
        if not groups:
            return []
        self.steps += 1
        rows = np.concatenate([np.arange(len(g.requests)) for g in groups])
        owner = np.concatenate([np.full(len(g.requests), i) for i, g in enumerate(groups)])
        fed = np.concatenate([g.fed for g in groups])
        busy = np.concatenate([g.busy for g in groups])
        tokens = np.concatenate([g.tokens[np.arange(len(g.fed)), g.fed] for g in groups])
        segments, start = [], 0
        for g in groups:
            count = len(g.requests)
            columns = min(round_up(int(g.fed.max()) + 1, COLUMNS), g.slots.capacity)
            segments.append(Segment(g.slots, slice(start, start + count), slice(0, count), columns))
            start += count
        positions = self._ids(fed[:, None])
        final = self._step(self._ids(tokens[:, None]), Pass(segments, positions))  # [B, 1, H]
        if self.recorder:
            states = self.recorder.states(final)[:, 0]  # a free slot's row is overwritten before it is read
            for g, s in zip(groups, segments, strict=True):
                if g.tape:
                    g.tape.keep(positions[s.batch, 0], states[s.batch])
        final = final[:, 0]  # [B, H]
        for g in groups:
            g.fed += g.busy

        wanted = np.flatnonzero(busy & (fed + 1 >= np.concatenate([g.prompt for g in groups])))
        if not len(wanted):
            return []
        chosen, best, logsumexp = self._choose(final, wanted, fed, [groups[owner[i]].requests[rows[i]] for i in wanted])
        if best is not None and logsumexp is not None:
            for number, g in enumerate(groups):
                mine = owner[wanted] == number
                at, which = self._ids(np.stack([rows[wanted[mine]], fed[wanted[mine]]])), self._ids(mine.nonzero()[0])
                if g.tape:
                    g.tape.keep_choice(at[0], at[1], best[which], logsumexp[which])
        self.generated_tokens += len(wanted)
        return self._record(groups, owner[wanted], rows[wanted], chosen)

    # ------------------------------------------------------------------ slots

    def _group(self, rows: int) -> _Group:
        zeros = np.zeros(rows, dtype=np.int64)
        tokens = np.zeros((rows, COLUMNS), dtype=np.int64)
        tape = self.recorder.tape(rows, COLUMNS) if self.recorder else None
        return _Group(SlotGroup(rows, COLUMNS), tokens, zeros, zeros.copy(), [None] * rows, tape)

    def _columns_for(self, request: Request) -> int:
        """Columns that a request may come to need; reading a prompt in one pass pads it to a multiple of ROWS."""
        return round_up(max(len(request.ids) + self.max_new_tokens, len(request.ids) + ROWS), COLUMNS)

    def _admit(self) -> None:
        """Give waiting requests to free slots: the first groups get the longest that wait, the last the shortest.

        A group whose sequences are long uses so few of its slots that it keeps to its share of the memory.
        """
        if not self.waiting:
            return
        for place, group in enumerate(self._groups):
            for row, held in enumerate(group.requests):
                if held is not None or not self.waiting:
                    continue
                order = sorted(range(len(self.waiting)), key=lambda i: -len(self.waiting[i].ids))
                request = self.waiting[order[(2 * place + 1) * len(order) // (2 * len(self._groups))]]
                columns = max(self._columns_for(request), group.slots.capacity)
                used = int(group.busy.sum())
                if used and (used + 1) * columns > self._columns * ROWS:
                    break
                self.waiting.remove(request)
                self._place(group, row, request)

    def _place(self, group: _Group, row: int, request: Request) -> None:
        need = self._columns_for(request)
        if need > group.slots.capacity:
            group.slots.grow(need)
            group.tokens = np.pad(group.tokens, ((0, 0), (0, group.slots.capacity - group.tokens.shape[1])))
            if group.tape:
                group.tape.grow(group.slots.capacity)
        ids = list(request.ids)
        group.requests[row] = request
        group.tokens[row, : len(ids)] = ids
        group.prompt[row] = len(ids)
        group.loops.clear(row)
        done = 0
        if self._prefix_slots is not None and len(ids) > len(self.prefix) and ids[: len(self.prefix)] == self.prefix:
            done = len(self.prefix)
            group.slots.copy_prefix(row, self._prefix_slots, done)
        if group.tape:
            group.tape.begin(row, self._prefix_tape, done)
        if len(ids) - 1 - done >= (LONG if self.device.type == "cpu" else 2):
            self._read(group.slots, row, ids[:-1], done, group.tape)
            done = len(ids) - 1
        group.fed[row] = done

    def _read(self, slots: SlotGroup, row: int, ids: Sequence[int], start: int, tape: Tape | None = None) -> None:
        """Put ids[start:] into a slot in one pass, padded on the right, where nothing looks, to a multiple of ROWS."""
        count = len(ids) - start
        padded = round_up(count, ROWS)
        slots.grow(start + padded)
        tokens = np.array([*ids[start:], *[ids[-1]] * (padded - count)], dtype=np.int64)
        positions = np.arange(start, start + padded)
        columns = min(round_up(start + padded, COLUMNS), slots.capacity)
        segment = Segment(slots, slice(0, 1), slice(row, row + 1), columns)
        final = self._step(self._ids(tokens[None]), Pass([segment], self._ids(positions[None])))
        if tape and self.recorder:
            tape.keep_run(row, start, self.recorder.states(final)[0, :count])

    def _ids(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    # ------------------------------------------------------------------ tokens

    def _choose(
        self, final: torch.Tensor, wanted: np.ndarray, fed: np.ndarray, requests: Sequence[Request | None]
    ) -> tuple[np.ndarray, torch.Tensor | None, torch.Tensor | None]:
        """The next token of the rows `wanted` of final [B, H], [n]; when recording, the best one and the logsumexp."""
        n = len(wanted)
        padded = np.resize(wanted, round_up(n, ROWS))  # repeats rows; see slots.py on multiples of ROWS
        states = final[self._ids(padded)].to(self._head.weight.device)  # [m, H]
        if self.temperature == 0.0:
            best, logsumexp = self._head.greedy(states, with_logsumexp=self.recorder is not None)
            return best[:n].cpu().numpy(), best[:n], None if logsumexp is None else logsumexp[:n]
        draws = [uniform(r.seed, int(fed[i]) + 1 - len(r.ids)) for i, r in zip(wanted, requests, strict=True) if r]
        logits = self._head.logits(states)[:n]  # [n, V]
        chosen = pick(logits, self.temperature, draws, self.top_k).cpu().numpy()
        return (chosen, logits.argmax(-1), logits.float().logsumexp(-1)) if self.recorder else (chosen, None, None)

    def _record(self, groups: list[_Group], owner: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> list[Generated]:
        """Append the chosen tokens to their rows and free the slots whose answer ended."""
        ended = []
        stops = np.isin(chosen, self.eos)
        for number, group in enumerate(groups):
            mine = np.flatnonzero(owner == number)
            if not len(mine):
                continue
            at, new = rows[mine], chosen[mine]
            group.tokens[at, group.fed[at]] = new
            looping = group.loops.push(at, new) & self.stop_loops
            lengths = group.fed[at] + 1 - group.prompt[at]
            for row, stop, loop, length in zip(at, stops[mine], looping, lengths, strict=True):
                if not (stop or loop or length >= self.max_new_tokens):
                    continue
                request = group.requests[row]
                assert request is not None
                answer = group.tokens[row, group.prompt[row] : group.fed[row] + 1].tolist()
                kept = group.tape.take(row, int(group.fed[row]) + 1) if group.tape and not (loop and not stop) else None
                ended.append(Generated(request.key, answer, "stop" if stop else "loop" if loop else "length", kept))
                group.requests[row] = None
                group.fed[row] = 0
        return ended
