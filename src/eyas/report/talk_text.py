"""A conversation for the terminal: who made which words, what an answer's rounds came to, one round in words.

Everything a model says passes `harmless` first: an escape sequence in an answer must not steer the terminal.
    pytest tests/test_chat_cli.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from eyas.terminal import CONTROL

if TYPE_CHECKING:
    from eyas.decode.talk import Guess, Look
    from eyas.talk import Turn

DRAFTED, OWN = "green", "yellow"
OPEN, CLOSE = "‹", "›"


def harmless(text: str) -> str:
    """The text without what would steer a terminal: as terminal.harmless, which writes it out where this drops it."""
    return CONTROL.sub("", text)


def quoted(text: str) -> str:
    """A token between quotes, with every character that is not plainly visible written out."""
    return repr(text)


class Marks:
    """Who made which words: in two colours, or without colours what was drafted between ‹ and ›."""

    def __init__(self, colours: bool) -> None:
        self.colours = colours

    @property
    def legend(self) -> str:
        """One line that says how to read it."""
        if self.colours:
            return f"{self._dyed('drafted and accepted', DRAFTED)}, {self._dyed('said by the target itself', OWN)}"
        return f"{OPEN}drafted and accepted{CLOSE}, the rest said by the target itself"

    def piece(self, text: str, own: bool | None) -> str:
        """A piece of an answer, harmless and marked. own: None where nobody knows."""
        text = harmless(text)
        if not text or own is None:
            return text
        if self.colours:
            return self._dyed(text, OWN if own else DRAFTED)
        return text if own else f"{OPEN}{text}{CLOSE}"

    def pieces(self, parts: Sequence[tuple[str, bool | None]]) -> str:
        """Pieces that came together, neighbours of one maker under one mark."""
        merged: list[tuple[str, bool | None]] = []
        for text, own in parts:
            if merged and merged[-1][1] is own:
                merged[-1] = (merged[-1][0] + text, own)
            elif text:
                merged.append((text, own))
        return "".join(self.piece(text, own) for text, own in merged)

    def accepted(self, text: str) -> str:
        """A line about something accepted."""
        return self._dyed(text, DRAFTED) if self.colours else text

    def faint(self, text: str) -> str:
        """A line beside the conversation."""
        import click

        return click.style(text, dim=True) if self.colours else text

    def _dyed(self, text: str, colour: str) -> str:
        import click

        return click.style(text, fg=colour)


def status(turn: Turn, so_far: float | None, source: Any) -> str:
    """The line below an answer: its τ and speed. so_far: τ of the whole conversation; source: who answered."""
    rounds, accepted, drafted = turn.counts
    counted = getattr(source, "counted", None)
    parts = []
    if not source.visible:
        parts.append(f"{source.engine or 'this engine'} sends single tokens: which were drafted cannot be seen")
    elif rounds:
        of = f" of {drafted}" if drafted else ""
        parts.append(f"τ {1 + accepted / rounds:.2f} ({accepted}{of} drafts accepted in {_count(rounds, 'round')})")
        if so_far is not None:
            parts.append(f"{so_far:.2f} so far")
    if counted is not None and counted.rounds and (not source.visible or counted.rounds != len(turn.rounds) - 1):
        merged = "; some rounds arrived together and look like one" if source.visible else ""
        tau, of = 1 + counted.accepted / counted.rounds, _count(counted.rounds, "round")
        parts.append(f"the server counts τ {tau:.2f}, {counted.accepted} in {of}, the last included{merged}")
    speed = turn.tokens_per_s
    parts.append(f"{len(turn.tokens)} tokens" + (f", {speed:.1f} a second" if speed else ""))
    if turn.finish != "stop":
        parts.append("cut off by --max-new-tokens" if turn.finish == "length" else turn.finish)
    return harmless("[" + " · ".join(parts) + "]")


def telling(looks: Sequence[Look | None]) -> int | None:
    """Which round shows most: the first with an accepted and a rejected draft, else with most accepted; None: none."""
    found = [(i, look) for i, look in enumerate(looks) if look is not None and look.guesses]
    if not found:
        return None

    def accepted(look: Look) -> int:
        return sum(g.accepted for g in look.guesses)

    mixed = [i for i, look in found if accepted(look) and not look.tree and accepted(look) < len(look.guesses)]
    return mixed[0] if mixed else max(found, key=lambda pair: accepted(pair[1]))[0]


def explained(look: Look, number: int, decode: Callable[[int], str], marks: Marks) -> str:
    """One round in words. decode: a token's text; number: which round of its answer."""

    def word(token: int) -> str:
        return quoted(decode(token))

    accepted = sum(g.accepted for g in look.guesses)
    how = "as a tree" if look.tree else "one after the other"
    rule = f"sampling at temperature {look.temperature:g}" if look.temperature else "greedy"
    lines = [
        f"Round {number} ({rule}). The text ends with {word(look.last)}. {_count(len(look.guesses), 'token')} drafted "
        f"{how}; the target read them all in one forward."
    ]
    lines += _tree(look, word, marks) if look.tree else _chain(look, word, marks)
    lines.append(_ending(look, word, accepted))
    return "\n".join(lines)


