"""The summary has what issue and README promise; the story says what the numbers say.

pytest -q tests/test_report.py
"""

import copy

import pytest

from eyas.config import RunConfig
from eyas.report.summary import print_summary, story, summarise
from eyas.stages import StageRecord

PROOF = {
    "tau_mean": 1.6, "tau_mean_low": 1.5, "tau_mean_high": 1.7,
    "tau": {
        "mt_bench": {"tau": 1.5, "low": 1.4, "high": 1.6, "prompts": 16, "rounds": 400, "unconditional": [0.3, 0.1]},
        "gsm8k": {"tau": 1.7, "low": 1.6, "high": 1.8, "prompts": 16, "rounds": 300, "unconditional": [0.4, 0.2]},
    },
    "per_position": {"unconditional": [0.35, 0.15], "conditional": [0.35, 0.43]},
    "lossless": True, "compared": 32, "identical": 31, "near_ties": [{}], "differences": [],
    "speedup": 1.25, "speed": {}, "definition": "tau = ...",
}  # fmt: skip


def records() -> dict[str, StageRecord]:
    counts = {
        "regenerate": {"prompts": 1200, "kept": 1000, "set_aside": {"repetition": 200}},
        "extract": {"supervised_tokens": 61234},
        "vocab": {"ids": 8192, "coverage": 0.99, "held_out_coverage": 0.975},
        "train": {"steps": 300, "tokens_seen": 250_000, "predicted": {"accept_length": 1.58}},
    }
    return {
        name: StageRecord("k", {}, None, True, "o", value, duration_s=60.5, peak_memory_gib=1.0 + i)
        for i, (name, value) in enumerate(counts.items())
    }


@pytest.fixture
def summary() -> dict:
    return summarise(records(), PROOF, RunConfig.model_validate({"prove": {"draft_tokens": 2}}))


def test_the_summary_has_the_promised_keys(summary):
    promised = "tau_mean tau per_position lossless supervised_tokens seconds peak_memory_gib speedup"
    assert list(summary)[:8] == promised.split()
    for numbers in summary["tau"].values():
        assert {"tau", "low", "high", "prompts", "rounds"} <= set(numbers)
    assert summary["seconds"] == 242.0
    assert summary["peak_memory_gib"] == 4.0
    assert summary["supervised_tokens"] == 61234


def test_the_story_tells_the_numbers(summary):
    told = story(summary)
    for words in ("1,200 prompts", "200 set aside (repetition)", "61,234 tokens", "97.5%", "300 steps", "1.58",
                  "Of 32 answers", "31 are token for token equal", "1 first differ at a near-tie", "1.60 tokens",
                  "1.25 times faster", "4.0 minutes", "4.0 GiB"):  # fmt: skip
        assert words in told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lossless": False, "identical": 30, "near_ties": []}, "NOT lossless: 2 of 32"),
        ({"lossless": None}, "sampled"),
        ({"speedup": 0.8}, "1.25 times slower"),
    ],
)
def test_what_went_badly_is_said(changes, words):
    proof = copy.deepcopy(PROOF) | changes
    assert words in story(summarise(records(), proof, RunConfig()))


def test_a_run_on_given_conversations_tells_nothing_of_answers():
    without = records()
    del without["regenerate"]
    summary = summarise(without, PROOF, RunConfig())
    assert summary["answers"] is None
    assert "answered" not in story(summary)


def test_the_table_shows_each_set_and_the_mean(summary, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    print_summary(summary)
    out = capsys.readouterr().out
    for words in ("mt_bench", "1.500", "1.40–1.60", "gsm8k", "mean of sets", "1.600", "35.0", "700"):
        assert words in out


def test_what_the_target_asked_is_told_where_it_did(summary):
    assert "wrote" not in story(summary)
    told = story({**summary, "asked": {"prompts": 1780, "shortened": 3}})
    assert told.startswith("The target wrote 1,780 requests itself")
