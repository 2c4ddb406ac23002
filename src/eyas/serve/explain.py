"""Why a server did not start: the lines of its log that say it, and what is known about them.

pytest tests/test_serve_process.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..engines.served.events import Events

LINES, WIDTH = 6, 400
LOOKED = 200_000  # bytes of the log's end
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


# What vLLM and SGLang put before a line; lines of errors without that; those that only say that another one failed.
PREFIX = re.compile(r"^(?:\([^)]*\) )*(?:\[[\d :.T-]+[^\]]*\] )?(?:(?:ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
SAYS = re.compile(
    r"^(?:ERROR:|[\w.]*(?:Error|Exception|Interrupt)\b: \S|\s*Value error, |(?:[\w.-]+ ?[\w.-]*: )?error: |E )|"
    r": error: |failed to (?:load|create|init)",
)
SECOND_HAND = ("Engine core initialization failed", "WorkerProc initialization failed", "EngineDeadError")
SHOWN = 4  # such lines


def explained(log: Path) -> str:
    """ "It says: ... The whole log: PATH", with the cause in front where it is known."""
    said = tail(log, LOOKED)
    for pattern, cause in CAUSES:
        if re.search(pattern, said, re.IGNORECASE):
            return f"{_sentence(cause)} {_end(said, log)}"
    events = Events()
    for line in said.splitlines():
        events.look(line)
    found = [event for event in events.all() if event.severity == "error"]
    return f"{_sentence(found[-1].meaning)} {_end(said, log)}" if found else _end(said, log)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _end(said: str, log: Path) -> str:
    """Lines that say an error, each once, the last ones; where there are none, the log's end."""
    lines = [PREFIX.sub("", line.rstrip())[:WIDTH] for line in said.splitlines() if line.strip()]
    if not lines:
        return f"It printed nothing. Its log: {log}"
    errors = [line.strip() for line in lines if SAYS.search(line) and not any(word in line for word in SECOND_HAND)]
    shown = list(dict.fromkeys(errors))[-SHOWN:] or lines[-LINES:]
    head = "It says:" if errors else "Its log ends:"
    return f"{head}\n" + "\n".join(f"  {line}" for line in shown) + f"\nThe whole log: {log}"


def tail(log: Path, n: int) -> str:
    """The last `n` bytes of a file, from the beginning of a line on; "" where there is none."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - n))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return (text.partition("\n")[2] if size > n else text) or text  # a single line may be longer than that
