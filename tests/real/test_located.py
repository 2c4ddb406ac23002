"""Faults served for real: a measurement and the doctor name the place each time: the files, or launch and engine.

Eight prompts of 48 tokens, four drafted, float32, greedy.   make test-engines   (EYAS_TEST_DRAFT=DIR: a healthy draft)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from targets import moved

from eyas.doctor.diagnosis import diagnose
from eyas.engines.launch import options
from eyas.measure.asking import How
from eyas.measure.engine import with_engine
from eyas.measure.locate import locate
from eyas.measure.measured import of_file, write
from eyas.measure.questions import questions_of
from eyas.prompt_sets import heldout_prompts
from eyas.serve import Launch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "faults"))
from kinds import BY_NAME, Held

pytestmark = pytest.mark.engine
K, HOW = 4, How(48)
IN_FILES = {
    "vllm": ("d2t subtracted twice", "d2t rolled by one", "k <-> v", "head missing", "random embedding stored",
             "norm_output flipped", "norm_before_residual flipped", "taps the first three", "rope_theta 100",
             "slices of fc 2 1 0"),
    "sglang": ("d2t subtracted twice", "norm_output flipped", "taps the first three"),
}  # fmt: skip
DRAFT_ENDS = """{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 4, "max_model_len": 64}"""
IN_LAUNCH = {
    "vllm": {"positions of the draft that end": ("--speculative-config", DRAFT_ENDS), "another target": ()},
    "sglang": {"EAGLE instead of EAGLE3": ("--speculative-algorithm", "EAGLE")},
}


def examined(folder: Path, target: Path, launch: Launch, scratch: Path, served: Path | None = None) -> dict[str, Any]:
    """What a user gets: the engine asked, the rows, and the doctor over both."""
    questions = questions_of(target, {name: heldout_prompts(name, n) for name, n in
                                      (("mt_bench", 3), ("humaneval", 3), ("gsm8k", 2))}, 800)  # fmt: skip
    part = with_engine(launch, questions, HOW, plain=False)
    assert part["errors"] == []
    flags = options(" ".join(f"'{word}'" for word in part["command"]))
    part["locate"] = locate(folder, target, launch.engine, questions, HOW, K, part["acceptance"], launch=flags,
                            reference=False)  # fmt: skip
    write(scratch / "measured.json", {"engines": [part]})
    file = of_file(scratch / "measured.json")
    found = diagnose(folder, target=target, engines=(launch.engine,), served=file.served, located=file.located,
                     launch=flags)  # fmt: skip
    taus = {row["row"]: row["tau"] for row in part["locate"]["rows"]}
    confirmed = [f"{f['id']}:{f['convention']}" for f in found["findings"] if f["severity"] == "error"]
    print(f"\n{launch.engine}: {taus}, falls {part['locate']['falls']!r}, where {found['where']}, {confirmed}")
    return {"taus": taus, "falls": part["locate"]["falls"], **found}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_nothing_is_wrong_with_a_healthy_draft(engine, draft, target, tmp_path):
    found = examined(draft, target, Launch(engine, target, draft, K), tmp_path)
    assert found["falls"] == ""
    assert found["where"] in ("none", "training")
    assert found["taus"]["served"] == pytest.approx(found["taus"]["declared"], rel=0.01)
    assert found["taus"]["served"] > 1.05


@pytest.mark.parametrize(("engine", "fault"), [(e, f) for e, faults in IN_FILES.items() for f in faults])
def test_a_fault_in_the_files_is_found_there(engine, fault, draft, target, tmp_path):
    held = Held.read(draft, target)
    assert BY_NAME[fault].apply(held) is not None
    folder = held.write(tmp_path / "draft")
    found = examined(folder, target, Launch(engine, target, folder, K), tmp_path)
    assert found["falls"] != "served", "the engine runs what it reads"
    assert found["where"] in ("checkpoint", "export")
    named = {f["convention"] for f in found["findings"] if f["severity"] == "error"}
    assert named & {*BY_NAME[fault].conventions, "head" if fault == "head missing" else ""}


@pytest.mark.parametrize(("engine", "fault"), [(e, f) for e, faults in IN_LAUNCH.items() for f in faults])
def test_a_fault_of_the_launch_is_not_blamed_on_the_draft(engine, fault, draft, target, tmp_path):
    extra = tuple(word.replace("DRAFT", str(draft)) for word in IN_LAUNCH[engine][fault])
    served = moved(target, tmp_path / "target") if fault == "another target" else target
    found = examined(draft, target, Launch(engine, served, draft, K, extra=extra), tmp_path)
    assert found["falls"] == "served"
    assert found["where"] in ("launch", "engine")
    assert found["taus"]["served"] < 0.99 * found["taus"]["as_read"]
