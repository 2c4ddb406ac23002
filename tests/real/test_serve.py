"""Each real engine serves a trained draft: it answers, says what it accepted, and leaves no process behind.

Target SmolLM2-135M-Instruct, float32, greedy. The draft is that of EYAS_TEST_DRAFT, else of runs/demo/export, else one
that is trained here.   make test-engines
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from eyas.serve import Launch, Server, running
from eyas.serve.check import check

pytestmark = pytest.mark.engine
ENGINES = ("vllm", "sglang", "llamacpp", "openvino")
TOKENS = 48


@pytest.fixture(scope="module")
def prompt(target: Path) -> list[int]:
    from tokenizers import Tokenizer

    # A long answer: past the end of one llama.cpp's ignore_eos forbids the end's token, the others' say it and go on.
    text = "<|im_start|>user\nTell me a long story about a hawk and a fox.<|im_end|>\n<|im_start|>assistant\n"
    return Tokenizer.from_file(str(target / "tokenizer.json")).encode(text).ids


@pytest.fixture(scope="module")
def draft(plain_draft: Path) -> Path:
    return plain_draft


@pytest.fixture(scope="module")
def plain(target: Path, prompt: list[int]) -> list[int]:
    """The target's own answer: ids."""
    with running(Launch("llamacpp", target, None), wait=300) as server:
        return answer(server, prompt)["tokens"]


def post(server: Server, page: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{server.url}/{page}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as said:
        return json.loads(said.read())


def answer(server: Server, prompt: list[int]) -> dict[str, Any]:
    """{"tokens"; with a draft "accepted"; "rounds" where said}"""
    if server.engine == "vllm":
        body = {"model": server.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        said = post(server, "v1/completions", body)
        counts = said["metrics"]["speculative_decoding"]
        return {"tokens": said["choices"][0]["token_ids"], "accepted": counts["num_accepted_draft_tokens"],
                "rounds": counts["num_spec_steps"]}  # fmt: skip
    if server.engine == "sglang":
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        said = post(server, "generate", {"input_ids": prompt, "sampling_params": sampling})
        meta = said["meta_info"]
        return {"tokens": said["output_ids"], "accepted": meta["spec_num_correct_drafts"],
                "rounds": meta["spec_verify_ct"]}  # fmt: skip
    body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    said = post(server, "completion", body)
    accepted = said["timings"].get("draft_n_accepted", 0)
    return {"tokens": said["tokens"], "accepted": accepted,
            "rounds": said.get("rounds", len(said["tokens"]) - 1 - accepted)}  # fmt: skip


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("engine", ENGINES)
def test_it_serves_and_is_gone(engine: str, draft: Path, target: Path, prompt: list[int], plain: list[int]):
    launch = Launch(engine, target, draft)
    assert check(launch) == []
    heard: list[str] = []
    with running(launch, tell=heard.append, wait=600) as server:
        said = answer(server, prompt)
        family = server._process.family()
        assert server.alive() and server.pid in family
    print(engine, f"{server.seconds:.1f} s, {len(family)} processes,", said["accepted"], "in", said["rounds"])
    assert said["tokens"] == plain, "greedy in float32: the draft changes nothing"
    assert said["accepted"] > 0 and said["rounds"] < TOKENS
    assert not any(map(lives, family))
    assert not server.alive() and server.log.is_file() and any(str(server.log) in line for line in heard)
    if engine == "openvino":
        assert any("one layer further" in line for line in heard)


def test_openvino_streams_what_a_round_brings(draft: Path, target: Path, prompt: list[int], plain: list[int]):
    with running(Launch("openvino", target, draft), wait=600) as server:
        body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{server.url}/completion", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=300) as lines:
            parts = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(server, "completion", {"prompt": prompt, "n_predict": 5000})
    assert [i for part in parts for i in part["tokens"]] == plain
    assert parts[-1]["stop"] and parts[-1]["rounds"] == len([part for part in parts[:-1] if part["tokens"]]) - 1


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_nothing_is_left_of_an_engine_when_eyas_is_killed(engine: str, draft: Path, target: Path, tmp_path: Path):
    words = ["serve", draft, "--target", target, "--engine", engine, "--json", "--log", tmp_path / "log"]
    eyas = subprocess.Popen([sys.executable, "-m", "eyas", *words], stdout=subprocess.PIPE)
    assert eyas.stdout is not None
    said = json.loads(eyas.stdout.readline())
    guard = int(Path(f"/proc/{said['pid']}/stat").read_text().rpartition(")")[2].split()[1])
    from eyas.serve.guard import descendants

    family = [guard, *descendants(guard)]
    assert said["pid"] in family and len(family) > 2
    eyas.send_signal(signal.SIGKILL)
    eyas.communicate()
    end = time.monotonic() + 40
    while any(map(lives, family)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not any(map(lives, family))


def test_ctrl_c_ends_it_with_0(draft: Path, target: Path, tmp_path: Path):
    words = ["serve", draft, "--target", target, "--engine", "llamacpp", "--json", "--log", tmp_path / "log"]
    eyas = subprocess.Popen([sys.executable, "-m", "eyas", *words], stdout=subprocess.PIPE)
    assert eyas.stdout is not None
    said = json.loads(eyas.stdout.readline())
    eyas.send_signal(signal.SIGINT)
    eyas.communicate(timeout=30)
    assert eyas.returncode == 0 and not lives(said["pid"])
