"""What the numbers of a server suggest by themselves, and next to a replay of the same draft.

    signatures(from_log("server.log"))          signatures(served, replayed)

Nothing is proven here: each finding names the families of cause in the order of their likelihood, and the option of
`eyas doctor` that decides between them.   pytest tests/test_doctor_signatures.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from ..decode.acceptance import Acceptance
from ..engines.served import Served
from .finding import ORDER, Finding, Severity

NOTHING = 0.005
"""Accepted drafts a round that a log prints as an accept length of 1.00."""
FIRST_BROKEN = 0.12
"""First position of a draft that is fed, or read, wrongly: 0.11 (vllm#18909), 0.036 (vllm#50170)."""
AFTER_BROKEN = 0.15
"""Its second position, given the first: 0.09 and 0.02 in the same reports; of a weak but sound draft 0.28 (README)."""
CLIFF_FROM = 0.2
"""First position from which a cliff after it can be told from noise."""
CLIFF = 0.5
"""Second position, given the first, over the first: 0.7 to 1.0 in sound drafts (vllm#18909: 0.71 after 0.77)."""
GOOD_FIRST = 0.6
"""First position of a draft that nobody complains about: 0.71 to 0.77 (vllm#25961, #18909); 0.55 is called
undertrained (speculators#751)."""
ENOUGH_ROUNDS = 200
"""The rate of a position has a standard error below 0.036 then."""
SERIES = 9
"""Points below which a course in time is not judged."""
DECAYED = 0.75
"""Last third over first third, in accepted drafts a round."""
CERTAIN = 0.8
"""Share of pairs (one point of each third) in which the later one is lower; 0.5 by chance."""
EQUAL = 0.9
"""Served over replayed, in accepted drafts a round: other prompts and bf16 move as much."""
FAR = 0.7
"""Below it no approximation explains the gap: engines lose 8 to 15 % of the accept length by theirs (vllm#14649)."""

SOUND = ("EY-SERVED-UNDERTRAINED", "EY-SERVED-HEALTHY")
"""Shapes that acquit the draft as it is served; a replay that does far better knows more."""
ONLY_FIRST = " (unless only the first position is accepted, which these numbers do not show)"
ENGINE_OPTION = {"sglang": " --engine sglang", "vllm": " --engine vllm", "llamacpp": " --engine llamacpp"}


def signatures(served: Served, replayed: Acceptance | None = None) -> list[Finding]:
    """Findings about what a server says, worst first. `replayed`: the same draft in the reference decoder."""
    found = [*_log(served)]
    if served.tau is not None:
        compared = list(_compared(served, replayed))
        below = any(finding.id == "EY-SERVED-BELOW-REPLAY" for finding in compared)
        shape = [finding for finding in _shape(served, served.tau) if not (below and finding.id in SOUND)]
        found += [*compared, *shape, *_course(served), *_few(served)]
    return sorted(found, key=lambda finding: ORDER[finding.severity])


def _log(served: Served) -> Iterator[Finding]:
    """Lines of the log that speak for themselves."""
    for event in served.events:
        severity = Severity(event.severity)
        remedy = (
            "" if severity in (Severity.OK, Severity.INFO) else f"Settle this first: {_command(served, '--launch')}"
        )
        yield Finding("EY-SERVED-LOG", severity, f"the log says: {event.line}", _sentence(event.meaning), remedy)


def _shape(served: Served, tau: float) -> Iterator[Finding]:
    """One finding for the accept length and the course of the rates over the positions."""
    shown = _shown(served)
    first, second = _first(served, tau), _given(served, 1)
    if tau - 1 < NOTHING:
        yield Finding(
            "EY-SERVED-NOTHING",
            Severity.ERROR,
            f"{shown}: no draft is accepted at all",
            f"Likely, in this order: {'; '.join(_nothing(served.engine))}. A draft that was only badly trained "
            "would be right now and then",
            _command(served, "--target T", "--launch"),
            ("sgl-project/sglang#27908", "sgl-project/sglang#21272", "vllm-project/vllm#18909"),
        )
    elif served.steps is not None and tau > served.steps + 1 - NOTHING:
        yield Finding(
            "EY-SERVED-EVERYTHING",
            Severity.WARNING,
            f"{shown}: every one of {served.steps} drafts is accepted, always",
            "Likely, in this order: logits that are NaN (answers like '!!!!'); simulated acceptance; answers that "
            "repeat themselves without end; a draft tested on the text that it learnt by heart",
            "Read some answers first; then " + _command(served, "--target T"),
            ("NVIDIA/TensorRT-LLM#5146",),
        )
    elif first is not None and first <= FIRST_BROKEN and (second is None or second <= AFTER_BROKEN):
        yield Finding(
            "EY-SERVED-FIRST-LOW",
            Severity.ERROR,
            f"{shown}: the first position is accepted in {first:.1%} of rounds"
            + (" at most" if not served.unconditional else ", the next almost never"),
            "The draft is read or fed otherwise than it was trained. Likely, in this order: the vocabulary map is not "
            "applied or holds another kind of numbers; states of other layers; a norm left out, or embeddings with "
            "another scale; a freshly initialised embedding",
            _command(served, "--target T"),
            ("vllm-project/vllm#18909", "vllm-project/vllm#50170", "lightseekorg/TorchSpec#38"),
        )
    elif _cliff(served):
        yield Finding(
            "EY-SERVED-CLIFF",
            Severity.ERROR,
            f"{shown}: the second position is accepted in {second:.0%} of the rounds that accepted the first, "
            f"which {first:.0%} did",
            "The target's states are read rightly, the draft's own are not. Likely, in this order: which state is fed "
            "back (before or after the norm: norm_output); a draft not trained on its own states; layers beyond the "
            "first; RoPE positions of the later steps",
            f"{_command(served, '--target T')}: a replay without the cliff means the engine, with it the draft",
            ("sgl-project/SpecForge#879", "Tencent/AngelSlim#157", "vllm-project/vllm#33330"),
        )
    elif first is not None and first < GOOD_FIRST:
        yield Finding(
            "EY-SERVED-UNDERTRAINED",
            Severity.INFO,
            f"{shown}: low, "
            + ("and falling evenly from position to position" if second is not None else "with positions not said"),
            "That is how an undertrained draft looks, NOT a broken one"
            + ("" if second is not None else ONLY_FIRST)
            + ". Likely, in this order: too little text; text "
            "that the target did not write itself; another chat template than in training; prompts unlike its text",
            f"{_command(served, '--target T')}: if the replay is as low, train longer on the target's own answers",
            ("vllm-project/speculators#751", "sgl-project/SpecForge#128", "sgl-project/SpecForge#296"),
        )
    else:
        yield Finding("EY-SERVED-HEALTHY", Severity.OK, f"{shown}: a healthy draft, served as it was trained",
                      "Nothing in these numbers points to a fault")  # fmt: skip


def _nothing(engine: str) -> tuple[str, ...]:
    """Why nothing is accepted, most likely first."""
    head = "no head in the file, so that one of random numbers is used"
    if engine == "sglang":
        return ("--speculative-algorithm EAGLE instead of EAGLE3, which says nothing", head,
                "tensors under other names, dropped in silence", "the vocabulary map missing", "NaN")  # fmt: skip
    if engine == "vllm":
        return ("no d2t in the file, or under a name that is not found", "no head in the file, so that the target's "
                "first rows are used", "tensors missing, in silence",
                "requests longer than the draft's positions, whose zeros count as drafts", "NaN")  # fmt: skip
    if engine == "llamacpp":
        return ("a draft of another target", "a head or fc lost in conversion", "taps named in eagle_config alone, "
                "where the converter does not look")  # fmt: skip
    return ("EAGLE instead of EAGLE3 in the launch", head, "the vocabulary map missing", "NaN")


def _course(served: Served) -> Iterator[Finding]:
    """A decay with uptime: the last third of the log against the first."""
    taus = [tau for _, tau in served.series]
    third = len(taus) // 3
    if len(taus) < SERIES:
        return
    early, late = taus[:third], taus[-third:]
    before, after = median(early) - 1, median(late) - 1
    lower = sum((b < a) + (a == b) / 2 for a in early for b in late) / third**2
    if before < NOTHING or after > DECAYED * before or lower < CERTAIN:
        return
    yield Finding(
        "EY-SERVED-DECAY",
        Severity.WARNING,
        f"the accept length falls with uptime: {1 + before:.2f} in the first third of the log, {1 + after:.2f} in the "
        f"last",
        "A draft does not change while it is served. Likely, in this order: the engine attends to stale or empty "
        "keys after prefix-cache hits under load; other or longer requests as time went on; positions that end before "
        "the context",
        "Restart, and serve the same requests with the prefix cache off (vLLM: --no-enable-prefix-caching, SGLang: "
        "--disable-radix-cache); if that cures it, it is the engine",
        ("vllm-project/vllm#41838", "sgl-project/sglang#19897"),
    )


def _few(served: Served) -> Iterator[Finding]:
    if served.rounds is not None and served.rounds < ENOUGH_ROUNDS:
        yield Finding("EY-SERVED-FEW", Severity.INFO, f"these numbers are of {served.rounds:,} rounds",
                      "A rate of so few is uncertain by several percent",
                      f"Serve some dozen prompts: {ENOUGH_ROUNDS} rounds or more")  # fmt: skip


def _compared(served: Served, replayed: Acceptance | None) -> Iterator[Finding]:
    """Served against replayed, at the same number of drafts a round."""
    if replayed is None or not replayed.rounds or served.tau is None:
        return
    pair = _alike(served, served.tau, replayed)
    if pair is None:
        yield Finding("EY-SERVED-INCOMPARABLE", Severity.INFO,
                      f"served with {served.steps} drafts a round, replayed with {replayed.k}: no common number",
                      "", f"Replay with {served.steps} drafts a round")  # fmt: skip
        return
    live, replay, noise, drafts = pair
    said = f"with {drafts} drafts a round, served {1 + live:.2f}, replayed {1 + replay:.2f}"
    if served.steps is None:
        said = f"served {1 + live:.2f} (drafts a round not said), replayed {1 + replay:.2f} with {drafts}"
    if live < FAR * replay - noise:
        yield Finding(
            "EY-SERVED-BELOW-REPLAY",
            Severity.ERROR,
            f"{said}: served far below what the draft can do",
            "The draft is sound where it is replayed; the launch or the engine makes less of it. Likely, in this "
            "order: a wrong method or algorithm flag; the engine reads the files otherwise than they were trained; "
            "requests longer than the draft's positions; prompts or a template unlike those replayed",
            _command(served, "--target T", "--launch"),
        )
    elif live < EQUAL * replay - noise:
        yield Finding(
            "EY-SERVED-LITTLE-BELOW-REPLAY",
            Severity.INFO,
            f"{said}: somewhat below the replay",
            "Engines lose so much by their own approximations, by bf16, and on prompts other than those replayed",
            "Compare on the same prompts, greedily, before you look for a fault",
            ("vllm-project/vllm#14649",),
        )
    elif live > replay / EQUAL + noise:
        yield Finding("EY-SERVED-ABOVE-REPLAY", Severity.INFO, f"{said}: served above the replay",
                      "Easier prompts, drafts in trees, or a relaxed acceptance; no fault of the draft",
                      "Compare on the same prompts, with a chain (--speculative-eagle-topk 1)")  # fmt: skip
    else:
        yield Finding("EY-SERVED-EQUALS-REPLAY", Severity.OK, f"{said}: equal, within what prompts differ by",
                      "Launch and engine are acquitted: the draft is what it is",
                      "What is to be gained lies in the draft: its files, its training, its data")  # fmt: skip


def _alike(served: Served, tau: float, replayed: Acceptance) -> tuple[float, float, float, int] | None:
    """(accepted a round served, replayed, noise, drafts a round); None where they cannot be brought to the same K."""
    drafts = min(served.steps or replayed.k, replayed.k)
    live = tau - 1
    if served.steps is not None and served.steps > drafts:
        if len(served.unconditional) < drafts:
            return None
        live = sum(served.unconditional[:drafts])
    counts = [(min(accepted, drafts), n) for accepted, n in enumerate(replayed.histogram)]
    mean = sum(accepted * n for accepted, n in counts) / replayed.rounds
    spread = math.sqrt(sum(n * (accepted - mean) ** 2 for accepted, n in counts) / replayed.rounds)
    rounds = min(replayed.rounds, served.rounds or replayed.rounds)
    return live, mean, 2 * 1.5 * spread / math.sqrt(rounds), drafts  # 1.5: rounds of one answer are alike


def _first(served: Served, tau: float) -> float | None:
    """Rate of the first position; without rates, what it is at most (low) or what an even decay gives (else)."""
    if served.unconditional:
        return served.unconditional[0]
    if tau - 1 <= FIRST_BROKEN:
        return tau - 1  # the sum over positions, so the first is not above it
    return _even(tau, served.steps)


def _even(tau: float, steps: int | None) -> float:
    """The rate c that gives this accept length if each position, given those before, is accepted with c."""
    if steps is None:
        return 1 - 1 / tau
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in range(steps + 1)) < tau else (low, middle)
    return low


def _given(served: Served, position: int) -> float | None:
    """Rate of a position (from 0) among the rounds that accepted those before; None where not said."""
    rates: Sequence[float] = served.unconditional
    if len(rates) <= position:
        return None
    return rates[position] / rates[position - 1] if rates[position - 1] else 0.0


def _cliff(served: Served) -> bool:
    first, second = (served.unconditional or (0.0,))[0], _given(served, 1)
    if second is None or first < CLIFF_FROM:
        return False
    noise = 2 / math.sqrt(served.rounds * first) if served.rounds else 0.0
    return second + noise * math.sqrt(second * (1 - second)) < CLIFF * first


def _shown(served: Served) -> str:
    rates = ", ".join(f"{rate:.0%}" if rate >= 0.1 or rate == 0 else f"{rate:.1%}" for rate in served.unconditional)
    of = "" if served.engine == "unknown" else f" of {served.engine}"
    return f"accept length{of} {served.tau or 0:.2f}" + (f", by position {rates}" if rates else "")


def _command(served: Served, *options: str) -> str:
    """What to run next."""
    words = [option if option != "--launch" else '--launch "COMMAND"' for option in options]
    return f"eyas doctor DRAFT {' '.join(words)}{ENGINE_OPTION.get(served.engine, '')}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
