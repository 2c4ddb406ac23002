"""docs/architecture.md draws the house as it is: every module stands on a floor, and imports point downwards only.

pytest -q tests/test_architecture.py
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/eyas"
ABOVE_ALL = {"__init__", "__main__"}  # the package's door: it knows the API, and `python -m eyas`
# Run under the Pythons of the engines, with the packages of the engines: no modules of Eyas.
FOREIGN = {"engines/loaders", "engines/servers", "engines/setup/stand_in"}


def floors() -> list[set[str]]:
    """The names on each line of the drawing, the lowest floor first."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    drawing = re.findall(r"^    (\w+(?:  ?\w+)*)(?: {3,}.*| {2,}[a-z].*)?$", text, re.MULTILINE)
    return [set(re.split(r"  +", line)) for line in reversed(drawing)]


def modules() -> list[Path]:
    return [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        if not any(path.relative_to(SOURCE).as_posix().startswith(f"{folder}/") for folder in FOREIGN)
    ]


def unit(dotted: str) -> str:
    """eyas.draft.model -> draft; eyas -> __init__"""
    return [*dotted.split("."), "__init__"][1]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, unit) of every import of Eyas, wherever in the file it stands."""
    package = ["eyas", *path.relative_to(SOURCE).with_suffix("").parts][:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, unit(a.name)) for a in node.names if a.name.split(".")[0] == "eyas")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            base = base if node.level else node.module or ""
            assert not node.level or base.startswith("eyas"), f"{path}:{node.lineno} leads out of the package"
            if base == "eyas":
                yield from ((node.lineno, unit(f"eyas.{a.name}")) for a in node.names)
            elif base.startswith("eyas."):
                yield node.lineno, unit(base)


def test_every_module_stands_on_one_floor():
    drawn = [name for floor in floors() for name in floor]
    there = {
        p.stem if p.is_file() else p.name
        for p in SOURCE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").is_file()
    }
    assert sorted(drawn) == sorted(there - ABOVE_ALL)


def test_imports_point_downwards():
    height = {name: i for i, floor in enumerate(floors()) for name in floor}
    wrong = []
    for path in modules():
        here = unit(".".join(["eyas", *path.relative_to(SOURCE).with_suffix("").parts]))
        for line, other in imported(path):
            if here not in ABOVE_ALL and other != here and height.get(other, 99) >= height[here]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} uses {other}, which does not lie below it")
    assert wrong == []


def test_the_rule_is_not_empty():
    assert len(floors()) > 20 and sum(1 for path in modules() for _ in imported(path)) > 1000


def test_the_first_lines_of_a_module_say_what_lives_there():
    told = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in modules()}
    assert [str(path) for path, text in told.items() if len(text.partition("\n")[0]) < 20] == []


def test_the_command_that_exercises_a_module_is_there():
    named = {(p, t) for p in modules() for t in re.findall(r"\btests/\w+\.py", p.read_text(encoding="utf-8"))}
    assert [f"{p.relative_to(ROOT)}: {t}" for p, t in sorted(named) if not (ROOT / t).is_file()] == []


def test_the_floors_of_security_are_those_of_the_package():
    """SECURITY.md names the oldest releases without known holes; pyproject.toml must refuse older ones."""
    import tomllib

    told = re.findall(r"^\| (\w+) ([\d.]+) \| .*CVE-", (ROOT / "SECURITY.md").read_text(encoding="utf-8"), re.MULTILINE)
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert len(told) >= 4
    assert {f"{name}>={version}" for name, version in told} <= set(asked)
