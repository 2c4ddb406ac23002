"""The numbers of docs/explanation/acceptance.md, computed again by the code that counts.

pytest -q tests/test_docs_acceptance.py
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

from eyas.decode.acceptance import Acceptance
from eyas.engines.served.logs import from_log
from eyas.measure.counting import fitting, in_all, rounds_of
from eyas.serve.client import Reply

PAGE = (Path(__file__).resolve().parents[1] / "docs/explanation/acceptance.md").read_text(encoding="utf-8")
K, EACH = 4, (3, 0, 4, 1)
FOUND = Acceptance.of(EACH, K)
TOKENS = 1 + sum(a + 1 for a in EACH)


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table after a line that begins so."""
    lines = itertools.dropwhile(lambda line: not line.startswith(heading), PAGE.splitlines())
    table = itertools.takewhile(
        lambda x: x.startswith("|"), itertools.dropwhile(lambda x: not x.startswith("|"), lines)
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table][2:]


def value(tool: str, words: str) -> str:
    """What the table says that `tool` prints under these `words`."""
    found = [row[2] for row in rows("What each tool prints") if row[0].startswith(tool) and row[1].startswith(words)]
    assert len(found) == 1, (tool, words, found)
    return found[0]


def numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", text)]


def test_the_example_is_the_one_that_is_drawn():
    drawn = re.findall(r"^    round \d +(.*?)\s+accepted (\d), bonus 1$", PAGE, re.MULTILINE)
    assert tuple(int(n) for _, n in drawn) == EACH
    assert [len(text.split("|")[0].split()) for text, _ in drawn] == list(EACH)
    assert drawn[-1][0].endswith(f"t{TOKENS}")
    assert f"R = {FOUND.rounds}, A = {FOUND.accepted}, {K * FOUND.rounds} drafted" in PAGE


def test_the_rates_by_position():
    for row, j in zip(rows("Thirteen tokens"), range(1, K + 1), strict=True):
        wanted = [j, FOUND.at_least[j], round(FOUND.unconditional[j - 1], 3), round(FOUND.conditional[j - 1], 3)]
        assert [float(cell) for cell in row] == wanted
    assert FOUND.tau == pytest.approx(1 + sum(FOUND.unconditional))
    assert [math.prod(FOUND.conditional[: j + 1]) for j in range(K)] == pytest.approx(list(FOUND.unconditional))


def test_what_each_tool_prints():
    rounds, accepted, tau = FOUND.rounds, FOUND.accepted, FOUND.tau
    share, at_end = accepted / (K * rounds), TOKENS / rounds
    unconditional, conditional = list(FOUND.unconditional), [round(c, 3) for c in FOUND.conditional]
    assert numbers(value("Eyas", "τ")) == [tau]
    assert numbers(value("vLLM, since", "Mean")) == [tau]
    assert numbers(value("vLLM, before", "Mean")) == [tau - 1]
    assert numbers(value("vLLM", "Avg")) == [100 * share]
    assert numbers(value("vLLM", "Per-position")) == unconditional
    assert numbers(value("SGLang, log", "accept len")) == [sum(a + 1 for a in EACH) / rounds]
    assert numbers(next(r for r in rows("What each tool") if r[0] == "SGLang, log" and r[1] == "accept rate")[2]) == [
        share
    ]
    assert numbers(value("SGLang, log before", "accept rate")) == pytest.approx([(accepted / rounds + 1) / (K + 1)])
    assert numbers(value("SGLang, response", "spec_accept_length")) == [at_end]
    assert numbers(value("SGLang, response", "spec_num")) == [accepted, rounds]
    assert numbers(value("llama.cpp", "draft acceptance")) == [share]
    assert numbers(value("llama.cpp", "mean len")) == [tau]
    assert numbers(value("OpenVINO", "get_num")) == [accepted - EACH[-1]]
    assert numbers(value("TensorRT-LLM", "acceptance_length")) == [a + 1 for a in EACH]
    assert numbers(value("SpecForge, `benchmark`", "Average")) == [at_end]
    simulated = sum(math.prod(FOUND.conditional[: j + 1]) for j in range(K))
    assert numbers(value("SpecForge, evaluation", "simulated")) == pytest.approx([simulated])
    assert numbers(value("speculators", "cond_acc")) == conditional
    assert numbers(value("EAGLE papers", "τ")) == [tau]
    assert numbers(value("EAGLE papers", "0-α")) == conditional


