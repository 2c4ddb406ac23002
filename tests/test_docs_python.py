"""The modules that the site's Python reference lists exist, are documented, and export what their docstrings promise.

pytest -q tests/test_docs_python.py
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def modules() -> list[str]:
    """MODULES of docs/hooks/reference.py, read without mkdocs."""
    tree = ast.parse((ROOT / "docs/hooks/reference.py").read_text(encoding="utf-8"))
    values = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "MODULES"]
    return list(ast.literal_eval(values[0]))


@pytest.mark.parametrize("name", modules())
def test_a_public_module_says_what_lives_there_and_what_each_thing_does(name: str):
    path = ROOT / "src" / f"{name.replace('.', '/')}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    silent = [
        node.name
        for holder in [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_")]
        for node in holder.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and not (isinstance(holder, ast.ClassDef) and node.name == "forward")  # torch's own contract
    ]
    assert silent == []
