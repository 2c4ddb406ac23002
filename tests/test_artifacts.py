"""Writes are whole or not at all, also when killed or when the disk is full; manifests say what is current.

pytest -q tests/test_artifacts.py
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas import artifacts, digests, writes
from eyas.errors import BadInput, EyasError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@settings(max_examples=50, deadline=None)
@given(value=st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_a_digest_ignores_the_order_of_keys_and_survives_the_disk(value):
    backwards = dict(reversed(value.items()))
    assert digests.sha256_json(value) == digests.sha256_json(backwards)
    assert digests.sha256_json(json.loads(json.dumps(value))) == digests.sha256_json(value)


def test_a_digest_sees_every_value():
    assert digests.sha256_json({"a": 1}) != digests.sha256_json({"a": 2})
    assert digests.sha256_json({"a": [1, 2]}) != digests.sha256_json({"a": [2, 1]})
    assert digests.sha256_json({"p": Path("x")}) == digests.sha256_json({"p": "x"})


def test_sha256_file_is_the_known_digest_and_names_a_missing_file(tmp_path: Path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert digests.sha256_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(BadInput, match="nothing-here"):
        digests.sha256_file(tmp_path / "nothing-here")


def test_a_write_replaces_the_old_content_and_makes_folders(tmp_path: Path):
    path = tmp_path / "a" / "b.txt"
    writes.atomic_write(path, "old")
    writes.atomic_write(path, "nü")
    assert path.read_bytes() == "nü".encode()
    assert names(path.parent) == ["b.txt"]


def test_an_error_in_the_middle_leaves_the_old_content(tmp_path: Path):
    path = tmp_path / "b.txt"
    writes.atomic_write(path, "old")
    with pytest.raises(ZeroDivisionError), writes.atomic_path(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert names(tmp_path) == ["b.txt"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EyasError, match=r"big\.json cannot be written .*disk is full.*--out"):
        writes.atomic_write_json(tmp_path / "big.json", {"x": 1})
    assert names(tmp_path) == []


def test_a_disk_that_really_is_full(tmp_path: Path):
    """The device that is always full, as the kernel reports it."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with (
        pytest.raises(EyasError, match="disk is full"),
        writes.atomic_path(tmp_path / "x.bin"),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"0" * 4096)
    assert names(tmp_path) == []


def test_a_full_disk_reported_by_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import safetensors.torch
    import torch

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(EyasError, match=r"w\.safetensors.*disk is full"):
        writes.atomic_save_safetensors({"w": torch.zeros(2)}, tmp_path / "w.safetensors")
    assert names(tmp_path) == []


def test_a_folder_that_is_a_file_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EyasError, match="folder"):
        writes.atomic_write(tmp_path / "file" / "x", "")


KILLED_WRITER = """
import sys
from eyas.writes import atomic_dir, atomic_path
from pathlib import Path
kind, target = sys.argv[1:]
with (atomic_path if kind == "file" else atomic_dir)(target) as temporary:
    part = temporary if kind == "file" else temporary / "part"
    with open(part, "wb") as file:
        file.write(b"half of it"); file.flush()
        print("half", flush=True)
        import time; time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["file", "dir"])
def test_sigkill_in_the_middle_leaves_nothing_under_the_final_name(tmp_path: Path, kind: str):
    target = tmp_path / "out"
    writer = subprocess.Popen([sys.executable, "-c", KILLED_WRITER, kind, str(target)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"half\n"
    assert not target.exists()
    assert writes.remove_leftovers(tmp_path) == [], "a living writer's file was taken away"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert not target.exists()
    assert len(names(tmp_path)) == 1, "the temporary file is all that a kill leaves"
    assert len(writes.remove_leftovers(tmp_path)) == 1
    assert names(tmp_path) == []


def test_a_folder_is_replaced_whole(tmp_path: Path):
    target = tmp_path / "draft"
    for generation in ("first", "second"):
        with writes.atomic_dir(target) as temporary:
            (temporary / generation).mkdir()
            (temporary / generation / "w").write_text(generation)
    assert names(target) == ["second"]
    with pytest.raises(ZeroDivisionError), writes.atomic_dir(target) as temporary:
        (temporary / "third").write_text("")
        raise ZeroDivisionError
    assert names(target) == ["second"]
    assert names(tmp_path) == ["draft"]


def test_safetensors_are_equal_bytes_for_equal_content(tmp_path: Path):
    import torch
    from safetensors.torch import load_file

    tensors = {"b": torch.arange(6).view(2, 3).T, "a": torch.ones(2, dtype=torch.bfloat16)}
    writes.atomic_save_safetensors(tensors, tmp_path / "1", {"k": "v"})
    writes.atomic_save_safetensors(dict(reversed(tensors.items())), tmp_path / "2", {"k": "v"})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert torch.equal(load_file(tmp_path / "1")["b"], tensors["b"])


def test_the_order_of_metadata_does_not_change_from_one_write_to_the_next(tmp_path: Path):
    """The library's hash map is seeded anew for each file."""
    import torch
    from safetensors import safe_open

    metadata = {name: "x" * i + '\n"ü\x07\x7f\b\u2028' for i, name in enumerate("abcdefghij")}
    for name in ("1", "2", "3"):
        writes.atomic_save_safetensors({"w": torch.arange(5.0)}, tmp_path / name, metadata)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes() == (tmp_path / "3").read_bytes()
    with safe_open(tmp_path / "1", "pt") as file:
        assert file.get_tensor("w").tolist() == [0, 1, 2, 3, 4]
        assert file.metadata() == metadata


