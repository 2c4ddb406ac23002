"""A served count in, a verdict out: pass, near, or fail, and what the failing pattern looks like.

    verdict(canary, Heard(rounds=104, accepted=416))

Pass: every draft of every round was accepted and the answers are the recorded ones. Near: the answers leave the
recorded text somewhere, and up to there nearly everything was accepted: another precision or kernel. Fail: anything
else. The text tells first whether the target is another; only then do the counts speak of the draft.

    pytest tests/test_canary.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..chat import common_length
from ..decode.acceptance import Acceptance
from ..errors import BadInput, Mismatch
from ..untrusted import content, parse_json

NEAR_TEXT = 0.25  # share of the text that must be the recorded one before it is called the same target
NEAR_ACCEPTED = 0.8  # share of drafts that must be accepted within that text
ALIKE = 0.02  # difference of the mean acceptance rate below which two patterns are the same
WHOLE = 8  # rounds that were accepted whole, and no other with a single draft: more than chance
NAMED = 4  # neighbours that a verdict names at most

Verdict = Literal["pass", "near", "fail"]


@dataclass(frozen=True)
class Heard:
    """What a deployment gave on the canary's prompts. Raises BadInput for impossible counts."""

    rounds: int
    accepted: int
    at_least: tuple[int, ...] = ()
    """Rounds in which the first 1, 2, ... K drafts were all accepted; () where nobody says."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """The answers; () where nobody says."""
    each: tuple[tuple[int, ...], ...] = ()
    """Accepted drafts round by round, for each answer; () where nobody says."""
    engine: str = ""
    k: int | None = None

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.accepted < 0 or (self.accepted and not self.rounds):
            raise BadInput(
                f"{self.accepted} accepted drafts in {self.rounds} rounds: no server counts that; check `rounds` "
                "and `accepted`"
            )
        most = max(self.k or 0, len(self.at_least)) or None
        if most and self.accepted > most * self.rounds:
            raise BadInput(
                f"{self.accepted} accepted drafts in {self.rounds} rounds of {most}: no server counts that; check "
                "`rounds`, `accepted` and `k`"
            )

    @property
    def tau(self) -> float:
        """1 + accepted / rounds; 1 where nothing was drafted."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


@dataclass(frozen=True)
class Judged:
    """The verdict."""

    verdict: Verdict
    tau: float
    expected: float
    rounds: int
    accepted: int
    says: str
    """One or two sentences."""
    like: tuple[str, ...] = ()
    """Neighbours whose pattern it is, nearest first."""
    unconditional: tuple[float, ...] = ()
    text: dict[str, Any] = field(default_factory=dict)
    """{"same": answers that are the recorded ones, "of": all, "first_difference": token}; {} where nobody says."""
    engine: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def verdict(canary: Mapping[str, Any], heard: Heard) -> Judged:
    """Judge. Raises Mismatch where it was measured with another K than the canary's."""
    k, expected = int(canary["k"]), canary["expected"]
    drafted = heard.k or len(heard.at_least) or k
    if drafted != k:
        raise Mismatch(f"measured with {drafted} drafted tokens a round, but this canary is for {k}; serve it with {k}")
    text = _text(canary, heard)
    rates = tuple(round(n / heard.rounds, 4) for n in heard.at_least) if heard.rounds else ()
    whole = heard.rounds > 0 and heard.accepted == heard.rounds * k
    same = not text or text["same"] == text["of"]
    how: Verdict = "fail"
    like: tuple[str, ...] = ()
    if whole and same and heard.rounds == expected["rounds"]:
        how, says = "pass", "Every draft of every round was accepted: the engine reads this draft as it was trained."
    elif whole and same:
        says = (
            f"Every draft was accepted, but in {heard.rounds} rounds instead of {expected['rounds']}: these are not "
            f"the canary's prompts, or the server counted other requests, too."
        )
    elif not same:
        how, says = _other_text(k, heard, text)
    elif not heard.rounds:
        says = "Nothing was drafted at all: the server runs without a draft, or stops drafting at once."
    else:
        like = resembles(canary, heard)
        says = _counts(heard, k, like)
    return Judged(how, round(heard.tau, 4), expected["tau"], heard.rounds, heard.accepted, says, like, rates, text,
                  heard.engine)  # fmt: skip


def _text(canary: Mapping[str, Any], heard: Heard) -> dict[str, Any]:
    wanted = [p["tokens"] for p in canary["prompts"]]
    if not heard.tokens:
        return {}
    if len(heard.tokens) != len(wanted):
        raise Mismatch(
            f"{len(heard.tokens)} answers, but the canary has {len(wanted)} prompts; ask it all prompts of "
            "canary.json, in their order"
        )
    common = [common_length(a, b) for a, b in zip(wanted, heard.tokens, strict=True)]
    differ = [c for c, w in zip(common, wanted, strict=True) if c < len(w)]
    return {"same": len(wanted) - len(differ), "of": len(wanted), "first_difference": min(differ, default=None),
            "common": common, "tokens": sum(map(len, wanted))}  # fmt: skip


