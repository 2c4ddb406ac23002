"""The reports of a diagnosis: whole with any part missing, escaped, loading nothing, and true to their numbers.

pytest -q tests/test_report_diagnosis.py
"""

import copy
import io
import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from eyas.report import plots
from eyas.report.diagnosis_html import render
from eyas.report.diagnosis_text import show, words
from html_page import Page

HOSTILE = '<script>alert("x")</script>'


def acceptance(tau: float, first: float) -> dict[str, Any]:
    rates = [round(first**j, 4) for j in range(1, 5)]
    return {
        "tau": tau, "interval": [tau - 0.07, tau + 0.08], "rounds": 1799, "accepted": 1131,
        "histogram": [1100, 400, 200, 70, 29], "unconditional": rates, "conditional": [first] * 4,
    }  # fmt: skip


def hypothesis_row(order: int, convention: str, hypothesis: str, gain: float | None, verdict: str, **more: Any) -> dict:
    reach = None if gain is None else [gain - 0.06, gain + 0.07]
    delta = None if gain is None else gain / 2
    row = {"order": order, "round": 1, "convention": convention, "hypothesis": hypothesis, "from": "declared"}
    return {**row, "gain": gain, "interval": reach, "verdict": verdict, "delta_tau": delta, "note": "", **more}


FULL: dict[str, Any] = {
    "draft": "drafts/kimi-64x160",
    "eyas": "0.9.1",
    "verdict": "faulty",
    "where": "checkpoint",
    "summary": "The map d2t holds absolute ids and the engines read it as offsets, so nothing is accepted after the "
    "first ids. Read as ids, the same weights reach an accept length of 1.63.",
    "findings": [
        {
            "id": "EY-D2T-ZERO-PREFIX", "status": "static", "severity": "ok",
            "evidence": "the first 20 offsets are zero", "consequence": "", "remedy": "", "sources": [],
        },
        {
            "id": "EY-TRIAL-D2T", "status": "confirmed", "severity": "error", "convention": "d2t", "declared": "offset",
            "best": "absolute", "equivalents": ["absolute", {"subtract": "arange"}], "delta_tau": 0.6263,
            "interval": [0.55, 0.7], "evidence": "read as ids the draft fits the target's choices better by 3.2 nats",
            "consequence": "acceptance is zero", "remedy": "eyas repair drafts/kimi-64x160 --out mended",
            "sources": ["vllm-project/vllm#18909", "sglang 0.5.23, models/llama_eagle3.py:231"],
        },
        {
            "id": "EY-ROPE-UNNAMED", "status": "static", "severity": "warning", "convention": "rope_theta",
            "declared": 10000.0, "best": None, "equivalents": [], "delta_tau": None, "interval": None,
            "evidence": "no rope_theta", "consequence": "engines differ", "remedy": "write it", "sources": [],
        },
        {"id": "EY-NORM-ONES", "status": "static", "severity": "info", "evidence": "norm is exactly 1"},
    ],
    "tau": {
        "declared": 1.0031, "best": 1.6294, "as_read": {"sglang": 1.0142, "vllm@0.32.0": 1.0153}, "served": 1.0264,
        "training": 1.8375,
    },
    "acceptance": {
        "declared": acceptance(1.0031, 0.02), "best": acceptance(1.6294, 0.41),
        "as_read": {"sglang": acceptance(1.0142, 0.03), "vllm@0.32.0": acceptance(1.0153, 0.031)}, "served": None,
    },
    "controls": {"declared": 9.4, "best": 2.1, "shuffled_states": 7.2, "random_draft": 9.01, "knows_nothing": 10.8},
    "ledger": [
        hypothesis_row(1, "d2t", "d2t holds ids", 3.2, "confirmed"),
        hypothesis_row(2, "taps", "taps 1, 14, 26 instead of 2, 15, 27", -1.3, "refuted"),
        hypothesis_row(3, "taps", "taps 3, 16, 28 instead of 2, 15, 27", -2.4, "refuted", **{"from": "sglang"}),
        hypothesis_row(4, "rope_theta", "theta 500000", 0.01, "inconclusive", note="confirmed before d2t was mended"),
        hypothesis_row(5, "norm_output", "norm(h) fed back", -0.4, "refuted", interval=None, delta_tau=None),
        hypothesis_row(6, "head", "the target's rows", None, "not_evaluated"),
    ],
    "not_evaluated": [{"what": "served accept length", "supply": "--served-accept-length or --metrics URL"}],
    "positions": [
        {"from": 0, "to": 511, "tau": 1.71, "rounds": 900}, {"from": 512, "to": None, "tau": 1.4, "rounds": 899},
    ],
    "map": {
        "size": 32000, "target_size": 163840, "points": [[i * 160, 2 * i * 160 + (i % 7) * 90] for i in range(200)],
        "best_points": [[i * 160, i * 790 + (i % 7) * 90] for i in range(200)],
    },
    "tensors": [
        {"name": "fc.weight", "dtype": "BF16", "shape": [576, 1728], "std": 0.021, "max": 0.31, "note": ""},
        {"name": "norm.weight", "dtype": "BF16", "shape": [576], "std": 0.0, "max": float("inf"), "note": "fresh"},
    ],
    "features": {"source": "recorded", "positions": 4200, "documents": 16, "share_top1": 0.982},
    "engines": {
        "sglang": {"version": "0.5.23", "starts": True, "differences": ["taps 1, 14, 26"], "needs": ["float32"]},
        "vllm@0.32.0": {"version": "0.32.0", "starts": False, "differences": [], "needs": []},
    },
    "served": {"engine": "sglang", "rounds": 1234},
    "next": "eyas repair drafts/kimi-64x160 --out mended",
    "seconds": 41.3,
    "peak_mib": 1423.0,
}  # fmt: skip
MINIMAL: dict[str, Any] = {"draft": "d", "eyas": "0.9.1", "verdict": "healthy", "where": "none", "findings": []}
SECTIONS = (
    "tau", "acceptance", "findings", "evidence", "ruled-out", "map", "positions", "tensors", "controls",
    "not-evaluated", "engines", "details",
)  # fmt: skip


