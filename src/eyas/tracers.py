"""Where the assistant's turns lie in a rendered conversation, for any chat template: tracers.

The messages are rendered a second time with short marks around the visible text of every message. Taking the marks out
must give the first rendering back, letter by letter: the proof that they changed nothing. So we know where each message
lies, whatever its text holds (the template's own headers, the same sentence twice) and whatever the template does with
it (trimming, dropping old thoughts, moving the system message). A turn begins where the generation prompt ends, seen by
rendering the messages before it with `add_generation_prompt`; it ends with the first end-of-turn token after it.

Exercise it:  pytest tests/test_chat.py
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import BadInput
from eyas.turn_ends import Ends
from eyas.untrusted import parse_json

Messages = Sequence[Mapping[str, Any]]
_UNMARKED = {"role", "type", "id", "tool_call_id"}  # values that templates compare or index by
_TAGS_BEFORE = re.compile(r"(?:\s|<[^<>]*>|\[[^\[\]]*\])*")
_TAGS_AFTER = re.compile(r"(?:\s|<[^<>]*>|\[[^\[\]]*\])*$")
_REMEDY = "put {% generation %} ... {% endgeneration %} around the assistant's turns in the template"
_WIDTH = 14  # characters of one tracer
_ANSWERS = ("Quite so.", "7 of them.")  # two answers that begin differently, so that only the header is common


class Unusable(BadInput):
    """A conversation that cannot be trained on; `reason` is one of the names below, for counting.

    malformed, no_assistant_turn, empty_turn, template_rejects, turn_not_found, mask_all_zero, mask_all_one, too_long
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def render_text(
    tokenizer: Any, messages: Messages, tools: list[Any] | None, generation_prompt: bool, kwargs: Mapping[str, Any]
) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **kwargs
        )
    except Exception as error:  # a template may raise anything; its own words help most
        raise Unusable("template_rejects", f"the chat template rejects it: {error}") from error


@dataclass
class _Leaf:
    """One string inside one message, and where its tracers go."""

    message: int
    path: tuple[Any, ...]
    text: str
    style: str = "outer"  # outer: around the visible text | inner: within it, clear of <tags> | none

    def cuts(self) -> tuple[int, int] | None:
        """Where the two tracers go, as positions in `text`; None where there is nothing to mark."""
        first = len(self.text) - len(self.text.lstrip())
        last = len(self.text.rstrip())
        if self.style == "inner":
            before, after = _TAGS_BEFORE.match(self.text), _TAGS_AFTER.search(self.text)
            first, last = (before.end() if before else first), (after.start() if after else last)
        if self.style == "none" or first >= last:
            return None
        return (min(first + 1, last - 1), last - 1) if self.style == "inner" else (first, last)

    def marked(self, number: int, nonce: str) -> str:
        """The text with its tracers, each `_WIDTH` characters of [A-Za-z0-9], which no filter and no JSON changes."""
        cuts = self.cuts()
        if cuts is None:
            return self.text
        first, last = cuts
        begin, end = (f"{nonce}{number:06d}{side}" for side in "be")
        return self.text[:first] + begin + self.text[first:last] + end + self.text[last:]

    def outside(self) -> tuple[str, str]:
        """The visible text before the first tracer and after the second one; both empty in the outer style."""
        first, last = self.cuts() or (0, 0)
        return self.text[:first].lstrip(), self.text[last:].rstrip()


@dataclass(frozen=True)
class _Mark:
    leaf: _Leaf
    message: int
    side: str  # b: before the text, e: after it
    start: int  # character span in the traced rendering
    end: int


