"""A repair restores the right bytes or changes nothing; a right map is never "fixed".

pytest -q tests/test_repair.py
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from changing import in_memory, leftovers, state
from drafts import make_draft, write_flat
from eyas.cli import cli
from eyas.doctor.examine import examine
from eyas.doctor.finding import Severity
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.errors import BadInput, EyasError
from eyas.export.check import check_draft
from eyas.repair import apply
from eyas.repair.apply import repair
from eyas.repair.history import history, revert
from eyas.repair.lock import locked
from eyas.repair.operations import perform
from eyas.repair.overlay import Overlay
from eyas.repair.plan import Plan, make_plan, read_plan, write_plan
from eyas.repair.step import Step
from eyas.vocab import VocabMap
from mending import Config, D, Tensors, V, change, healthy, right_map, small_target

PLACE = torch.arange(D)
SECRET = "eagle_aux_hidden_state_layer_ids"


def damage(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Tensors of model.safetensors replaced, or dropped, as somebody's script would."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, folder / "model.safetensors")
    return folder


def twice(folder: Path, style: str = "eyas") -> Path:
    """Somebody subtracted arange once more."""

    def subtract(tensors: Tensors, _: Config) -> None:
        tensors.update({n: t - PLACE for n, t in tensors.items() if n.endswith("d2t")})

    return change(healthy(folder, style), subtract)


def errors(folder: Path) -> list[str]:
    return [f.id for f in examine(folder) if f.severity is Severity.ERROR]


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def refused(result: Result, *texts: str) -> None:
    """A sentence for the user, with exit code 2, and nothing else."""
    error = result.exception
    assert isinstance(error, BadInput) or (isinstance(error, SystemExit) and error.code == 2), repr(error)
    said = result.output + str(error)
    for text in texts:
        assert text in said


FAULTS = {
    "EY-D2T-TWICE": lambda m: {"d2t": m.d2t - PLACE},
    "EY-D2T-ABSOLUTE": lambda m: {"d2t": m.ids},
    "EY-D2T-ARANGE": lambda m: {"d2t": PLACE},
    "EY-D2T-ZEROS": lambda m: {"d2t": torch.zeros(D, dtype=torch.int64)},
    "EY-D2T-MISSING": lambda m: {"d2t": None},
    "EY-D2T-RANGE": lambda m: {"d2t": m.d2t + 250},
    "EY-D2T-DUPLICATE": lambda m: {"d2t": m.d2t.index_fill(0, torch.tensor([4]), -1)},
    "EY-D2T-SIZE": lambda m: {"d2t": m.d2t[:-3]},
    "EY-D2T-DTYPE": lambda m: {"d2t": m.d2t.float()},
    "EY-T2D-SIZE": lambda m: {"t2d": m.t2d[:-1]},
}


@pytest.mark.parametrize("finding", FAULTS)
@pytest.mark.parametrize("auto", [False, True], ids=["finding", "auto"])
def test_the_right_bytes_come_back(tmp_path: Path, finding: str, auto: bool):
    good = healthy(tmp_path / "good")
    broken = damage(healthy(tmp_path / "broken"), **FAULTS[finding](right_map()))
    before = state(broken)
    assert finding in errors(broken)
    mended = tmp_path / "mended"
    done = repair(broken, out=mended, finding=None if auto else finding)
    assert state(broken) == before and not (broken / ".eyas").exists(), "the source is never touched"
    wanted, got = load_file(good / "model.safetensors"), load_file(mended / "model.safetensors")
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) and got[name].dtype == wanted[name].dtype for name in wanted)
    assert done.left == [] and errors(mended) == [] and done.out == mended
    assert any("bit for bit what training wrote" in text for text in done.told)
    assert check_draft(mended).ok
    [record] = history(mended)
    assert (record["kind"], record["number"], done.number) == ("new", 1, 1)
    assert record["entry"]["finding"] == finding
    assert Plan.from_dict(record["entry"]["plan"]).steps == done.plan.steps
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".eyas-tmp")]


def test_the_founding_story(tmp_path: Path):
    """Right offsets are not "fixed"; by force they are; the exact inverse is found without any reference, and done;
    and all of it can be reverted."""
    draft = healthy(tmp_path / "draft")
    first, ids = state(draft), right_map().d2t
    with pytest.raises(BadInput, match=r"does not find EY-D2T-ABSOLUTE.*nothing was done"):
        repair(draft, in_place=True, finding="EY-D2T-ABSOLUTE")
    with pytest.raises(BadInput, match=r"d2t is right as it stands.*Zeros at its beginning only say"):
        perform(Overlay.of(draft), Step("absolute-to-offset"))
    assert state(draft) == first

    forced = repair(draft, in_place=True, finding="EY-D2T-ABSOLUTE", force=True)
    assert [step.operation for step in forced.plan.steps] == ["subtract-arange"]
    said = "\n".join(history(draft)[0]["entry"]["forced"])
    for text in ("EY-D2T-ABSOLUTE was not found", "although absolute-to-offset refused", "right as it stands",
                 "worse: it brings up EY-D2T-TWICE"):  # fmt: skip
        assert text in said
    assert torch.equal(load_file(draft / "model.safetensors")["d2t"], ids - PLACE)
    assert [row["finding"] for row in forced.left] == ["EY-D2T-TWICE"] == errors(draft)

    undone = repair(draft, in_place=True)
    assert [step.operation for step in undone.plan.steps] == ["add-arange"] and undone.number == 2
    assert "found d2t: 120 numbers, it begins [0, -1, -2, -3]" in undone.told
    assert not [text for text in undone.told if "training wrote" in text], "eyas.json speaks of change 1 by now"
    assert torch.equal(load_draft(draft)[1].d2t, ids)

    revert(draft)
    assert torch.equal(load_file(draft / "model.safetensors")["d2t"], ids - PLACE)
    revert(draft, 1)
    assert state(draft) == first
    assert leftovers(draft) == []


def test_a_map_of_another_run_needs_the_reference(tmp_path: Path):
    other = VocabMap.from_absolute(torch.arange(D) + 100, V)
    broken = damage(healthy(tmp_path / "broken"), d2t=other.d2t)
    assert errors(broken) == ["EY-D2T-T2D"]
    with pytest.raises(BadInput, match="--reference"):
        repair(broken, out=tmp_path / "a", finding="EY-D2T-T2D")
    done = repair(broken, out=tmp_path / "a")
    assert done.plan is None and done.out is None and not (tmp_path / "a").exists()
    assert [row["finding"] for row in done.left] == ["EY-D2T-T2D"] and "--reference" in done.left[0]["why"]
    repair(broken, out=tmp_path / "a", finding="EY-D2T-T2D", reference=healthy(tmp_path / "good"))
    assert torch.equal(load_draft(tmp_path / "a")[1].d2t, right_map().d2t)
    draft, vocab_map = make_draft(sizes={"draft_vocab_size": 100})
    wrong = save_draft(draft, vocab_map, tmp_path / "wrong")
    with pytest.raises(BadInput, match="not of the same draft"):
        repair(broken, out=tmp_path / "b", finding="EY-D2T-T2D", reference=wrong)
    assert not (tmp_path / "b").exists()


def test_several_faults_of_a_sharded_foreign_draft_at_once(tmp_path: Path):
    draft, _ = make_draft(norm_before_fc=True)
    ids = {SECRET: [2, 4, 5], "eagle_config": {SECRET: [1, 3, 4]}}
    write_flat(tmp_path / "d", draft, right_map(), "layers0", "sharded", tie_word_embeddings=True, draft_vocab_size=...,
               **ids)  # fmt: skip
    index = json.loads((tmp_path / "d" / "model.safetensors.index.json").read_text())["weight_map"]
    shard = tmp_path / "d" / index["d2t"]
    save_file(load_file(shard) | {"d2t": right_map().ids}, shard)
    found = errors(tmp_path / "d")
    assert set(found) == {"EY-D2T-ABSOLUTE", "EY-TIED-PRUNED", "EY-VOCAB-UNNAMED", "EY-NORM-UNFLAGGED"}
    done = repair(tmp_path / "d", out=tmp_path / "out")
    assert {step.why for step in done.plan.steps} == set(found)
    assert errors(tmp_path / "out") == []
    mended, vocab_map, conventions = load_draft(tmp_path / "out")
    assert conventions.norm_before_fc
    assert torch.equal(vocab_map.d2t, right_map().d2t)
    assert torch.equal(mended.fc.weight, draft.fc.weight)


@pytest.mark.parametrize("style", ["flat", "prefixed", "fused", "speculators"])
def test_every_spelling_is_mended_in_place_and_reverted(tmp_path: Path, style: str):
    broken, good = twice(tmp_path / "broken", style), healthy(tmp_path / "good", style)
    first = state(broken)
    done = repair(broken, in_place=True)
    assert done.out == broken and done.left == []
    mine, theirs = load_file(broken / "model.safetensors"), load_file(good / "model.safetensors")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert state(broken)["config.json"] == first["config.json"]
    revert(broken)
    assert state(broken) == first


def test_only_what_is_asked_for_is_mended(tmp_path: Path):
    broken = change(twice(tmp_path / "broken", "flat"), lambda t, c: c.update(tie_word_embeddings=True))
    done = repair(broken, out=tmp_path / "out", finding="EY-TIED-PRUNED")
    assert [step.why for step in done.plan.steps] == ["EY-TIED-PRUNED"]
    [left] = done.left
    assert (left["finding"], left["why"]) == ("EY-D2T-TWICE", "it was not asked for")
    assert "arange was subtracted twice" in left["evidence"]
    assert errors(tmp_path / "out") == ["EY-D2T-TWICE"]


def test_a_warning_is_mended_only_where_it_is_asked_for(tmp_path: Path):
    broken = change(healthy(tmp_path / "d", "flat"), lambda t, c: c.update(architectures=None))
    warnings = [f.id for f in examine(broken) if f.severity is Severity.WARNING]
    assert warnings == ["EY-CONFIG-NULL"] or "EY-ARCHITECTURE" in warnings
    assert repair(broken).plan is None
    done = repair(broken, finding=warnings[0])
    assert done.plan is not None and done.out is None
    after = Overlay.of(broken)
    for step in done.plan.steps:
        after = perform(after, step).after
    assert warnings[0] not in {f.id for f in examine(after.folder)}


def test_a_healthy_draft_is_left_alone(tmp_path: Path):
    draft = healthy(tmp_path / "draft")
    first = state(draft)
    for where in ({"out": tmp_path / "out"}, {"in_place": True}, {}):
        done = repair(draft, **where)
        assert done.plan is None and done.out is None and done.left == [] and done.ledger == []
    assert state(draft) == first and sorted(p.name for p in tmp_path.iterdir()) == ["draft"]
    assert not (draft / ".eyas").exists()


# ---------------------------------------------------------------- nothing half done


def test_what_is_worse_leaves_nothing(tmp_path: Path):
    broken = twice(tmp_path / "broken")
    plan = make_plan(Overlay.of(broken), [Step("drop-tensors", {"names": ["fc.weight"]})])
    first = state(broken)
    for where in ({"out": tmp_path / "out"}, {"in_place": True}):
        with pytest.raises(EyasError, match=r"makes the draft worse.*EY-TENSOR-MISSING.*nothing was written"):
            repair(broken, plan=plan, **where)
    assert state(broken) == first and sorted(p.name for p in tmp_path.iterdir()) == ["broken"]
    done = repair(broken, plan=plan, out=tmp_path / "out", force=True)
    assert any("worse: it brings up EY-TENSOR-MISSING" in text for text in done.forced)


@pytest.mark.parametrize("way", ["other bytes", "unreadable"])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_read_back_otherwise_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, in_place: bool
):
    broken = twice(tmp_path / "broken")
    first = state(broken)

    class Other(Overlay):
        @classmethod
        def of(cls, path: Any, facts: Any = None) -> Overlay:
            overlay = Overlay.of(path, facts)
            if "reading back" not in seen:  # the first look
                seen.append("reading back")
                return overlay
            if way == "unreadable":
                raise BadInput("the disk is mad")
            return overlay.with_tensors({"d2t": None})

    seen: list[str] = []
    monkeypatch.setattr(apply, "Overlay", Other)
    with pytest.raises(EyasError, match=r"(d2t is missing|the disk is mad)\); it was taken back"):
        repair(broken, out=None if in_place else tmp_path / "out", in_place=in_place)
    assert state(broken) == first
    assert not (tmp_path / "out").exists()


def test_a_full_disk_and_a_read_only_folder_leave_the_draft_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = twice(tmp_path / "broken")
    first = state(broken)
    for name, often in (("write", 99), ("pwrite", 2), ("pwrite", 99)):
        with monkeypatch.context() as patched:

            def full(*args: Any, real: Any = getattr(os, name), left: Any = iter(range(often))) -> int:
                if next(left, None) is not None and len(args[1]) > 20:  # the lock's few bytes may go unwritten
                    raise OSError(errno.ENOSPC, "No space left on device")
                return int(real(*args))

            patched.setattr(os, name, full)
            with pytest.raises(EyasError, match="No space left"):
                repair(broken, in_place=True)
        if often == 99 and name == "pwrite":  # not even what was there can be put back: it is finished later
            assert len(history(broken)) == 1
            revert(broken)
        assert state(broken) == first and errors(broken) == ["EY-D2T-TWICE"]
        assert leftovers(broken) == []
    broken.chmod(0o555)
    try:
        with pytest.raises(BadInput, match="read-only"):
            repair(broken, in_place=True)
    finally:
        broken.chmod(0o755)
    assert state(broken) == first
    repair(broken, in_place=True)
    assert errors(broken) == []


def test_a_draft_that_changes_while_it_is_tried_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was decided on other bytes is not put over those that somebody wrote since."""
    real, broken = apply.mend, twice(tmp_path / "broken")
    good = load_file(healthy(tmp_path / "good") / "model.safetensors")

    def meanwhile(*args: Any, **options: Any) -> Any:
        out = real(*args, **options)
        if not history(broken):
            monkeypatch.setattr(apply, "mend", real)
            repair(broken, in_place=True)
        return out

    monkeypatch.setattr(apply, "mend", meanwhile)
    with pytest.raises(BadInput, match=r"was changed while its repair was being tried.*Run the same command again"):
        repair(broken, in_place=True)
    assert len(history(broken)) == 1 and torch.equal(load_file(broken / "model.safetensors")["d2t"], good["d2t"])
    monkeypatch.setattr(apply, "mend", meanwhile)
    revert(broken)
    with locked(broken), pytest.raises(EyasError, match=f"is being changed by process {os.getpid()}"):
        repair(broken, in_place=True)


