"""docs/explanation/conventions.md names every convention of the code, its values, and findings that exist.

pytest -q tests/test_docs_conventions.py
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from eyas.conventions import Conventions, Known, default_taps
from eyas.doctor.groups import GROUPS
from eyas.draft.dialects.keys import FUSED
from eyas.draft.dialects.numbering import sglang_ids
from eyas.draft.model import ACTIVATIONS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "explanation/conventions.md").read_text(encoding="utf-8")
ROWS = {
    cells[0]: cells[1:]
    for cells in (re.split(r" \| ", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("| `"))
    if len(cells) == 5
}
FIELDS = [f for f in dataclasses.fields(Conventions) if f.name != "how"]


def test_every_convention_has_one_row_and_no_row_is_without_one():
    assert set(ROWS) == {f"`{f.name}`" for f in FIELDS}


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_a_row_names_the_values_that_the_code_knows_the_default_first(field):
    kind, values = get_type_hints(Conventions)[field.name], ROWS[f"`{field.name}`"][0]
    if get_origin(kind) is Literal:
        assert tuple(re.findall(r"`([a-z_]+)`", values))[: len(get_args(kind))] == get_args(kind)
        assert values.startswith(f"`{field.default}`")
    elif kind is bool:
        assert values.startswith(str(field.default).lower())
        assert str(not field.default).lower() in values
    elif kind in (int, float):
        first = float(re.match(r"[\d,.e-]+", values)[0].rstrip(",;").replace(",", ""))
        assert first == field.default
    elif kind is str:
        assert values.startswith(field.default)
    if field.name == "hidden_act":
        assert set(re.findall(r"\w+", values)) >= set(ACTIVATIONS)


def test_every_finding_that_is_named_has_its_page_and_what_the_doctor_measures_stands_in_its_row():
    links = re.findall(r"\[(EY-[A-Z0-9-]+)\]\(\.\./catalogue/(EY-[A-Z0-9-]+)\.md\)", PAGE)
    assert links and all(name == file and (DOCS / f"catalogue/{file}.md").is_file() for name, file in links)
    for name, group in GROUPS.items():
        if f"`{name}`" in ROWS:
            assert group.id in ROWS[f"`{name}`"][3], name


def test_how_values_are_known_and_layers_are_numbered():
    assert all(f"**{known}**" in PAGE for known in Known)
    assert default_taps(30) == (2, 15, 27) and "(2, n//2, n − 3)" in ROWS["`taps`"][1]
    assert sglang_ids((2, 15, 27)) == [1, 14, 26] and "| outputs of blocks | j − 1 |" in PAGE


def test_the_other_names_of_tensors_are_those_that_are_read():
    for fused in FUSED:
        assert f"`{'self_attn' if 'qkv' in fused else 'mlp'}.{fused.split('.')[-1]}`" in PAGE
    source = "".join(p.read_text() for p in (DOCS.parent / "src/eyas/draft/dialects").glob("*.py"))
    for name in ("aux_norm_low", "aux_norm_mid", "aux_norm_high", "layers.0.", "midlayer."):
        assert name in PAGE and name.removesuffix("low").removesuffix("mid").removesuffix("high") in source
