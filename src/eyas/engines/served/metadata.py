"""Response metadata and server state, as JSON -> Served.   from_metadata("answers.jsonl")

Takes whole responses, lists or lines of them, and finds in them

- SGLang's meta_info or spec_tokens_details (0.5.23 managers/tokenizer_manager.py:3149-3200): spec_accept_length there
  is completion_tokens / rounds, prefill's token among them, so it is not used where counts are given;
- vLLM's metrics.speculative_decoding (0.32 v1/metrics/stats.py:395-425);
- llama.cpp's timings (b11434 tools/server/server-common.cpp:99);
- SGLang's /server_info, whose internal_states hold avg_spec_accept_length (managers/scheduler_components/
  internal_state.py:125): tokens / rounds since the start, of whole log intervals.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import BadInput
from ...untrusted import parse_json
from .record import Served, counted, text_of

DEEPEST = 40
MOST_POSITIONS = 64
# What SGLang called the same counts until sgl-project/sglang#23530.
SGLANG_ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
SGLANG_DRAFTED = ("spec_num_proposed_drafts", "spec_draft_token_num")
SGLANG_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def from_metadata(source: Any) -> Served:
    """A response, a list of them, their JSON, JSON lines or a file of either. Raises BadInput where nothing is said."""
    found = list(_objects(_loaded(source), 0))
    for read in (_sglang, _vllm, _llamacpp, _server_info):
        served = read(found)
        if served is not None:
            return served
    raise BadInput(
        "this JSON says nothing about acceptance: expected SGLang's meta_info (spec_verify_ct), vLLM's "
        "metrics.speculative_decoding (--per-request-spec-decode-metrics), llama.cpp's timings (draft_n) or SGLang's "
        "/server_info (avg_spec_accept_length)"
    )


def _loaded(source: Any) -> Any:
    if isinstance(source, bytes):
        source = source.decode("utf-8", "replace")
    if not isinstance(source, str | os.PathLike):
        return source
    text = text_of(source, "JSON")
    try:
        return parse_json(text)
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            return [parse_json(line) for line in lines] if len(lines) > 1 else _refuse(error)
        except ValueError as second:
            raise BadInput(
                f"response metadata is not JSON, nor JSON lines ({second}); give the responses as the server sent them"
            ) from second


def _refuse(error: Exception) -> Any:
    raise BadInput(f"response metadata is not JSON ({error}); give the response as the server sent it") from error


def _objects(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """Every object inside, outer ones first."""
    if depth > DEEPEST:
        return
    if isinstance(value, Mapping):
        yield value
        for inner in value.values():
            yield from _objects(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _objects(inner, depth + 1)


def _number(place: Mapping[str, Any], *names: str) -> float | None:
    """The first of them that is a finite number, not negative."""
    for name in names:
        value = place.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15:
            return float(value)
    return None


def _sum(places: Sequence[Mapping[str, Any]], *names: str) -> float | None:
    values = [_number(place, *names) for place in places]
    return None if None in values or not values else sum(value for value in values if value is not None)


def _reached(places: Sequence[Mapping[str, Any]], names: tuple[str, ...], rounds: float) -> list[float]:
    """Rounds that accepted at least 1, 2, ... drafts, from the histograms; [] where one does not fit its rounds."""
    total: list[float] = []
    for place in places:
        histogram = next((place[name] for name in names if isinstance(place.get(name), list)), None)
        if histogram is None or len(histogram) > MOST_POSITIONS:
            return []
        if not all(isinstance(n, int) and 0 <= n < 1e15 for n in histogram):
            return []
        total += [0.0] * (len(histogram) - len(total))
        for accepted, count in enumerate(histogram):
            total[accepted] += count
    if not total or sum(total) != rounds:
        return []
    return [float(sum(total[j:])) for j in range(1, len(total))]


def _sglang(found: Sequence[Mapping[str, Any]]) -> Served | None:
    places = [place for place in found if _number(place, "spec_verify_ct")]
    rounds = _sum(places, "spec_verify_ct")
    if not rounds:
        return None
    accepted, drafted = _sum(places, *SGLANG_ACCEPTED), _sum(places, *SGLANG_DRAFTED)
    tokens = _sum(places, "completion_tokens")
    said = {"spec_verify_ct": rounds, "completion_tokens": tokens, "spec_num_correct_drafts": accepted,
            "spec_num_proposed_drafts": drafted,
            "spec_accept_length": tokens / rounds if tokens is not None else None,
            "spec_accept_rate": accepted / drafted if accepted is not None and drafted else None,
            "responses": float(len(places))}  # fmt: skip
    said = {name: value for name, value in said.items() if value is not None}
    if accepted is not None:
        per_round = drafted / rounds if drafted else 0.0
        steps = round(per_round) if per_round >= 1 and per_round == round(per_round) else None
        reached = _reached(places, SGLANG_HISTOGRAM, rounds)
        reached += [0.0] * ((steps or 0) - len(reached)) if reached else []
        notes = ("SGLang's own spec_accept_length counts prefill's token, too.",
                 "Of a tree, drafted tokens a round are its nodes, not its depth.")  # fmt: skip
        base = Served("sglang", said=said, steps=steps, notes=notes)
        return counted(base, rounds, accepted, drafted, reached)
    if tokens is not None and tokens - len(places) >= rounds:
        note = "Accepted tokens follow from completion_tokens, without prefill's; a stop cuts the last round."
        return counted(Served("sglang", said=said, notes=(note,)), rounds, tokens - len(places) - rounds)
    return None


def _vllm(found: Sequence[Mapping[str, Any]]) -> Served | None:
    places = [place for place in found if _number(place, "num_spec_steps") and "acceptance_histogram" in place]
    rounds, accepted = _sum(places, "num_spec_steps"), _sum(places, "num_accepted_draft_tokens")
    if not rounds or accepted is None:
        return None
    drafted, limit = _sum(places, "num_draft_tokens"), _number(places[0], "num_spec_tokens")
    said = {"num_spec_steps": rounds, "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted,
            "mean_acceptance_length": 1 + accepted / rounds, "responses": float(len(places))}  # fmt: skip
    reached = _reached(places, ("acceptance_histogram",), rounds)
    steps = round(limit or 0) or len(reached) or None
    note = "vLLM counts accepted drafts beyond max_tokens or a stop in each request's last round."
    return counted(Served("vllm", said=said, steps=steps, notes=(note,)), rounds, accepted, drafted, reached)


def _llamacpp(found: Sequence[Mapping[str, Any]]) -> Served | None:
    places = [place for place in found if _number(place, "draft_n") and "draft_n_accepted" in place]
    accepted, drafted, tokens = _sum(places, "draft_n_accepted"), _sum(places, "draft_n"), _sum(places, "predicted_n")
    if accepted is None or drafted is None or tokens is None:
        return None
    rounds = tokens - len(places) - accepted
    if rounds <= 0:
        return None
    said = {"predicted_n": tokens, "draft_n": drafted, "draft_n_accepted": accepted, "responses": float(len(places))}
    note = ("Rounds follow from predicted_n, without prefill's token: each emits its accepted drafts and one token; "
            "the last one is cut.")  # fmt: skip
    return counted(Served("llamacpp", said=said, notes=(note,)), rounds, accepted, drafted)


def _server_info(found: Sequence[Mapping[str, Any]]) -> Served | None:
    lengths = [x for x in (_number(place, "avg_spec_accept_length") for place in found) if x]
    if not lengths:
        if any(isinstance(place.get("internal_states"), list) for place in found):
            raise BadInput(
                "SGLang's server info has no avg_spec_accept_length: it runs without a draft, or has not decoded "
                "40 steps since it started; send it longer requests, or start it with the draft"
            )  # fmt: skip
        return None
    steps = next((n for n in (_number(place, "speculative_num_steps") for place in found) if n), None)
    version = next((str(place["version"]) for place in found if isinstance(place.get("version"), str)), "")
    algorithm = next((place["speculative_algorithm"] for place in found if place.get("speculative_algorithm")), None)
    tau = math.fsum(lengths) / len(lengths)
    return Served(
        "sglang",
        version,
        tau,
        {"avg_spec_accept_length": tau} | ({"speculative_algorithm": str(algorithm)} if algorithm else {}),
        steps=round(steps or 0) or None,
        notes=("Tokens / rounds since the server started, of whole log intervals (40 decode steps).",),
    )
