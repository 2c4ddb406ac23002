"""The catalogue of findings: a page for every id that the source can emit, and commands that parse.

pytest tests/test_catalogue.py
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from eyas.cli import cli
from eyas.doctor.groups import group
from eyas.repair import remedies_measured, remedies_static

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = ROOT / "docs/catalogue"
PAGES = sorted(CATALOGUE.glob("EY-*.md"))
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
SECTIONS = ["Symptom", "Cause", "Check", "Repair", "References"]
PLACES = ["Checkpoint", "Config", "Launch", "Features", "Served"]
INDEX_LINE = re.compile(r"^\| \[`(EY-[A-Z0-9-]+)`\]\((EY-[A-Z0-9-]+)\.md\) \| (.+?) \| (.+) \|$", re.MULTILINE)


def emitted() -> set[str]:
    """Every id that a finding can have; what ends in a dash is the beginning of several."""
    text = "".join(p.read_text() for p in (ROOT / "src/eyas/doctor").rglob("*.py"))
    beginnings = re.compile(r'"EY-[A-Z]+-"|f"EY-TAPS-{kind}"')
    ids = set(re.findall(r"EY-[A-Z0-9-]+[A-Z0-9]", beginnings.sub("", text)))
    return ids | {f"EY-TAPS-{kind}" for kind in re.findall(r'_taps_error\(\s*"([A-Z]+)"', text)}


def test_every_id_has_a_page_and_no_page_is_without_an_id():
    assert {page.stem for page in PAGES} == emitted()


def test_every_id_has_one_line_in_the_index_under_one_of_the_places():
    text = (CATALOGUE / "README.md").read_text()
    lines = INDEX_LINE.findall(text)
    assert [a for a, b, *_ in lines if a != b] == []
    assert sorted(line[0] for line in lines) == sorted(emitted())
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == PLACES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_sections_and_says_what_the_index_says(page: Path):
    text = page.read_text()
    assert re.findall(r"^# (.+)$", text, re.MULTILINE) == [page.stem]
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    parts = re.split(r"^## .+$", text, flags=re.MULTILINE)
    assert [s for s, part in zip(SECTIONS, parts[1:], strict=True) if not part.strip()] == []
    index = {
        id_: (severity, line) for id_, _, severity, line in INDEX_LINE.findall((CATALOGUE / "README.md").read_text())
    }
    severity, line = index[page.stem]
    assert f"{line[0].upper()}{line[1:]}. Severity: {severity}. Place: " in text


@pytest.mark.parametrize("page", [*PAGES, *GUIDES, CATALOGUE / "README.md"], ids=lambda page: page.stem)
def test_every_command_of_a_page_parses(page: Path, monkeypatch: pytest.MonkeyPatch):
    """Whole lines are parsed, without running them; of what stands in a sentence verb and options must exist."""
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: Path(value))  # no file need be there
    text = page.read_text()
    for line in commands(text):
        parses(shlex.split(line, comments=True)[1:])
    for words in re.findall(r"`(eyas [^`]+)`", re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)):
        given = shlex.split(words)[1:]
        known = {name for p in verb(given[0]).params for name in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
        assert [w for w in given if w.startswith("-") and w != "--" and w not in known] == [], words


def test_a_page_shows_a_repair_exactly_where_there_is_one():
    measured = {group(name).id for name in (*remedies_measured.REMEDIES, "name of fc", "tensor fc")}
    mended = measured | set(remedies_static.REMEDIES)
    shown = {page.stem for page in PAGES if f"--finding {page.stem} " in page.read_text()}
    assert shown == mended


@pytest.mark.parametrize(
    "page", [*PAGES, *GUIDES, CATALOGUE / "README.md", ROOT / "docs/checks.md"], ids=lambda p: p.stem
)
def test_every_file_that_a_page_points_to_is_there(page: Path):
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text())
    assert [x for x in links if "://" not in x and not (page.parent / x).is_file()] == []


def commands(text: str) -> list[str]:
    """Indented lines that begin with `eyas`, with or without a prompt, joined where they go on."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = re.findall(r"^ {4,}(?:\$ )?(eyas .+)$", joined, re.MULTILINE)
    return [part.strip() for line in lines for part in re.split(r"; (?=eyas )|&& (?=eyas )", line)]


def verb(name: str) -> click.Command:
    """The real command of a verb."""
    found = cli.get_command(click.Context(cli), name)  # type: ignore[attr-defined]
    assert found is not None, f"eyas {name}"
    return found


def parses(words: list[str]) -> None:
    """Through click's own parser, verb by verb; click raises where it does not."""
    command, rest = verb(words[0]), words[1:]
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, words
        command, rest = found, rest[1:]
    command.make_context(command.name, rest)
