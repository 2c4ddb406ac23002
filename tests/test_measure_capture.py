"""States that an engine fed a draft, told from the target's own.   pytest -q tests/test_measure_capture.py"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.measure.capture import SKIPPED, compare, speculative
from eyas.target.model import Target

TAPS = (2, 4, 5)
H = 32
PROMPTS = [torch.randint(3, 300, (n,), generator=torch.Generator().manual_seed(n)) for n in (40, 25)]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def states(tiny_target: Path) -> Callable[[Sequence[int]], Pairs]:
    target = Target.load(tiny_target, dtype=torch.float32)

    def of(taps: Sequence[int]) -> Pairs:
        return [(ids, target.states(ids[None], taps=taps)[0][0].float()) for ids in PROMPTS]

    return of


def test_what_is_right_is_called_right(states: Any, tiny_target: Path):
    said = compare(states(TAPS), tiny_target, TAPS)
    assert said["right"] is True and said["tokens"] == 65 and "at the declared taps" in said["says"]
    for tap, one in zip(TAPS, said["slices"], strict=True):
        assert (one["declared"], one["nearest"], one["shift"], one["right"]) == (tap, tap, 0, True)
        assert one["distance"] < 1e-3 and one["norm_ratio"] == pytest.approx(1) and one["cosine"] == pytest.approx(1)
    json.dumps(said, allow_nan=False)


def test_bf16_is_the_same(states: Any, tiny_target: Path):
    rounded = [(ids, s.bfloat16().float()) for ids, s in states(TAPS)]
    assert compare(rounded, tiny_target, TAPS)["right"] is True


@pytest.mark.parametrize("off", [1, -1])
def test_taps_off_by_one(states: Any, tiny_target: Path, off: int):
    said = compare(states([t + off for t in TAPS]), tiny_target, TAPS)
    assert said["right"] is False
    assert [one["nearest"] for one in said["slices"]] == [t + off for t in TAPS]
    assert all(f"tap {t} are those of tap {t + off}" in said["says"] for t in TAPS)


def test_one_tap_of_three_and_two_that_are_exchanged(states: Any, tiny_target: Path):
    said = compare(states([2, 4, 6]), tiny_target, TAPS)
    assert [one["right"] for one in said["slices"]] == [True, True, False] and "tap 6" in said["says"]
    exchanged = [(ids, s.unflatten(-1, (3, H))[:, [1, 0, 2]].flatten(1)) for ids, s in states(TAPS)]
    said = compare(exchanged, tiny_target, TAPS)
    assert [one["nearest"] for one in said["slices"]] == [4, 2, 5] and said["right"] is False


def test_scaled_states(states: Any, tiny_target: Path):
    """Gemma-like: multiplied by the square root of the width. A cosine does not see it."""
    said = compare([(ids, s * H**0.5) for ids, s in states(TAPS)], tiny_target, TAPS)
    assert said["right"] is False and "5.66 times as large" in said["says"]
    assert all(one["cosine"] > 0.999 and one["norm_ratio"] == pytest.approx(H**0.5, rel=1e-3) for one in said["slices"])


def test_states_a_little_too_large(states: Any, tiny_target: Path):
    """The right tap is still the nearest one; it is a third of its norm away."""
    said = compare([(ids, s * 1.3) for ids, s in states(TAPS)], tiny_target, TAPS)
    assert [one["nearest"] for one in said["slices"]] == list(TAPS)
    assert said["right"] is False and "1.3 times as large" in said["says"]


@pytest.mark.parametrize(("shift", "word"), [(1, "late"), (-1, "early")])
def test_states_of_another_token(states: Any, tiny_target: Path, shift: int, word: str):
    said = compare([(ids, s.roll(shift, 0)) for ids, s in states(TAPS)], tiny_target, TAPS)
    assert said["right"] is False and f"one token {word}" in said["says"]
    assert {one["shift"] for one in said["slices"]} == {-shift}


def test_states_of_no_tap(states: Any, tiny_target: Path):
    noise = torch.Generator().manual_seed(1)
    said = compare([(ids, torch.randn(s.shape, generator=noise)) for ids, s in states(TAPS)], tiny_target, TAPS)
    assert said["right"] is False and "no tap's" in said["says"] and "another target" in said["says"]


def test_another_width(states: Any, tiny_target: Path):
    said = compare([(ids, s[:, :H]) for ids, s in states(TAPS)], tiny_target, TAPS)
    assert said["right"] is False and said["slices"] == [] and "32 wide instead of 3 of 32" in said["says"]


def test_states_that_are_not_finite_and_prompts_that_are_too_short(states: Any, tiny_target: Path):
    broken = states(TAPS)
    broken[0][1][7, 3] = float("nan")
    said = compare(broken, tiny_target, TAPS)
    assert said["right"] is False and "not finite" in said["says"]
    few = [(ids[: SKIPPED + 1], s[: SKIPPED + 1]) for ids, s in states(TAPS)]
    assert compare(few, tiny_target, TAPS)["right"] is None
    assert compare([*few, *states(TAPS)], tiny_target, TAPS)["right"] is True
    json.dumps(said, allow_nan=False)


def test_the_first_rows_are_not_compared(states: Any, tiny_target: Path):
    """Some models hold a huge number there, which engines and references round differently."""
    pairs = states(TAPS)
    for _, one in pairs:
        one[:SKIPPED] *= 1000
    assert compare(pairs, tiny_target, TAPS)["right"] is True


def test_the_options_of_a_launch():
    drafting = json.dumps({"method": "eagle", "model": "d", "num_speculative_tokens": 3})
    assert speculative(["vllm", "serve", "--speculative-config", drafting]) == {
        "method": "eagle", "num_speculative_tokens": 3
    }  # fmt: skip
    assert speculative([]) == {} and speculative(["vllm", "serve", "m"]) == {}
    assert speculative(["vllm", "--speculative-config", "no json"]) == {}
