"""A change in place, and the same change into a new directory: the bytes that were asked for and no others.

pytest -q tests/test_repair_in_place.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from changing import CHANGES, SHAPES, extent, in_memory, leftovers, loaded, piece, same_size, state, values, write_draft
from eyas.draft.assemble import Piece
from eyas.draft.digests import compare
from eyas.draft.files import open_folder
from eyas.errors import BadInput, EyasError
from eyas.repair.change import Change
from eyas.repair.history import history
from eyas.repair.in_place import repair_in_place
from eyas.repair.lock import locked
from eyas.repair.write_new import write_new


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_change_is_made_and_nothing_else(tmp_path: Path, name: str, sharded: bool):
    draft = write_draft(tmp_path / "draft", sharded)
    change, before, files = CHANGES[name](draft), loaded(draft), state(draft)
    asked = {n: p and np.concatenate([_numbers(part) for part in p.parts]) for n, p in change.tensors.items()}
    write_new(draft, tmp_path / "new", change, {"operation": name})
    assert state(draft) == files, "the source is only read"
    assert repair_in_place(draft, change, {"operation": name}) == 1
    assert state(draft) == state(tmp_path / "new"), "both ways make the same bytes"
    after = loaded(draft)
    assert after.keys() == (before.keys() | asked.keys()) - {n for n, raw in asked.items() if raw is None}
    for tensor, (dtype, numbers) in after.items():
        if (raw := asked.get(tensor)) is None:
            assert (dtype, numbers.tobytes()) == (before[tensor][0], before[tensor][1].tobytes())
        else:
            wanted = change.tensors[tensor]
            assert (dtype, numbers.shape, numbers.tobytes()) == (wanted.dtype, wanted.shape, raw.tobytes())
    folder = open_folder(draft)
    if change.config is not None:
        assert folder.config == change.config
    if change.eyas is None:
        assert compare(folder).same, "eyas.json follows"
    else:
        assert folder.eyas["note"] == "new"
    assert leftovers(draft) == []
    assert [h["kind"] for h in history(tmp_path / "new")] == ["new"]
    assert [h["entry"] for h in (*history(draft), *history(tmp_path / "new"))] == [{"operation": name}] * 2
    if sharded:
        index = json.loads((draft / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == after.keys()
        assert index["metadata"]["total_size"] == sum(numbers.nbytes for _, numbers in after.values())
        assert (draft / "model-3.safetensors").exists() == ("t2d" in after)


def _numbers(part) -> np.ndarray:
    """The raw bytes of a part."""
    if hasattr(part, "start"):
        return np.frombuffer(part.file.read_bytes()[part.start : part.stop], np.uint8)
    return np.ascontiguousarray(part() if callable(part) else part).reshape(-1).view(np.uint8)


def test_a_tensor_of_the_same_size_is_written_into_its_file(tmp_path: Path, monkeypatch):
    draft = write_draft(tmp_path / "draft", eyas=False)
    weights = draft / "model.safetensors"
    weights.chmod(0o640)
    inode, raw, place, written = weights.stat().st_ino, weights.read_bytes(), extent(draft, "d2t"), []
    real = os.pwrite

    def pwrite(descriptor, data, at):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(weights):
            written.append((at, len(data)))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    repair_in_place(draft, same_size(draft), {})
    assert written == [(place.start, place.stop - place.start)]
    assert (weights.stat().st_ino, weights.stat().st_mode & 0o777) == (inode, 0o640)
    new = values("I64", (40,), 100).tobytes()
    assert weights.read_bytes() == raw[: place.start] + new + raw[place.stop :]


@pytest.mark.parametrize(("name", "how"), [("renamed", "replace"), ("renamed_shorter", "patch")])
def test_a_rename_keeps_no_weights_and_keeps_the_mode(tmp_path: Path, name: str, how: str):
    draft = write_draft(tmp_path / "draft", eyas=False)
    (draft / "model.safetensors").chmod(0o640)
    repair_in_place(draft, CHANGES[name](draft), {})
    (file,) = history(draft)[0]["files"]
    assert file["how"] == how
    assert file["undo_bytes"] < 1000, "a header, no tensor"
    assert (draft / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_bytes_may_come_from_another_file(tmp_path: Path):
    draft = write_draft(tmp_path / "draft", sharded=True)
    old = loaded(draft)["fc.weight"]
    moved = Piece("copy", "F32", (48, 32), (extent(draft, "fc.weight"),))
    repair_in_place(draft, Change({"fc.weight": None, "copy": moved}), {})
    assert loaded(draft)["copy"][1].tobytes() == old[1].tobytes()
    theirs = Piece("d2t", "I64", (40,), (extent(write_draft(tmp_path / "other"), "d2t"),))
    repair_in_place(draft, Change({"d2t": theirs}), {})
    assert loaded(draft)["d2t"][1].tolist() == loaded(tmp_path / "other")["d2t"][1].tolist()


def test_links_and_what_is_read_only_is_refused(tmp_path: Path):
    draft = write_draft(tmp_path / "draft")
    weights = draft / "model.safetensors"

    def refused(words: str, folder: Path = draft) -> None:
        before = state(draft)
        with pytest.raises(BadInput, match=words):
            repair_in_place(folder, same_size(draft), {})
        assert state(draft) == before
        assert not (draft / ".eyas").exists(), "nothing was changed, so nothing is left"

    (tmp_path / "link").symlink_to(draft)
    refused("link is a symlink to .*draft", tmp_path / "link")
    refused("is not a directory", weights)
    os.link(weights, tmp_path / "twin")
    refused(r"model\.safetensors has 2 hard links.*--out")
    (tmp_path / "twin").unlink()
    weights.rename(tmp_path / "blob")
    weights.symlink_to(tmp_path / "blob")
    refused(r"model\.safetensors is a symlink to .*blob.*--out")
    weights.unlink()
    (tmp_path / "blob").rename(weights)
    weights.chmod(0o444)
    refused(r"model\.safetensors is read-only \(mode 0444\)")
    weights.chmod(0o644)
    (draft / "eyas.json").chmod(0o444)
    refused(r"eyas\.json is read-only")
    (draft / "eyas.json").chmod(0o644)
    draft.chmod(0o555)
    refused(r"draft is read-only \(mode 0555\)")
    draft.chmod(0o755)
    repair_in_place(draft, same_size(draft), {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change({"no": None}), "holds no no that could be left out"),
        (Change(dict.fromkeys(SHAPES)), "leaves out every tensor"),
        (Change({"d2t": piece("t2d", "I64", (40,), 1)}), "the piece for d2t is named t2d"),
        (Change({"d2t": Piece("d2t", "I64", (40,), (values("I64", (39,), 1),))}), "parts are 312 bytes, not 320"),
        (Change({}), "would leave every file as it is"),
    ],
)  # fmt: skip
def test_a_change_that_does_not_fit_changes_nothing(tmp_path: Path, change: Change, words: str):
    draft = write_draft(tmp_path / "draft")
    before = state(draft)
    with pytest.raises(BadInput, match=words):
        repair_in_place(draft, change, {})
    assert state(draft) == before and not (draft / ".eyas").exists()
    if change.tensors:
        with pytest.raises(BadInput, match=words):
            write_new(draft, tmp_path / "out", change, {})
        assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_pickles_are_not_written(tmp_path: Path):
    import torch

    draft = write_draft(tmp_path / "draft", eyas=False)
    (draft / "model.safetensors").unlink()
    torch.save({"d2t": torch.arange(40)}, draft / "pytorch_model.bin")
    for do in (lambda: repair_in_place(draft, same_size(draft), {}),
               lambda: write_new(draft, tmp_path / "out", same_size(draft), {})):  # fmt: skip
        with pytest.raises(BadInput, match=r"pytorch_model\.bin is a pickle.*eyas export"):
            do()
    repair_in_place(draft, Change(config={"hidden_size": 9}), {})
    assert open_folder(draft).config == {"hidden_size": 9}


def test_space_is_looked_for_first(tmp_path: Path, monkeypatch):
    draft = write_draft(tmp_path / "draft")
    before = state(draft)

    class Full:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(EyasError, match=r"needs \d{3},\d{3} bytes of free space, 40,960 are there"):
        repair_in_place(draft, same_size(draft), {})
    with pytest.raises(EyasError, match=r"40,960 are there"):
        write_new(draft, tmp_path / "out", same_size(draft), {})
    assert state(draft) == before and [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_two_repairs_at_once(tmp_path: Path):
    draft = write_draft(tmp_path / "draft")
    code = "import sys, time; from pathlib import Path; from eyas.repair.lock import locked\n"
    code += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(draft)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with pytest.raises(EyasError, match=f"is being changed by process {other.pid}"):
        repair_in_place(draft, same_size(draft), {})
    other.kill()
    other.wait()
    other.stdout.close()
    assert repair_in_place(draft, same_size(draft), {}) == 1
    with locked(draft), pytest.raises(EyasError, match=f"process {os.getpid()}"):
        repair_in_place(draft, same_size(draft), {})


def test_a_new_directory_shares_nothing_with_its_source(tmp_path: Path):
    """Hub caches: links into a folder of blobs, read-only."""
    draft, blobs = write_draft(tmp_path / "draft"), tmp_path / "blobs"
    blobs.mkdir()
    (draft / "sub").mkdir()
    (draft / "sub" / "notes.txt").write_text("notes")
    repair_in_place(draft, CHANGES["of_config"](draft), {"operation": "earlier"})
    for i, path in enumerate(p for p in sorted(draft.iterdir()) if p.is_file()):
        path.rename(blobs / str(i))
        (blobs / str(i)).chmod(0o444)
        path.symlink_to(Path("..") / "blobs" / str(i))
    (draft / "loop").symlink_to(draft)
    write_new(draft, tmp_path / "out", same_size(draft), {"operation": "mend"})
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert all(not p.is_symlink() and p.stat().st_nlink == 1 and p.stat().st_mode & 0o200 for p in files)
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "out" / "sub" / "notes.txt").read_text() == "notes"
    assert not (tmp_path / "out" / "loop").exists()
    told = history(tmp_path / "out")
    assert [(h["number"], h["kind"], h["entry"]) for h in told] == [(1, "new", {"operation": "mend"})]
    assert leftovers(tmp_path / "out") == [] and not (tmp_path / "out" / ".eyas" / "undo").exists()
    with pytest.raises(BadInput, match="exists; name a new directory"):
        write_new(draft, tmp_path / "out", same_size(draft), {})
    with pytest.raises(BadInput, match=r"lies in .*draft itself"):
        write_new(draft, draft / "out", same_size(draft), {})
    assert repair_in_place(tmp_path / "out", CHANGES["left_out"](tmp_path / "out"), {}) == 2


def test_a_map_of_a_large_draft_needs_neither_torch_nor_the_weights(tmp_path: Path):
    """2.5 GB, sparse: half a second here, most of it Python's start; see benchmarks/repair_in_place.py."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        from kimi import kimi_shaped
    finally:
        sys.path.pop(0)
    draft = tmp_path / "draft"
    draft.mkdir()
    kimi_shaped(draft)
    code = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from eyas.draft.assemble import Piece\n"
        "from eyas.repair.change import Change; from eyas.repair.in_place import repair_in_place\n"
        "new = np.arange(32000)\n"
        "repair_in_place(Path(sys.argv[1]), Change({'d2t': Piece('d2t', 'I64', (32000,), (new,))}), {})\n"
        "print('torch' in sys.modules, dict(l.split(': ') for l in open('/proc/self/io'))['wchar'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(draft)], capture_output=True, text=True, check=True)
    torch, written = done.stdout.split()
    assert torch == "False"
    assert int(written) < 1 << 20