def terminal(diagnosis: dict, width: int = 80, verbose: bool = False, colour: bool = False) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=colour, color_system=None), diagnosis, verbose)
    return out.getvalue()


@pytest.fixture
def full() -> dict:
    return copy.deepcopy(FULL)


# ---- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("diagnosis", [FULL, MINIMAL, {}])
def test_page_is_whole_and_loads_nothing(diagnosis: dict) -> None:
    text = render(diagnosis)
    page = Page(text)
    assert [name for name in page.ids if name in SECTIONS] == list(SECTIONS)
    assert not {"script", "link", "img", "iframe", "object", "embed", "image", "use", "form"} & set(page.tags)
    assert "@import" not in text and "url(" not in text
    assert text.encode("utf-8") and text == render(diagnosis)
    assert page.tags.count("svg") == text.count('role="img"') + text.count('aria-hidden="true"')


def test_verdict_comes_first_then_the_sentences_and_the_command(full: dict) -> None:
    text = "".join(Page(render(full)).text)
    places = [
        text.index(part) for part in ("Faulty (in: checkpoint)", full["summary"], full["next"], "Accept length τ")
    ]
    assert places == sorted(places)


def test_tiles_hold_the_numbers_of_the_input(full: dict) -> None:
    page, tau = Page(render(full)), full["tau"]
    assert page.values == [tau["declared"], *tau["as_read"].values(), tau["best"], tau["served"], tau["training"]]
    text = "".join(page.text)
    for value in page.values:
        assert f"{value:.3f}" in text
    assert "1 + accepted / rounds, bonus included" in text and "unconditional rate" in text


def test_missing_parts_are_said_to_be_missing() -> None:
    text = "".join(Page(render(MINIMAL)).text)
    assert "Not evaluated: no hypothesis was measured." in text and "not evaluated" in text
    assert Page(render({**MINIMAL, "tau": {"declared": 0.0}})).values == [0.0]


def test_findings_errors_first_and_what_is_in_order_folded(full: dict) -> None:
    text = render(full)
    places = [text.index(name) for name in ("EY-TRIAL-D2T", "EY-ROPE-UNNAMED", "EY-NORM-ONES", "EY-D2T-ZERO-PREFIX")]
    assert places == sorted(places)
    assert text.rindex("<details>", 0, places[-1]) > places[-2]


