"""Every command that README and docs/ show is run, page by page in the order of the page, in a world made small.

pytest -q tests/test_docs_commands.py

The catalogue's commands are parsed by test_catalogue.py; the repairs that they show run in test_repair_*.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import docs_world
from docs_world import ELSEWHERE, commands, run
from fake_engines import Engine

ROOT = Path(__file__).resolve().parents[1]
# Facts show what others run; experiments.md is a log, whose commands were true of the code of their day.
OTHERS = {"catalogue", "facts", "experiments.md"}
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if not OTHERS & set(p.relative_to(ROOT).parts)),
]
FINDS = r"eyas (doctor|measure) "
"""These leave with 1 where they find something, and in a draft of random numbers they do."""
FAILS = {
    r"eyas prove .* --fail-below 1.8 ": "below the --fail-below of 1.8",
    r"eyas repair .* --auto\b": "nothing could be mended|errors remain",
    r"eyas repair draft --finding EY-D2T-ABSOLUTE --in-place$": "the doctor does not find EY-D2T-ABSOLUTE",
    r"eyas repair draft --finding EY-D2T-ABSOLUTE --in-place --force$": "spite of this:\n +EY-D2T-ABSOLUTE was not",
    r"eyas revert DRAFT": "has no history",
    r"eyas repair DRAFT --(finding|plan) ": "the doctor does not find|plan.json",
}
"""What a page shows for its refusal, or what would need a draft that was trained; and what is said here instead."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return docs_world.build(tmp_path_factory.mktemp("docs") / "world")


def shown(page: Path) -> list[str]:
    return list(commands(page.read_text()))


@pytest.mark.parametrize("page", [p for p in PAGES if shown(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_commands_of_a_page_do_what_it_says(page: Path, world: Path, tmp_path: Path, monkeypatch):
    here = tmp_path / "here"
    shutil.copytree(world, here)
    monkeypatch.chdir(here)
    before = [path.name for path in here.iterdir() if path.is_dir()]
    with Engine("vllm") as server:
        for command in shown(page):
            if any(re.match(pattern, command) for pattern in ELSEWHERE):
                continue
            if command.startswith("cp -r "):
                shutil.rmtree(here / command.split()[-1], ignore_errors=True)
            if not command.startswith("eyas "):
                subprocess.run(command, shell=True, check=True)
                continue
            if (out := made_by(command)) in before:
                shutil.rmtree(here / before.pop(before.index(out)))  # the page makes its own
            code, said = run(command, server.url)
            refusal = next((words for pattern, words in FAILS.items() if re.match(pattern, command)), None)
            if refusal:
                assert re.search(refusal, said) and code in (1, 2), f"{command}\n{code}: {said}"
            else:
                allowed = (0, 1) if re.match(FINDS, command) else (0,)
                assert code in allowed and "Traceback" not in said, f"{command}\n{code}: {said}"


def made_by(command: str) -> str | None:
    """The folder that a stage writes."""
    out = re.search(r"--out (\w+)(?: |$)", command)
    return out[1] if out and not command.startswith(("eyas prove", "eyas measure")) else None


def test_what_is_run_elsewhere_is_run_there():
    every = [command for page in PAGES for command in shown(page)]
    for pattern, file in ELSEWHERE.items():
        assert (ROOT / "tests" / file).is_file()
        assert any(re.match(pattern, command) for command in every), f"no page shows {pattern}"
