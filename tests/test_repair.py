"""A repair restores the right bytes or changes nothing; a right map is never "fixed".

pytest -q tests/test_repair.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from drafts import make_draft, write_flat
from eyas.cli.repair import command
from eyas.doctor.examine import examine
from eyas.doctor.finding import Severity
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.errors import BadInput, EyasError
from eyas.export.check import check_draft
from eyas.repair import apply
from eyas.repair.apply import repair
from eyas.repair.operations import BY_NAME, Change, Operation
from eyas.vocab import VocabMap

D, V = 120, 300
PLACE = torch.arange(D)


def right_map() -> VocabMap:
    return VocabMap.from_absolute(torch.cat([torch.arange(20), torch.arange(20, D) + 7]), V)


def healthy(folder: Path) -> Path:
    draft, _ = make_draft()
    return save_draft(draft, right_map(), folder)


def damage(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Tensors of model.safetensors replaced, or dropped, as somebody's script would."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, folder / "model.safetensors")
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()
    }


def errors(folder: Path) -> list[str]:
    return [f.id for f in examine(folder) if f.severity is Severity.ERROR]


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
@pytest.mark.parametrize("auto", [False, True])
def test_the_right_bytes_come_back(tmp_path: Path, finding: str, auto: bool):
    good = healthy(tmp_path / "good")
    broken = damage(healthy(tmp_path / "broken"), **FAULTS[finding](right_map()))
    before = digests(broken)
    assert finding in errors(broken)
    done = repair(broken, tmp_path / "mended", finding=None if auto else finding)
    assert digests(broken) == before, "the source is never touched"
    wanted, got = load_file(good / "model.safetensors"), load_file(tmp_path / "mended" / "model.safetensors")
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) and got[name].dtype == wanted[name].dtype for name in wanted)
    assert done.left == []
    assert errors(tmp_path / "mended") == []
    assert any("bit for bit what training wrote" in line for step in done.steps for line in step["told"])
    assert check_draft(tmp_path / "mended").ok
    journal = json.loads((tmp_path / "mended" / "repairs.json").read_text())
    assert journal[0]["steps"][0]["finding"] == finding
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".eyas-tmp")]


def test_the_founding_story(tmp_path: Path):
    """Right offsets are not "fixed"; after somebody did, the exact inverse is found and done."""
    good = healthy(tmp_path / "good")
    with pytest.raises(BadInput, match="does not find EY-D2T-ABSOLUTE"):
        repair(good, tmp_path / "no", finding="EY-D2T-ABSOLUTE")
    from eyas.doctor.case import Case

    with pytest.raises(BadInput, match=r"d2t is right as it stands.*Zeros at its beginning only say"):
        BY_NAME["absolute-to-offset"].plan(Case.open(good), None)
    broken = damage(healthy(tmp_path / "broken"), d2t=right_map().d2t - PLACE, t2d=None)
    done = repair(broken, tmp_path / "mended", finding="EY-D2T-TWICE")
    assert [step["operation"] for step in done.steps] == ["add-arange"]
    assert "found d2t: 120 numbers, it begins [0, -1, -2, -3]" in done.steps[0]["told"]
    assert torch.equal(load_draft(tmp_path / "mended")[1].d2t, right_map().d2t)


def test_a_map_of_another_run_needs_the_reference(tmp_path: Path):
    other = VocabMap.from_absolute(torch.arange(D) + 100, V)
    broken = damage(healthy(tmp_path / "broken"), d2t=other.d2t)
    assert errors(broken) == ["EY-D2T-T2D"]
    with pytest.raises(BadInput, match="--reference"):
        repair(broken, tmp_path / "a", finding="EY-D2T-T2D")
    with pytest.raises(BadInput, match="none of its errors can be mended"):
        repair(broken, tmp_path / "a")
    repair(broken, tmp_path / "a", finding="EY-D2T-T2D", reference=healthy(tmp_path / "good"))
    assert torch.equal(load_draft(tmp_path / "a")[1].d2t, right_map().d2t)
    draft, vocab_map = make_draft(sizes={"draft_vocab_size": 100})
    wrong = save_draft(draft, vocab_map, tmp_path / "wrong")
    with pytest.raises(BadInput, match="not of the same draft"):
        repair(broken, tmp_path / "b", finding="EY-D2T-T2D", reference=wrong)
    assert not (tmp_path / "b").exists()


def test_several_faults_of_a_sharded_foreign_draft_at_once(tmp_path: Path):
    draft, _ = make_draft(norm_before_fc=True)
    ids = {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }
    write_flat(tmp_path / "d", draft, right_map(), "layers0", "sharded", tie_word_embeddings=True, draft_vocab_size=...,
               **ids)  # fmt: skip
    index = json.loads((tmp_path / "d" / "model.safetensors.index.json").read_text())["weight_map"]
    shard = tmp_path / "d" / index["d2t"]
    save_file(load_file(shard) | {"d2t": right_map().ids}, shard)
    found = errors(tmp_path / "d")
    assert set(found) == {"EY-D2T-ABSOLUTE", "EY-TIED-PRUNED", "EY-VOCAB-UNNAMED", "EY-NORM-UNFLAGGED"}
    done = repair(tmp_path / "d", tmp_path / "out")
    assert {step["finding"] for step in done.steps} == set(found)
    assert errors(tmp_path / "out") == []
    mended, vocab_map, conventions = load_draft(tmp_path / "out")
    assert conventions.norm_before_fc
    assert torch.equal(vocab_map.d2t, right_map().d2t)
    assert torch.equal(mended.fc.weight, draft.fc.weight)


def test_what_is_no_better_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = damage(healthy(tmp_path / "broken"), d2t=right_map().d2t - PLACE)
    idle = Operation("idle", "nothing", ("EY-D2T-TWICE",), None, lambda case, _: Change({}, {}, []))
    monkeypatch.setattr(apply, "mending", lambda finding: idle)
    with pytest.raises(EyasError, match="EY-D2T-TWICE is still there"):
        repair(broken, tmp_path / "out", finding="EY-D2T-TWICE")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken"]


def test_the_command(tmp_path: Path):
    broken = damage(healthy(tmp_path / "broken"), d2t=right_map().d2t - PLACE)
    run = CliRunner()
    assert run.invoke(command, [str(broken), "--out", str(tmp_path / "x")]).exit_code == 2
    done = run.invoke(command, [str(broken), "--auto", "--out", str(tmp_path / "x")])
    assert done.exit_code == 0, done.output
    for text in ("EY-D2T-TWICE: add-arange", "writes d2t: 120 numbers, it begins [0, 0, 0, 0]", "no error left"):
        assert text in done.output
    again = run.invoke(command, [str(broken), "--auto", "--out", str(tmp_path / "x")])
    assert isinstance(again.exception, BadInput)
    assert "exists" in str(again.exception)
