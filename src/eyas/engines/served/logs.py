"""A server's log -> Served.   from_log("server.log")

Intervals are weighed by the rounds behind them, where a line tells them, else by what is in proportion to them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...errors import BadInput
from .events import Events
from .lines import HINT, READERS, WITHOUT_BONUS, Interval, seconds
from .record import PRINTED, Served, as_path, counted, thinned

LONGEST = 1 << 16  # characters of a line; SGLang prints all its settings in one
DEEPEST = 64  # drafts of a round
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_SETTINGS = re.compile(
    r"(?:^|[\s'\"(,{-])(speculative[_-]num[_-]steps|speculative[_-]eagle[_-]topk|num_spec_tokens|"
    r"num_speculative_tokens|spec-draft-n-max|n_draft|n_predict|n_drafted|n_accept)['\"]?(?:\s*[=:]\s*| +)(\d{1,9})\b"
)
_SETTING_KEYS = ("spec", "n_draft", "n_predict", "n_accept")
_VERSIONS = {
    "vllm": re.compile(r"(?:vLLM (?:API )?server version |V1 LLM engine \(v)(\d[\w.+-]*)"),
    "llamacpp": re.compile(r"\bbuild: (\d+) "),
    "sglang": re.compile(r"\bsglang[ =]=?v?(\d+\.\d+[\w.]*)"),
}


def from_log(source: str | os.PathLike[str]) -> Served:
    """A log file of SGLang, vLLM or llama.cpp, or its text; a string is a file's name if it is one.

    Raises BadInput where it cannot be read, or says nothing about acceptance.
    """
    found: dict[str, list[tuple[float | None, Interval]]] = {engine: [] for engine in READERS}
    settings: dict[str, int] = {}
    versions: dict[str, str] = {}
    events = Events()
    for line in _lines(source):
        if HINT.search(line):
            for engine, read in READERS.items():
                interval = read(line)
                if interval is not None:
                    found[engine].append((seconds(line), interval))
            continue
        events.look(line)
        if any(key in line for key in _SETTING_KEYS):
            settings |= {name.replace("-", "_"): int(value) for name, value in _SETTINGS.findall(line)}
        for engine, pattern in _VERSIONS.items():
            said = pattern.search(line)
            if said:
                versions[engine] = said.group(1)
    engine = max(found, key=lambda name: len(found[name]))
    if found[engine]:
        others = [name for name in found if found[name] and name != engine]
        notes = [f"The log also has lines of {' and '.join(others)}, which were left out."] if others else []
        return _summary(engine, versions.get(engine, ""), found[engine], settings, events, notes)
    if all(name in settings for name in ("n_draft", "n_predict", "n_drafted", "n_accept")):
        return _speculative_simple(settings, versions.get("llamacpp", ""), events)
    if events.all():
        return Served(events=events.all(), notes=("The log says nothing about acceptance.",))
    what = as_path(source) or "the text given as a log (no file has this name)"
    raise BadInput(
        f"{what} says nothing about acceptance: expected SGLang's 'Decode batch ... accept len', vLLM's 'SpecDecoding "
        f"metrics' or llama.cpp's 'draft acceptance' lines; serve some requests with the draft, with logging on"
    )


def _lines(source: str | os.PathLike[str]) -> Iterator[str]:
    path = as_path(source)
    if path is None:
        yield from (_COLOURS.sub("", line) for line in str(source).splitlines())
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(LONGEST):
                yield _COLOURS.sub("", line) if "\x1b" in line else line
    except OSError as error:
        raise BadInput(f"{path} cannot be read as a log ({error.strerror}); name the server's log file") from error


def _summary(
    engine: str,
    version: str,
    found: list[tuple[float | None, Interval]],
    settings: dict[str, int],
    events: Events,
    notes: list[str],
) -> Served:
    intervals = [interval for _, interval in found]
    single = [(when, i) for when, i in found if not i.cumulative and i.tau is not None]
    last = {i.cumulative: i for i in intervals if i.cumulative}
    totals = list(last.values()) or [i for _, i in single]
    if any(WITHOUT_BONUS in i.said for i in intervals):
        notes.append("This vLLM prints the mean acceptance length without the bonus token; 1 was added.")
    steps = _steps(engine, totals, settings, notes)
    rounds, accepted, drafted = (_sum(getattr(i, name) for i in totals) for name in ("rounds", "accepted", "drafted"))
    base = Served(
        engine,
        version,
        said={**_means(totals or intervals), "lines": len(single) or len(intervals)},
        unconditional=_rates(totals, steps or 0),
        steps=steps,
        series=thinned(_series(single)),
        events=events.all(),
    )
    if not totals:
        return replace(base, notes=(*notes, _rate_alone(intervals)))
    if rounds and accepted is not None:
        exact = counted(base, rounds, accepted, drafted)
        return replace(exact, unconditional=base.unconditional, notes=tuple(notes))
    weighed = "running requests" if engine == "sglang" else "drafted tokens"
    total = sum(i.weight for i in totals)
    return replace(
        base,
        tau=sum((i.tau or 1.0) * i.weight for i in totals) / total,
        accepted=None if accepted is None else round(accepted),
        drafted=None if drafted is None else round(drafted),
        notes=(*notes, f"The lines do not count rounds; they were weighed by {weighed}."),
    )


def _rates(totals: Sequence[Interval], steps: int) -> tuple[float, ...]:
    """Weighted rates by position, of the lines that have all positions."""
    whole = [i for i in totals if steps and len(i.rates) == steps]
    weight = sum(i.weight for i in whole)
    return tuple(sum(i.rates[j] * i.weight for i in whole) / weight for j in range(steps)) if weight else ()


def _sum(values: Iterable[float | None]) -> float | None:
    """None where one is None, or there is none."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) if known and len(known) == len(listed) else None


