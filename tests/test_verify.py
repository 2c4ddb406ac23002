"""A copy is intact, or what differs is named: tensors by their digests, the draft by its recorded choices.

pytest -q tests/test_verify.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from drafts import foreign_tensors, make_draft, with_embedding
from eyas.cli import cli
from eyas.draft.assemble import Piece
from eyas.draft.checkpoint import save_draft
from eyas.draft.digests import compare
from eyas.draft.directory import PROBE
from eyas.draft.files import open_folder
from eyas.draft.probe import answer, collect, write_probe
from eyas.errors import BadInput
from eyas.repair.change import Change
from eyas.repair.history import revert
from eyas.repair.in_place import repair_in_place
from eyas.repair.verify import verify_draft
from eyas.vocab import VocabMap


class Features:
    """Two documents of random ids and states, in the interface of FeatureSet."""

    dir = "features"

    def __init__(self) -> None:
        self.doc_lengths = torch.tensor([30, 21])
        generator = torch.Generator().manual_seed(2)
        self.documents = [
            {"ids": torch.randint(0, 300, (n,), generator=generator), "taps": torch.randn(n, 96, generator=generator)}
            for n in (30, 21)
        ]

    def document(self, i: int) -> dict[str, torch.Tensor]:
        return self.documents[i]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft directory with digests and a probe."""
    folder = tmp_path_factory.mktemp("verify") / "draft"
    draft, vocab_map = make_draft(1)
    inputs: Any = collect(Features(), with_embedding(draft), tokens=24)  # type: ignore[arg-type]
    answers = answer(draft, vocab_map, inputs)
    save_draft(draft, vocab_map, folder)
    write_probe(folder, inputs, answers)
    return folder


@pytest.fixture
def draft(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "draft"))


def write(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | change
    save_file({n: t.contiguous() for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


def test_a_copy_is_intact(draft: Path):
    report = verify_draft(draft)
    assert report.ok and report.problems == []
    assert report.compared.same and report.tensors == len(load_file(draft / "model.safetensors"))
    assert report.probe is not None and report.probe.choices > 0
    (draft / PROBE).unlink()
    assert verify_draft(draft).ok and verify_draft(draft).probe is None


@pytest.mark.parametrize("scheme", ["layers0", "prefixed_midlayer", "fused"])
def test_a_conversion_that_renames_and_widens_is_intact(draft: Path, scheme: str):
    module, vocab_map = make_draft(1)
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in
               foreign_tensors(module, vocab_map, scheme).items()}  # fmt: skip
    save_file(tensors, draft / "model.safetensors")
    report = verify_draft(draft)
    assert report.problems == []
    assert len(report.compared.converted) == report.tensors - 2, "all but the maps"


@pytest.mark.parametrize(
    ("change", "kind", "names"),
    [
        ({"midlayer.mlp.up_proj.weight": ...}, "changed", ["midlayer.mlp.up_proj.weight"]),
        ({"midlayer.input_layernorm.weight": None}, "missing", ["midlayer.input_layernorm.weight"]),
        ({"t2d": None}, "missing", ["t2d"]),
        ({"a_stranger": torch.ones(3)}, "additional", ["a_stranger"]),
        ({"fc.weight": torch.ones(32, 95)}, "changed", ["fc.weight"]),
        ({"d2t": torch.arange(120)}, "changed", ["d2t"]),
        ({"norm.weight": torch.ones(32).bfloat16()}, "changed", ["norm.weight"]),
    ],
)
def test_each_tensor_that_differs_is_named(draft: Path, change: dict[str, Any], kind: str, names: list[str]):
    if ... in change.values():  # one bit
        (name,) = change
        flipped = load_file(draft / "model.safetensors")[name]
        flipped.view(torch.int32)[7, 7] ^= 1
        change = {name: flipped}
    write(draft, change)
    report = verify_draft(draft)
    assert not report.ok
    told = report.compared.to_dict()
    assert {k: told[k] for k in ("missing", "additional", "changed")} == {
        "missing": [], "additional": [], "changed": [], kind: names
    }  # fmt: skip
    assert all(any(name in problem for problem in report.problems) for name in names)


def test_the_probe_sees_what_no_digest_can(draft: Path):
    """The tensors are right, the conventions are not: the draft chooses otherwise."""
    eyas = json.loads((draft / "eyas.json").read_text())
    eyas["conventions"]["norm_before_residual"] = not eyas["conventions"].get("norm_before_residual", False)
    (draft / "eyas.json").write_text(json.dumps(eyas))
    report = verify_draft(draft)
    assert report.compared.same and not report.ok
    assert any(problem.startswith("the probe: ") for problem in report.problems)


def test_a_draft_without_digests_cannot_be_checked(draft: Path):
    eyas = json.loads((draft / "eyas.json").read_text())
    (draft / "eyas.json").write_text(json.dumps({**eyas, "tensors": {}}))
    with pytest.raises(BadInput, match="keeps no digests"):
        verify_draft(draft)
    (draft / "eyas.json").unlink()
    with pytest.raises(BadInput, match=r"eyas\.json is missing, so nothing says"):
        verify_draft(draft)


def test_repairs_keep_the_digests_in_step(draft: Path):
    other = VocabMap.from_absolute(torch.arange(120) * 2, 300)
    pieces = {
        "d2t": Piece("d2t", "I64", (120,), (other.d2t.numpy(),)),
        "t2d": Piece("t2d", "BOOL", (300,), (other.t2d.numpy(),)),
    }
    repair_in_place(draft, Change(pieces), {})
    report = verify_draft(draft)
    assert report.compared.same
    assert [p for p in report.problems if not p.startswith("the probe")] == [], "the digest of the map follows, too"
    assert report.probe is not None and not report.probe.ok, "another map chooses other ids"
    revert(draft)
    assert verify_draft(draft).ok


def test_digests_of_fused_tensors_follow(tmp_path: Path):
    module, vocab_map = make_draft(1)
    draft = save_draft(module, vocab_map, tmp_path / "draft")
    save_file(foreign_tensors(module, vocab_map, "fused"), draft / "model.safetensors")
    assert compare(open_folder(draft)).same
    held = open_folder(draft).tensors["midlayer.self_attn.qkv_proj.weight"]
    changed = held.array().copy()
    changed[-1] += 1  # a row of v
    name = held.name
    repair_in_place(draft, Change({name: Piece(name, held.dtype, held.shape, (changed,))}), {})
    assert compare(open_folder(draft)).same


def test_the_command(draft: Path):
    run = CliRunner()
    done = run.invoke(cli, ["verify", str(draft)])
    assert done.exit_code == 0 and "intact" in done.output and "recorded choices replayed" in done.output
    write(draft, {"norm.weight": torch.zeros(32)})
    done = run.invoke(cli, ["verify", str(draft)])
    assert done.exit_code == 1 and "norm.weight is not what eyas.json recorded" in done.output
    told = json.loads(run.invoke(cli, ["verify", str(draft), "--json"]).output)
    assert told["ok"] is False and told["compared"]["changed"] == ["norm.weight"]
    (draft / "eyas.json").unlink()
    refused = run.invoke(cli, ["verify", str(draft)])
    assert isinstance(refused.exception, BadInput) and refused.exception.exit_code == 2
