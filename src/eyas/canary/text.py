"""What a canary is trained on and asked for: the target's own greedy float32 answers to a handful of prompts.

Answers are chosen that a small numerical difference does not change: of more candidates those whose least gap between
the two best logits is widest, and that do not end early. Their length is 1 + rounds * (K + 1) tokens, so that where
everything is accepted no round is cut off, and every way of counting gives the same.

    pytest tests/test_canary.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..doctor.material import Material
from ..errors import BadInput
from ..target.facts import TargetFacts
from ..target.model import Target

FINAL = -1
"""In place of a tap: the final state after the final norm."""
BATCH = 4  # answers whose states are computed at once: bounds memory

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    """One prompt of a canary."""

    messages: Messages | None
    """None where only ids were given."""
    ids: list[int]
    tokens: list[int]
    """The answer as it is asked for; a few more tokens are recorded."""
    gap: float
    """Least difference of the two best logits in it."""


@dataclass(frozen=True)
class Text:
    """The chosen prompts and their recorded answers."""

    asked: list[Asked]
    material: Material
    """States of each tap, and of FINAL, in float32."""
    rounds: int
    """Of one prompt, where everything is accepted."""


def record(
    folder: Path,
    prompts: Sequence[Messages],
    taps: Sequence[int],
    *,
    count: int,
    k: int,
    rounds: int,
    device: str = "cpu",
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Text:
    """Answer all `prompts`, keep the best `count`, record their states at `taps`.

    Raises BadInput where the target's positions do not suffice.
    """
    from ..chat import render
    from ..target.answering import make_generator, run_all
    from ..target.requests import Request

    target = Target.load(folder, device=device, dtype=torch.float32, trust_remote_code=trust_remote_code)
    facts, tokens = target.facts, 1 + rounds * (k + 1)
    more = tokens + k - 1  # a round that begins before the last token is verified to its end
    texts = [render(target.tokenizer, messages, add_generation_prompt=True) for messages in prompts]
    room = facts.max_position or (1 << 30)
    requests = [Request(i, ids) for i, ids in enumerate(texts) if 0 < len(ids) <= room - more]
    if not requests:
        raise BadInput(
            f"{folder}: none of the prompts leaves room for {more} tokens in {room} positions; give shorter prompts "
            "(--prompts)"
        )
    tell(f"the target answers {len(requests)} prompts")
    generator = make_generator(target, slots=len(requests), max_new_tokens=more, eos_ids=(), stop_loops=False)
    answers = {answer.key: list(answer.ids) for answer in run_all(generator, requests)}
    tell("recording its states")
    found = [(*_gap(target, texts[i], answers[i], tokens), i) for i in sorted(answers)]
    # Those that would have ended come last; of the others the safest first.
    best = sorted(found, key=lambda f: (not f[1], f[0]), reverse=True)[:count]
    chosen = sorted(i for *_, i in best)
    gaps = {i: gap for gap, _, i in best}
    asked = [Asked(prompts[i], texts[i], answers[i][:tokens], round(gaps[i], 4)) for i in chosen]
    return Text(asked, _material(target, [(texts[i], answers[i]) for i in chosen], taps), rounds)


def _gap(target: Target, prompt: Sequence[int], answer: Sequence[int], tokens: int) -> tuple[float, bool]:
    """(least gap of the two best logits over the answer, does it end before its last token)."""
    ids = torch.tensor([*prompt, *answer[:-1]])[None]
    _, final = target.states(ids, taps=(0,))
    best = target.head(final[0, len(prompt) - 1 :]).float().topk(2, -1).values
    return float((best[:, 0] - best[:, 1]).min()), bool(set(answer[:tokens]) & set(target.facts.eos_ids))


def _material(target: Target, pairs: Sequence[tuple[list[int], list[int]]], taps: Sequence[int]) -> Material:
    states: dict[int, list[torch.Tensor]] = {tap: [] for tap in (*taps, FINAL)}
    width = target.facts.hidden_size
    for start in range(0, len(pairs), BATCH):
        part = [[*prompt, *answer] for prompt, answer in pairs[start : start + BATCH]]
        lengths = [len(ids) for ids in part]
        padded = torch.tensor([ids + [ids[-1]] * (max(lengths) - len(ids)) for ids in part])
        seen, final = target.states(padded, lengths, taps)
        for row, length in enumerate(lengths):
            for place, tap in enumerate(taps):
                states[tap].append(seen[row, :length, place * width : (place + 1) * width].cpu().clone())
            states[FINAL].append(final[row, :length].cpu().clone())
    documents = [[*prompt, *answer] for prompt, answer in pairs]
    ids = torch.tensor([i for d in documents for i in d])
    mask = torch.tensor([n >= len(prompt) for prompt, answer in pairs for n in range(len(prompt) + len(answer))])
    following = torch.cat([ids[1:], ids[:1] * 0 - 1])
    ahead = torch.cat([mask[1:], mask[:1] & False])
    return Material(
        ids=ids,
        offsets=torch.tensor([0, *(len(d) for d in documents)]).cumsum(0),
        mask=mask,
        choice=torch.where(ahead, following, -1),  # greedy: what it chose is what stands there
        states={tap: torch.cat(parts) for tap, parts in states.items()},
        source=f"{len(documents)} greedy answers of the target",
        final_tap=target.facts.num_layers,
    )


def needed_taps(facts: TargetFacts, taps: Sequence[int]) -> tuple[int, ...]:
    """Every tap that a neighbour of `taps` may read; ascending."""
    wanted = {t + shift for t in taps for shift in (-1, 0, 1)} | {facts.num_layers, 0, 1, 2}
    if facts.num_layers >= 7:
        wanted |= {t + shift for t in facts.default_taps for shift in (-1, 0, 1)}
    return tuple(sorted(t for t in wanted if 0 <= t <= facts.num_layers))


def messages_of(prompts: Sequence[str]) -> list[Messages]:
    """One user message each."""
    return [[{"role": "user", "content": text}] for text in prompts]


def to_json(asked: Sequence[Asked]) -> list[Mapping[str, Any]]:
    """As canary.json holds them."""
    return [{"messages": a.messages, "ids": a.ids, "tokens": a.tokens, "gap": a.gap} for a in asked]
