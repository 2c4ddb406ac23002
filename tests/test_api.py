"""The Python API: cheap to import, the command line's own answers, and every example of docs/api.md runs.

pytest -q tests/test_api.py
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import eyas
from drafts import make_draft, with_embedding
from eyas import api
from eyas.cli import LazyGroup
from eyas.draft.checkpoint import save_draft
from eyas.target.facts import read_facts

DOCUMENT = Path(__file__).parents[1] / "docs" / "api.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def place(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `draft` and `target` in it."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "target").symlink_to(tiny_target)
    draft, vocab_map = make_draft()
    with_embedding(draft)
    save_draft(draft, vocab_map, folder / "draft", facts=read_facts(tiny_target))
    return folder


def test_importing_it_imports_nothing_and_using_it_does():
    code = "import eyas, sys\nprint(*sys.modules)\nassert 'prove' in dir(eyas)\nassert callable(eyas.prove)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "eyas.api", "click", "pydantic"} & set(loaded)


def test_what_is_offered_is_documented_and_typed():
    document = DOCUMENT.read_text(encoding="utf-8")
    for name in set(eyas.__all__) - {"__version__"}:
        offered = getattr(eyas, name)
        assert offered is getattr(api, name)
        assert (offered.__doc__ or "").strip(), name
        assert re.search(rf"\b{name}\b", document), f"{name} is not in docs/api.md"
        if inspect.isfunction(offered):
            parameters = inspect.signature(offered).parameters.values()
            assert all(p.annotation is not p.empty for p in parameters), name
    assert set(eyas.__all__) == {*api.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        eyas.nothing  # type: ignore[attr-defined]


def test_no_name_is_that_of_a_module_which_would_replace_it():
    folder = Path(eyas.__file__).parent
    modules = {p.stem for p in folder.glob("*.py")} | {p.name for p in folder.iterdir() if p.is_dir()}
    assert not modules & set(eyas.__all__)


def test_the_examples_run_in_their_order(place: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(place)
    assert len(BLOCKS) == 6
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, str(DOCUMENT), "exec"), names)
    told = capsys.readouterr().out
    assert "no-such-draft" in told and "eyas" in told
    assert (place / "published" / "eyas.json").is_file()


@pytest.mark.parametrize(
    ("verb", "options", "answer"),
    [
        ("inspect", ["--target", "target"], lambda: eyas.inspect("draft", "target")),
        ("doctor", ["--target", "target", "--static"], lambda: eyas.diagnose("draft", "target", static=True)),
    ],
)
def test_it_says_what_the_command_line_says(verb, options, answer, place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place)
    command = LazyGroup().get_command(None, verb)  # type: ignore[arg-type]
    said = json.loads(CliRunner().invoke(command, ["draft", *options, "--json"]).stdout)
    answered = json.loads(json.dumps(answer()))
    for one in (said, answered):
        one.pop("seconds", None)
    assert answered == said


def test_errors_are_those_of_the_command_line(place: Path):
    with pytest.raises(eyas.BadInput):
        eyas.prove(place / "draft", place / "target", [])
    with pytest.raises(eyas.BadInput, match="nothing"):
        eyas.diagnose(place / "draft", engines=["nothing"], static=True)
    with pytest.raises(eyas.EyasError):
        eyas.load_target(place / "nowhere" / "at" / "all")