def test_two_commands_at_once(tmp_path: Path):
    """One of them changes the draft; the other is told, or finds nothing to do."""
    broken, good = twice(tmp_path / "broken"), healthy(tmp_path / "good")
    argv = [sys.executable, "-m", "eyas", "repair", str(broken), "--auto", "--in-place"]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [p.communicate(timeout=120) for p in both]
    codes = sorted(p.returncode for p in both)
    assert codes[0] == 0 and codes[1] in (0, 1, 2) and not any("Traceback" in err for _, err in said), said
    assert len(history(broken)) == 1 and leftovers(broken) == []
    assert torch.equal(load_file(broken / "model.safetensors")["d2t"], load_file(good / "model.safetensors")["d2t"])


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_repair_that_is_killed_is_finished_by_the_same_command(every: int):
    script = Path(__file__).with_name("killing_whole_repairs.py")
    with in_memory() as folder:
        argv = [sys.executable, str(script), str(folder), str(every)]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["wrong"] == [] and told["calls"] > 20 and told["ends"]["old"], told
    assert every > 1 or all(told["ends"].values())


# ---------------------------------------------------------------- drafts and places that are odd


def no_config(folder: Path) -> Path:
    (twice(folder) / "config.json").unlink()
    return folder


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def cached(folder: Path) -> Path:
    """As the hub's cache has it: links to blobs."""
    draft, blobs = twice(folder, "flat"), folder.parent / "blobs"
    blobs.mkdir()
    for path in list(draft.iterdir()):
        shutil.move(path, blobs / path.name)
        path.symlink_to(blobs / path.name)
    return draft


