"""A stage runs once per key; a changed key runs it afresh; a failed one is called again.

pytest -q tests/test_stages.py
"""

import json
from pathlib import Path

import pytest

from eyas.artifacts import write_manifest
from eyas.errors import BadInput, EyasError
from eyas.locks import inside
from eyas.stages import StageRunner, peak_memory_gib


class Counter:
    """A stage that writes what it is told and counts its calls."""

    def __init__(self, text: str = "x"):
        self.text = text
        self.calls = 0
        self.found: list[str] = []

    def __call__(self, out: Path) -> dict[str, object]:
        self.calls += 1
        self.found = sorted(path.name for path in out.iterdir())
        (out / "part").write_text("")
        (out / "data").write_text(self.text)
        write_manifest(out, "s", inputs={}, files=["data"])
        return {"tokens": 1234, "rate": 0.5}


def run(folder: Path, work: Counter, *, config=None, inputs=None, schema="1", **options):
    lines: list[str] = []
    runner = StageRunner(folder, lines.append, {"s": schema})
    record = runner.stage("s", work, inputs=inputs or {"a": "1"}, config=config, **options)
    return record, lines


def test_it_runs_once_and_is_skipped_by_the_next_process(tmp_path: Path):
    work = Counter()
    first, lines = run(tmp_path, work)
    assert len(lines) == 1
    assert "1,234 tokens, rate 0.500" in lines[0]
    second, lines = run(tmp_path, work)
    assert work.calls == 1
    assert second == first
    assert lines[0].startswith("s           unchanged")


@pytest.mark.parametrize("change", [{"config": {"a": 2}}, {"inputs": {"a": "2"}}, {"schema": "2"}])
def test_a_changed_key_runs_it_in_an_empty_folder(tmp_path: Path, change):
    work = Counter()
    run(tmp_path, work, config={"a": 1})
    run(tmp_path, work, **{"config": {"a": 1}, **change})
    assert work.calls == 2
    assert work.found == []


def test_keep_partial_leaves_the_parts_to_the_stage(tmp_path: Path):
    work = Counter()
    run(tmp_path, work)
    run(tmp_path, work, config={"more": True}, keep_partial=True)
    assert work.calls == 2
    assert "part" in work.found


def test_a_file_that_vanished_runs_it_again(tmp_path: Path):
    work = Counter()
    run(tmp_path, work)
    (tmp_path / "s" / "data").unlink()
    run(tmp_path, work)
    assert work.calls == 2


def test_equal_content_has_an_equal_output_digest_whatever_made_it(tmp_path: Path):
    one, _ = run(tmp_path, Counter("same"), config={"lr": 1})
    two, _ = run(tmp_path, Counter("same"), config={"lr": 2})
    other, _ = run(tmp_path, Counter("other"), config={"lr": 3})
    assert one.key != two.key
    assert one.output == two.output != other.output


def test_an_error_leaves_its_parts_and_the_next_call_finds_them(tmp_path: Path):
    class Failing(Counter):
        def __call__(self, out: Path) -> dict[str, object]:
            self.calls += 1
            (out / "part").write_text("")
            raise EyasError("no")

    with pytest.raises(EyasError, match="no"):
        run(tmp_path, Failing())
    work = Counter()
    run(tmp_path, work)
    assert work.calls == 1
    assert work.found == ["part"]


def test_a_stage_without_a_manifest_is_not_finished(tmp_path: Path):
    with pytest.raises(BadInput, match="no stage finished there"):
        run(tmp_path, lambda out: {})
    assert json.loads((tmp_path / "stages.json").read_text())["stages"]["s"]["finished"] is False


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("ten years")
    with pytest.raises(BadInput, match="not empty"):
        run(tmp_path, Counter())
    assert (tmp_path / "s" / "thesis.tex").read_text() == "ten years"


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other"}', '{"schema": "eyas-stages/1", "stages": {"a": {}}}'])
def test_a_broken_record_is_named(tmp_path: Path, text: str):
    (tmp_path / "stages.json").write_text(text)
    with pytest.raises(BadInput, match=r"stages\.json"):
        StageRunner(tmp_path, print, {})


def test_two_runs_in_one_folder_are_refused(tmp_path: Path):
    with inside(tmp_path), pytest.raises(EyasError, match="is being written by process"), inside(tmp_path):
        pass
    with inside(tmp_path):
        pass


def test_peak_memory_grows_with_what_is_held():
    before = peak_memory_gib()
    held = bytearray(256 << 20)
    held[::4096] = b"x" * len(held[::4096])
    after = peak_memory_gib()
    del held
    assert 0.001 < before < 64
    assert after >= 0.25
    assert after >= before
