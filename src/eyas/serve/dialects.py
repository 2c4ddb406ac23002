"""How each server is asked for tokens, and what its stream says: one dialect an engine.

Prompts are token ids, never text, so that every engine and the reference decoder read the same; answers are streamed.
Sources: vLLM 0.32 entrypoints/openai/completion/serving.py:300-490; SGLang 0.5.23 managers/tokenizer_manager.py:3149;
llama.cpp b11434 tools/server/server-task.cpp:344-710; OpenVINO GenAI has no server of its own: engines/servers.

    pytest tests/test_serve_client.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Asked:
    """One request for an answer."""

    ids: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None
    model: str = ""


@dataclass(frozen=True)
class Said:
    """What one event of a stream says."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    whole: bool = False
    """tokens and text are the answer so far, not what is new."""
    total: int | None = None
    """Tokens of the answer so far, where the server counts them."""
    finish: str = ""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """What it says of this request's acceptance, by its own names."""


@dataclass(frozen=True)
class Dialect:
    """How to ask one kind of server."""

    engine: str
    path: str
    body: Callable[[Asked], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], Said]
    by_round: bool = False
    """Does each event of the stream hold whole rounds of speculative decoding (the first: prefill's token)? One as a
    rule; a server that is busy sends several together."""


def _openai_body(a: Asked) -> dict[str, Any]:
    body = {"model": a.model, "prompt": list(a.ids), "max_tokens": a.max_tokens, "temperature": a.temperature,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}  # fmt: skip
    return body | ({"ignore_eos": True} if a.ignore_eos else {}) | ({"seed": a.seed} if a.seed is not None else {})


def _openai_read(event: Mapping[str, Any]) -> Said:
    choice = (event.get("choices") or [{}])[0]
    counts = (event.get("metrics") or {}).get("speculative_decoding") or {}
    return Said(_ids(choice.get("token_ids")), choice.get("text") or "", finish=choice.get("finish_reason") or "",
                counts=counts)  # fmt: skip


def _sglang_body(a: Asked) -> dict[str, Any]:
    how = {"temperature": a.temperature, "max_new_tokens": a.max_tokens, "ignore_eos": a.ignore_eos}
    how |= {"sampling_seed": a.seed} if a.seed is not None else {}
    return {"input_ids": list(a.ids), "sampling_params": how, "stream": True}


def _sglang_read(event: Mapping[str, Any]) -> Said:
    meta = event.get("meta_info") or {}
    finish = (meta.get("finish_reason") or {}).get("type") or ""
    ids, total = _ids(event.get("output_ids")), _count(meta.get("completion_tokens"))
    return Said(ids, event.get("text") or "", whole=total is None or len(ids) >= total, total=total, finish=finish,
                counts=meta if finish else {})  # fmt: skip


def _llamacpp_body(a: Asked) -> dict[str, Any]:
    body = {"prompt": list(a.ids), "n_predict": a.max_tokens, "temperature": a.temperature, "stream": True,
            "return_tokens": True, "cache_prompt": False, "ignore_eos": a.ignore_eos}  # fmt: skip
    body |= {"top_k": 1} if not a.temperature else {}
    return body | ({"seed": a.seed} if a.seed is not None else {})


def _llamacpp_read(event: Mapping[str, Any]) -> Said:
    """Its last event repeats nothing when it streams; the counts are those of the whole request. `rounds` stands beside
    the timings in those of OpenVINO's server."""
    finish = {"eos": "stop", "word": "stop", "limit": "length"}.get(str(event.get("stop_type")), "")
    ended = bool(event.get("stop"))
    counts = event.get("timings") or {} if ended else {}
    counts = {**counts, "rounds": event["rounds"]} if ended and "rounds" in event else counts
    return Said(_ids(event.get("tokens")), event.get("content") or "", finish=(finish or "stop") if ended else "",
                counts=counts, total=_count(event.get("tokens_predicted")))  # fmt: skip


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 40 else None


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) and all(type(i) is int for i in value) else ()


DIALECTS = {
    "vllm": Dialect("vllm", "/v1/completions", _openai_body, _openai_read, by_round=True),
    "sglang": Dialect("sglang", "/generate", _sglang_body, _sglang_read, by_round=True),
    "llamacpp": Dialect("llamacpp", "/completion", _llamacpp_body, _llamacpp_read),
    "openvino": Dialect("openvino", "/completion", _llamacpp_body, _llamacpp_read),
}
