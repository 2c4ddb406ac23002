"""docs/troubleshooting.md quotes messages that the source really says, and covers every kind of error.

pytest -q tests/test_docs_troubleshooting.py
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
from pathlib import Path

import click

from eyas.cli import VERBS, cli
from raised import SOURCE, literal, messages

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
CATALOGUED, SILENT = PAGE.split("## Symptoms without a message")


def quoted() -> list[str]:
    """The messages of the page: first cells of its tables, without their outer backticks."""
    cells = [re.split(r"(?<=`) \| ", line)[0] for line in CATALOGUED.splitlines() if line.startswith("| `")]
    return [cell.removeprefix("| `").removesuffix("`") for cell in cells]


@functools.cache
def said() -> tuple[str, ...]:
    """Every string of the source with `…` for what is put in, blanks made one."""
    texts = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                texts.append(" ".join(literal(node)[0].replace("{}", "…").split()))
    return tuple(texts)


def test_every_quoted_message_is_said_somewhere():
    assert len(quoted()) > 70
    known = "\n".join(said())
    missing = []
    for message in quoted():
        parts = [re.escape(part) for part in " ".join(message.split()).split("…")]
        # a placeholder stands for one value, or for the words of a constant
        if re.search("[^\n]*?".join(part for part in parts if part.strip("\\ ()")), known) is None:
            missing.append(message)
    assert missing == []


def test_no_message_is_quoted_twice():
    assert len(quoted()) == len(set(quoted()))


def test_every_kind_of_error_has_its_exit_code():
    table = {row[1]: row[0] for row in re.findall(r"^\| (\d+) \| (.*?) \|", PAGE, re.MULTILINE)}
    assert set(table.values()) == {"0", "1", "2", "3", "130"}
    codes = {name: code for names, code in table.items() for name in re.findall(r"`(\w+)`", names)}
    bases = {"EyasError": "1", "BadInput": "2", "Mismatch": "3"}
    found = dict(bases)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.bases and (base := ast.unparse(node.bases[0])) in bases:
                found.setdefault(node.name, bases[base])
    assert codes == found


def test_every_group_of_messages_is_there_and_every_link_leads_somewhere():
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == [
        "Exit codes", "Paths and folders", "Pairs that do not belong together", "Data", "Training",
        "Memory, devices, disk", "Engines and serving", "Repair", "Hub and packages", "Symptoms without a message",
    ]  # fmt: skip
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (DOCS / target).is_file(), target
    assert len(re.findall(r"EY-[A-Z0-9-]+\]", SILENT)) > 12


def test_the_commands_of_the_page_exist():
    for words in re.findall(r"`(eyas [^`]+)`", PAGE.replace("`eyas …`", "").replace("eyas engines setup …", "")):
        verb, *rest = shlex.split(words)[1:]
        if verb not in VERBS:
            raise AssertionError(words)
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        assert [w for w in rest if w.startswith("--") and w not in known] == [], words


def test_what_most_often_goes_wrong_is_in_it():
    """Every Mismatch of the stages (a wrong pair) is quoted by some row; repair and canary have their own pages."""
    stages = ("features/", "train/", "export/write", "draft/directory", "serve/check.py:14", "cli/extract")
    rows = [re.compile("[^\n]*?".join(map(re.escape, q.split("…")))) for q in quoted()]
    pairs = [m for m in messages() if m.kind == "Mismatch" and m.place.startswith(stages)]
    told = [m for m in pairs if any(r.search(m.text.replace("{}", "…")) for r in rows)]
    assert len(pairs) >= 10
    assert len(told) >= 7, [m.text for m in pairs if m not in told]
