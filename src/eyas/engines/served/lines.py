"""One line of a log -> the interval of acceptance that it reports, in each engine's spellings.

Sources: SGLang 0.5.23 managers/scheduler_components/metrics_reporter.py:957-1035; vLLM 0.32
v1/spec_decode/metrics.py:123-140; llama.cpp b11434 tools/server/server-context.cpp:714, common/speculative.cpp:3053,
examples/speculative-simple/speculative-simple.cpp:353. Older spellings: docs/facts/serving.md.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .record import PRINTED

NUMBER = r"(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)"
MOST = 1 << 53  # larger counts are no counts
WITHOUT_BONUS = "without the bonus token"


@dataclass
class Interval:
    """What one line reports."""

    tau: float | None
    weight: float = 1.0
    """In proportion to the rounds behind it; the line's own count of rounds where `rounds` is known."""
    rounds: float | None = None
    accepted: float | None = None
    drafted: float | None = None
    rates: tuple[float, ...] = ()
    """Unconditional, per position."""
    said: dict[str, Any] = field(default_factory=dict)
    cumulative: str = ""
    """Not "": counts since the start of the server, under this name; only the last such line counts."""


def _number(pattern: str, line: str) -> float | None:
    found = re.search(pattern, line)
    value = float(found.group(1)) if found else None
    return value if value is None or abs(value) <= MOST else None


def _rates(text: str) -> tuple[float, ...]:
    """ "0.802, 0.551" as rates, () where one is none, or they rise."""
    try:
        values = tuple(float(word) for word in text.replace("(", " ").replace(")", " ").split(",") if word.strip())
    except ValueError:
        return ()
    fit = all(0 <= rate <= 1 for rate in values) and list(values) == sorted(values, reverse=True)
    return values if fit else ()


def sglang(line: str) -> Interval | None:
    """ "Decode batch, #running-req: 1, ..., accept len: 2.17, accept rate: 0.39, ...": one every 40 forwards.

    The length is tokens / (forwards x requests), the bonus token counted, in every version. The line does not say how
    many rounds are behind it; they are in proportion to the running requests.
    """
    if "Decode batch" not in line:
        return None
    tau = _number(rf"(?<!block )\baccept len: ?{NUMBER}", line)
    if tau is None or tau < 1 - PRINTED:
        return None
    rate = _number(rf"\baccept rate: ?{NUMBER}", line)
    running = _number(r"#running-req: ?(\d+)", line)
    said = {"accept len": tau} | ({} if rate is None else {"accept rate": rate})
    return Interval(max(tau, 1.0), max(running or 1.0, 1.0), said=said)


def vllm(line: str) -> Interval | None:
    """ "SpecDecoding metrics: Mean acceptance length: ...": one every 10 s, of that time alone.

    Every round drafts K tokens, also where fewer can be used, so drafted / K is the number of rounds.
    """
    if "SpecDecoding metrics:" not in line:
        return None
    mean = _number(rf"Mean acceptance length: {NUMBER}", line)
    accepted, drafted = _number(r"\bAccepted: (\d+) tokens", line), _number(r"\bDrafted: (\d+) tokens", line)
    listed = re.search(r"Per-position acceptance rate: ((?:[\d.]+(?:, )?)+)", line)
    rates = _rates(listed.group(1)) if listed else ()
    said: dict[str, Any] = {"Mean acceptance length": mean, "Accepted": accepted, "Drafted": drafted}
    said["Draft acceptance rate"] = _number(rf"Draft acceptance rate: {NUMBER}%", line)
    said = {name: value for name, value in said.items() if value is not None}
    if accepted is not None and drafted and rates:
        rounds = drafted * 1.0 / len(rates)
        tau = 1 + accepted / rounds
        if mean is not None and abs(tau - mean) > 2 * PRINTED:
            if abs(tau - 1 - mean) <= 2 * PRINTED:  # before vllm-project/vllm#17908: without the bonus token
                said[WITHOUT_BONUS] = True
            elif mean > 1 + PRINTED and accepted:  # rounds of fewer drafts, as structured output has them
                rounds, tau = accepted / (mean - 1), mean
        if tau > len(rates) + 1 + PRINTED:
            return None
        return Interval(tau, rounds, rounds, accepted, drafted, rates, said)
    if mean is None or mean < 1 - PRINTED:
        return Interval(None, said=said) if said else None
    return Interval(max(mean, 1.0), drafted or 1.0, None, accepted, drafted, rates, said)


def llamacpp(line: str) -> Interval | None:
    """ "draft acceptance = ... ( 467 accepted / 1000 generated), mean len = 2.21", one a request; or the statistics.

    A draft may be shorter than its limit, so the number of drafted tokens does not tell the rounds, though they are
    about in proportion. The statistics count them (`a` of #calls(b,g,a)), since the start of the server.
    """
    found = re.search(r"statistics +([\w-]+): #calls\(b,g,a\) = *\d+ +\d+ +(\d+),.*#gen tokens = *(\d+), "
                      r"#acc tokens = *(\d+)", line)  # fmt: skip
    if found:
        rounds, drafted, accepted = (float(n) for n in found.groups()[1:])
        if not 0 < rounds <= MOST or max(drafted, accepted) > MOST:
            return None
        listed = re.search(r"#acc rate/pos = \(([^)]*)\)", line)
        rates = _rates(listed.group(1)) if listed else ()
        said = {"#calls(a)": rounds, "#gen tokens": drafted, "#acc tokens": accepted}
        return Interval(1 + accepted / rounds, rounds, rounds, accepted, drafted, rates, said, found.group(1))
    found = re.search(r"draft acceptance(?: rate)? = *([\d.]+) *\( *(\d+) accepted / *(\d+) generated\)", line)
    if not found:
        return None
    accepted, drafted = float(found.group(2)), float(found.group(3))
    if not 0 <= accepted <= drafted <= MOST or not drafted:
        return None
    mean = _number(rf"mean (?:len|acceptance length) = *{NUMBER}", line)
    listed = re.search(r"acceptance rate per position = \(([^)]*)\)", line)
    said = {"accepted": accepted, "generated": drafted} | ({} if mean is None else {"mean len": mean})
    tau = 1.0 if not accepted else mean if mean is not None and mean >= 1 else None
    rates = _rates(listed.group(1)) if listed else ()
    return Interval(tau, drafted, None, accepted, drafted, rates, said)


READERS: dict[str, Callable[[str], Interval | None]] = {"sglang": sglang, "vllm": vllm, "llamacpp": llamacpp}
HINT = re.compile(r"accept len:|SpecDecoding metrics:|draft acceptance|#acc tokens")

_CLOCK = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_LLAMA_CLOCK = re.compile(r"^\s*(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) [A-Z] ")


def seconds(line: str) -> float | None:
    """When a line was written, on its engine's own clock; None where it does not say.

    "[2026-01-31 10:27:56 TP0]" (SGLang), "INFO 01-31 10:27:56" (vLLM: no year), "0.09.401.679 I" (llama.cpp: minutes,
    seconds, milli- and microseconds since its start).
    """
    found = _LLAMA_CLOCK.match(line)
    if found:
        minutes, whole, milli, micro = (int(n) for n in found.groups())
        return minutes * 60 + whole + milli / 1e3 + micro / 1e6
    found = _CLOCK.search(line)
    if not found:
        return None
    year, *rest = (int(n) if n else 2000 for n in found.groups())
    try:
        moment = datetime.datetime(year, *rest, tzinfo=datetime.UTC)  # type: ignore[arg-type,misc]
    except ValueError:
        return None
    return moment.timestamp()
