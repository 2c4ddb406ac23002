"""A world in which the commands of README and docs/ run as they stand there, in seconds: tiny targets, drafts, prompts.

    world = build(folder)                       folders and files by the names that the pages use
    run("eyas doctor DRAFT --target TARGET")    (exit code, what was printed) in the current folder

Names such as TARGET stay; they are folders here. Only what decides about time is made smaller (`SMALLER`), and what
needs a graphics card, another machine or a server is turned to this one (`HERE`).
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conftest import build_tiny_target
from doctoring import patient_of, save
from eyas.cli import main
from training import conversations

TARGETS = ("TARGET", "T", "TUNED", "FOLDER", "shared/T")
DRAFTS = ("draft", "DRAFT", "BASE_DRAFT", "my-draft", "path/to/draft", "COPY", "runs/demo/export", "runs/quick/export")
HERE = [
    (r"^/shared/", "shared/"),
    (r"^(smollm2|path/to/target|BASE|Qwen/.*|owner/target)$", "TARGET"),
    (r"^cuda$", "cpu"),
    (r"^(COPY)\|.*", r"\1"),  # any of these
]
"""Whole words. The built-in target is as real as the demo's: what it takes to run is not for a suite of minutes."""
BUILT_IN = ("regenerate", "extract", "train", "prove", "measure", "serve", "chat")
"""Without --target these take the built-in one."""
SMALLER = {
    "ask": ["--count", "4", "--max-new-tokens", "12"],
    "regenerate": ["--max-new-tokens", "12", "--limit", "40"],
    "vocab": ["--size", "120"],
    "train": ["--set", "steps=2", "--set", "batch_tokens=256"],
    "doctor": ["--budget", "2"],
    "plan": ["--draft-vocab", "64"],
    "prove": ["--limit", "2", "--max-new-tokens", "8"],
    "measure": ["--limit", "2", "--max-new-tokens", "8", "--context-length", "4096"],
}
"""Options that come last and so win over those of a page."""


ELSEWHERE = {
    r"make demo|eyas run ": "test_pipeline.py",
    r"make (install|test|check|performance|pictures)|python benchmarks/": "test_benchmark_rows.py",
    r"(pip|ray|vllm) |eyas .*--engine ray": "test_on_ray.py",
    r"torchrun ": "test_train_ranks.py",
    r"eyas canary ": "test_canary.py",
    r"eyas .*--base-url ": "test_regenerate_server.py",
    r"eyas plan .*--(calibrate|synthetic|features)|eyas \w+ .*\bdry/": "test_plan_synthetic.py",
    r"eyas extract .*--from-speculators": "test_features_foreign.py",
    r"eyas extract .*--engine vllm": "real/test_extract.py",
    r"eyas (measure|serve) (?!.*(--print|--url))": "real/test_serve.py",
    r"eyas engines ": "test_engines_setup.py",
    r"eyas completion .*>": "test_console.py",  # into a file of the user's home
    r"eyas .*\b(owner/draft|OWNER/NAME|me/my-draft)\b": "test_hub.py",
    r"eyas report ": "test_report_run.py",
    r"eyas export run draft --for sglang,vllm --target TARGET": "test_export.py",  # of a run that torchrun made
}
"""What a page shows and another test runs, since it needs minutes, an engine, several processes or other machines."""


def build(folder: Path) -> Path:
    """Everything that a page may name, each in its own folder or file below `folder`."""
    target = build_tiny_target(folder / "TARGET", vocab=300)
    config = json.loads((target / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (target / "config.json").write_text(json.dumps(config))
    tokens = json.loads((target / "tokenizer_config.json").read_text()) | {"model_max_length": 4096}
    (target / "tokenizer_config.json").write_text(json.dumps(tokens))
    for name in TARGETS[1:]:
        shutil.copytree(target, folder / name)
    with torch.random.fork_rng():
        patient = patient_of(target, text={"documents": 2, "length": 12})
    for name in DRAFTS:
        save(patient, folder / name, target)
    rows = conversations(24, seed=3)
    for name in ("conversations", "few", "many", "train", "heldout"):
        _lines(folder / f"{name}.jsonl", conversations(8, seed=4) if name == "heldout" else rows)
    asked = [{"prompt": f"say {word} and count to {n}"} for n, word in enumerate("one two three four five six".split())]
    for name in ("prompts", "requests", "tests/requests"):
        (folder / name).parent.mkdir(exist_ok=True)
        _lines(folder / f"{name}.jsonl", asked)
    ids = patient.vocab_map.d2t
    torch.save(ids, folder / "d2t.pt")
    torch.save({"d2t": ids, "t2d": patient.vocab_map.t2d}, folder / "vocab_mapping.pt")
    (folder / "deploy").mkdir()
    (folder / "deploy/command.txt").write_text(
        "vllm serve TARGET --speculative-config "
        + shlex.quote(json.dumps({"method": "eagle3", "model": "draft", "num_speculative_tokens": 4}))
    )
    (folder / "server.log").write_text("".join(LOG))
    (folder / "answers").mkdir()
    shutil.copy(folder / "conversations.jsonl", folder / "answers")
    for name in ("features", "heldout"):
        done(f"eyas extract {'train' if name == 'features' else name}.jsonl --target TARGET --out {name}", folder)
    return folder


LOG = [
    "INFO: SpecDecoding metrics: Mean acceptance length: 2.00, Accepted throughput: 8.00 tokens/s, "
    "Drafted throughput: 32.00 tokens/s, Accepted: 80 tokens, Drafted: 320 tokens, "
    "Per-position acceptance rate: 0.500, 0.300, 0.150, 0.050, Avg Draft acceptance rate: 25.0%\n"
]


def done(command: str, folder: Path) -> None:
    """Run a command in `folder`; it must succeed."""
    with contextlib.chdir(folder):
        code, said = run(command)
    assert code == 0, said


def _lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def commands(page: str) -> Iterator[str]:
    """What a reader would type, in order: indented lines that begin with a program's name, joined where they go on."""
    joined = re.sub(r"\\\n\s*", "", page)
    for line in re.findall(rf"^ {{4,}}(?:\$ )?((?:{PROGRAMS}) .+)$", joined, re.MULTILINE):
        yield from (part.strip() for part in re.split(r"; (?=eyas )|&& (?=eyas |tail )", line))


PROGRAMS = "eyas|cp -r|head -n|tail -n|make|python|pip|torchrun|ray start|vllm serve"


def words_of(command: str) -> list[str]:
    """A command as it is run here: without comments and prose after it, with a server that is there, smaller."""
    text = re.sub(r"\s{3,}.*$|\s*\|\| exit 1$", "", command)
    text = text.replace('"$(cat deploy/command.txt)"', shlex.quote(Path("deploy/command.txt").read_text()))
    words = shlex.split(text.replace("[N]", ""), comments=True)[1:]
    for pattern, instead in HERE:
        words = [re.sub(pattern, instead, word) for word in words]
    after = words[words.index("--") :] if "--" in words else []
    before = words[: len(words) - len(after)]
    if words[0] in BUILT_IN and "--target" not in words:
        before += ["--target", "TARGET"]
    return [*before, *SMALLER.get(words[0], []), *after]


def run(command: str, url: str = "") -> tuple[int, str]:
    """Exit code and what was printed. url: of the server that stands for the one on a page."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as left:
        main([re.sub(r"^http://[a-z]+:\d+$", url, word) for word in words_of(command)])
    return int(left.value.code or 0), out.getvalue()