def linked(folder: Path) -> Path:
    folder.symlink_to(twice(folder.with_name("real"), "flat"))
    return folder


def truncated(folder: Path) -> Path:
    (twice(folder) / "model.safetensors").write_bytes(b"123")
    return folder


def pickled(folder: Path) -> Path:
    draft = healthy(folder, "bin")
    held = torch.load(draft / "pytorch_model.bin")
    torch.save(held | {"d2t": held["d2t"] - PLACE}, draft / "pytorch_model.bin")
    return draft


UNWRITABLE: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "missing": (lambda folder: folder, "does not exist", "does not exist"),
    "a file": (lambda folder: twice(folder) / "model.safetensors", "is not a directory", "is not a directory"),
    "empty": (empty, "holds no weights", "holds no weights"),
    "no config": (no_config, "has no config.json", "has no config.json"),
    "truncated": (truncated, "truncated", "truncated"),
    "a pickle": (pickled, "is a pickle", "is a pickle"),
    "hub cache": (cached, "", "is a symlink to"),
    "a link": (linked, "", "is a symlink to"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_odd_drafts_are_mended_elsewhere_or_refused_in_words(tmp_path: Path, name: str):
    make, elsewhere, in_place = UNWRITABLE[name]
    draft, out = make(tmp_path / "draft"), tmp_path / "out"
    copied = call("repair", draft, "--auto", "--out", out)
    if elsewhere:
        refused(copied, str(draft), elsewhere)
        assert not out.exists()
    else:
        assert copied.exit_code == 0 and errors(out) == [] and not any(p.is_symlink() for p in out.rglob("*"))
    refused(call("repair", draft, "--auto", "--in-place"), in_place)


def test_where_it_cannot_be_written_is_said_before_anything_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    draft = twice(tmp_path / "draft", "flat")
    monkeypatch.setattr(apply, "mend", lambda *a, **o: pytest.fail("minutes were spent"))
    file = draft / "config.json"
    for out, text in ((draft, "exists"), (draft / "x", "lies in"), (draft / ".." / "draft" / "x", "lies in"),
                      (tmp_path / "file" / "x", "is a file")):  # fmt: skip
        (tmp_path / "file").write_text("")
        refused(call("repair", draft, "--auto", "--out", out), str(out), text)
    dry = ("repair", draft, "--auto", "--dry-run")
    refused(call(*dry, "--reference", tmp_path / "none"), "none does not exist; --reference takes")
    refused(call(*dry, "--reference", empty(tmp_path / "empty")), "holds no weights")
    refused(call(*dry, "--features", tmp_path / "none"), "none is not a directory")
    refused(call(*dry, "--target", tmp_path / "none"), "no folder or file")
    refused(call(*dry, "--engine", "nope"), "unknown engine 'nope'")
    refused(call(*dry, "--budget", "soon"), "--budget 'soon'")
    refused(call(*dry, "--save-plan", tmp_path), "--save-plan", "cannot be written")
    refused(call(*dry, "--save-plan", file / "x"), "--save-plan", "cannot be written")
    if not torch.cuda.is_available():
        refused(call(*dry, "--target", small_target(tmp_path / "target"), "--device", "cuda"), "device 'cuda'")


def test_relative_paths_and_names_in_any_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    twice(tmp_path / "Ünï codé 名", "flat")
    monkeypatch.chdir(tmp_path)
    assert call("repair", "Ünï codé 名", "--auto", "--out", "neu 名").exit_code == 0
    assert errors(Path("neu 名")) == []
    monkeypatch.chdir(tmp_path / "Ünï codé 名")
    done = call("repair", ".", "--auto", "--in-place", "--json")
    assert json.loads(done.output)["change"] == 1 and errors(Path()) == []
    assert call("revert", ".").exit_code == 0 and errors(Path()) == ["EY-D2T-TWICE"]


@pytest.mark.parametrize(
    "value",
    [{"tensors": []}, {"tensors": {"d2t": 3}}, {"tensors": {"d2t": {"sha256": 5}}}, {"conventions": []}, {"shape": 3}],
    ids=str,
)
def test_an_eyas_json_that_holds_something_else(tmp_path: Path, value: dict[str, Any]):
    broken = twice(tmp_path / "broken")
    said = json.loads((broken / "eyas.json").read_text())
    (broken / "eyas.json").write_text(json.dumps(said | value))
    first = state(broken)
    done = repair(broken, in_place=True)
    assert "EY-D2T-TWICE" not in errors(broken)
    assert [row["finding"] for row in done.left] == ([] if "tensors" in value else ["EY-READ"])
    assert all("eyas.json" in row["evidence"] for row in done.left)
    assert not [text for text in done.told if "bit for bit" in text] or "tensors" not in value
    revert(broken)
    assert state(broken) == first


def test_another_target_is_not_written_into_the_draft(tmp_path: Path):
    """Its vocabulary is another size: t2d and vocab_size are right for the draft's own target."""
    draft, target = healthy(tmp_path / "draft", "flat"), small_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": V + 20}))
    ends = load_file(target / "model.safetensors")
    more = {n: torch.cat([t, t[:20]]) if t.dim() == 2 else t for n, t in ends.items()}
    save_file(more, target / "model.safetensors")
    done = repair(draft, target=target, finding=None, in_place=False)
    assert done.plan is None and {row["finding"] for row in done.left} == {"EY-T2D-SIZE", "EY-VOCAB-TARGET"}
    assert "name its own target" in next(r["why"] for r in done.left if r["finding"] == "EY-VOCAB-TARGET")


# ---------------------------------------------------------------- plans


def test_a_plan_is_replayed_on_a_copy_elsewhere_and_on_nothing_else(tmp_path: Path):
    broken, file = twice(tmp_path / "broken"), tmp_path / "plans" / "plan.json"
    tried = call("repair", broken, "--auto", "--dry-run", "--save-plan", file)
    assert tried.exit_code == 0 and "nothing was written (--dry-run)" in tried.output
    assert not (broken / ".eyas").exists() and read_plan(file).steps[0].operation == "add-arange"
    copy, good = tmp_path / "copy", healthy(tmp_path / "good")
    shutil.copytree(broken, copy)
    done = call("repair", copy, "--plan", file, "--in-place")
    assert done.exit_code == 0 and "no error left" in done.output, done.output
    assert load_file(copy / "model.safetensors")["d2t"].tolist() == right_map().d2t.tolist()
    first = state(good)
    for more in ([], ["--force"]):  # force passes over the bytes, not over the precondition
        refused(call("repair", good, "--plan", file, "--in-place", *more),
                "right as it stands" if more else "is not what the plan was made for: d2t has other bytes")  # fmt: skip
    assert state(good) == first
    other = twice(tmp_path / "other", "flat")
    refused(call("repair", other, "--plan", file, "--in-place"), "config.json is another one")
    forced = call("repair", other, "--plan", file, "--in-place", "--force", "--json")
    assert any("config.json is another one" in text for text in json.loads(forced.output)["forced"])
    assert any("config.json is another one" in text for text in history(other)[0]["entry"]["forced"])
    assert "forced over: config.json is another one" in call("history", other).output


def edited(file: Path, **values: Any) -> Path:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return file


ODD_STEPS: dict[str, tuple[Any, str]] = {
    "unknown operation": ({"operation": "mend-all"}, "there is no operation 'mend-all'; known are"),
    "unknown argument": (("add-arange", {"x": 1}), "unexpected keyword argument 'x'"),
    "wrong type": (("write-taps", {"taps": "2,4,5"}), "taps = '2,4,5'"),
    "a list of odd things": (("write-taps", {"taps": [2, True, 5]}), "valid integer"),
    "no object": ("add-arange", "a step is an object"),
    "more fields": ({"operation": "add-arange", "sudo": True}, "unknown fields ['sudo']"),
    "another file": (("write-fields", {"values": {"../x.json": {"/a": 1}}}), "has no ../x.json"),
    "no name": (("rename-keys", {"names": {"d2t": ""}}), "'' is no name of a tensor"),
    "a line": (("rename-keys", {"names": {"d2t": "a\nb"}}), "is no name of a tensor"),
    "metadata": (("rename-keys", {"names": {"d2t": "__metadata__"}}), "is no name of a tensor"),
    "a folder up": (("rename-keys", {"names": {"d2t": "../../d2t"}}), "d2t is missing"),
    "what is not there": (("drop-tensors", {"names": ["d2t", "nope"]}), "has no nope"),
    "a foreign file": (("map-from-reference", {"reference": "/etc/hostname"}), "/etc/hostname"),
    "not a number": (("set-rope", {"theta": float("nan")}), "no JSON values"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_STEPS)
def test_a_plan_edited_by_hand_is_refused_in_words(tmp_path: Path, name: str):
    step, text = ODD_STEPS[name]
    step = {"operation": step[0], "arguments": step[1]} if isinstance(step, tuple) else step
    broken, file = twice(tmp_path / "broken", "flat"), tmp_path / "plan.json"
    write_plan(make_plan(Overlay.of(broken), [Step("add-arange")]), file)
    first = state(broken)
    refused(call("repair", broken, "--plan", edited(file, steps=[step]), "--in-place"), text)
    assert state(broken) == first and sorted(p.name for p in tmp_path.iterdir()) == ["broken", "plan.json"]


def test_a_plan_must_make_what_it_says(tmp_path: Path):
    broken, file = twice(tmp_path / "broken", "flat"), tmp_path / "plan.json"
    steps = [Step("add-arange"), Step("set-flag", {"name": "tie_word_embeddings", "value": True})]
    write_plan(make_plan(Overlay.of(broken), steps), file)
    edited(file, steps=[steps[0].to_dict()])
    refused(call("repair", broken, "--plan", file, "--in-place"), "make something else than it says in `makes`")
    done = call("repair", broken, "--plan", file, "--in-place", "--force")
    assert (
        done.exit_code == 0
        and "by force, in spite of this:\n  other than the plan says: config.json is another one" in done.output
    )
    for text in ("{", "[1]", "null"):
        file.write_text(text)
        refused(call("repair", broken, "--plan", file, "--dry-run"), str(file))
    refused(call("repair", broken, "--plan", tmp_path / "none.json", "--dry-run"), "none.json")


# ---------------------------------------------------------------- the command


def test_the_command(tmp_path: Path):
    broken = twice(tmp_path / "broken")
    for odd in ([], ["--auto"], ["--auto", "--plan", "p", "--dry-run"], ["--auto", "--out", "x", "--in-place"],
                ["--auto", "--force", "--dry-run"]):  # fmt: skip
        refused(call("repair", broken, *odd))
    done = call("repair", broken, "--auto", "--out", tmp_path / "x")
    assert done.exit_code == 0, done.output
    for text in ("EY-D2T-TWICE: add-arange: kept", "writes d2t: 120 numbers, it begins [0, 0, 0, 0]", "no error left"):
        assert text in done.output
    refused(call("repair", broken, "--auto", "--out", tmp_path / "x"), "exists")
    for id_ in ("EY-NOPE", "EY-D2T-ABSOLUTE", "EY-MEASURED-TAPS"):
        refused(call("repair", broken, "--finding", id_, "--dry-run"), f"does not find {id_}", "it finds EY-D2T-TWICE")
    refused(call("repair", broken, "--finding", "EY-NOPE", "--dry-run", "--force"), "no operation mends EY-NOPE")
    told = json.loads(call("repair", broken, "--finding", "EY-D2T-TWICE", "--in-place", "--json").output)
    assert told["out"] == str(broken) and told["change"] == 1 and told["left"] == [] and told["forced"] == []
    assert told["plan"]["steps"][0]["operation"] == "add-arange" and told["ledger"][0]["verdict"] == "kept"
    shown = call("history", broken).output
    assert "repair  EY-D2T-TWICE: add-arange" in shown and "made_for" not in shown and len(shown) < 1500
    again = call("repair", broken, "--auto", "--in-place", "--save-plan", tmp_path / "none.json")
    assert again.exit_code == 0 and "nothing is wrong that a repair would mend" in again.output
    assert not (tmp_path / "none.json").exists()


def test_what_remains_is_an_exit_code_and_a_reason(tmp_path: Path):
    broken = damage(twice(tmp_path / "broken", "flat"), **{"fc.weight": torch.full((32, 96), float("nan"))})
    done = call("repair", broken, "--auto", "--in-place")
    assert done.exit_code == 1
    for text in ("errors remain:", "EY-TENSOR-NAN: fc.weight holds NaN", "Not mended: what stood there is lost"):
        assert text in done.output
    assert errors(broken) == ["EY-TENSOR-NAN"]
    nothing = call("repair", broken, "--auto", "--in-place", "--json")
    assert nothing.exit_code == 1 and json.loads(nothing.output)["plan"] is None
    refused(call("repair", broken, "--finding", "EY-TENSOR-NAN", "--dry-run"), "EY-TENSOR-NAN was not mended", "lost")


def test_by_force_what_is_there_is_mended_as_ever(tmp_path: Path):
    """A finding that holds is no other operation under --force, and nothing is said to have been passed over."""
    done = repair(twice(tmp_path / "a"), finding="EY-D2T-TWICE", force=True)
    assert [step.operation for step in done.plan.steps] == ["add-arange"] and done.forced == []
    absolute = damage(healthy(tmp_path / "b"), d2t=right_map().ids)
    done = repair(absolute, finding="EY-D2T-ABSOLUTE", force=True)
    assert [step.operation for step in done.plan.steps] == ["absolute-to-offset"] and done.forced == []
    with pytest.raises(BadInput, match="would not make a map"):
        repair(tmp_path / "a", finding="EY-D2T-ABSOLUTE", force=True)
    for odd in ({"plan": done.plan, "finding": "EY-D2T-TWICE"}, {"force": True}):
        with pytest.raises(BadInput, match="a plan or a finding"):
            repair(absolute, **odd)
