"""Ask a real engine for greedy answers to prompts of ids, with a draft or without: tokens and acceptance counts.

    answers("vllm", target, draft, prompts, scratch)["accepted"]        eyas repair DRAFT ... --serve vllm

The scripts in servers/ run under the engine's own Python (`eyas engines setup`), float32 on the CPU.
    make test-engines (tests/real/test_serving.py)
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import EyasError
from .environment import SCRIPTS, Environment, required


def environment(engine: str) -> Environment:
    """The engine's environment. Raises BadInput where it was not set up here."""
    return required(engine)


def answers(
    engine: str, target: Path, draft: Path | None, prompts: list[list[int]], folder: Path, k: int = 4, tokens: int = 64
) -> dict[str, Any]:
    """{"tokens": lists of ids; with a draft also "rounds", "accepted", "at_least": rounds with j or more accepted}.

    folder: for a scratch file. Raises EyasError where the engine fails, with the end of what it printed. llama.cpp:
    `target` and `draft` are .gguf files, and there is no count by position.
    """
    if engine == "llamacpp":
        return _llamacpp(target, draft, prompts, k, tokens)
    file = folder / f"{engine}-prompts.json"
    file.write_text(json.dumps(prompts))
    script = SCRIPTS / f"serve_{engine}.py"
    options = ["--k", str(k), "--tokens", str(tokens)]
    return environment(engine).run(script, [target, draft or "none", file, *options], timeout=1800)[0]


def _llamacpp(target: Path, draft: Path | None, prompts: list[list[int]], k: int, tokens: int) -> dict[str, Any]:
    with _server(target, draft, k) as url:
        said = [_complete(url, ids, tokens) for ids in prompts]
    out: dict[str, Any] = {"tokens": [s["tokens"] for s in said]}
    if draft is not None:
        accepted = sum(s["timings"]["draft_n_accepted"] for s in said)
        # Its log counts drafted tokens, not rounds; every token but the prefill's was accepted or ended a round.
        rounds = sum(len(s["tokens"]) - 1 for s in said) - accepted
        out |= {"rounds": rounds, "accepted": accepted}
    return out


@contextlib.contextmanager
def _server(target: Path, draft: Path | None, k: int) -> Iterator[str]:
    env = environment("llamacpp")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    drafted = [] if draft is None else ["-md", str(draft), "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(k),
                                        "-td", "1"]  # fmt: skip
    command = [str(env.programs["llama-server"]), "-m", str(target), "-t", "1", "-c", "1024", "-np", "1", "-fa", "off",
               "--no-cache-prompt", "--host", "127.0.0.1", "--port", str(port), *drafted]  # fmt: skip
    process = subprocess.Popen(command, env=env.environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(240):
            if process.poll() is not None:
                said = process.stdout.read() if process.stdout else ""
                raise EyasError(f"llama-server left with exit code {process.returncode}: {said[-2000:].strip()}")
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"{url}/health", timeout=2).status == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _complete(url: str, ids: list[int], tokens: int) -> dict[str, Any]:
    greedy = {"temperature": 0, "top_k": 1, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
    asked = {"prompt": ids, "n_predict": tokens, **greedy}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        said: dict[str, Any] = json.loads(response.read())
    return said
