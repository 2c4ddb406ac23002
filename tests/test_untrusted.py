"""Files that others wrote are read within bounds: what is too deep, too long or no file is refused, not waited for.

pytest -q tests/test_untrusted.py
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
import yaml

from eyas.errors import BadInput
from eyas.untrusted import DEEPEST, content, inside, lines, parse_json, parse_yaml, regular


def test_only_regular_files_are_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"expected a file|no regular file"):
            regular(path)
    (tmp_path / "long").write_bytes(b"x" * 20)
    assert content(tmp_path / "long", 20) == b"x" * 20
    with pytest.raises(ValueError):
        content(tmp_path / "long", 19)


def test_json_has_a_depth_and_no_half_characters():
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)
    for text in ("[" * 100_000, "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), '"\\ud800"', "{", ""):
        with pytest.raises(ValueError):
            parse_json(text)


def test_yaml_has_no_tags_and_no_bombs():
    assert parse_yaml("a: [1, &x b, *x]") == {"a": [1, "b", "b"]}
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    for text in (bomb, "!!python/object/apply:os.getcwd []", "a: &a [*a]", "[" * 5000):
        with pytest.raises(yaml.YAMLError):
            parse_yaml(text)


def test_lines_have_a_length_plain_and_packed(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b"1\n22\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"1\n22\n"))
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert list(lines(tmp_path / name)) == [b"1\n", b"22\n"]
        with pytest.raises(ValueError):
            list(lines(tmp_path / name, 1))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a\\b", "c:x", "a\x00b", "x" * 300, "out/x"])
def test_a_name_does_not_lead_out(tmp_path: Path, name: str):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "out").symlink_to("..")
    with pytest.raises(BadInput, match=r"index\.json names the file"):
        inside(folder, name, Path("index.json"))


def test_an_entry_may_be_a_link(tmp_path: Path):
    (tmp_path / "blob").write_text("weights")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("../blob")
    assert inside(folder, "model.safetensors", Path("index.json")).read_text() == "weights"
