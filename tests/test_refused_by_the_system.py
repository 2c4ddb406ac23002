"""SIGTERM, Ctrl-C, a full disk, a limit and a read-only folder, in every stage: a sentence, nothing half-written under
a final name, and the same command then ends in the same files. (SIGKILL: test_pipeline.py, test_repair_crash.py.)

pytest -q tests/test_refused_by_the_system.py
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafts import make_draft, write_flat
from eyas.answers import JOURNAL
from eyas.cli.failures import interrupted
from eyas.draft.checkpoint import save_draft
from hostile import Said, eyas
from training import conversations, material

# What differs from run to run: times, and logs that hold them.
TIMED = ("manifest.json", "metrics.jsonl", "result.json", "summary.json")


@dataclass(frozen=True)
class Given:
    """Inputs of all stages, made once."""

    folder: Path
    target: Path
    features: Path

    def arguments(self, stage: str, out: Path) -> list[str]:
        common, place = ["--target", str(self.target)], ["--out", str(out)]
        short = ["--set", "steps=2", "--set", "intermediate_size=16", "--set", "ttt_steps=2", "--set", "save_every=1",
                 "--set", "batch_tokens=80"]  # fmt: skip
        return {
            "ask": ["ask", *common, *place, "--count", "3", "--max-new-tokens", "4"],
            "regenerate": ["regenerate", str(self.folder / "p.jsonl"), *common, *place, "--max-new-tokens", "4"],
            "extract": ["extract", str(self.folder / "talks.jsonl"), *common, *place],
            "vocab": ["vocab", str(self.features), "--size", "50", *common, *place],
            "train": ["train", str(self.features), "--vocab", str(self.folder / "vocab"), *common, *place, *short],
            "export": ["export", str(self.folder / "draft"), str(out)],
            "prove": ["prove", str(self.folder / "draft"), "--prompts", str(self.folder / "p.jsonl"), *common, *place,
                      "--max-new-tokens", "3", "--timed", "0"],
            "repair": ["repair", str(self.folder / "faulty"), "--auto", "--out", str(out)],
            "canary": ["canary", *common, *place],
            "run": ["run", str(self.folder / "recipe.yaml"), *place],
        }[stage]  # fmt: skip


@pytest.fixture(scope="module")
def given(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Given:
    m, folder = material(tiny_target, tmp_path_factory), tmp_path_factory.mktemp("given")
    (folder / "p.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Ho there"}\n')
    (folder / "talks.jsonl").write_text("".join(json.dumps(c) + "\n" for c in conversations(3, 5)))
    m.vocab_map.save(folder / "vocab" / "vocab.safetensors")
    save_draft(*make_draft(), folder / "draft")
    faulty = write_flat(folder / "faulty", *make_draft(), eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    tensors = load_file(faulty / "model.safetensors")
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))  # absolute ids where offsets belong
    save_file(tensors, faulty / "model.safetensors")
    (folder / "recipe.yaml").write_text(f"target: {{source: {tiny_target}}}\n")
    made = Given(folder, tiny_target, m.features.dir)
    from click.testing import CliRunner

    from eyas.cli import cli

    for stage in STAGES:  # in this process once, so that no child has to import what it imports
        assert CliRunner().invoke(cli, made.arguments(stage, folder / "warm" / stage)).exit_code == 0, stage
    return made


STAGES = ("ask", "regenerate", "extract", "vocab", "train", "export", "prove")


def content(out: Path) -> dict[str, str]:
    """Name -> digest of what a stage wrote, but for times."""
    found = {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in TIMED and "tensorboard" not in path.parts
    }
    if (out / "result.json").is_file():
        result = json.loads((out / "result.json").read_text())
        found["result.json"] = json.dumps([result[name] for name in ("tau", "rounds", "lossless", "per_position")])
    return found


def at_fsync(nth: int, do: Callable[[], Any]) -> Callable[[], None]:
    """In the child: `do` before its n-th flush of anything to the disk."""

    def arm() -> None:
        real, seen = os.fsync, 0

        def flush(descriptor: int) -> None:
            nonlocal seen
            seen += 1
            if seen == nth:
                do()
            real(descriptor)

        os.fsync = flush

    return arm


def refuse(number: int) -> Callable[[], None]:
    def do() -> None:
        raise OSError(number, os.strerror(number))

    return do


def sent(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def limited() -> None:
    """No file may become larger than a hundred bytes (SIGXFSZ is ignored by Python: a write fails with EFBIG)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def powerless() -> None:
    """Drop all capabilities (capset(2)), so that permissions hold for root, too."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)())


REFUSALS: dict[str, tuple[Callable[[], None], int, str]] = {
    "SIGTERM at the first flush": (at_fsync(1, sent(signal.SIGTERM)), 143, "ended by SIGTERM; {left}"),
    "SIGTERM at the third flush": (at_fsync(3, sent(signal.SIGTERM)), 143, "ended by SIGTERM; {left}"),
    "Ctrl-C at the second flush": (at_fsync(2, sent(signal.SIGINT)), 130, "interrupted; {left}"),
    "a disk full at the first flush": (at_fsync(1, refuse(errno.ENOSPC)), 1, "The disk is full"),
    "a disk full at the third flush": (at_fsync(3, refuse(errno.ENOSPC)), 1, "The disk is full"),
    "a limit of a hundred bytes": (limited, 1, "may not become so large"),
}


def half_written(out: Path) -> list[str]:
    """Files under a final name that cannot be read as what they are."""
    from safetensors import safe_open

    found = []
    for path in out.rglob("*"):
        if not path.is_file() or ".eyas-tmp-" in str(path):
            continue
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    list(file.keys())
            elif path.suffix == ".json":
                json.loads(path.read_text())
        except Exception as error:
            found.append(f"{path.name}: {error}")
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_refused_anywhere_it_says_so_and_goes_on(given: Given, tmp_path: Path, stage: str) -> None:
    whole = content(given.folder / "warm" / stage)
    assert whole
    for name, (arm, code, words) in REFUSALS.items():
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        said = eyas(*given.arguments(stage, out), before=arm)
        assert said.code == code and "Traceback" not in said.err, (name, said)
        line = said.err.strip().splitlines()[-1]
        words = words.format(left=interrupted(stage).partition("; ")[2])
        assert line.startswith("eyas: ") and words in line, (name, said.err)
        if code == 1:
            assert str(out) in line and "run the same command again" in line, (name, line)
        assert not half_written(tmp_path), name
        assert not (out / "manifest.json").exists(), f"{name}: it looks finished"
        again = eyas(*given.arguments(stage, out))
        assert again.code == 0, (name, again)
        assert content(out) == whole, name
        assert not [p for p in tmp_path.rglob("*") if ".eyas-tmp-" in p.name or p.name.endswith(".lock")], name


@pytest.mark.parametrize("stage", [*STAGES, "repair", "canary", "run"])
def test_a_folder_that_may_not_be_written_is_named(given: Given, tmp_path: Path, stage: str) -> None:
    place = tmp_path / "locked away"
    place.mkdir()
    place.chmod(0o555)
    said: Said = eyas(*given.arguments(stage, place / "out"), before=powerless).refused()
    assert str(place) in said.err and "not be written" in said.err, said.err
    assert not list(place.iterdir())


def test_a_signal_while_the_target_answers_keeps_what_is_answered(given: Given, tmp_path: Path) -> None:
    """From outside, as a batch system sends it, in the middle of the work."""
    out = tmp_path / "out"

    def soon() -> None:
        import eyas.journal

        real = eyas.journal.Journal.append

        def append(self: Any, record: Any) -> None:
            real(self, record)
            os.kill(os.getpid(), signal.SIGTERM)

        eyas.journal.Journal.append = append  # type: ignore[method-assign]

    said = eyas(*given.arguments("regenerate", out), before=soon)
    assert said.code == 143
    kept = (out / JOURNAL).read_text().splitlines()
    assert len(kept) == 2, "the settings, and the answer that had just come"
    assert eyas(*given.arguments("regenerate", out)).code == 0
    assert content(out) == content(given.folder / "warm" / "regenerate")


def test_children_end_with_a_command_that_is_terminated(tmp_path: Path) -> None:
    """What Eyas runs for a while (git, pip, compilers, engines) is not left behind."""
    mark = tmp_path / "pid"

    def start() -> None:
        import subprocess
        import threading

        import eyas.cli.inspect as verb

        def describe(*_: Any, **__: Any) -> Any:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            return subprocess.run(["sh", "-c", f"echo $$ > {mark}; exec sleep 60"])

        verb.command.callback = describe

    said = eyas("inspect", str(tmp_path), before=start)
    assert said.code == 143
    assert not Path(f"/proc/{mark.read_text().strip()}").exists()
