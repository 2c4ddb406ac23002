"""Recorded features against the target, asked again: the same, of other layers, of other tokens, of another model.

pytest -q tests/test_doctor_features_audit.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.doctor.features_audit import audit
from eyas.doctor.finding import Severity
from eyas.doctor.material import Material
from eyas.doctor.place import where
from eyas.doctor.record import answers
from eyas.doctor.verdict import Told

TAPS = (2, 4, 5)


@pytest.fixture(scope="module")
def every(tiny_target: Path) -> Material:
    """Answers with the states of all layers."""
    prompts = ["what is the capital of France?", "def add(a, b):", "the young hawk", "a draft"]
    return answers(tiny_target, prompts, tuple(range(9)), tokens=24, ends=False, dtype="float32")


def recorded(every: Material, states: dict[int, torch.Tensor] | None = None, **fields) -> Material:
    states = states or {t: every.states[t].bfloat16() for t in TAPS}
    return replace(every, states=states, **fields)


def moved(every: Material, x: torch.Tensor, by: int) -> torch.Tensor:
    """Within each document: row i holds row i + by."""
    at = torch.arange(len(x)) + by
    first, last = every.offsets[every.packing.document], every.offsets[1:][every.packing.document] - 1
    return x[at.clamp(first, last)]


def ids(found) -> list[str]:
    return [f.id for f in found]


def test_the_targets_own_states_are_acquitted(every: Material, tiny_target: Path):
    found = audit(recorded(every), tiny_target, "f")
    assert ids(found) == ["EY-FEATURES-SAME"] and found[0].severity is Severity.OK


@pytest.mark.parametrize(("tap", "real"), [(2, 3), (4, 3), (5, 8)])
def test_states_of_another_layer_are_named(every: Material, tiny_target: Path, tap: int, real: int):
    states = {t: every.states[real if t == tap else t] for t in TAPS}
    found = audit(recorded(every, states), tiny_target, "f")
    assert ids(found) == ["EY-FEATURES-TAPS"]
    assert f"recorded for tap {tap} are those of tap {real}" in found[0].evidence


@pytest.mark.parametrize(("by", "word"), [(-1, "before"), (1, "after")])
def test_states_of_another_token_are_named(every: Material, tiny_target: Path, by: int, word: str):
    states = {t: moved(every, every.states[t], by) for t in TAPS}
    found = audit(recorded(every, states), tiny_target, "f")
    assert ids(found) == ["EY-FEATURES-SHIFT"] * 3
    assert all(f"of the token {word}" in f.evidence and f.convention == "state_shift" for f in found)


@pytest.mark.parametrize("scale", [2.0, 0.25])
def test_another_scale_is_told_from_other_states(every: Material, tiny_target: Path, scale: float):
    found = audit(recorded(every, {t: every.states[t] * scale for t in TAPS}), tiny_target, "f")
    assert ids(found) == ["EY-FEATURES-OTHER"] * 3 and f"{scale:.3g} times as large" in found[0].evidence


def test_states_of_another_model(every: Material, tiny_target: Path):
    generator = torch.Generator().manual_seed(0)
    states = {t: torch.randn(every.states[t].shape, generator=generator) for t in TAPS}
    found = audit(recorded(every, states), tiny_target, "f")
    assert ids(found) == ["EY-FEATURES-OTHER"] * 3 and "no layer's are near" in found[0].evidence
    narrow = audit(recorded(every, {2: every.states[2][:, :7]}), tiny_target, "f")
    assert "7 wide" in narrow[0].evidence


@pytest.mark.parametrize("by", [-1, 1])
def test_choices_at_another_place(every: Material, tiny_target: Path, by: int):
    found = audit(recorded(every, choice=moved(every, every.choice, by)), tiny_target, "f")
    assert ids(found) == ["EY-FEATURES-LABELS"] and ("before" if by < 0 else "after") in found[0].evidence


def test_choices_of_another_model(every: Material, tiny_target: Path):
    found = audit(recorded(every, choice=(every.choice + 7) % 50), tiny_target, "f")
    assert ids(found) == ["EY-FEATURES-CHOICES"] and found[0].convention == "label_shift"


def test_wrong_features_are_a_matter_of_the_data():
    told = [Told("EY-FEATURES-TAPS", "static", Severity.ERROR, "taps", "")]
    assert where(told, None, {}, None, ()) == "data"
