"""A measurement in the terminal: whole with any part missing, within 80 columns, and printable whatever it holds.

pytest -q tests/test_report_measured.py
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from eyas.engines.served import Event, Served
from eyas.report.measured_text import TAU, show, show_log

SPEED = {
    "requests": 24, "tokens": 1536, "seconds": 49.1, "tokens_per_s": 31.28,
    "first_token_ms": {"p50": 131.4, "p95": 205.1, "p99": 215.4},
    "per_token_ms": {"p50": 28.2, "p95": 29.7, "p99": 29.9}, "gap_ms": {"p50": 40.0, "p95": 52.1, "p99": 56.0},
}  # fmt: skip
PART: dict[str, Any] = {
    "engine": "vllm", "version": "0.32.0", "k": 4, "url": "http://127.0.0.1:8000", "log": "/x/server.log",
    "acceptance": {"tau": 1.4483, "rounds": 87, "accepted": 39, "unconditional": [0.3678, 0.069, 0.0115, 0.0],
                   "rule": "whole", "source": "the server, for this request", "at_most": False,
                   "own": {"mean_acceptance_length": 1.4483, "num_spec_steps": 87.0},
                   "counting": "every round in full", "strict": {"tau": 1.4737, "rounds": 76, "accepted": 36}},
    "other_traffic": {"seen": False, "tokens": 0, "rounds": 0, "why": ""},
    "speed": [{"concurrency": 1, "with_draft": SPEED, "without_draft": SPEED, "speedup": 1.31}],
    "lossless": {"lossless": True, "compared": 24, "identical": 23, "differences": [],
                 "near_ties": [{"set": "gsm8k", "prompt": 3, "position": 17, "gap": 0.0002,
                                "plain": {"token": 198, "text": "\n"}, "speculative": {"token": 30, "text": "."}}]},
    "locate": {"rows": [
        {"row": "training", "what": "predicted in training, on text of its own", "tau": 1.61, "why": ""},
        {"row": "declared", "what": "replayed as declared", "tau": 1.4483, "rounds": 87, "accepted": 39},
        {"row": "as_read", "what": "replayed as the engine reads it", "tau": 1.4483, "rounds": 87, "accepted": 39},
        {"row": "reference", "what": "decoded by the reference, as declared", "tau": 1.4483, "rounds": 87,
         "accepted": 39},
        {"row": "served", "what": "served", "tau": 1.4483, "rounds": 87, "accepted": 39}],
        "falls": "", "says": "No row falls"},
    "capture": {"right": True, "says": "right", "slices": [
        {"declared": 2, "nearest": 2, "shift": 0, "norm_ratio": 1.0, "cosine": 1.0, "right": True}]},
    "answers": [], "errors": [], "warnings": [],
}  # fmt: skip
RESULT: dict[str, Any] = {
    "eyas": "1", "draft": "path/to/draft", "target": "/x/target", "target_as_given": "smollm2",
    "settings": {"k": 4, "max_new_tokens": 64, "temperature": 0.0, "dtype": "float32",
                 "prompts": {"mt_bench": 8, "gsm8k": 16}},
    "engines": [PART], "failed": {}, "complete": True,
}  # fmt: skip


def shown(result: Any = RESULT, out: Path | None = None, width: int = 200) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width, highlight=False, markup=False), result, out)
    return file.getvalue()


def part(**changes: Any) -> dict[str, Any]:
    return {**RESULT, "engines": [{**copy.deepcopy(PART), **changes}]}


def test_everything_is_there():
    text = shown(out=Path("m.json"))
    for words in ("24 prompts × 64 tokens, 4 drafted a round, greedy, float32", "vLLM", "1.448", "37%", "23/24",
                  "31.3", "mean_acceptance_length 1.4483", "Counted by the server, for this request",
                  "τ 1.474 over the 76 rounds", "near-tie: gsm8k prompt 3, token 17",
                  "1 at once, with the draft: 31.3 tokens/s", "first token 131/205/215", "39 of 87 rounds",
                  "No row falls", "nearest is tap 2", "Written to m.json",
                  "eyas doctor path/to/draft --target smollm2 --measured m.json"):  # fmt: skip
        assert words in text, words
    assert TAU[:40] in text


def test_eighty_columns():
    three = {**RESULT, "engines": [PART, {**PART, "engine": "sglang"}, {**PART, "engine": "llamacpp"}]}
    lines = shown(three, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    (title,) = [line for line in lines if "24 prompts" in line]
    table = lines[lines.index(title) + 1 : lines.index(title) + 7]
    assert all(any(f" {name} " in line for line in table) for name in ("vLLM", "SGLang", "llama.cpp")), table
    assert "…" not in "".join(table) and sum(line.count("31.3") for line in table) == 6
    assert sum(line.count("1.448") for line in table) == 9, "predicted, reference and served of each"


def test_a_bound_is_marked_in_the_table():
    bound = {**PART["acceptance"], "at_most": True}
    assert "≤ 1.448" in shown(part(acceptance=bound)) and "≤ 1.448" not in shown()


def test_what_falls_is_marked():
    located = copy.deepcopy(PART["locate"])
    located |= {"falls": "served", "says": "The files are right and read rightly"}
    located["rows"][4]["tau"] = 1.21
    text = shown(part(locate=located))
    (line,) = [line for line in text.splitlines() if "→" in line]
    assert "served" in line and "1.210" in line and "The files are right" in text


def test_losses_other_people_and_errors():
    lost = {"lossless": False, "compared": 24, "identical": 20, "near_ties": [],
            "differences": [{"set": "s", "prompt": 1, "position": 2, "gap": None, "plain": {"token": 5},
                             "speculative": {"token": None}}]}  # fmt: skip
    text = shown(part(lossless=lost, other_traffic={"seen": True, "tokens": 214, "rounds": 202, "why": ""},
                      errors=["http://h: the connection broke"], warnings=["it is quantised"]))  # fmt: skip
    assert "NO 20/24" in text and "DIFFERS: s prompt 1, token 2" in text
    assert "Somebody else was served meanwhile (214 tokens more than ours)" in text
    assert "the connection broke" in text and "it is quantised" in text
    unknown = shown(part(other_traffic={"seen": None, "tokens": None, "rounds": None, "why": "no metrics: 404"}))
    assert "is not known: no metrics: 404" in unknown


def test_an_engine_that_failed_and_one_that_said_nothing():
    text = shown(
        {**RESULT, "failed": {"sglang": "it left with exit code 1"}, "engines": [{**PART, "acceptance": None}]}
    )
    assert "SGLang: not measured: it left with exit code 1" in text and "did not say what it accepted" in text


@pytest.mark.parametrize("key", [*PART])
def test_any_part_may_be_missing_or_empty(key: str):
    for value in (None, {}, [], "", 0):
        text = shown(part(**{key: value}))
        assert "None" not in text and "nan" not in text
    without = copy.deepcopy(PART)
    del without[key]
    assert "vLLM" in shown({**RESULT, "engines": [without]}) or key == "engine"


@pytest.mark.parametrize("result", [{}, {"engines": []}, {"engines": None, "settings": None, "failed": None},
                                    {"settings": {"prompts": {"a": None}}}], ids=str)  # fmt: skip
def test_an_empty_result(result: dict[str, Any]):
    assert "0 prompts" in shown(result)


def test_control_characters_do_not_reach_the_terminal():
    bad = "x\x1b[2J\x1b]0;owned\x07\r\ny"
    located = {"rows": [{"row": bad, "what": bad, "tau": None, "why": bad}], "falls": bad, "says": bad}
    text = shown({
        **part(engine=bad, version=bad, errors=[bad], warnings=[bad], locate=located,
               acceptance={**PART["acceptance"], "source": bad, "counting": bad, "own": {bad: 1.0}},
               other_traffic={"seen": None, "why": bad},
               lossless={"lossless": False, "compared": 1, "identical": 0, "near_ties": [],
                         "differences": [{"set": bad, "prompt": bad, "position": bad, "plain": {"token": bad},
                                          "speculative": {"text": bad}}]},
               capture={"right": False, "says": bad, "slices": [{"declared": bad, "nearest": bad, "shift": bad}]}),
        "failed": {bad: bad}, "draft": bad, "target_as_given": bad,
    }, Path("m.json"))  # fmt: skip
    assert all(c.isprintable() or c == "\n" for c in text), [c for c in text if not c.isprintable() and c != "\n"]


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@given(st.sampled_from([key for key in PART if key != "k"]), values)
@settings(max_examples=60, deadline=None)
def test_whatever_stands_in_a_part(key: str, value: Any):
    assert "24 prompts" in shown(part(**{key: value}))


def test_a_log():
    def of(served: Served) -> str:
        file = io.StringIO()
        show_log(Console(file=file, width=80, highlight=False, markup=False), served)
        return file.getvalue()

    event = Event("x", "Draft model's taps \x1b[31m differ", "another model")
    text = of(Served("vllm", "0.32.0", 1.5, {"Mean acceptance length": 1.5}, (0.3, 0.1), 20, 80, 10, 4,
                     notes=("of that time",), events=(event,)))  # fmt: skip
    assert "vLLM 0.32.0" in text and "τ 1.500 over 20 rounds" in text and "≥1 30.0 %" in text and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "SGLang\n  τ –\n" in of(Served("sglang"))
