"""One place for what Eyas keeps, wherever the user wants it.   pytest -q tests/test_cache.py"""

from pathlib import Path

import pytest

from eyas.cache import cache_dir
from eyas.doctor import record
from eyas.engines.environment import engine_folder
from eyas.serve.process import default_log
from eyas.target import gguf, source


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EYAS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_nearest_wish_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert cache_dir() == tmp_path / ".cache" / "eyas"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "eyas"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "eyas"
    monkeypatch.setenv("EYAS_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"
    monkeypatch.chdir(tmp_path)
    assert cache_dir("here") == tmp_path / "here"


def test_all_that_is_kept_follows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(gguf, "convert_gguf", lambda file, folder: folder)
    (tmp_path / "model.gguf").touch()
    assert source.resolve_target(tmp_path / "model.gguf") == tmp_path / "xdg" / "eyas" / "targets"
    assert engine_folder("vllm", "1").is_relative_to(tmp_path / "xdg" / "eyas")
    assert default_log("vllm").is_relative_to(tmp_path / "xdg" / "eyas")
    assert record.cache_dir is cache_dir
