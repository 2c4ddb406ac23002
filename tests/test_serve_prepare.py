"""What is made of target and draft for an engine: named by its content, made whole, once.

pytest -q tests/test_serve_prepare.py        (with the engines' own converters: tests/real/test_serve.py)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drafts import make_draft, write_flat
from eyas.serve import Launch
from eyas.serve.prepare import (
    MADE,
    Wanted,
    as_it_is,
    identity,
    made,
    mended_taps,
    prepared,
    wanted_draft,
    wanted_target,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_flat(tmp_path / "draft", *make_draft())


def touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def test_folders_are_served_as_they_are(draft: Path, tiny_target: Path):
    for engine in ("vllm", "sglang"):
        said = prepared(Launch(engine, tiny_target, draft))
        assert (said.target, said.draft) == (tiny_target, draft)


def test_what_is_converted_already_is_used(tmp_path: Path):
    for name in ("t.gguf", "d.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    said = prepared(Launch("llamacpp", tmp_path / "t.gguf", tmp_path / "d.gguf"))
    assert (said.target, said.draft) == (tmp_path / "t.gguf", tmp_path / "d.gguf")
    (tmp_path / "openvino_model.xml").write_text("")
    assert as_it_is("openvino", tmp_path) and not as_it_is("openvino", tmp_path / "t.gguf")
    assert prepared(Launch("openvino", tmp_path, None)).target == tmp_path


def test_names_of_targets(tiny_target: Path, make_tiny_target, tmp_path: Path, cache: Path):
    def place(target: Path = tiny_target, engine: str = "llamacpp", version: str = "1", **more) -> Path:
        return wanted_target(Launch(engine, target, None, **more), target, version).path

    target = make_tiny_target(tmp_path / "target")
    first = place(target)
    assert first == place(target) and first.is_relative_to(cache / "serve" / "llamacpp" / "targets")
    assert place(target, k=7, context=9, port=1) == first, "nothing that the file does not depend on"
    others = {place(), place(target, version="2"), place(target, dtype="bfloat16"), place(target, engine="openvino")}
    assert len(others) == 4 and first not in others
    assert place(target, "openvino", dtype="auto") == place(target, "openvino"), (
        "OpenVINO converts in fp32, runs in any"
    )
    touch(target / "model.safetensors")
    assert place(target) != first


def test_names_of_drafts(draft: Path, tiny_target: Path, tmp_path: Path):
    def place() -> Path:
        return wanted_draft(Launch("llamacpp", tiny_target, draft), tiny_target, draft, "1").path

    first = place()
    assert first == place() and first.name == "draft.gguf"
    touch(draft / "config.json")
    assert place() == first, "a config is known by what it says"
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    second = place()
    assert second != first
    touch(draft / "model.safetensors")
    assert place() != second
    (draft / "notes").mkdir()
    (draft / "notes" / "a.txt").write_text("not of the draft")
    assert json.dumps(identity(draft)) and identity(draft) == identity(draft)


def test_it_appears_whole_or_not_at_all(tmp_path: Path):
    wanted = Wanted(tmp_path / "made" / "key", "model.gguf", {"of": "x"})

    def fails(path: Path) -> None:
        path.write_text("half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        made(wanted, fails, print, "converting")
    assert not wanted.folder.exists()
    heard: list[str] = []
    assert made(wanted, lambda path: path.write_text("whole"), heard.append, "converting x") == wanted.path
    assert wanted.path.read_text() == "whole" and json.loads((wanted.folder / MADE).read_text()) == {"of": "x"}
    assert heard == [f"converting x, once; it is kept in {wanted.folder}"]
    made(wanted, fails, heard.append, "converting x")
    assert len(heard) == 1, "the second time at once, and in silence"


def test_two_that_want_the_same_make_it_once(tmp_path: Path):
    wanted = Wanted(tmp_path / "made" / "key", "model", {})
    done: list[Path] = []
    heard: list[str] = []

    def work(path: Path) -> None:
        done.append(path)
        time.sleep(0.2)
        path.mkdir()

    threads = [threading.Thread(target=made, args=(wanted, work, heard.append, "converting")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 1 and wanted.path.is_dir()
    assert sum("waiting for it" in line for line in heard) == 2


KILLED = """
import sys, time
from pathlib import Path
from eyas.serve.prepare import Wanted, made
def work(path):
    path.write_text("half")
    print("begun", flush=True)
    time.sleep(300)
made(Wanted(Path(sys.argv[1]), "model", {}), work, lambda line: None, "converting")
"""


def test_what_a_killed_one_left_is_cleared(tmp_path: Path):
    folder = tmp_path / "made" / "key"
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE)
    assert killed.stdout is not None and killed.stdout.readline() == b"begun\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not folder.exists() and any(folder.parent.glob(".eyas-tmp-*"))
    made(Wanted(folder, "model", {}), lambda path: path.write_text("whole"), print, "converting")
    assert (folder / "model").read_text() == "whole" and not any(folder.parent.glob(".eyas-tmp-*"))


def test_openvinos_taps_are_said(tiny_target: Path, tmp_path: Path):
    (tmp_path / MADE).write_text(json.dumps({"taps": [2, 4, 5]}))
    said = mended_taps(tmp_path / MADE, tiny_target)
    assert "taps 2, 4, 5 stand in the converted draft (hidden_layers_list '1 3 4')" in said
    assert said.endswith("by itself OpenVINO would take 3, 5 and 6, one layer further")
