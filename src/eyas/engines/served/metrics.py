"""Prometheus text, or the URL that serves it -> Served.

    from_url("http://localhost:8000")          from_prometheus(text, before=text_before_the_test)

vLLM and llama.cpp count since the process started; SGLang shows gauges of its last interval, and counters of finished
requests. Sources: vLLM 0.32 v1/spec_decode/metrics.py:220-260; SGLang 0.5.23 observability/metrics_collector.py:511-546
and 2095-2136; llama.cpp b11434 tools/server/server-task.cpp:1565-1575.
"""

from __future__ import annotations

import http.client
import math
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import BadInput
from .metadata import from_metadata
from .record import Served, counted, text_of

TIMEOUT = 10.0
MOST_BYTES = 64 << 20
MOST_POSITIONS = 64
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
COUNTS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
Samples = dict[str, list[tuple[dict[str, str], float]]]


def from_prometheus(
    source: str | os.PathLike[str], before: str | os.PathLike[str] | None = None, model: str | None = None
) -> Served:
    """Prometheus text (or a file of it) of vLLM, SGLang or llama.cpp.

    `before`: an earlier snapshot of the same process, so that only what happened since counts. `model`: its numbers
    alone, where labels tell models apart. Raises BadInput where no speculative decoding is in it, or none has happened.
    """
    now = _of_model(_parse(text_of(source, "Prometheus text")), model)
    earlier = _of_model(_parse(text_of(before, "Prometheus text")), model) if before is not None else {}
    for prefix, engine in (("vllm:", "vllm"), ("llamacpp:", "llamacpp")):
        if f"{prefix}{COUNTS[0]}" in now:
            return _counters(engine, prefix, now, earlier)
    if "sglang:spec_accept_length" in now:
        return _sglang(now, earlier, before is not None)
    raise BadInput(
        "no speculative decoding in these metrics: expected vllm:spec_decode_num_drafts_total, "
        "sglang:spec_accept_length (with --enable-metrics) or llamacpp:spec_decode_num_drafts_total (with --metrics); "
        "is the server running with the draft?"
    )


def from_url(url: str, timeout: float = TIMEOUT) -> Served:
    """A server's /metrics, or what else it answers with; SGLang without metrics is asked for its /server_info.

    Raises BadInput where it does not answer, or says nothing about acceptance.
    """
    parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadInput(f"{url!r} is no http address of a server, as http://localhost:8000 would be; give its address")
    named = parts.path.rstrip("/")
    root = f"{parts.scheme}://{parts.netloc}{named.removesuffix('/metrics')}"
    exact = named and not named.endswith("/metrics")
    pages = [urllib.parse.urlunsplit(parts)] if exact else [f"{root}/metrics"]
    pages += [] if exact else [f"{root}/server_info", f"{root}/get_server_info"]
    reasons = []
    for page in pages:
        try:
            text = fetch(page, timeout)
            return from_metadata(text) if text.lstrip().startswith(("{", "[")) else from_prometheus(text + "\n")
        except BadInput as error:
            reasons.append(f"{page}: {error}")
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, urllib.error.HTTPError):
                break  # nobody listens there: no other page will answer either
    raise BadInput("; ".join(reasons))


def fetch(page: str, timeout: float = TIMEOUT) -> str:
    """The text of a page. Raises BadInput where there is none."""
    try:
        with urllib.request.urlopen(page, timeout=timeout) as answer:
            return str(answer.read(MOST_BYTES).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        raise BadInput(f"the server answers {error.code} {error.reason}; check the path: /metrics is usual") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadInput(
            f"no answer ({getattr(error, 'reason', None) or error}); is a server running there? Check host and port"
        ) from error


@dataclass(frozen=True)
class Counters:
    """What a server did between two snapshots of its metrics; None where they do not say."""

    tokens: float | None = None
    rounds: float | None = None
    accepted: float | None = None
    missing: str = ""
    """What was looked for in vain."""


# engine's prefix -> its counters of tokens, rounds and accepted drafts
_TOTALS = {
    "vllm:": ("generation_tokens", COUNTS[0], COUNTS[2]),
    "sglang:": ("generation_tokens", "spec_verify_calls", ""),
    "llamacpp:": ("tokens_predicted", COUNTS[0], COUNTS[2]),
}


def counters_between(before: str, after: str, model: str | None = None) -> Counters:
    """Increase of the counters between two texts of /metrics, of `model` alone where their labels tell models apart.

    Raises BadInput where one fell: the server was restarted in between.
    """
    earlier, now = (_of_model(_parse(text), model) for text in (before, after))
    for prefix, names in _TOTALS.items():
        if f"{prefix}{names[0]}" in now:
            tokens, rounds, accepted = (_since(now, earlier, prefix + name) if name else None for name in names)
            lacking = "" if rounds is not None else f"{prefix}{names[1]}_total is not among its metrics"
            return Counters(tokens, rounds, accepted, lacking)
    looked = ", ".join(f"{prefix}{names[0]}_total" for prefix, names in _TOTALS.items())
    return Counters(missing=f"its metrics have none of {looked}")


def _of_model(samples: Samples, model: str | None) -> Samples:
    """Without the samples that are labelled with another model, where `model` is among the labels at all."""
    labelled = {labels.get("model_name") for found in samples.values() for labels, _ in found}
    if not model or model not in labelled:
        return samples
    mine = {
        name: [(labels, value) for labels, value in found if labels.get("model_name") in (None, model)]
        for name, found in samples.items()
    }
    return {name: kept for name, kept in mine.items() if kept}


def _parse(text: str) -> Samples:
    """Name without `_total` -> its samples; lines that are none are passed over."""
    out: Samples = {}
    for line in text.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line.strip())
        if not found:
            continue
        try:
            value = float(found.group(3))
        except ValueError:
            continue
        if math.isfinite(value):
            out.setdefault(found.group(1).removesuffix("_total"), []).append(
                (dict(_LABEL.findall(found.group(2) or "")), value)
            )
    return out