def _means(intervals: Sequence[Interval]) -> dict[str, float]:
    """The engine's own numbers, averaged as they stand."""
    out = {}
    for name in dict.fromkeys(name for i in intervals for name in i.said if name != WITHOUT_BONUS):
        values = [float(i.said[name]) for i in intervals if name in i.said]
        out[name] = round(sum(values) / len(values), 4)
    return out


def _steps(engine: str, intervals: Sequence[Interval], settings: dict[str, int], notes: list[str]) -> int | None:
    """Drafts in a round: what lists of rates show, what the launch said, or what length and rate have in common."""
    listed = Counter(len(i.rates) for i in intervals if i.rates)
    if listed:
        return listed.most_common(1)[0][0]
    names = ("speculative_num_steps",) if engine == "sglang" else ("num_spec_tokens", "num_speculative_tokens")
    names = ("spec_draft_n_max",) if engine == "llamacpp" else names
    for name in names:
        if settings.get(name):
            return settings[name] if settings[name] <= DEEPEST else None
    if engine != "sglang" or settings.get("speculative_eagle_topk", 1) > 1:
        return None
    pairs = {(i.said["accept len"], i.said["accept rate"]) for i in intervals if "accept rate" in i.said}
    strict = {k for k in range(1, DEEPEST + 1) if all(_fits(rate, (tau - 1) / k, 1 / k) for tau, rate in pairs)}
    # Until sgl-project/sglang#23530 the bonus token counted as a draft on both sides of the rate.
    biased = {k for k in range(1, DEEPEST + 1) if all(_fits(rate, tau / (k + 1), 1 / (k + 1)) for tau, rate in pairs)}
    if not pairs or len(strict | biased) != 1:
        return None
    steps = next(iter(strict | biased))
    how = "" if strict else ", whose rate in this version counts the bonus token on both sides"
    notes.append(f"{steps} drafted tokens a round follow from accept len and accept rate{how}; of a tree it is another "
                 f"number.")  # fmt: skip
    return steps


def _fits(printed: float, exact: float, slope: float) -> bool:
    return abs(printed - exact) <= PRINTED * (1 + slope) + 1e-9


def _series(found: Sequence[tuple[float | None, Interval]]) -> list[tuple[float, float, float]]:
    times = [when for when, _ in found]
    known = [when for when in times if when is not None]
    rising = len(known) == len(times) and known == sorted(known)
    return [
        (
            (when or 0.0) - (known[0] if rising else 0.0) if rising else float(place),
            interval.tau or 1.0,
            interval.weight,
        )
        for place, (when, interval) in enumerate(found)
    ]


def _rate_alone(intervals: Sequence[Interval]) -> str:
    accepted, drafted = _sum(i.accepted for i in intervals), _sum(i.drafted for i in intervals)
    if accepted is None or not drafted:
        return "The lines say nothing from which an accept length follows."
    return (
        f"{accepted:.0f} of {drafted:.0f} drafted tokens were accepted; the lines do not say in how many rounds, so no "
        f"accept length follows (1 + {accepted / drafted:.3f} x drafted tokens a round, where all rounds draft alike)."
    )


def _speculative_simple(settings: dict[str, int], version: str, events: Events) -> Served:
    """llama-speculative-simple: each round adds its accepted drafts and one token to n_predict."""
    rounds, accepted = settings["n_predict"] - settings["n_accept"], settings["n_accept"]
    said = {name: settings[name] for name in ("n_draft", "n_predict", "n_drafted", "n_accept")}
    if rounds <= 0 or settings["n_draft"] > DEEPEST:
        raise BadInput(
            f"{said} are no counts of llama-speculative-simple: each round predicts one token at least; give the "
            "whole log"
        )
    base = Served("llamacpp", version, said=said, steps=settings["n_draft"] or None, events=events.all())
    return counted(base, rounds, accepted, settings["n_drafted"])
