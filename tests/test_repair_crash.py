"""Killed at any call of the system, out of space at any write: the old state or the new one, and both ways open.

pytest -q tests/test_repair_crash.py
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from changing import CHANGES, in_memory, leftovers, state, write_draft
from eyas.draft.files import PENDING, open_folder
from eyas.errors import BadInput, EyasError
from eyas.repair.history import history, revert
from eyas.repair.in_place import repair_in_place
from killing_repairs import CALLS

KILLED = {
    "same_size": 45, "other_size": 70, "renamed": 50, "of_config": 35, "sharded_left_out": 70,
    "sharded_of_everything": 90, "revert": 70, "recovery": 15, "full_disk": 50,
}  # fmt: skip
"""Case -> kills that there must be at least, so that a hook that came off is noticed."""


@pytest.fixture
def fast() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


@pytest.mark.parametrize("case", KILLED)
def test_killed_anywhere_it_is_old_or_new(fast: Path, case: str):
    script = Path(__file__).with_name("killing_repairs.py")
    done = subprocess.run([sys.executable, str(script), case, str(fast)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong"] == []
    assert report["kills"] >= KILLED[case]


@pytest.mark.parametrize("case", ["same_size", "sharded_of_everything"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_any_one_call_loses_nothing(fast: Path, monkeypatch, case: str, error: int):
    pristine = write_draft(fast / "pristine", case.startswith("sharded_"))
    change, draft = CHANGES[case.removeprefix("sharded_")], fast / "draft"
    shutil.copytree(pristine, draft)
    repair_in_place(draft, change(draft), {})
    old, new = state(pristine), state(draft)
    refused, nth = 0, 0
    while True:
        nth += 1
        shutil.rmtree(draft)
        shutil.copytree(pristine, draft)
        wanted = change(draft)
        with monkeypatch.context() as patch:
            seen = fail_at(patch, nth, error)
            try:
                repair_in_place(draft, wanted, {})
            except (EyasError, OSError) as failed:
                assert isinstance(failed, EyasError), f"call {nth}: {failed!r}"
                refused += 1
                pending = (draft / PENDING).exists()
                done = len(list((draft / ".eyas" / "journal").glob("*.json"))) == 1  # only not flushed
                assert ("eyas history" in str(failed)) == (pending or done), str(failed)
                assert pending or state(draft) == (new if done else old)
        if seen() < nth:
            break
        history(draft)
        assert state(draft) in (old, new)
        if state(draft) == old:
            repair_in_place(draft, change(draft), {})
        assert state(draft) == new
        revert(draft)
        assert state(draft) == old and leftovers(draft) == []
    assert refused > 20


def fail_at(patch: pytest.MonkeyPatch, nth: int, error: int):
    """The n-th call of the system that changes something fails; returns a counter of the calls."""
    seen = 0

    def hooked(real):
        def call(*args, **options):
            nonlocal seen
            seen += 1
            if seen == nth:
                raise OSError(error, os.strerror(error))
            return real(*args, **options)

        return call

    for name in CALLS:
        if name not in ("copy_file_range", "unlink", "rmdir"):  # the first has another way, the others only tidy up
            patch.setattr(os, name, hooked(getattr(os, name)))
    return lambda: seen


@pytest.mark.parametrize("case", ["same_size", "other_size", "sharded_of_everything", "revert"])
def test_a_loss_of_power_finds_everything_on_the_disk(fast: Path, monkeypatch, case: str):
    """Before the draft is touched all material is synced; before the record is filed, the draft is."""
    draft = write_draft(fast / "draft", case.startswith("sharded_"))
    if case == "revert":
        repair_in_place(draft, CHANGES["other_size"](draft), {})
    unsynced: set[str] = set()
    touched = []

    def path_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def is_draft(path: str) -> bool:
        return ".eyas" not in Path(path).relative_to(draft).parts

    def touching(path: str) -> None:
        if is_draft(path):
            touched.append(path)
            assert not {p for p in unsynced if not is_draft(p)}, f"{path} is changed before that is on the disk"

    real = {name: getattr(os, name) for name in (*CALLS, "open")}

    def write(name):
        def call(descriptor, *args, **options):
            touching(path_of(descriptor))
            if not path_of(descriptor).endswith("/lock"):  # who holds it matters to nobody after a loss of power
                unsynced.add(path_of(descriptor))
            return real[name](descriptor, *args, **options)

        return call

    def copied(source, target, *args, **options):
        touching(path_of(target))
        unsynced.add(path_of(target))
        return real["copy_file_range"](source, target, *args, **options)

    def sync(name):
        def call(descriptor):
            unsynced.discard(path_of(descriptor))
            return real[name](descriptor)

        return call

    def rename(source, target, **options):
        source, target = os.fspath(source), os.fspath(target)
        assert source not in unsynced, f"{source} gets its name before its bytes are on the disk"
        touching(target)
        if source == str(draft / PENDING):
            assert not {p for p in unsynced if is_draft(p)}, "the record is filed before the draft is on the disk"
        unsynced.update({str(Path(source).parent), str(Path(target).parent)} - {str(draft / ".eyas" / "staged")})
        return real["rename"](source, target, **options)

    def opened(path, flags, *args, **options):
        if flags & os.O_CREAT and not os.path.exists(path):
            unsynced.add(str(Path(path).parent))
        return real["open"](path, flags, *args, **options)

    with monkeypatch.context() as patch:
        for name in ("write", "pwrite"):
            patch.setattr(os, name, write(name))
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, sync(name))
        patch.setattr(os, "copy_file_range", copied)
        patch.setattr(os, "rename", rename)
        patch.setattr(os, "open", opened)
        if case == "revert":
            revert(draft)
        else:
            repair_in_place(draft, CHANGES[case.removeprefix("sharded_")](draft), {})
    assert touched


def test_a_reader_says_that_a_repair_was_interrupted(tmp_path: Path):
    draft = write_draft(tmp_path / "draft")
    repair_in_place(draft, CHANGES["same_size"](draft), {})
    record = draft / ".eyas" / "journal" / "000001.json"
    record.rename(draft / PENDING)
    for path in (draft, draft / "model.safetensors"):
        with pytest.raises(BadInput, match=r"in-place repair of this draft was interrupted.*eyas history"):
            open_folder(path)


def test_what_something_else_did_to_an_interrupted_draft_is_named(tmp_path: Path):
    draft = write_draft(tmp_path / "draft")
    repair_in_place(draft, CHANGES["same_size"](draft), {})
    (draft / ".eyas" / "journal" / "000001.json").rename(draft / PENDING)
    with open(draft / "model.safetensors", "ab") as file:
        file.write(b"more")
    with pytest.raises(EyasError, match=r"model\.safetensors has .* bytes, though a change of it is under way"):
        history(draft)
