"""A few proved answers as they were decoded: what each round drafted, what of it was accepted, what the target added.

`prove` keeps them in its result, with the text of each token, so that a page can show them without the tokenizer.
    eyas report runs/demo          pytest tests/test_decode_samples.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eyas.decode.pieces import Pieces
from eyas.decode.step import ChainDrafter

if TYPE_CHECKING:
    from eyas.decode.cases import Case
    from eyas.decode.step import Drafter

CONTEXT = 400
"""Characters of the prompt that are kept, from its end."""


def sample(tokenizer: Any, drafter: Drafter, case: Case) -> dict[str, Any]:
    """One speculative answer as plain JSON values; tokens are texts.

    set, index, prompt (its end), first (prefill's token), finish, and rounds of {drafted, accepted, own, known, said}:
    drafted is null for a tree; accepted holds the texts of the drafts that were; own is the target's token, null where
    the answer ended before it; known says whether the draft vocabulary has it. Each of these tokens is decoded alone
    behind what stands before it, so a part of a character is U+FFFD; `said` is the answer's own text, that of the
    accepted drafts and that of the target's token, a character of several tokens being with the last of them.
    """
    answer = case.speculative
    assert answer is not None
    tokens = answer.tokens
    known = set(drafter.ids.tolist()) if isinstance(drafter, ChainDrafter) else None
    prompt = str(tokenizer.decode(case.ids, skip_special_tokens=False))
    flow = Pieces(tokenizer, case.ids)
    first = flow.push(tokens[0])
    rounds: list[dict[str, Any]] = []
    start = 1
    for number, (accepted, end) in enumerate(zip(answer.accepted, answer.ends, strict=True)):
        before = case.ids + tokens[:start]
        kept = tokens[start:end]  # the slice ends where the answer does
        own = kept[accepted] if accepted < len(kept) else None
        drafted = answer.drafted[number] if answer.drafted else None
        rounds.append({
            "drafted": None if drafted is None else _texts(tokenizer, before, drafted),
            "accepted": _texts(tokenizer, before, kept[:accepted]),
            "own": None if own is None else _texts(tokenizer, before + kept[:accepted], [own])[0],
            "known": None if own is None or known is None else own in known,
            "said": ["".join(flow.push(t) for t in part) for part in (kept[:accepted], kept[accepted:])],
        })  # fmt: skip
        start = end
    rest = flow.flush()
    if rounds:
        rounds[-1]["said"][1] += rest
    else:
        first += rest
    return {
        "set": case.set,
        "index": case.index,
        "prompt": prompt if len(prompt) <= CONTEXT else "…" + prompt[-CONTEXT:],
        "first": first,
        "rounds": rounds,
        "finish": answer.finish,
    }


def _texts(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The text of each token behind what stands before it; a part of a character is U+FFFD."""
    texts, before = [], list(before)
    for token in tokens:
        piece = Pieces(tokenizer, before)
        texts.append(piece.push(token) + piece.flush())
        before.append(token)
    return texts