def test_only_issues_become_links(full: dict) -> None:
    full["findings"][1]["sources"] += ["https://evil.example/x", "a/b#1\n", "javascript:alert(1)#2", "a/b#1#2", "٣/b#٣"]
    assert Page(render(full)).links == ["https://github.com/vllm-project/vllm/issues/18909"]


def test_ledger_is_worded_and_drawn(full: dict) -> None:
    text = render(full)
    said = "".join(Page(text).text)
    assert "confirmed before d2t was mended" in said and "taps · from SGLang · round 1" in said
    assert "taps (2, gain −2.40 to −1.30 nats per token)" in said
    for verdict in ("confirmed", "refuted", "inconclusive", "not evaluated"):
        assert f">{verdict}</span>" in text
    assert text.count('class="interval v-confirmed"') == 2 and text.count('class="interval v-refuted"') == 3


def poison(value: Any, text: str) -> Any:
    """`value` with `text` behind every string and in every key."""
    if isinstance(value, dict):
        return {key if key in KEYS else key + text: poison(part, text) for key, part in value.items()}
    if isinstance(value, list):
        return [poison(part, text) for part in value]
    return value + text if isinstance(value, str) else value


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*(keys(part) for name, part in value.items() if name not in ("as_read", "engines")))
    return set().union(*(keys(part) for part in value)) if isinstance(value, list) else set()


KEYS = keys({**FULL, "served": {}}) - {"sglang", "vllm@0.32.0"}


@pytest.mark.parametrize(
    "text", [HOSTILE, '"><img src=x onerror=alert(1)>', "</style></title><svg onload=x>", "&lt;'`"]
)
def test_hostile_texts_stay_text(full: dict, text: str) -> None:
    clean, page = Page(render(full)), Page(render(poison(full, text)))
    assert set(page.tags) <= set(clean.tags)
    assert text in "".join(page.text)


def test_what_does_not_print_is_shown_as_its_code(full: dict) -> None:
    full["draft"], full["next"] = "a\x1b[31m\u202eb\x00\udc80", "eyas \x1b]0;x\x07"
    page = render(full)
    page.encode("utf-8")
    for text in (page, terminal(full)):
        assert not {"\x1b", "\u202e", "\x00", "\x07"} & set(text)
        assert "\\x1b[31m\\u202eb" in text


# ---- the terminal ---------------------------------------------------------------------------------------------------


def test_findings_of_one_kind_say_once_what_they_do(full: dict) -> None:
    """Two tensors with the same fault: both are named; what they do and what helps follows once."""
    first = {"id": "EY-TENSOR-FRESH", "severity": "warning", "status": "static", "evidence": "gate_proj looks fresh",
             "consequence": "It knows little", "remedy": "Train it", "sources": ["a"]}  # fmt: skip
    second = {**first, "evidence": "up_proj looks fresh"}
    other = {**first, "evidence": "down_proj looks fresh", "remedy": "Export it"}
    said = " ".join(terminal({**full, "findings": [first, second, other]}).split())
    assert "warning EY-TENSOR-FRESH gate_proj looks fresh up_proj looks fresh Consequence: It knows little" in said
    assert (said.count("warning EY-TENSOR-FRESH"), said.count("Remedy: Train it"), said.count("Export it")) == (2, 1, 1)


def test_terminal_says_verdict_evidence_findings_and_command(full: dict) -> None:
    text = terminal(full)
    flat = " ".join(text.split())
    assert text.startswith("faulty (in: checkpoint): drafts/kimi-64x160\n")
    assert full["summary"] in flat and text.rstrip().endswith(full["next"])
    every = " ".join(terminal(full, verbose=True).split())
    assert "ruled out taps: 2 alternatives, gain −2.40 to −1.30" in every and "ruled out taps" not in flat
    assert "ruled out norm_output: 1 alternative, gain −0.40" in every
    assert "theta 500000" in every and "theta 500000" not in flat and "taps 1, 14, 26 instead" not in every
    assert re.search(r"\d+ hypotheses were tried: \d+ confirmed, .*refuted.* \(--verbose lists them\)", flat)
    assert (
        flat.index("EY-TRIAL-D2T")
        < flat.index("hypotheses were tried")
        < flat.index("SGLang 0.5.23: loads it and starts")
    )
    assert "EY-NORM-ONES" not in text and "EY-NORM-ONES" in terminal(full, verbose=True)
    assert "Not shown: 1 of severity info (--verbose shows them)." in text
    assert flat.index("EY-TRIAL-D2T") < flat.index("EY-ROPE-UNNAMED") < flat.index("EY-D2T-ZERO-PREFIX")
    assert "SGLang 0.5.23: loads it and starts" in text and "vLLM 0.32.0: does not start" in text
    assert "served accept length; supply --served-accept-length" in flat
    assert max(map(len, text.splitlines())) <= 80


