"""What a measurement adds to a diagnosis: its findings, the place, and `eyas doctor --measured` from outside.

pytest -q tests/test_doctor_located.py
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from doctoring import Patient, patient_of, save
from eyas.cli import main
from eyas.doctor import record as recording
from eyas.doctor.finding import Severity
from eyas.doctor.located import OFF, SAME, STATES, Located, findings
from eyas.doctor.place import where
from eyas.measure.measured import write
from test_measure_file import PART

ROWS = {"declared": 1.5, "as_read": 1.5, "served": 1.5}
WRONG = {"right": False, "says": "the states fed as those of tap 2 are those of tap 3", "slices": []}

# ---------------------------------------------------------------- findings


def ids(located: Located) -> list[str]:
    return [finding.id for finding in findings(located)]


def test_served_as_read():
    (one,) = findings(Located("vllm", ROWS, ""))
    assert (one.id, one.severity) == (SAME, Severity.OK)
    assert "1.500 served, 1.500 replayed as vllm reads the draft" in one.evidence


def test_served_less_than_read():
    (one,) = findings(Located("sglang", ROWS | {"served": 1.2}, "served", "The files are right"))
    assert (one.id, one.severity) == (OFF, Severity.ERROR)
    assert "1.200 served, 1.500 replayed" in one.evidence and "eyas canary" in one.remedy


@pytest.mark.parametrize("falls", ["", "declared", "as_read"])
def test_what_falls_before_is_not_the_server_s(falls: str):
    located = Located("vllm", ROWS, falls)
    assert ids(located) == [SAME] and not located.off


def test_nobody_looked_or_a_side_is_missing():
    assert ids(Located("vllm")) == [] and not Located("vllm").settled
    assert ids(Located("vllm", ROWS)) == [], "falls None: nobody looked"
    for missing in ("as_read", "served"):
        rows = {name: tau for name, tau in ROWS.items() if name != missing}
        assert ids(Located("vllm", rows, "")) == [] and not Located("vllm", rows, "").settled


def test_wrong_states_are_an_error_whatever_the_rows_say():
    for located in (Located("vllm", ROWS, "", capture=WRONG), Located("vllm", capture=WRONG)):
        found = findings(located)
        assert found[-1].id == STATES and found[-1].severity is Severity.ERROR and found[-1].convention == "taps"
        assert "tap 2 are those of tap 3" in found[-1].evidence and located.off
    for right in (True, None):
        assert STATES not in ids(Located("vllm", ROWS, "", capture={"right": right, "says": "x"}))


# ---------------------------------------------------------------- the place


def place(located: Located | None, declared: float | None = 2.5, served: float | None = 2.4, **taus: float) -> str:
    return where((), None, {"declared": declared, **taus}, served, (), located)


def test_rows_over_the_same_prompts_decide():
    assert place(Located("vllm", ROWS | {"served": 1.3}, "served")) == "engine", (
        "though on other prompts it looked equal"
    )
    assert place(None) == "none"
    assert place(Located("vllm", ROWS, ""), served=1.4) == "none", "and the other way round"
    assert place(None, served=1.4) == "engine"


def test_a_healthy_server_of_a_weak_draft_is_training():
    assert place(Located("vllm", ROWS, ""), declared=1.5, served=1.5) == "training"
    assert place(Located("vllm", ROWS, ""), declared=1.5, served=1.5, training=2.9) == "training"


def test_wrong_states_are_the_engine_s():
    assert place(Located("vllm", capture=WRONG)) == "engine"
    assert place(Located("vllm", ROWS, "", capture={"right": None})) == "none"


def test_without_rows_the_numbers_are_compared_as_before():
    assert place(Located("vllm", {"served": 1.4}, ""), served=1.4) == "engine"
    assert place(Located("vllm", {"served": 2.4}, "")) == "none"


# ---------------------------------------------------------------- from outside


@pytest.fixture(scope="module")
def who(tiny_target: Path) -> Patient:
    return patient_of(tiny_target, text={"documents": 10, "length": 24})


@pytest.fixture(scope="module")
def draft(who: Patient, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(who, tmp_path_factory.mktemp("drafts") / "good", tiny_target)


def measured(path: Path, tau: float, falls: str, read: float | None = None, **more: Any) -> Path:
    part = copy.deepcopy(PART) | more
    part["acceptance"] |= {"tau": tau, "own": {}}
    part["locate"] |= {"falls": falls, "says": "as it is"}
    for row in part["locate"]["rows"]:
        row["tau"] = None if row["row"] == "training" else tau if row["row"] == "served" else read or tau
    write(path, {"engines": [part]})
    return path


@pytest.fixture
def doctor(
    who: Patient, draft: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """(exit code, the diagnosis or what was printed, what was said on standard error)"""
    monkeypatch.setattr(recording, "record", lambda *args, **kwargs: who.material)

    def called(*words: Any, target: bool = True) -> tuple[int, Any, str]:
        asked = [*words, "--target", tiny_target] if target else [*words, "--static"]
        with pytest.raises(SystemExit) as left:
            main(["doctor", str(draft), "--json", *map(str, asked)])
        out, err = capsys.readouterr()
        return int(left.value.code or 0), json.loads(out) if out.startswith("{") else out, err

    return called


def by_id(diagnosis: Any) -> dict[str, Any]:
    return {f["id"]: f for f in diagnosis["findings"]}


def test_a_healthy_measurement_acquits_the_server(doctor: Any, tmp_path: Path):
    code, said, err = doctor("--measured", measured(tmp_path / "m.json", 3.1, ""))
    assert (code, err) == (0, "") and by_id(said)[SAME]["severity"] == "ok"
    assert said["tau"]["served"] == 3.1 and said["where"] in ("none", "training")


def test_less_served_than_read_is_the_engine(doctor: Any, tmp_path: Path):
    code, said, _ = doctor("--measured", measured(tmp_path / "m.json", 1.3, "served", 3.1))
    assert code == 1 and by_id(said)[OFF]["severity"] == "error"
    assert said["where"] == "engine" and said["verdict"] != "healthy"


def test_captured_states_are_evidence(doctor: Any, tmp_path: Path):
    code, said, _ = doctor("--measured", measured(tmp_path / "m.json", 3.1, "", capture=WRONG))
    assert code == 1 and by_id(said)[STATES]["convention"] == "taps"


def test_its_command_is_the_launch(doctor: Any, draft: Path, tmp_path: Path):
    """What the measurement says of the command line is examined as --launch would be."""

    def command(algorithm: str) -> list[str]:
        flags = {"--speculative-algorithm": algorithm, "--speculative-draft-model-path": str(draft),
                 "--speculative-num-steps": "4", "--speculative-eagle-topk": "1",
                 "--speculative-num-draft-tokens": "5"}  # fmt: skip
        return ["sglang", "--model-path", "T", *(word for pair in flags.items() for word in pair)]

    found = []
    for algorithm in ("EAGLE3", "EAGLE"):
        file = measured(tmp_path / "m.json", 3.1, "", engine="sglang", command=command(algorithm))
        found.append({name for name in by_id(doctor("--measured", file)[1]) if name.startswith("EY-LAUNCH-")})
    assert found == [set(), {"EY-LAUNCH-ALGORITHM"}]


def test_without_a_target_the_files_alone(doctor: Any, tmp_path: Path):
    code, said, _ = doctor("--measured", measured(tmp_path / "m.json", 1.3, "served", 3.1), target=False)
    assert code == 1 and OFF in by_id(said)


def test_what_does_not_go_together(doctor: Any, tmp_path: Path):
    file = measured(tmp_path / "m.json", 3.1, "")
    for more in (["--served-accept-length", "1.5"], ["--log", file], ["--engine", "sglang"]):
        code, _, err = doctor("--measured", file, *more)
        assert code == 2 and err.startswith("eyas: ") and "Traceback" not in err
    assert doctor("--measured", tmp_path / "nowhere.json")[0] == 2
    (tmp_path / "bad.json").write_text('{"engines": [{"engine": "nobody", "acceptance": {"tau": 0.1}}]}')
    assert doctor("--measured", tmp_path / "bad.json")[0] == 2
    (tmp_path / "odd.json").write_text('{"engines": [{"engine": 7}]}')
    code, _, err = doctor("--measured", tmp_path / "odd.json")
    assert code == 2 and "Traceback" not in err
