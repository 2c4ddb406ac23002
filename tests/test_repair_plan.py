"""A plan is data: written, reviewed, replayed on the bytes that it was made for, refused on others, undone.

pytest -q tests/test_repair_plan.py
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas._version import __version__
from eyas.doctor.examine import examine
from eyas.draft.digests import compare
from eyas.errors import BadInput
from eyas.repair.operations import perform
from eyas.repair.overlay import Overlay
from eyas.repair.plan import Bytes, Plan, apply_plan, departures, inverse, make_plan, plan_of, read_plan, write_plan
from eyas.repair.remedies import steps_for
from eyas.repair.step import Step
from eyas.repair.write_new import write_new
from mending import FACTS, D, change, contents, healthy, right_map, same_tensors, says_the_same

PLACE = torch.arange(D)
STEPS = [
    Step("add-arange", why="EY-D2T-TWICE"),
    Step("rename", {"name": "fusion.weight", "to": "fc.weight", "transpose": True}, "EY-MEASURED-NAME"),
    Step("write-taps", {"taps": [2, 4, 5]}, "EY-MEASURED-TAPS"),
    Step("swap", {"a": "midlayer.mlp.gate_proj.weight", "b": "midlayer.mlp.up_proj.weight"}),
]


def damaged(folder: Path, style: str = "flat") -> Path:
    def inject(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["d2t"] = right_map().d2t - PLACE
        tensors["fusion.weight"] = tensors.pop("fc.weight").T
        up, gate = tensors["midlayer.mlp.up_proj.weight"], tensors["midlayer.mlp.gate_proj.weight"]
        tensors |= {"midlayer.mlp.up_proj.weight": gate, "midlayer.mlp.gate_proj.weight": up}
        config["eagle_aux_hidden_state_layer_ids"] = [3, 5, 6]

    return change(healthy(folder, style), inject)


@pytest.mark.parametrize("style", ["flat", "eyas"])
def test_a_plan_mends_several_faults_and_is_undone(tmp_path: Path, style: str):
    good = Overlay.of(healthy(tmp_path / "good", style), FACTS)
    bad = Overlay.of(damaged(tmp_path / "bad", style), FACTS)
    finding = {"id": "EY-D2T-TWICE", "status": "static", "severity": "error", "evidence": "arange was subtracted twice"}
    steps = STEPS if style == "flat" else [*STEPS[:2], STEPS[3]]  # there eyas.json says the right taps
    plan = make_plan(bad, steps, [finding])
    write_plan(plan, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read == plan and read.eyas_version == __version__ and read.findings == (finding,)
    concerned = {"d2t", "t2d", "fusion.weight", "fc.weight", STEPS[3].arguments["a"], STEPS[3].arguments["b"]}
    assert read.made_for.tensors.keys() == concerned and read.made_for.tensors["fc.weight"] is None
    assert read.makes.tensors["fusion.weight"] is None
    copy = Overlay.of(shutil.copytree(tmp_path / "bad", tmp_path / "copy"), FACTS)  # also elsewhere, with other spaces
    (tmp_path / "copy" / "config.json").write_text(json.dumps(json.loads((tmp_path / "copy/config.json").read_text())))
    applied = apply_plan(copy, read)
    assert same_tensors(applied.after, good) and says_the_same(applied.after, good)
    assert any(text.startswith("writes d2t: 120 numbers") for text in applied.told) and not applied.forced
    assert departures(applied.after, inverse(read)) == []
    back = apply_plan(applied.after, inverse(read))
    assert contents(back.after) == contents(bad)
    again = inverse(inverse(read))
    assert again.steps == read.steps and same_tensors(apply_plan(back.after, again).after, good)


def test_other_bytes_are_refused_and_force_is_recorded(tmp_path: Path):
    bad = Overlay.of(damaged(tmp_path / "bad"), FACTS)
    plan = make_plan(bad, [STEPS[0]])
    assert plan.made_for.tensors.keys() == {"d2t", "t2d"}
    elsewhere = {"midlayer.mlp.up_proj.weight": torch.ones(48, 32)}
    other = Overlay.of(change(damaged(tmp_path / "a"), lambda t, c: t.update(elsewhere)), FACTS)
    assert apply_plan(other, plan).forced == (), "only the tensors concerned matter"
    ids = right_map().ids + 1
    more = {"d2t": ids - 2 * PLACE, "t2d": torch.zeros(300, dtype=torch.bool).index_fill(0, ids, True)}
    other = Overlay.of(
        change(damaged(tmp_path / "b"), lambda t, c: t.update(more) or c.update(hidden_act="gelu")), FACTS
    )
    with pytest.raises(
        BadInput, match=r"not what the plan was made for: d2t has other bytes .* config\.json is another one"
    ):
        apply_plan(other, plan)
    applied = apply_plan(other, plan, force=True)
    assert len(applied.forced) == 3 and applied.entry()["forced"] == list(applied.forced)
    assert json.dumps(applied.entry())
    mended = Overlay.of(change(damaged(tmp_path / "c"), lambda t, c: t.update(d2t=right_map().d2t)), FACTS)
    for force in (False, True):
        with pytest.raises(BadInput, match="right as it stands" if force else "d2t has other bytes"):
            apply_plan(mended, plan, force=force)
    gone = Overlay.of(change(damaged(tmp_path / "d"), lambda t, c: t.pop("d2t")), FACTS)
    assert departures(gone, plan) == ["d2t is missing"]


def test_what_must_not_be_there(tmp_path: Path):
    bad = Overlay.of(change(healthy(tmp_path / "a", "flat"), lambda t, c: t.pop("t2d")), FACTS)
    plan = make_plan(bad, [Step("t2d-from-d2t")])
    assert departures(Overlay.of(healthy(tmp_path / "b", "flat"), FACTS), plan) == ["t2d is there, and was not"]


def test_a_plan_of_an_eyas_draft_knows_its_declarations(tmp_path: Path):
    bad = Overlay.of(damaged(tmp_path / "bad", "eyas"), FACTS)
    plan = make_plan(bad, [STEPS[0]])
    eyas = {**bad.eyas, "predicted": {"tau": 2.0}}
    assert departures(bad.with_eyas(eyas), plan) == []
    assert departures(bad.declare(norm_output=True), plan) == ["eyas.json is another one"]
    assert departures(bad.with_eyas(None), plan) == ["eyas.json is another one"]


def test_a_plan_without_an_inverse(tmp_path: Path):
    bad = Overlay.of(change(healthy(tmp_path / "a"), lambda t, c: t.update(d2t=PLACE)), FACTS)
    plan = make_plan(bad, [Step("d2t-from-t2d"), Step("swap-halves")])
    assert plan.inverse is None and inverse(plan) is None and inverse(read_back(plan)) is None


def read_back(plan: Plan) -> Plan:
    return Plan.from_dict(json.loads(json.dumps(plan.to_dict())))


def test_from_diagnosis_to_plan(tmp_path: Path):
    folder = change(healthy(tmp_path / "a"), lambda t, c: t.update(d2t=right_map().ids))
    overlay, done = Overlay.of(folder, FACTS), []
    findings = [f.to_dict() for f in examine(folder, FACTS) if f.severity == "error"]
    for finding in findings:
        (step,) = steps_for(finding, overlay)
        done.append(perform(overlay, step))
        overlay = done[-1].after
    plan = plan_of(done, findings)
    assert plan == make_plan(Overlay.of(folder, FACTS), [d.step for d in done], findings)
    assert [s.why for s in plan.steps] == ["EY-D2T-ABSOLUTE"] and plan.draft == str(folder)
    assert read_back(plan) == plan


@pytest.mark.parametrize("style", ["eyas", "sharded", "fused"])
def test_what_is_written_is_what_the_overlay_said(tmp_path: Path, style: str):
    overlay = Overlay.of(healthy(tmp_path / "a", style), FACTS)
    steps = [STEPS[3], Step("swap-halves"), Step("permute-fc-slices", {"order": [1, 2, 0]}),
             Step("write-taps", {"taps": [1, 4, 6]}), Step("set-flag", {"name": "norm_output", "value": True}),
             Step("respell", {"first": "layers.0.", "prefix": "model."})]  # fmt: skip
    applied = apply_plan(overlay, make_plan(overlay, steps))
    write_new(tmp_path / "a", tmp_path / "b", applied.after.change(), applied.entry())
    written = Overlay.of(tmp_path / "b", FACTS)
    assert same_tensors(written, applied.after) and written.config == applied.after.config
    assert departures(written, inverse(applied.plan)) == []
    if style == "eyas":
        assert compare(written.folder).same and written.reading.conventions == applied.after.reading.conventions
    back = apply_plan(written, inverse(applied.plan))
    write_new(tmp_path / "b", tmp_path / "c", back.after.change(), back.entry())
    assert contents(Overlay.of(tmp_path / "c", FACTS)) == contents(overlay)


def test_plans_that_cannot_be_read(tmp_path: Path):
    bad = Overlay.of(damaged(tmp_path / "bad"), FACTS)
    good = make_plan(bad, STEPS).to_dict()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"schema": "eyas-repair-plan/9"}, "expected 'eyas-repair-plan/1'"),
        ({"steps": []}, "non-empty list"),
        ({"steps": [{"operation": "nonsense"}]}, "there is no operation 'nonsense'; known are absolute-to-offset"),
        ({"steps": ["swap"]}, "a step is an object"),
        ({"inverse": {}}, "non-empty list"),
        ({"findings": [1]}, "list of objects"),
        ({"made_for": {"tensors": {"d2t": 3}}}, "must give the SHA-256, or null"),
        ({"makes": None}, "must give the SHA-256, or null"),
    ]
    for changes, message in wrong:
        (tmp_path / "plan.json").write_text(json.dumps({**good, **changes}))
        with pytest.raises(BadInput, match=r"plan\.json: .*" + message):
            read_plan(tmp_path / "plan.json")
    with pytest.raises(BadInput, match=r"step 2 of 2, swap"):
        apply_plan(bad, replace(read_back(make_plan(bad, STEPS)), steps=(STEPS[0], Step("swap", {"a": "x", "b": "y"}))))
    with pytest.raises(BadInput, match="at least one step"):
        make_plan(bad, [])
    assert Bytes.from_dict(Bytes().to_dict(), "here") == Bytes()
