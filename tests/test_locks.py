"""One writer of a folder: the second is refused at once and told by whom, a killed one leaves nothing behind.

pytest -q tests/test_locks.py
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drafts import make_draft
from eyas.draft.checkpoint import save_draft
from eyas.errors import EyasError
from eyas.locks import beside, inside
from eyas.prompts import Prompt
from training import conversations, material, run

HOLD = "import sys, time; from pathlib import Path; from eyas.locks import {how} as lock\n" \
       "with lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"  # fmt: skip


@pytest.fixture
def holder() -> Iterator[Callable[[str, Path], subprocess.Popen[str]]]:
    """Starts a process that holds a folder, `inside` or `beside` it."""
    started = []

    def start(how: str, folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD.format(how=how), str(folder)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None and started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def m(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return material(tiny_target, tmp_path_factory)


def do_ask(m: Any, out: Path) -> None:
    from eyas.ask import Asking, ask

    ask(m.target, out, 3, Asking(max_new_tokens=4))


def do_regenerate(m: Any, out: Path) -> None:
    from eyas.regenerate import regenerate

    regenerate([Prompt.single("Hi", source="x")], m.target, out, max_new_tokens=4)


def do_extract(m: Any, out: Path) -> None:
    from eyas.features.extract import extract

    extract(m.target, conversations(3, 5), out, progress=False)


def do_vocab(m: Any, out: Path) -> None:
    from eyas.features.count import make_vocab

    make_vocab(m.features.dir, out, 100)


def do_train(m: Any, out: Path) -> None:
    run(m, out, steps=1)


def do_export(m: Any, out: Path) -> None:
    from eyas.export import export_draft

    export_draft(save_draft(*make_draft(), out.parent / "source"), out)


def do_canary(m: Any, out: Path) -> None:
    from eyas.canary.make import make

    make(m.target, out)


def do_prove(m: Any, out: Path) -> None:
    from eyas.cli.prove import command

    prompts = out.parent / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "Hi"}) + "\n")
    draft = save_draft(*make_draft(), out.parent / "draft")
    arguments = [str(draft), "--target", str(m.target), "--prompts", str(prompts), "--out", str(out)]
    command.main([*arguments, "--max-new-tokens", "3", "--timed", "0"], standalone_mode=False)


def do_run(m: Any, out: Path) -> None:
    from eyas.config import validate
    from eyas.pipeline import run as run_all

    run_all(validate({"target": {"source": str(m.target)}}), out, say=lambda line: None)


STAGES = {"ask": ("inside", do_ask), "regenerate": ("inside", do_regenerate), "extract": ("inside", do_extract),
          "vocab": ("inside", do_vocab), "train": ("inside", do_train), "export": ("beside", do_export),
          "canary": ("beside", do_canary), "prove": ("inside", do_prove), "run": ("inside", do_run)}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_the_second_is_refused_at_once_and_told_who_holds_it(m, tmp_path, holder, stage: str) -> None:
    how, work = STAGES[stage]
    other = holder(how, tmp_path / "out")
    with pytest.raises(EyasError, match=f"out is being written by process {other.pid}; wait"):
        work(m, tmp_path / "out")


@pytest.mark.parametrize("how", ["inside", "beside"])
def test_a_killed_holder_blocks_nobody_and_a_lock_leaves_no_file(tmp_path, holder, how: str) -> None:
    other = holder(how, tmp_path / "out")
    other.send_signal(signal.SIGKILL)
    other.wait()
    files = [*tmp_path.rglob("*.lock"), *tmp_path.rglob(".*.lock")]
    assert len(set(files)) == 1, "this test must begin with a stale lock"
    with {"inside": inside, "beside": beside}[how](tmp_path / "out"):
        assert files[0].read_text().startswith(f"{os.getpid()} ")
    assert not files[0].exists()


@pytest.mark.parametrize("stage", ["vocab", "train", "export"])
def test_a_stale_lock_does_not_stop_a_stage(m, tmp_path, holder, stage: str) -> None:
    how, work = STAGES[stage]
    other = holder(how, tmp_path / "out")
    other.kill()
    other.wait()
    work(m, tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("as it was")
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises((EyasError, OSError)), inside(tmp_path / "out"):
        pass
    assert (tmp_path / "precious").read_text() == "as it was"


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch, capsys, error: int) -> None:
    def none(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", none)
    with inside(tmp_path / "out"):
        pass
    assert f"{tmp_path / 'out'} lies on a file system that keeps no locks" in capsys.readouterr().err


def test_many_that_race_for_a_folder_never_hold_it_together(tmp_path: Path) -> None:
    """The file is removed with each release: whoever locked the removed one must notice."""
    code = (
        "import sys; from pathlib import Path; from eyas.locks import inside; from eyas.errors import EyasError\n"
        "out, held = Path(sys.argv[1]), 0\n"
        "while held < 200:\n"
        "    try:\n"
        "        with inside(out):\n"
        "            (out / 'one').touch(exist_ok=False); held += 1; (out / 'one').unlink()\n"
        "    except EyasError: pass\n"
        "print(held)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [racer.communicate(timeout=300) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers), [error for _, error in said]
    assert [int(out) for out, _ in said] == [200, 200, 200]


def test_it_is_free_within_a_moment_of_its_end(tmp_path: Path) -> None:
    for _ in range(20):  # nobody waits for a lock: one that is still held would be refused
        with inside(tmp_path / "out"):
            pass