def _chain(look: Look, word: Callable[[int], str], marks: Marks) -> list[str]:
    lines, reached = [], True
    for guess in look.guesses:
        said = f"  {guess.row}. {word(guess.token)}: the draft gave it {guess.draft_odds:.1%}."
        if not reached:
            lines.append(f"{said} Not looked at: it continues a text that was rejected.")
            continue
        lines.append(f"{said} {_verdict(guess, look.temperature, word)}")
        if guess.accepted:
            lines[-1] = marks.accepted(lines[-1])
        reached = guess.accepted
    return lines


def _verdict(guess: Guess, temperature: float, word: Callable[[int], str]) -> str:
    if temperature:
        ratio = min(1.0, guess.target_odds / guess.draft_odds) if guess.draft_odds else 1.0
        what = "and it was" if guess.accepted else "and it was not"
        other = guess.likeliest != guess.token
        most = f" (most to {word(guess.likeliest)}, {guess.likeliest_odds:.1%})" if other else ""
        given = f"The target gives it {guess.target_odds:.1%}{most}"
        return f"{given}, so it is accepted with probability {ratio:.1%}: {what}."
    if guess.accepted:
        return f"The target says the same ({guess.target_odds:.1%}): accepted."
    return (
        f"The target says {word(guess.likeliest)} ({guess.likeliest_odds:.1%}; to the draft's it gives "
        f"{guess.target_odds:.1%}): rejected."
    )


def _tree(look: Look, word: Callable[[int], str], marks: Marks) -> list[str]:
    """The tree drawn, the accepted path marked with *; draft's and target's odds of each node after its parent."""
    below: dict[int, list[Guess]] = {}
    for guess in look.guesses:
        below.setdefault(guess.parent, []).append(guess)
    lines = [f"  {word(look.last)}"]

    def draw(row: int, indent: str) -> None:
        children = below.get(row, [])
        for guess in children:
            last = guess is children[-1]
            mark = "* " if guess.accepted else ""
            odds = f"(draft {guess.draft_odds:.1%}, target {guess.target_odds:.1%})"
            line = f"  {indent}{'└─' if last else '├─'} {mark}{word(guess.token)} {odds}"
            lines.append(marks.accepted(line) if guess.accepted else line)
            draw(guess.row, indent + ("   " if last else "│  "))

    draw(0, "")
    chosen = "drew its own token" if look.temperature else "said its likeliest token"
    lines.append(f"  At each place the target {chosen}; where a child held that token, the walk went on there (*).")
    return lines


def _ending(look: Look, word: Callable[[int], str], accepted: int) -> str:
    own = f"{word(look.token)} ({look.token_odds:.1%})"
    if accepted == len(look.guesses) and not look.tree:
        said = f"All were accepted, and the same forward gives one token more, the target's own {own}."
    elif look.tree:
        said = f"There no child held the target's own {own}, so it ends the round."
    elif look.temperature:
        said = f"In place of the rejected one, {own} is drawn from what the target gives beyond the draft."
    else:
        said = f"The target's own {own} takes the place of the rejected one."
    if not look.token_known:
        said += " It is not in the draft's vocabulary: no draft could have named it."
    return (
        f"{said} So one forward of the target gave {_count(accepted + 1, 'token')}: {accepted} accepted and 1 its own."
    )


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def turn_dict(turn: Turn, text: str, look: Any = None, counted: Any = None) -> dict[str, Any]:
    """Plain JSON values of a turn. look: (number of a round, what it looked at); counted: what the server counted."""
    rounds, accepted, drafted = turn.counts
    plain: dict[str, Any] = {
        "say": turn.say,
        "answer": text,
        "finish": turn.finish,
        "tokens": turn.tokens,
        "own": turn.own,
        "rounds": rounds,
        "accepted": accepted,
        "drafted": drafted or None,
        "tau": round(1 + accepted / rounds, 4) if rounds and any(own is not None for own in turn.own) else None,
        "tokens_per_s": None if turn.tokens_per_s is None else round(turn.tokens_per_s, 2),
    }
    if counted is not None:
        plain["counted_by_server"] = {name: getattr(counted, name) for name in ("rounds", "accepted", "rule", "source")}
    return plain if look is None else {**plain, "explained": {"round": look[0], **look[1].to_dict()}}