def test_the_log_lines_are_read_as_the_page_says():
    lines = [line.strip() for line in PAGE.splitlines() if re.match(r"    (?:Decode batch|SpecDec|draft acc)", line)]
    assert [from_log(line + "\n").engine for line in lines] == ["sglang", "vllm", "llamacpp"]
    assert [from_log(line + "\n").tau for line in lines] == [FOUND.tau] * 3
    assert list(from_log(lines[1] + "\n").unconditional) == pytest.approx(FOUND.unconditional)


REPLIES = {
    "vllm": {"num_spec_steps": 4, "num_accepted_draft_tokens": 8, "num_spec_tokens": 4},
    "sglang": {"spec_verify_ct": 4, "spec_num_correct_drafts": 8, "spec_num_proposed_drafts": 16},
    "llamacpp": {"predicted_n": TOKENS, "draft_n": 16, "draft_n_accepted": 8},
    "openvino": {"predicted_n": TOKENS, "rounds": 4, "draft_n": 16, "draft_n_accepted": 7},
}


@pytest.mark.parametrize("engine", REPLIES)
def test_every_engine_s_own_counts_convert_to_the_same_accept_length(engine: str):
    groups = [(0.0, 1), *((float(i), a + 1) for i, a in enumerate(EACH, 1))]
    found = rounds_of(engine, Reply(list(range(TOKENS)), groups, REPLIES[engine]))
    assert found is not None
    assert (found.rounds, found.accepted) == (FOUND.rounds, FOUND.accepted)
    assert in_all([found], K)["tau"] == FOUND.tau


def test_the_last_round_of_a_cut_answer():
    begun = list(itertools.accumulate((a + 1 for a in EACH[:-1]), initial=1))
    wholly, fits = rows("### The last round")
    assert (int(wholly[2]), int(wholly[3])) == (FOUND.rounds, FOUND.accepted)
    assert (int(fits[2]), int(fits[3])) == fitting(begun, EACH, 12)
    for row in (wholly, fits):
        assert float(row[4]) == 1 + int(row[3]) / int(row[2])


def test_averages_over_rounds_and_over_requests():
    other = Acceptance.of((0, 0), K)
    by_rounds, by_requests = rows("### Averages")
    assert float(by_rounds[1]) == round((FOUND + other).tau, 3)
    assert float(by_requests[1]) == (FOUND.tau + other.tau) / 2
    with_prefill = (TOKENS / FOUND.rounds + 3 / other.rounds) / 2
    assert f"with prefill's token: {with_prefill}" in by_requests[2]


def test_the_conversions():
    rounds, accepted, tau = FOUND.rounds, FOUND.accepted, FOUND.tau
    said = {row[0]: row[1] for row in rows("## To convert")}
    assert len(said) == 8
    c = FOUND.conditional
    of = {  # each formula of the table, in its order, on the example
        "that + 1": accepted / rounds + 1,
        "1 + k·s": 1 + K * accepted / (K * rounds),
        "r·(k + 1)": 0.6 * (K + 1),
        "1 + their sum": 1 + sum(FOUND.unconditional),
        "1 + c₁ + c₁c₂ + …": 1 + c[0] + c[0] * c[1] + c[0] * c[1] * c[2] + c[0] * c[1] * c[2] * c[3],
        "ℓ − 1/R": TOKENS / rounds - 1 / rounds,
        "1 + A/(n − 1 − A)": 1 + accepted / (TOKENS - 1 - accepted),
        "1 + (n − 1 − (I − 1))/(I − 1)": 1 + (TOKENS - 1 - rounds) / rounds,
    }
    assert list(said.values()) == list(of)
    assert list(of.values()) == pytest.approx([tau] * 8)
