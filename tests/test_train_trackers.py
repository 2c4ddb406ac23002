"""Trackers: asked for by name, told the same numbers, resumed under one name, and never in the way of training.

The real packages were tried by hand (docs/habits.md says which versions); here stand-ins record what they are called
with.   pytest -q tests/test_train_trackers.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eyas.cli.train import read_settings
from eyas.config import validate
from eyas.errors import BadInput, EyasError
from eyas.train import trackers
from eyas.train.loop import Run, train
from eyas.train.settings import TrainSettings
from training import die, exit_code_of, material, run

NAMES = ("wandb", "trackio")


@pytest.fixture(scope="module")
def m(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory):
    return material(tiny_target, tmp_path_factory)


class StandIn(ModuleType):
    """A package with `init`, whose run notes into a file what happens, so that a killed process has told it, too."""

    def __init__(self, name: str, notes: Path, step: int = 0) -> None:
        super().__init__(name)
        self.__spec__ = type("Spec", (), {"name": name})()  # type: ignore[assignment]
        self.notes, self.step, self.broken = notes, step, False

    def _note(self, **what: Any) -> None:
        with self.notes.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def init(self, **how: Any) -> StandIn:
        print(f"* \x1b[1m{self.__name__}\x1b[0m begins")  # as the real ones do, on stdout
        self._note(init=how)
        return self

    def log(self, values: dict[str, float] | None = None, step: int | None = None, metrics: Any = None) -> None:
        if self.broken and step == 3:
            raise ConnectionError("the network went away")
        self._note(step=step, values=values or metrics)

    def finish(self) -> None:
        self._note(finish=True)

    def told(self, key: str) -> list[Any]:
        rows = [json.loads(line) for line in self.notes.read_text().splitlines()]
        return [row[key] for row in rows if key in row]


@pytest.fixture(params=NAMES)
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(request.param, tmp_path / "notes.jsonl")
    monkeypatch.setitem(sys.modules, request.param, made)
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_a_tracker_hears_what_metrics_hold(m, package: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "mine"
    run(m, out, track=[package.__name__])
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert package.told("step") == [1, 2, 3, 4, 5, 6] == [r["step"] for r in records]
    third = package.told("values")[2]
    assert [third[f"loss/{k}"] for k in range(3)] == records[2]["loss"]
    assert third["gradient_norm"] == records[2]["gradient_norm"]
    assert third["accept_length/predicted"] == records[2]["predicted"]["accept_length"]
    assert package.told("finish") == [True]
    (init,) = package.told("init")
    assert (init["project"], init["resume"]) == ("eyas", "allow")
    assert init["name"].startswith("mine")
    assert init["config"]["ttt_steps"] == 3 and init["config"]["seed"] == 3
    assert not (out / "tensorboard").exists()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"* {package.__name__} begins" in printed.err


def test_a_killed_run_goes_on_under_the_same_name(m, package: StandIn, tmp_path: Path, monkeypatch):
    """Killed in step 4, after the checkpoint of step 2: steps 3 to 6 are told by the second process."""
    out, optimize = tmp_path / "run", Run.optimize

    def fatal(self: Run, step: Any) -> Any:
        if self.step == 3:
            die()
        return optimize(self, step)

    monkeypatch.setattr(Run, "optimize", fatal)
    assert exit_code_of(lambda: run(m, out, track=[package.__name__])) == -9
    monkeypatch.setattr(Run, "optimize", optimize)
    assert package.told("step") == [1, 2, 3]
    package.step = 4 if package.__name__ == "wandb" else 0  # what wandb says that it has: steps 0 to 3
    run(m, out, track=[package.__name__])
    expected = [1, 2, 3, 4, 5, 6] if package.__name__ == "wandb" else [1, 2, 3, 3, 4, 5, 6]
    assert package.told("step") == expected
    first, second = package.told("init")
    assert {key: first.get(key) for key in ("id", "name")} == {key: second.get(key) for key in ("id", "name")}
    again = dict(zip(package.told("step"), package.told("values"), strict=True))
    package.step = 0
    run(m, tmp_path / "whole", track=[package.__name__])
    assert package.told("values")[-6:] == [again[step] for step in range(1, 7)], "an unkilled run tells other numbers"


def test_tracking_makes_it_no_other_run(m, package: StandIn, tmp_path: Path):
    out = tmp_path / "run"
    run(m, out)
    before = (out / "manifest.json").read_bytes()
    run(m, out, track=[package.__name__])
    assert (out / "manifest.json").read_bytes() == before
    assert not package.notes.exists(), "a finished run was tracked again"
    assert "track" not in json.loads((out / "draft" / "eyas.json").read_text())["provenance"]["settings"]


def test_one_that_fails_fails_alone(m, package: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture):
    package.broken = True
    counts = run(m, tmp_path / "run", track=["tensorboard", package.__name__])
    assert counts["steps"] == 6
    assert package.told("step") == [1, 2]
    assert f"{package.__name__} tracks no longer (ConnectionError: the network" in capsys.readouterr().err
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_one_that_cannot_begin_stops_the_run_before_its_first_step(m, package: StandIn, tmp_path: Path, monkeypatch):
    def refuse(**_: Any) -> None:
        raise RuntimeError("no api key")

    monkeypatch.setattr(package, "init", refuse)
    with pytest.raises(EyasError, match=f"{package.__name__} cannot track this run .RuntimeError: no api key.. Log in"):
        run(m, tmp_path / "run", track=[package.__name__])
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_named_with_its_command_before_anything_is_read(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match=f"pip install {name} "):
        train(None, tmp_path / "run", target_dir="", vocab_map=None, settings=TrainSettings(track=[name]))
    trackers.check_trackers(["tensorboard"])


def test_where_the_choice_is_made():
    assert TrainSettings().track == ("tensorboard",)
    assert read_settings(None, (), None, ("wandb", "trackio", "wandb")).track == ("wandb", "trackio")
    assert read_settings(None, ("track=wandb,trackio",), None).track == ("wandb", "trackio")
    assert read_settings(None, ("track=[]",), None).track == ()
    assert validate({"train": {"track": "trackio"}}).train.track == ("trackio",)
    with pytest.raises(BadInput, match="mlflow"):
        validate({"train": {"track": ["mlflow"]}})
