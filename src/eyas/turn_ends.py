"""The texts that end a turn in rendered conversations, and which of them comes first.   pytest tests/test_chat.py"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ends:
    """Texts of the tokens that end a turn, and of all special tokens (any of which may, in some template)."""

    eos: tuple[str, ...]
    special: tuple[str, ...]

    @staticmethod
    def first(text: str, candidates: Iterable[str], start: int, stop: int) -> tuple[int, int] | None:
        """Earliest occurrence of a candidate that lies wholly in text[start:stop], the longest one on a tie."""
        found = [(at, -len(c)) for c in candidates if (at := text.find(c, start, stop)) >= 0]
        if not found:
            return None
        at, size = min(found)
        return at, at - size

    def settle(self, text: str, start: int, end: int) -> tuple[int, int]:
        """A span that a `{% generation %}` block gave, made to end with its end-of-turn token.

        Some authors close the block before that token, some after the newline that follows it.
        """
        inside = text[start:end].rstrip()
        if inside.endswith(self.eos):
            return start, start + len(inside)
        blank = len(text) - end - len(text[end:].lstrip())
        for candidates, at in ((self.eos, end + blank), (self.special, end)):
            closing = max((c for c in candidates if text.startswith(c, at)), key=len, default="")
            if closing and not (candidates is self.special and inside.endswith(self.special)):
                return start, at + len(closing)
        return start, start + len(inside) if inside.endswith(self.special) else end


_ends_of: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Ends]] = weakref.WeakKeyDictionary()


def end_texts(tokenizer: Any, eos_ids: Iterable[int]) -> Ends:
    wanted = tuple(sorted({*eos_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}))
    cache = _ends_of.setdefault(tokenizer, {})
    if wanted not in cache:
        added = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        eos = [added.get(i) or tokenizer.convert_ids_to_tokens(i) for i in wanted]
        cache[wanted] = Ends(tuple(e for e in eos if e), tuple({*added.values(), *tokenizer.all_special_tokens}))
    return cache[wanted]
