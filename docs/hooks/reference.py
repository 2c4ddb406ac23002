"""What the site holds beside the files of docs/: a page for each command and each public module, and the catalogue in
the navigation.

    make docs

The pages of the commands are made from the click commands themselves, whose modules import nothing heavy; those of the
modules by mkdocstrings, which reads the source and imports nothing. Neither end in a file of the repository.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from eyas.cli import VERBS, cli

FOLDER = "reference/cli"
PYTHON = "reference/python"
# What may be imported by others, in the order in which one meets it. A new public module is one line here.
MODULES = (
    "eyas.errors",
    "eyas.conventions",
    "eyas.vocab",
    "eyas.draft.shape",
    "eyas.draft.model",
    "eyas.draft.directory",
    "eyas.draft.checkpoint",
    "eyas.features.reader",
    "eyas.train.settings",
    "eyas.train.objective",
    "eyas.train.loop",
    "eyas.decode.step",
    "eyas.decode.acceptance",
    "eyas.decode.replay",
    "eyas.decode.prove",
    "eyas.doctor.diagnosis",
    "eyas.export.write",
    "eyas.engines.served.record",
    "eyas.measure.counting",
)
LINE = re.compile(r"^\| \[`(EY-[A-Z0-9-]+)`\]\(\1\.md\)")
HEADING = re.compile(r"^(##|###) (.+)$")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the two parts of the navigation that are lists."""
    index = Path(config.docs_dir, "catalogue/README.md").read_text(encoding="utf-8")
    verbs: list[Any] = [{f"eyas {name}": f"{FOLDER}/{name}.md"} for name in VERBS]
    for part in config.nav or []:
        for title, pages in part.items():
            if title == "Catalogue":
                pages += _catalogue(index)
            elif title == "Reference":
                pages.insert(0, {"Command line": [f"{FOLDER}/index.md", *verbs]})
                modules: list[Any] = [{name: f"{PYTHON}/{name}.md"} for name in MODULES]
                pages.insert(1, {"Python": [f"{PYTHON}/index.md", *modules]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the commands and of the modules."""
    pages = {f"{FOLDER}/index": _overview()} | {f"{FOLDER}/{name}": _command(name) for name in VERBS}
    pages |= {f"{PYTHON}/index": _modules()} | {f"{PYTHON}/{name}": f"# {name}\n\n::: {name}\n" for name in MODULES}
    for name, text in pages.items():
        files.append(File.generated(config, f"{name}.md", content=text))
    return files


def _modules() -> str:
    rows = [f"| [`{name}`]({name}.md) | {_cell(_first_line(name))} |" for name in MODULES]
    intro = (
        "What a program may import. Docstrings say shapes, units, what is raised and where a rule comes from. Until "
        "1.0 these may change between minor versions; CHANGELOG.md says so then."
    )
    return "\n".join(["# Python", "", intro, "", "| module | what lives there |", "|---|---|", *rows, ""])


def _first_line(module: str) -> str:
    """The first paragraph of a module's docstring, without importing it."""
    text = (Path("src") / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split("   ")[0]


def _catalogue(index: str) -> list[Any]:
    """[{place: [page, ... or {family: [page, ...]}, ...]}, ...], as the index has them."""
    places: list[Any] = []
    pages: list[Any] = []
    for line in index.splitlines():
        if heading := HEADING.match(line):
            pages = []
            if heading[1] == "##":
                places.append({heading[2]: pages})
            else:
                next(iter(places[-1].values())).append({heading[2]: pages})
        elif found := LINE.match(line):
            pages.append({found[1]: f"catalogue/{found[1]}.md"})
    return places


def _overview() -> str:
    rows = [f"| [`eyas {name}`]({name}.md) | {_cell(line)} |" for name, (_, line) in VERBS.items()]
    intro = "The commands in the order of the work. `eyas VERB --help` prints what stands here."
    codes = (
        "Each command, before or after its name, takes `--quiet` (only results and errors) and `--verbose` (logs, "
        "times, tracebacks).\n\n"
        "Exit codes: 0 done, 1 an error that Eyas explains, 2 bad usage or bad input, 3 two artifacts that do not "
        "belong together, 130 interrupted. Where a command says more, its page does."
    )
    return "\n".join(["# Command line", "", intro, "", "| command | what it does |", "|---|---|", *rows, "", codes, ""])


def _command(name: str) -> str:
    command = importlib.import_module(VERBS[name][0]).command
    return "\n".join(_described(command, click.Context(cli, info_name="eyas"), name, 1))


def _described(command: click.Command, parent: click.Context, name: str, level: int) -> list[str]:
    """Heading, usage, help and options of a command and of those below it."""
    context = click.Context(command, parent=parent, info_name=name)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    out = [f"{'#' * level} {context.command_path}", "", f"    {usage}", "", *_help(command.help or "")]
    params = [param for param in command.get_params(context) if param.name != "help"]
    records = [record for param in params if (record := param.get_help_record(context))]
    if records:
        out += ["| option | |", "|---|---|", *(f"| `{words}` | {_cell(text)} |" for words, text in records), ""]
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            if found is not None:
                out += _described(found, context, inner, level + 1)
    return out


def _help(text: str) -> list[str]:
    """Paragraphs as they are; a block that click leaves as it is written becomes one of code."""
    out = []
    for block in re.split(r"\n\s*\n", text.strip()):
        if not block.lstrip(" ").startswith("\b"):
            out += [_prose(block), ""]
            continue
        lines = block.split("\n")[1:]
        if lines and lines[0].rstrip().endswith(":"):
            out += [_prose(lines[0]), ""]
            lines = lines[1:]
        out += [f"    {line.removeprefix('  ')}" for line in lines] + [""]
    return out


def _prose(text: str) -> str:
    """Words in capitals with an underscore, and the like, are no markup."""
    return re.sub(r"([*_<])", r"\\\1", " ".join(text.split())).replace("\\_\\_", "__")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
