"""Lines of a server's log that bear on acceptance beside the numbers: quoted, with what they mean.

Sources stand beside each pattern: SGLang 0.5.23 (below sglang/srt), vLLM 0.32 (below vllm), llama.cpp b11434, or the
report where the line was seen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .record import Event

MOST_OF_A_KIND = 3
LONGEST_LINE = 300
EMBEDDING_OWN, EMBEDDING_SAME = "embedding-own", "embedding-same"


@dataclass(frozen=True)
class Sign:
    """A pattern, and what a line that matches it means."""

    id: str
    keys: tuple[str, ...]
    """One of them is in every line that matches: quick to look for, in logs of a million lines."""
    pattern: str
    meaning: str
    severity: str = "warning"


SIGNS = (
    # vLLM config/speculative.py:1703, seen in vllm-project/vllm#48894
    Sign("positions", ("index out of bounds",),
         r"index out of bounds: 0 <= .{1,60}? < \d+",
         "a position beyond the draft's max_position_embeddings was looked up in its RoPE table; without compilation "
         "the same reads garbage in silence", "error"),
    Sign("positions-raised", ("draft model max_position_embeddings",),
         r"Overriding draft model max_position_embeddings from \d+",
         "the draft's positions end before the served context; only the RoPE table is made longer, past its own limit "
         "vLLM stops drafting and counts zeros as drafts"),
    # SGLang configs/model_config.py:1297
    Sign("positions-short", ("derived context_length", "the draft model's max_pos"),
         r"Target model's context_length \(\d+\) is greater than the derived context_length|"
         r"Overriding the draft model's max_position_embeddings",
         "the draft's positions end before the served context"),
    # SGLang models/kimi_k25_eagle3.py:495
    Sign("weight-unexpected", ("unexpected weight",),
         r"skipping unexpected weight",
         "a tensor of the file has a name that the engine does not know; what it should have filled holds "
         "uninitialised memory", "error"),
    # vLLM model_executor/models/utils.py:443
    Sign("weight-unknown", ("no module or parameter named",),
         r"There is no module or parameter named '[^']{1,200}'",
         "the file has a tensor that the engine's class does not know; vLLM stops", "error"),
    # vLLM model_executor/model_loader/default_loader.py:565; transformers modeling_utils
    Sign("weight-missing", ("not initialized from", "newly initialized"),
         r"weights were not initialized from|were not initialized from the model checkpoint|"
         r"newly initialized",
         "parameters were left as created: the file lacks them, or names them otherwise", "error"),
    # SGLang model_loader/weight_utils.py:1583, vLLM model_executor/model_loader/weight_utils.py:1486
    Sign("weight-shape", ("Attempted to load weight", "size mismatch for"),
         r"Attempted to load weight \(.{1,80}\) into parameter|size mismatch for [\w.]+",
         "a tensor has another shape than the config says", "error"),
    # vllm-project/vllm#18906, #25883
    Sign("weight-key-error", ("KeyError: ",),
         r"KeyError: '?[\w.]*(?:weight|bias|embed_tokens|lm_head|midlayer|layers\.\d)[\w.]*'?",
         "the loader looked up a name that its model does not have: another key scheme, or an unquantised draft that "
         "inherits the target's quantisation", "error"),
    # vLLM v1/spec_decode/llm_base_proposer.py:1441-1542
    Sign("head-target", ("without its own lm_head",),
         r"Detected EAGLE model without its own lm_head in the checkpoint",
         "the file holds no head, so the target's is used; with a pruned vocabulary that means its first rows, which "
         "are other tokens"),
    Sign(EMBEDDING_OWN, ("distinct embed_tokens",),
         r"Detected EAGLE model with distinct embed_tokens weights",
         "the draft brings another embedding than the target's, and it is used: right if it was trained, fatal if an "
         "exporter wrote a fresh one", "info"),
    Sign(EMBEDDING_SAME, ("embed_tokens identical",),
         r"Detected EAGLE model with embed_tokens identical to the target",
         "the draft's embedding equals the target's, which is shared", "ok"),
    # vLLM v1/worker/gpu_model_runner.py:5236
    Sign("no-taps", ("not support EAGLE3",),
         r"Model does not support EAGLE3 interface|Model does not support EAGLE3",
         "the target's class cannot hand out the states that the draft needs", "error"),
    # SGLang speculative/eagle_worker_v2.py:370 (arg_groups/fields/spec.py:32 for the name)
    Sign("algorithm-eagle", ("EAGLE", "NEXTN"),
         r"speculative[_-]algorithm['\"]?(?:\s*[=:]\s*| +)['\"]?(?:EAGLE|NEXTN)\b",
         "the draft is run as EAGLE, not EAGLE3: fc is skipped, the target's head chooses, d2t is not used; nothing is "
         "accepted", "error"),
    # vLLM config/speculative.py:1332; the repr of SpeculativeConfig at 1990
    Sign("method-eagle", ("'eagle'", '"eagle"'),
         r"SpeculativeConfig\(method='eagle'|['\"]method['\"]: ?['\"]eagle['\"]",
         "the draft is run with method eagle, not eagle3: it is read as another kind of draft", "error"),
    # SGLang utils/async_probe.py:46; torch's sampler
    Sign("nan", ("NaN", "probability tensor"),
         r"NaN detected in|probability tensor contains either|NaN (?:logits|in logits)|logits contain NaN",
         "numbers overflowed: then all drafts are refused, or all accepted", "error"),
    # SGLang arg_groups/speculative_hook.py:1257
    Sign("draft-tokens", ("num_draft_tokens is adjusted",),
         r"speculative_num_draft_tokens is adjusted to speculative_num_steps \+ 1",
         "--speculative-num-draft-tokens was replaced by steps + 1, as a chain needs", "info"),
    # SGLang speculative/eagle_worker_v2.py:328
    Sign("token-map", ("Speculative token map",),
         r"Speculative token map specified, but EAGLE3 models already have this",
         "--speculative-token-map is ignored for EAGLE-3 drafts", "info"),
    # vLLM config/speculative.py:532, llama.cpp common/speculative.cpp:2813, SGLang environ.py:527
    Sign("synthetic", ("synthetic", "SIMULATE_ACC"),
         r"synthetic speculative acceptance is enabled|rejection_sample_method='synthetic'|"
         r"SGLANG_SIMULATE_ACC_LEN",
         "acceptance is simulated for a benchmark: these numbers are not the draft's", "error"),
    # llama.cpp tools/server/server-context.cpp:1375, 1396, 1253, common/speculative.cpp:119, 562
    Sign("drafting-off", ("speculative decoding", "load draft model"),
         r"speculative decoding not supported by this context|"
         r"failed to initialize speculative decoding context|failed to load draft model",
         "the server runs without a draft", "error"),
    Sign("draft-foreign", ("draft model",),
         r"draft model vocab type must match target|draft model is not eagle3",
         "the draft was not converted as an EAGLE-3 draft of this target", "error"),
)  # fmt: skip
_PATTERNS = {sign.id: re.compile(sign.pattern) for sign in SIGNS}


class Events:
    """Collects them line by line: at most a few different ones of a kind."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Event] = {}

    def look(self, line: str) -> None:
        """Keeps what the line gives away."""
        for sign in SIGNS:
            match = _PATTERNS[sign.id].search(line) if any(key in line for key in sign.keys) else None
            if not match or sum(kind == sign.id for kind, _ in self._found) >= MOST_OF_A_KIND:
                continue
            whole = len(line) <= LONGEST_LINE  # SGLang prints all its settings in one
            quoted = (
                line.strip() if whole else f"... {line[match.start() : match.end() + 60][:LONGEST_LINE].strip()} ..."
            )
            self._found.setdefault((sign.id, match.group(0)), Event(sign.id, quoted, sign.meaning, sign.severity))

    def all(self) -> tuple[Event, ...]:
        """In the order of the log; ranks that judged the embedding differently add one (vllm-project/vllm#50158)."""
        events = tuple(self._found.values())
        own = next((event for event in events if event.id == EMBEDDING_OWN), None)
        if own and any(event.id == EMBEDDING_SAME for event in events):
            meaning = "ranks judged the draft's embedding differently, so each runs another draft"
            return (*events, Event("embedding-ranks", own.line, meaning, "error"))
        return events