def _total(samples: Samples, name: str) -> float | None:
    return sum(value for _, value in samples[name]) if name in samples else None


def _since(now: Samples, earlier: Samples, name: str) -> float | None:
    """Increase of a counter over all its label sets. Raises BadInput where it fell."""
    total, start = _total(now, name), _total(earlier, name) or 0.0
    if total is not None and total < start:
        raise BadInput(
            f"{name} fell from {start:g} to {total:g}: the server was restarted between the two snapshots; take "
            "both snapshots from one run"
        )
    return None if total is None else total - start


def _counters(engine: str, prefix: str, now: Samples, earlier: Samples) -> Served:
    rounds, drafted, accepted = (_since(now, earlier, prefix + name) for name in COUNTS)
    if not rounds or accepted is None:
        raise BadInput(f"{prefix}{COUNTS[0]} is {rounds or 0:g}: no round has been drafted yet; send it requests first")
    by_position = {
        position: _at(now, prefix, position) - _at(earlier, prefix, position) for position in _positions(now, prefix)
    }
    whole = sorted(by_position) == list(range(len(by_position)))
    reached = [by_position[position] for position in sorted(by_position)] if whole else []
    said = {f"{prefix}{name}_total": value for name, value in zip(COUNTS, (rounds, drafted, accepted), strict=True)}
    if reached:
        said[f"{prefix}{PER_POSITION}_total"] = reached  # type: ignore[assignment]
    notes = ["vLLM counts accepted drafts beyond max_tokens or a stop in each request's last round."]
    if engine == "llamacpp":
        notes = ["llama.cpp cuts each request's last round, and counts only rounds that drafted."]
    if not earlier:
        notes.append("Counted since the server started.")
    models = {labels.get("model_name") for labels, _ in now[prefix + COUNTS[0]]}
    if len(models) > 1:
        notes.append(f"Several models were added up: {', '.join(sorted(str(model) for model in models))}.")
    steps = len(reached) or (drafted and engine == "vllm" and round(drafted / rounds)) or None
    return counted(Served(engine, said=said, steps=steps, notes=tuple(notes)), rounds, accepted, drafted, reached)


def _positions(samples: Samples, prefix: str) -> list[int]:
    said = {labels.get("position", "") for labels, _ in samples.get(prefix + PER_POSITION, ())}
    return sorted(int(word) for word in said if re.fullmatch(r"\d{1,3}", word) and int(word) < MOST_POSITIONS)


def _at(samples: Samples, prefix: str, position: int) -> float:
    listed = samples.get(prefix + PER_POSITION, ())
    return sum(value for labels, value in listed if labels.get("position") == str(position))


def _mean(samples: Samples, name: str) -> float | None:
    """Of a gauge over ranks, those apart that have nothing to say yet."""
    values = [value for _, value in samples.get(name, ()) if value > 0]
    return sum(values) / len(values) if values else None


def _sglang(now: Samples, earlier: Samples, differs: bool) -> Served:
    gauges = {name: _mean(now, f"sglang:{name}") for name in ("spec_accept_length", "spec_accept_rate",
                                                              "spec_num_steps", "spec_num_draft_tokens")}  # fmt: skip
    said: Mapping[str, float] = {f"sglang:{name}": value for name, value in gauges.items() if value is not None}
    steps = round(gauges["spec_num_steps"] or 0) or None
    counters = ("spec_verify_calls", "generation_tokens", "num_requests")
    rounds, tokens, requests = (_since(now, earlier, f"sglang:{name}") for name in counters)
    if rounds and tokens is not None and requests is not None and tokens - requests >= rounds:
        said = {**said, **{f"sglang:{name}_total": value for name, value in
                           zip(counters, (rounds, tokens, requests), strict=True)}}  # fmt: skip
        note = "From finished requests: their tokens without prefill's, in their rounds; a stop cuts the last round."
        return counted(Served("sglang", said=said, steps=steps, notes=(note,)), rounds, tokens - requests - rounds)
    length = gauges["spec_accept_length"]
    if length is None:
        raise BadInput("sglang:spec_accept_length is 0: SGLang sets it every 40 decode steps; send it longer requests")
    note = "A gauge of SGLang's last interval (40 decode steps), not of all that was served."
    notes = (note, "It cannot be counted from a snapshot before.") if differs else (note,)
    return Served("sglang", tau=length, said=said, steps=steps, notes=notes)
