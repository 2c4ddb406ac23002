"""Why a server did not start: the end of its log, and what is known about the line that matters.

pytest tests/test_serve_process.py
"""

from __future__ import annotations

import re
from pathlib import Path

from ..engines.served.events import Events

LINES, WIDTH = 12, 300
TAKEN = re.compile(
    r"address already in use|port \d+ (?:is )?(?:not available|already|in use)|"
    r"couldn't bind (?:to )?(?:HTTP )?server socket",
    re.IGNORECASE,
)
# Pattern -> what it means and what to do. Sources: SGLang 0.5.23, vLLM 0.32.0, llama.cpp b11434.
CAUSES = (
    (TAKEN.pattern,
     "another program took the port meanwhile; start again, or name another --port"),
    (r"unrecognized arguments?: (.{1,120})", "the engine does not know an option given after `--`; remove it"),
    (r"invalid argument: (.{1,120})", "the engine does not know an option given after `--`; remove it"),
    (r"out of memory|MemoryError|Cannot allocate memory|bad_alloc",
     "the memory of this machine does not suffice; lower --context-length or --requests, or end other programs"),
    (r"KV cache (?:is )?(?:needed|required).{0,200}|No available memory for the cache blocks",
     "the cache for one sequence does not fit; lower --context-length"),
    (r"context_length .{0,80}greater than|max_model_len .{0,120}greater than",
     "the context is longer than the model's; lower --context-length"),
    (r"not support EAGLE3|set_eagle3_layers_to_capture",
     "this engine's class of the target cannot hand out the states that an EAGLE-3 draft reads; choose another "
     "--engine"),
    (r"No module named '?[\w.]+", "the engine's environment is incomplete; run `eyas engines setup ENGINE --force`"),
)  # fmt: skip


def explained(said: str, log: Path) -> str:
    """ "It says: ... The whole log: PATH", with the cause in front where it is known."""
    for pattern, cause in CAUSES:
        if re.search(pattern, said, re.IGNORECASE):
            return f"{cause[0].upper()}{cause[1:]}. {_end(said, log)}"
    events = Events()
    for line in said.splitlines():
        events.look(line)
    found = [event for event in events.all() if event.severity == "error"]
    return f"{found[-1].meaning[0].upper()}{found[-1].meaning[1:]}. {_end(said, log)}" if found else _end(said, log)


def _end(said: str, log: Path) -> str:
    lines = [line.rstrip()[:WIDTH] for line in said.splitlines() if line.strip()][-LINES:]
    if not lines:
        return f"It printed nothing. Its log: {log}"
    return "Its log ends:\n" + "\n".join(f"  {line}" for line in lines) + f"\nThe whole log: {log}"