class Tracing:
    """Where each message lies in a rendering, learned by rendering it once more with tracers."""

    def __init__(
        self, tokenizer: Any, messages: Messages, tools: list[Any] | None, kwargs: Mapping[str, Any], text: str
    ):
        self.tokenizer, self.tools, self.kwargs = tokenizer, tools, kwargs
        self.text = text
        self.leaves = [_Leaf(i, path, value) for i, m in enumerate(messages) for path, value in _strings(m)]
        self.nonce = next(n for n in _nonces() if n not in text and all(n not in leaf.text for leaf in self.leaves))
        self.pattern = re.compile(self.nonce + r"(\d{6})([be])")
        self.messages = [_plain(m) for m in messages]
        self.traced = self._trace()
        self.marks = self._marks(self.traced)

    def _render(self, upto: int | None = None, generation_prompt: bool = False, extra: Messages = ()) -> str:
        """Render the first `upto` messages, with tracers, and `extra` ones after them."""
        traced = [_plain(m) for m in self.messages[:upto]]
        for number, leaf in enumerate(self.leaves):
            if upto is None or leaf.message < upto:
                at: Any = traced[leaf.message]
                for key in leaf.path[:-1]:
                    at = at[key]
                at[leaf.path[-1]] = leaf.marked(number, self.nonce)
        return render_text(self.tokenizer, [*traced, *extra], self.tools, generation_prompt, self.kwargs)

    def _harmless(self) -> str | None:
        """The traced rendering if the tracers changed nothing else, None otherwise."""
        try:
            traced = self._render()
        except Unusable:
            return None
        return traced if self.pattern.sub("", traced) == self.text else None

    def _trace(self) -> str:
        traced = self._harmless()
        if traced is not None:
            return traced
        # Some text is compared by the template. Find out which, one leaf at a time, and trace it differently.
        styles = ["outer"] * len(self.leaves)
        for leaf in self.leaves:
            leaf.style = "none"
        for number, leaf in enumerate(self.leaves):
            for style in ("outer", "inner", "none"):
                leaf.style = styles[number] = style
                if style == "none" or self._harmless() is not None:
                    break
            leaf.style = "none"
        for leaf, style in zip(self.leaves, styles, strict=True):
            leaf.style = style
        traced = self._harmless()
        if traced is None:
            raise Unusable(
                "turn_not_found",
                f"the chat template depends on the texts of several messages at once; {_REMEDY}",
            )
        return traced

    def _marks(self, traced: str) -> list[_Mark]:
        found = ((m, self.leaves[int(m[1])]) for m in self.pattern.finditer(traced))
        return [_Mark(leaf, leaf.message, m[2], m.start(), m.end()) for m, leaf in found]

    def _real(self, position: int) -> int:
        """A position in the traced rendering as one in the real rendering."""
        return position - _WIDTH * sum(mark.end <= position for mark in self.marks)

    def spans(self, ends: Ends) -> list[tuple[int, int]]:
        """Character spans, in the real rendering, of the assistant turns."""
        turns = []
        for j, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            mine = [m for m in self.marks if m.message == j]
            if not mine:
                texts = [leaf for leaf in self.leaves if leaf.message == j and leaf.text.strip()]
                if not texts:
                    raise Unusable("empty_turn", f"message {j}, an assistant turn, is empty; remove it or fill it")
                if any(leaf.cuts() for leaf in texts):
                    continue  # the template drops this turn altogether
                raise Unusable(
                    "turn_not_found", f"the chat template takes message {j}, an assistant turn, apart; {_REMEDY}"
                )
            others = [m for m in self.marks if m.message != j]
            if any(mine[0].start < m.start < mine[-1].start for m in others):
                raise Unusable("turn_not_found", f"the chat template mixes message {j} with others")
            before = max((m.end for m in others if m.end <= mine[0].start), default=0)
            after = min((m.start for m in others if m.start >= mine[-1].end), default=len(self.traced))
            rest = mine[-1].leaf.outside()[1] if mine[-1].side == "e" else ""
            last = mine[-1].end + (len(rest) if self.traced.startswith(rest, mine[-1].end) else 0)
            turns.append((j, self._start(j, before, mine[0]), last, after))
        learned = self._learned_end(turns, ends)
        return [
            (self._real(start), self._real(self._end(j, last, after, ends, learned))) for j, start, last, after in turns
        ]

    def _start(self, j: int, before: int, first: _Mark) -> int:
        """Where turn j begins: after the generation prompt that follows the message before it."""
        mark = self.traced[max(0, before - _WIDTH) : before]
        tail = self._prompt_tail(j, mark)
        if tail is not None and self.traced.startswith(tail, before):
            return before + len(tail)
        # The turn does not begin with the generation prompt (which opens a thought, or is spaced differently): then the
        # header is what two answers that begin differently have in common. Spaces at its end go with the answer, since
        # tokenizers put them into the first word.
        pieces = [self._tail(upto=j, extra=[{"role": "assistant", "content": c}]) for c in _ANSWERS] if j else []
        if pieces and all(p is not None and p[0] == mark for p in pieces):
            header = _common_prefix([p[1] for p in pieces if p]).rstrip(" ")
            if header and self.traced.startswith(header, before):
                return before + len(header)
        head = first.leaf.outside()[0]
        if first.side == "b" and self.traced.endswith(head, 0, first.start):
            return first.start - len(head)  # the scaffold alone: the turn begins with its visible text
        raise Unusable(
            "turn_not_found",
            f"where message {j}, an assistant turn, begins cannot be told from the chat template; {_REMEDY}",
        )

    def _prompt_tail(self, j: int, mark: str) -> str | None:
        """What follows `mark`, the last tracer before turn j, when the target is asked to go on there."""
        found = self._tail(upto=j, generation_prompt=True) if j else None
        return found[1] if found and found[0] == mark else None

    def _tail(self, **rendering: Any) -> tuple[str, str] | None:
        """(last tracer of a rendering, the text after it), None where the template refuses to render that."""
        try:
            text = self._render(**rendering)
        except Unusable:
            return None
        end = max((m.end for m in self._marks(text)), default=0)
        return text[max(0, end - _WIDTH) : end], text[end:]

    def _learned_end(self, turns: list[tuple[int, int, int, int]], ends: Ends) -> tuple[str, ...]:
        """The special token that follows an answer in plain words, where it is none of the known eos ids."""
        for j, _, last, after in turns:
            if self.messages[j].get("tool_calls") or Ends.first(self.traced, ends.eos, last, after):
                continue
            found = Ends.first(self.traced, ends.special, last, after)
            if found and self.traced[slice(*found)] not in self._generation_prompt(j):  # not the next turn's header
                return (self.traced[slice(*found)],)
        return ()

    def _generation_prompt(self, j: int) -> str:
        """What `add_generation_prompt` adds after the messages before turn j."""
        without, added = self._tail(upto=j), self._tail(upto=j, generation_prompt=True)
        if j and without and added and without[0] == added[0] and added[1].startswith(without[1]):
            return added[1][len(without[1]) :]
        return ""

    def _end(self, j: int, last: int, after: int, ends: Ends, learned: tuple[str, ...]) -> int:
        found = Ends.first(self.traced, (*ends.eos, *learned), last, after)
        if found:
            return found[1]
        if self.messages[j].get("tool_calls"):  # what closes the call lies after its last text
            found = Ends.first(self.traced, ends.special, last, after)
            if found and self.traced[slice(*found)] not in self._generation_prompt(j):
                return found[1]
            if after < len(self.traced):
                raise Unusable(
                    "turn_not_found", f"no end-of-turn token follows the tool call of message {j}; {_REMEDY}"
                )
            return len(self.traced.rstrip())
        return last


def _nonces() -> Iterator[str]:
    number = 0
    while True:
        yield f"Zq{number:03d}Kv"
        number += 1


def _common_prefix(texts: list[str]) -> str:
    size = 0
    for letters in zip(*texts, strict=False):
        if len(set(letters)) > 1:
            break
        size += 1
    return texts[0][:size]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(dict(message))


def _strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Every text inside a message that may be traced, with the path to it."""
    if isinstance(value, str):
        if path[-1:] != ("arguments",) or not _is_json(value):  # a JSON text may be parsed by the template
            yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _UNMARKED:
                yield from _strings(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _strings(inner, (*path, i))


def _is_json(text: str) -> bool:
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        parse_json(text)
    except ValueError:
        return False
    return True