def test_terminal_without_measurements() -> None:
    text = terminal(MINIMAL)
    assert text.startswith("healthy: d\n") and "of the files alone" in text
    assert "undecided" in terminal({})


def test_terminal_takes_nothing_for_markup(full: dict) -> None:
    marked = "[red]x[/red] [link=https://e.example]y[/link] :smiley: [/nothing]"
    full["summary"] = full["ledger"][0]["hypothesis"] = full["engines"]["sglang"]["needs"][0] = full["draft"] = marked
    text = " ".join(terminal(full, width=200, colour=True).split())
    assert text.count(marked) == 4 and "\x1b]8" not in text


# ---- any part may be missing ----------------------------------------------------------------------------------------

STRANGE = st.one_of(
    st.none(), st.booleans(), st.text(max_size=8), st.floats(), st.integers(), st.just([]), st.just({}),
    st.just([None]), st.just({"a": [1, {"b": None}]}), st.just(10**400),
)  # fmt: skip


def damaged(value: Any, draw: Any) -> Any:
    """`value` with some of its parts, at any depth, left out or replaced by something strange."""
    if isinstance(value, dict):
        kept = [(key, part) for key, part in value.items() if draw(st.integers(0, 9)) > 0]
        return {key: damaged(part, draw) if draw(st.integers(0, 9)) else draw(STRANGE) for key, part in kept}
    if isinstance(value, list):
        return [damaged(part, draw) if draw(st.integers(0, 14)) else draw(STRANGE) for part in value]
    return value


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_may_be_missing_or_strange(data: st.DataObject) -> None:
    small = copy.deepcopy(FULL)
    for key in ("points", "best_points"):
        small["map"][key] = small["map"][key][::50]
    diagnosis = damaged(small, data.draw)
    page = Page(render(diagnosis))
    assert [name for name in page.ids if name in SECTIONS] == list(SECTIONS)
    assert "\x1b" not in terminal(diagnosis)


@pytest.mark.parametrize("key", sorted(FULL))
@pytest.mark.parametrize("absent", [True, False])
def test_each_part_alone_may_be_missing(full: dict, key: str, absent: bool) -> None:
    diagnosis = {name: part for name, part in full.items() if name != key} | ({} if absent else {key: None})
    Page(render(diagnosis))
    assert terminal(diagnosis)


# ---- plots ----------------------------------------------------------------------------------------------------------


def test_labels_of_lines_keep_apart_and_inside() -> None:
    series = [(f"engine {i}", f"engine{i % 3}", [0.5, 0.2]) for i in range(9)]
    drawn = plots.acceptance("p", "t", "d", series)
    heights = [float(y) for y in re.findall(r'y="([\d.]+)" text-anchor="start">engine', drawn)]
    assert len(heights) == 9 and min(heights) > 0 and max(heights) < 230
    assert min(b - a for a, b in itertools.pairwise(heights)) > 13


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 37.2), (-160000, 163840), (0, 1e-12), (0, 0), (0, 1e99)])
def test_ticks_hold_the_range(low: float, high: float) -> None:
    ticks = plots._ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 8 and ticks == sorted(set(ticks))


def test_words_of_values() -> None:
    assert words([2, 15, 27]) == "2, 15, 27" and words(True) == "true" and words(None) == "–" and words(1e6) == "1e+06"
    assert words({"a": [1]}) == '{"a": [1]}' and words("a\nb") == "a b" and len(words("x" * 999)) == 400
