"""Local generation for targets that slots do not fit: one request after the other, with the model's own cache."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from eyas.repetition import RunningPeriods
from eyas.target.requests import Generated, Request
from eyas.target.sampling import pick, uniform


class PlainGenerator:
    """Answers one request after the other with the model's own cache: slow, and right for every causal LM.

    For families whose layers keep something else than keys and values (state-space layers), or whose attention cannot
    be given by name. Used like a Generator.
    """

    def __init__(
        self,
        target: Any,
        *,
        max_new_tokens: int = 192,
        temperature: float = 0.0,
        top_k: int | None = None,
        eos_ids: Sequence[int] | None = None,
        stop_loops: bool = True,
    ):
        self.target = target
        self.facts = target.facts
        self.max_new_tokens = max_new_tokens
        self.temperature, self.top_k = temperature, top_k
        self.eos = set(self.facts.eos_ids if eos_ids is None else eos_ids)
        self.stop_loops = stop_loops
        self.waiting: deque[Request] = deque()
        self.active = self.underway = 0
        self.generated_tokens = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def step(self) -> list[Generated]:
        """Answer the next request."""
        if not self.waiting:
            return []
        from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

        request = self.waiting.popleft()
        loops = RunningPeriods(1)
        start, looped = len(request.ids), False
        temperature, top_k, row = self.temperature, self.top_k, np.zeros(1, dtype=np.int64)

        class Choose(LogitsProcessor):  # our own draw, as a distribution with one token in it
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                token = pick(scores, temperature, [uniform(request.seed, input_ids.shape[1] - start)], top_k)
                return torch.full_like(scores, -torch.inf).index_fill_(1, token, 0.0)

        class Loop(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
                nonlocal looped
                looped = bool(loops.push(row, input_ids[0, -1:].cpu().numpy())[0])
                return torch.tensor([looped], device=input_ids.device)

        model = self.target.model
        ids = torch.tensor([list(request.ids)], device=next(model.parameters()).device)
        stops = sorted(self.eos)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                repetition_penalty=1.0,
                eos_token_id=stops or None,
                pad_token_id=stops[0] if stops else 0,
            ),
            logits_processor=[Choose()],
            stopping_criteria=[Loop()] if self.stop_loops else [],
        )
        new = out[0, start:].tolist()
        self.generated_tokens += len(new)
        return [Generated(request.key, new, "stop" if new[-1] in self.eos else "loop" if looped else "length")]