def test_a_stage_is_current_only_with_the_same_inputs_config_schema_and_files(tmp_path: Path):
    (tmp_path / "data").write_text("x")
    started = time.monotonic()
    manifest = artifacts.write_manifest(
        tmp_path,
        "extract",
        inputs={"conversations": "aa"},
        config={"taps": (2, 4, 5), "out": Path("x")},
        counts={"tokens": 3},
        duration_s=time.monotonic() - started,
        files=["data"],
        schema="s/1",
    )
    assert artifacts.read_manifest(tmp_path) == manifest
    assert manifest["counts"] == {"tokens": 3}
    config = {"out": "x", "taps": [2, 4, 5]}
    inputs = {"conversations": "aa"}
    assert artifacts.is_current(tmp_path, "extract", inputs, config, "s/1")
    assert not artifacts.is_current(tmp_path, "train", inputs, config, "s/1")
    assert not artifacts.is_current(tmp_path, "extract", {"conversations": "bb"}, config, "s/1")
    assert not artifacts.is_current(tmp_path, "extract", inputs, {**config, "taps": [1, 4, 5]}, "s/1")
    assert not artifacts.is_current(tmp_path, "extract", inputs, config, "s/2")
    artifacts.check_files(tmp_path)
    (tmp_path / "data").write_text("y")
    artifacts.check_files(tmp_path, hashes=False)
    with pytest.raises(BadInput, match="data is not what"):
        artifacts.check_files(tmp_path)
    (tmp_path / "data").unlink()
    assert not artifacts.is_current(tmp_path, "extract", inputs, config, "s/1")
    with pytest.raises(BadInput, match="missing"):
        artifacts.check_files(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other/9"}'])
def test_a_manifest_that_is_none_is_refused_by_name(tmp_path: Path, text: str):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BadInput, match=r"manifest\.json"):
        artifacts.read_manifest(tmp_path)
    assert not artifacts.is_current(tmp_path, "x", {})


def test_no_manifest_says_that_the_stage_did_not_finish(tmp_path: Path):
    with pytest.raises(BadInput, match="no stage finished there"):
        artifacts.read_manifest(tmp_path)


def test_a_folder_of_another_stage_a_file_and_a_closed_folder_are_refused(tmp_path, monkeypatch):
    artifacts.check_out(tmp_path / "new/deeper", "vocab")
    artifacts.write_manifest(tmp_path / "made", "train", inputs={})
    artifacts.check_out(tmp_path / "made", "train")
    with pytest.raises(BadInput, match="is what `eyas train` wrote; choose another --out"):
        artifacts.check_out(tmp_path / "made", "vocab")
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/below"):
        with pytest.raises(BadInput, match="file is a file; choose a folder"):
            artifacts.check_out(tmp_path / place, "vocab")
    (tmp_path / "made/manifest.json").write_text("torn")
    artifacts.check_out(tmp_path / "made", "vocab")  # nothing that could be lost
    monkeypatch.setattr(os, "access", lambda *_: False)
    artifacts.check_out(tmp_path / "made", "vocab")
    with pytest.raises(BadInput, match="may not be written to"):
        artifacts.check_out(tmp_path / "new", "vocab")
