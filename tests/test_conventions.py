"""Conventions: every check, the round trip through JSON, and how a value is known.

pytest -q tests/test_conventions.py
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.conventions import Conventions, Known, default_taps

FIELDS = [f.name for f in dataclasses.fields(Conventions) if f.name != "how"]


def strategy(name: str, kind: object) -> st.SearchStrategy:
    """Valid values of one field, from its type."""
    if name in ("rms_norm_eps", "rope_theta", "logit_scale", "embedding_scale"):
        return st.floats(1e-8, 1e8)
    if name == "partial_rotary_factor":
        return st.floats(0.01, 1.0)
    if name == "max_position":
        return st.integers(1, 10**6)
    if name == "sliding_window":
        return st.none() | st.integers(1, 4096)
    if name == "hidden_act" or name == "rope_type":
        return st.text(min_size=1, max_size=8)
    if name == "rope_scaling":
        return st.dictionaries(st.text(max_size=5), st.floats(0.1, 10) | st.integers(0, 9), max_size=3)
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(-3, 3)
    return st.sampled_from(get_args(kind))


HINTS = get_type_hints(Conventions)
FREE = {n: strategy(n, HINTS[n]) for n in FIELDS if n not in ("taps", "num_target_layers", "fc_norm", "attention")}


@st.composite
def conventions(draw) -> Conventions:
    layers = draw(st.integers(4, 90))
    taps = draw(st.sets(st.integers(0, layers), min_size=1, max_size=5))
    values = {name: draw(one) for name, one in FREE.items()}
    told = draw(st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(list(Known)), max_size=6))
    mla = draw(st.booleans()) and not values["qk_norm"]
    return Conventions(
        taps=tuple(sorted(taps)), num_target_layers=draw(st.none() | st.just(layers)), how=told,
        fc_norm=draw(st.booleans()) and not values["norm_before_fc"], attention="mla" if mla else "gqa", **values,
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(conventions())
def test_json_brings_back_the_same_value(c):
    text = json.dumps(c.to_dict())
    back = Conventions.from_dict(json.loads(text))
    assert back == c
    assert back.how == c.how
    assert json.dumps(back.to_dict()) == text
    assert back.differences(c) == {}


@settings(max_examples=25, deadline=None)
@given(conventions(), st.sampled_from(["norm_output", "norm_before_residual", "rope_offset", "mask_shift"]))
def test_a_substitution_changes_one_field_and_how_it_is_known(c, name):
    old = getattr(c, name)
    new = (not old) if isinstance(old, bool) else old + 1
    changed = c.with_(Known.GUESSED, **{name: new})
    assert changed.differences(c) == {name: (new, old)}
    assert changed.known(name) is Known.GUESSED
    assert {k: v for k, v in changed.how.items() if k != name} == {k: v for k, v in c.how.items() if k != name}
    assert getattr(c, name) == old, "the original is frozen"


def test_how_a_value_is_known():
    c = Conventions(taps=(2, 4, 5), how={"taps": "declared"})
    assert c.known("taps") is Known.DECLARED
    assert c.known("norm_output") is Known.DEFAULT
    assert c.with_(norm_output=True).known("norm_output") is Known.DECLARED
    assert c == Conventions(taps=(2, 4, 5)), "how a value is known is not part of what it is"
    assert f"{Known.INFERRED}" == "inferred"
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.norm_output = True  # type: ignore[misc]


def test_it_does_not_share_what_it_was_given():
    scaling = {"factor": 2.0}
    c = Conventions(taps=[1, 3], rope_scaling=scaling)  # type: ignore[arg-type]
    scaling["factor"] = 9.0
    c.to_dict()["rope_scaling"]["factor"] = 7.0
    assert c.rope_scaling == {"factor": 2.0}
    assert c.taps == (1, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"taps": ()}, "conventions.taps = []: must be distinct, ascending"),
        ({"taps": (5, 2)}, "conventions.taps = [5, 2]"),
        ({"taps": (2, 2)}, "conventions.taps = [2, 2]"),
        ({"taps": (-1, 2)}, "conventions.taps = [-1, 2]"),
        ({"num_target_layers": 4}, "the target has 4 layers, so taps run from 0 to 4"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"qk_norm": True, "attention": "mla"}, "qk_norm does not exist for attention = 'mla'"),
        ({"rms_norm_eps": 0.0}, "conventions.rms_norm_eps = 0.0: must be finite and greater than 0.0"),
        ({"rms_norm_eps": float("nan")}, "conventions.rms_norm_eps = nan"),
        ({"rope_theta": float("inf")}, "conventions.rope_theta = inf"),
        ({"max_position": 0}, "conventions.max_position = 0"),
        ({"logit_scale": -1.0}, "conventions.logit_scale = -1.0"),
        ({"partial_rotary_factor": 0.0}, "conventions.partial_rotary_factor = 0.0: must be in (0, 1]"),
        ({"partial_rotary_factor": 1.5}, "conventions.partial_rotary_factor = 1.5"),
        ({"sliding_window": 0}, "conventions.sliding_window = 0: must be positive or absent"),
        ({"how": {"tap": "declared"}}, "`how` names unknown fields ['tap']"),
        ({"how": {"taps": "certain"}}, "'certain' is not a valid Known"),
        ({"d2t": "relative"}, "conventions.d2t = 'relative': must be one of 'offset', 'absolute', 'none'"),
        ({"teacher": "draft"}, "conventions.teacher = 'draft': must be one of"),
        ({"norm_output": "yes"}, "conventions.norm_output = 'yes': must be true or false"),
    ],
)
def test_contradictions_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Conventions(**{"taps": (2, 4, 5), **values})


def test_a_newer_file_is_refused():
    with pytest.raises(ValueError, match=r"newer Eyas: unknown fields \['colour'\]"):
        Conventions.from_dict({"taps": [2, 4, 5], "colour": "red"})


def test_default_taps():
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27)
    for layers in (0, 5, 6):
        with pytest.raises(ValueError, match="name the taps"):
            default_taps(layers)
    for layers in range(7, 200):
        assert list(default_taps(layers)) == sorted(set(default_taps(layers)))
