"""Text of tokens as they come: no broken characters, no lost spaces.   pytest tests/test_talk.py

A character of several bytes may be spread over tokens, and a tokenizer may drop a space at the beginning of what it
decodes. So tokens are decoded together with a few before them, and only what is new is given out, once it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
LONGEST = 4
"""Tokens after which an unfinished character is given out as it is: UTF-8 has at most four bytes a character."""


class Pieces:
    """`push` a token, get the text that it completes. `before`: ids before the first one, for its leading space."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.past = list(before)[-LONGEST:]  # given out, kept as context
        self.waiting: list[int] = []
        self.given = 0  # characters of what waits that are given out already
        self.silent = 0  # tokens since something was given out

    def push(self, token: int) -> str:
        """The text that is whole with this token, "" while a character is not."""
        self.waiting.append(token)
        text = self._new()
        whole = text.rstrip(UNFINISHED)
        self.silent = 0 if len(whole) > self.given else self.silent + 1
        if whole == text or self.silent >= LONGEST:
            return self._take(text)
        fresh = whole[self.given :]
        self.given = max(self.given, len(whole))
        return fresh

    def flush(self) -> str:
        """What is left at the end of an answer, an unfinished character as U+FFFD."""
        return self._take(self._new()) if self.waiting else ""

    def _new(self) -> str:
        """What the waiting tokens say after the past ones."""
        old, whole = self._decode(self.past), self._decode(self.past + self.waiting)
        # An unfinished character that was given out as U+FFFD may be finished now: too late for it.
        return whole[len(old) :] if whole.startswith(old) else self._decode(self.waiting)

    def _take(self, text: str) -> str:
        fresh = text[self.given :]
        self.past, self.waiting = (self.past + self.waiting)[-LONGEST:], []
        self.given = self.silent = 0
        return fresh

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
