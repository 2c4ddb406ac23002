"""What is kept in tests/corpus goes through its parser: answered, or refused in a sentence.

`make fuzz` mutates these files, and adds what it finds.   pytest -q tests/test_fuzz_corpus.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.errors import EyasError
from fuzz_readers import fuzz
from fuzzing import CORPUS, LARGEST, PARSERS, seeds

FILES = sorted(path for path in CORPUS.rglob("*") if path.is_file())


def test_the_corpus_is_small_and_every_parser_has_some() -> None:
    assert {path.parent.name for path in FILES} == set(PARSERS)
    assert max(path.stat().st_size for path in FILES) <= LARGEST
    assert sum(path.stat().st_size for path in FILES) < 200_000


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_kept_is_answered_or_refused(tmp_path: Path, name: str) -> None:
    for path in sorted((CORPUS / name).iterdir()):
        try:
            PARSERS[name](tmp_path, path.read_bytes())
        except EyasError as error:
            assert len(str(error)) < 4000, path


def test_seeds_are_as_generated() -> None:
    """Where zip and torch write no dates or names of their own."""
    for name, files in seeds().items():
        for what in files:
            assert (CORPUS / name / what).is_file(), f"python tests/fuzzing.py writes {name}/{what}"


def test_a_fault_is_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer itself: a parser that trusts a key is found within a second."""
    import fuzz_readers

    def trusting(folder: Path, data: bytes) -> None:
        import json

        json.loads(data)["weight_map"]

    (tmp_path / "trusting").mkdir()
    (tmp_path / "trusting" / "small").write_bytes(b'{"weight_map": {}}')
    monkeypatch.setattr(fuzz_readers, "CORPUS", tmp_path)
    monkeypatch.setitem(PARSERS, "trusting", trusting)
    assert fuzz("trusting", 5.0, seed=0, most=1)["found"] == 1
    assert len(list((tmp_path / "trusting").glob("found-*"))) == 1