def _other_text(k: int, heard: Heard, text: Mapping[str, Any]) -> tuple[Verdict, str]:
    """The answers are not the recorded ones: another target, or the same in another precision?"""
    share = sum(text["common"]) / text["tokens"]
    where = (f"{text['of'] - text['same']} of {text['of']} answers leave the recorded text, the first at token "
             f"{text['first_difference']}")  # fmt: skip
    rounds, accepted = _within(heard, text["common"], k)
    rate = accepted / (rounds * k) if rounds else math.nan
    before = f"; up to there {accepted} of {rounds * k} drafts were accepted" if rounds else ""
    if share < NEAR_TEXT:
        return "fail", f"{where}: the server runs another target, or another prompt reaches it{before}."
    if rate >= NEAR_ACCEPTED or (not rounds and heard.tau > 1 + NEAR_ACCEPTED * k * share):
        return "near", (f"{where}{before}. The draft is read rightly; the target's numbers are not float32's (dtype, "
                        f"quantisation, kernels). Serve in float32 to be sure.")  # fmt: skip
    return "fail", f"{where}{before}: the target is another one (weights, precision), and the draft does not fit it."


def _within(heard: Heard, common: Sequence[int], k: int) -> tuple[int, int]:
    """(rounds, accepted) of those rounds that lie within the recorded text; (0, 0) where rounds are not told."""
    rounds = accepted = 0
    for each, length in zip(heard.each, common, strict=False):
        at = 1
        for n in each:
            if at + k + 1 > length:
                break
            rounds, accepted, at = rounds + 1, accepted + n, at + n + 1
    return rounds, accepted


def resembles(canary: Mapping[str, Any], heard: Heard) -> tuple[str, ...]:
    """Neighbours with the pattern that was heard, nearest first: those with the very counts, which engines reproduce,
    else all that are as near as the nearest."""
    k, found, exact = int(canary["k"]), [], []
    for n in canary["neighbours"]:
        a = Acceptance(tuple(n["histogram"]))
        if (a.rounds, a.accepted) == (heard.rounds, heard.accepted) and heard.at_least in ((), a.at_least[1:]):
            exact.append(n["name"])
        if heard.at_least and heard.rounds and a.rounds:
            mine = [count / heard.rounds for count in heard.at_least]
            distance = sum(abs(x - y) for x, y in zip(mine, a.unconditional, strict=True)) / k
        else:
            distance = abs(heard.tau - a.tau) / k
        found.append((distance, n["name"]))
    if exact:
        return tuple(exact)
    found.sort(key=lambda f: f[0])
    return tuple(name for distance, name in found if distance <= found[0][0] + ALIKE and distance <= ALIKE)


def _counts(heard: Heard, k: int, like: Sequence[str]) -> str:
    share = heard.accepted / (heard.rounds * k)
    said = f"{heard.accepted} of {heard.rounds * k} drafts were accepted in {heard.rounds} rounds"
    at_once = heard.at_least and len(set(heard.at_least)) == 1 and heard.at_least[0] >= WHOLE
    if heard.accepted == 0:
        return (
            f"{said}: the draft is not read at all as it was trained (map, head, states, EAGLE instead of EAGLE3, a "
            f"tensor that was not loaded)."
        )
    if share > 0.9:
        return f"{said}: nearly all. The end of each answer, or a little noise (precision, kernels), not a convention."
    if at_once:
        return (f"{said}, each round whole or not at all: that is how an engine looks that stops drafting where "
                f"sequences grow too long (max_position_embeddings, the length it is served with).")  # fmt: skip
    if like:
        more = f" (or {len(like) - NAMED} others)" if len(like) > NAMED else ""
        return f"{said}: as with {'; '.join(like[:NAMED])}{more}."
    return f"{said}: a pattern that none of the replayed neighbours has. The engine or its flags are at fault."


def of_file(path: str | Path) -> Heard:
    """A measurement made elsewhere: JSON with `rounds` and `accepted`, where known also `at_least`, `tokens`, `k`,
    `engine`. Raises BadInput naming what is missing."""
    try:
        value = parse_json(content(path))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{path} cannot be read as JSON ({error}); --check takes an object with `rounds` and `accepted`"
        ) from None
    if not isinstance(value, Mapping) or not all(type(value.get(n)) is int for n in ("rounds", "accepted")):
        raise BadInput(f"{path}: expected an object with whole numbers `rounds` and `accepted`")
    try:
        return Heard(
            value["rounds"], value["accepted"], tuple(int(n) for n in value.get("at_least") or ()),
            tuple(tuple(int(i) for i in ids) for ids in value.get("tokens") or ()),
            tuple(tuple(int(n) for n in each) for each in value.get("each") or ()),
            str(value.get("engine") or ""), value.get("k"),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise BadInput(f"{path}: at_least, tokens and each must be lists of whole numbers ({error})") from None
