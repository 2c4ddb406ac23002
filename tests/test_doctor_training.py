"""What a training run predicted, in each place where trainers write it.   pytest -q tests/test_doctor_training.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.doctor.training import predicted_tau
from eyas.errors import BadInput

EYAS = {"predicted": {"accept_length": 1.83, "k": 4}}
SPECULATORS = {"loss_epoch": 2.1} | {f"full_acc_{i}_epoch": acc for i, acc in enumerate((0.6, 0.35, 0.2, 0.1, 0.05))}


def write(folder: Path, name: str, values: Any) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def test_without_a_run_the_draft_itself_may_say():
    assert predicted_tau(None, EYAS) == 1.83
    for nothing in ({}, {"predicted": None}, {"predicted": {}}, {"predicted": {"accept_length": "1.8"}}):
        assert predicted_tau(None, nothing) is None


@pytest.mark.parametrize(
    ("name", "values", "tau"),
    [("eyas.json", EYAS, 1.83), ("draft/eyas.json", EYAS, 1.83), ("summary.json", {"tau_mean": 1.629}, 1.629),
     ("val_metrics.json", SPECULATORS, 2.25)],
)  # fmt: skip
def test_a_run_is_read_where_its_trainer_writes(tmp_path: Path, name: str, values: Any, tau: float):
    assert predicted_tau(write(tmp_path, name, values), {}) == pytest.approx(tau)
    said = {"predicted": {"accept_length": 9.0}}
    assert predicted_tau(str(tmp_path), said) == pytest.approx(tau), "the run goes first"


def test_a_file_that_says_nothing_is_passed_over(tmp_path: Path):
    short = {name: value for name, value in SPECULATORS.items() if name != "full_acc_2_epoch"}
    write(tmp_path, "val_metrics.json", short)
    write(tmp_path, "eyas.json", {"predicted": {"accept_length": True}})
    with pytest.raises(BadInput, match=r"neither val_metrics\.json nor an eyas\.json"):
        predicted_tau(tmp_path, {})
    write(tmp_path, "draft/eyas.json", EYAS)
    assert predicted_tau(tmp_path, {}) == 1.83


@pytest.mark.parametrize(
    ("values", "why"), [("{", "cannot be read"), ("[1]", "holds no JSON object"), ("\udcff", "cannot be read")]
)
def test_a_damaged_file_is_named(tmp_path: Path, values: str, why: str):
    (tmp_path / "eyas.json").write_bytes(values.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInput, match=rf"eyas\.json {why}"):
        predicted_tau(tmp_path, {})


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="is no directory"):
        predicted_tau(tmp_path / "no", EYAS)
    with pytest.raises(BadInput, match="holds neither"):
        predicted_tau(tmp_path, EYAS)
