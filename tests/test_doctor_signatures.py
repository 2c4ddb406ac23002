"""Numbers of a server alone: each shape is called by its name, and a weak draft is not called a broken one.

pytest -q tests/test_doctor_signatures.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.decode.acceptance import Acceptance
from eyas.doctor.finding import Severity
from eyas.doctor.signatures import signatures
from eyas.engines.served import Event, Served, from_log, from_number

HEALTHY = (0.77, 0.55, 0.38, 0.29)  # vllm-project/vllm#18909


def served(rates: tuple[float, ...], rounds: int | None = 5000, engine: str = "vllm") -> Served:
    return Served(engine, tau=1 + sum(rates), unconditional=rates, rounds=rounds, steps=len(rates))


def replay(rates: tuple[float, ...], rounds: int = 5000) -> Acceptance:
    reached = np.array([1.0, *rates, 0.0]) * rounds
    return Acceptance(tuple(round(n) for n in reached[:-1] - reached[1:]))


def ids(found: list) -> list[str]:
    return [finding.id for finding in found]


SHAPES = [
    ("EY-SERVED-HEALTHY", served(HEALTHY)),
    ("EY-SERVED-HEALTHY", served((0.71, 0.48, 0.34))),  # vllm-project/vllm#25961
    ("EY-SERVED-NOTHING", served((0.0, 0.0, 0.0))),
    ("EY-SERVED-NOTHING", Served("sglang", tau=1.0, said={"accept rate": 0.0})),
    ("EY-SERVED-EVERYTHING", served((1.0, 1.0, 1.0))),
    ("EY-SERVED-FIRST-LOW", served((0.11, 0.01, 0.0, 0.0))),  # vllm-project/vllm#18909, broken
    ("EY-SERVED-FIRST-LOW", served((0.036, 0.0006, 0.0))),  # vllm-project/vllm#50170
    ("EY-SERVED-FIRST-LOW", from_number(1.037)),  # sgl-project/SpecForge#310
    ("EY-SERVED-CLIFF", served((0.7, 0.1, 0.02, 0.0))),
    ("EY-SERVED-CLIFF", served((0.45, 0.05, 0.01))),
    ("EY-SERVED-UNDERTRAINED", served((0.55, 0.30, 0.15))),  # vllm-project/speculators#751
    ("EY-SERVED-UNDERTRAINED", served((0.289, 0.08, 0.022, 0.007))),  # MT-bench of the demo
    ("EY-SERVED-UNDERTRAINED", served((0.351, 0.105, 0.048, 0.028), 248)),
    ("EY-SERVED-UNDERTRAINED", Served("sglang", tau=1.94, steps=4)),  # sgl-project/SpecForge#128
    ("EY-SERVED-UNDERTRAINED", from_number(1.26)),  # NickL77/BaldEagle#17
    ("EY-SERVED-HEALTHY", from_number(3.1)),
    ("EY-SERVED-HEALTHY", Served("sglang", tau=2.6, steps=3)),
]


@pytest.mark.parametrize(("id", "said"), SHAPES, ids=[f"{i}-{id}" for i, (id, _) in enumerate(SHAPES)])
def test_a_shape_has_a_name(id: str, said: Served):
    found = signatures(said)
    assert ids(found) == [id]
    assert found[0].evidence and found[0].consequence
    if found[0].severity is not Severity.OK:
        assert "eyas doctor" in found[0].remedy


def test_an_undertrained_draft_is_not_called_broken():
    found = signatures(served((0.55, 0.30, 0.15)))
    assert found[0].severity is Severity.INFO
    assert "NOT a broken one" in found[0].consequence


def test_few_rounds_make_no_cliff():
    assert ids(signatures(served((0.5, 0.15, 0.05), 30))) == ["EY-SERVED-UNDERTRAINED", "EY-SERVED-FEW"]
    assert ids(signatures(served((0.5, 0.10, 0.02), 5000))) == ["EY-SERVED-CLIFF"]


@pytest.mark.parametrize(
    ("engine", "first"),
    [("sglang", "--speculative-algorithm EAGLE"), ("vllm", "no d2t"), ("llamacpp", "a draft of another target")],
)
def test_what_is_likely_depends_on_the_engine(engine: str, first: str):
    found = signatures(Served(engine, tau=1.0))
    assert f"in this order: {first}" in found[0].consequence
    assert f"--engine {engine}" in found[0].remedy


# ---------------------------------------------------------------- time


def in_time(taus: list[float]) -> Served:
    return replace(served(HEALTHY), series=tuple((float(at), tau) for at, tau in enumerate(taus)))


def test_a_decay_with_uptime():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.2, 60)
    falling = np.linspace(3, 1.6, 60)
    assert "EY-SERVED-DECAY" in ids(signatures(in_time(list(falling + noise))))
    assert "EY-SERVED-DECAY" not in ids(signatures(in_time(list(3 + noise))))
    assert "EY-SERVED-DECAY" not in ids(signatures(in_time(list(falling[::-1] + noise))))
    assert "EY-SERVED-DECAY" not in ids(signatures(in_time([3.0, 1.0])))
    spiky = [3.0] * 30 + [1.0] + [3.0] * 30
    assert "EY-SERVED-DECAY" not in ids(signatures(in_time(spiky)))
    assert "EY-SERVED-DECAY" not in ids(signatures(in_time([1.0] * 60)))


# ---------------------------------------------------------------- beside a replay


def test_served_equals_replay():
    found = signatures(served(HEALTHY), replay(HEALTHY))
    assert ids(found) == ["EY-SERVED-EQUALS-REPLAY", "EY-SERVED-HEALTHY"]
    weak = (0.35, 0.12, 0.04, 0.01)
    assert "EY-SERVED-EQUALS-REPLAY" in ids(signatures(served(weak), replay(weak)))


@pytest.mark.parametrize(
    ("rates", "id"),
    [
        ((0.11, 0.01, 0.0, 0.0), "EY-SERVED-BELOW-REPLAY"),
        ((0.0, 0.0, 0.0, 0.0), "EY-SERVED-BELOW-REPLAY"),
        ((0.68, 0.45, 0.28, 0.18), "EY-SERVED-LITTLE-BELOW-REPLAY"),
        ((0.9, 0.8, 0.7, 0.6), "EY-SERVED-ABOVE-REPLAY"),
    ],
)
def test_served_differs_from_replay(rates: tuple[float, ...], id: str):
    assert id in ids(signatures(served(rates), replay(HEALTHY)))


def test_a_replay_that_does_far_better_is_not_contradicted():
    found = signatures(served((0.5, 0.25, 0.12, 0.06)), replay(HEALTHY))
    assert ids(found) == ["EY-SERVED-BELOW-REPLAY"]
    assert "launch or the engine" in found[0].consequence


def test_both_are_brought_to_the_same_number_of_drafts():
    longer = (*HEALTHY, 0.2, 0.15, 0.1)
    assert "EY-SERVED-EQUALS-REPLAY" in ids(signatures(served(longer), replay(HEALTHY)))
    assert "EY-SERVED-EQUALS-REPLAY" in ids(signatures(served(HEALTHY), replay(longer)))
    unlisted = replace(served(longer), unconditional=())
    assert "EY-SERVED-INCOMPARABLE" in ids(signatures(unlisted, replay(HEALTHY)))
    assert "EY-SERVED-EQUALS-REPLAY" in ids(signatures(from_number(2.99), replay(HEALTHY)))
    assert ids(signatures(served(HEALTHY), Acceptance((0, 0, 0)))) == ["EY-SERVED-HEALTHY"]


def test_few_replayed_rounds_prove_no_gap():
    assert "EY-SERVED-BELOW-REPLAY" not in ids(
        signatures(served((0.4, 0.2, 0.1, 0.0), 40), replay((0.6, 0.4, 0.1, 0.0), 40))
    )


# ---------------------------------------------------------------- events


def test_what_the_log_says_comes_with_its_line():
    said = replace(
        served((0.0, 0.0, 0.0), engine="sglang"),
        events=(
            Event("algorithm-eagle", "speculative_algorithm='EAGLE'", "the draft is run as EAGLE", "error"),
            Event("embedding-same", "identical", "the embedding is shared", "ok"),
        ),
    )
    found = signatures(said)
    assert ids(found) == ["EY-SERVED-LOG", "EY-SERVED-NOTHING", "EY-SERVED-LOG"]
    assert found[0].evidence == "the log says: speculative_algorithm='EAGLE'"
    assert found[0].consequence == "The draft is run as EAGLE"
    assert ids(signatures(from_log("KeyError: 'embed_tokens.weight'"))) == ["EY-SERVED-LOG"]


rates = st.lists(st.floats(0, 1), max_size=8).map(lambda values: tuple(sorted(values, reverse=True)))


@settings(max_examples=200, deadline=None)
@given(rates, st.none() | st.integers(1, 10**6), st.lists(st.floats(1, 9), max_size=30), rates, st.integers(1, 500))
def test_whatever_is_served_one_shape_is_named(
    values: tuple[float, ...], rounds: int | None, taus: list[float], other: tuple[float, ...], replayed: int
):
    said = replace(served(values, rounds), series=tuple((float(i), t) for i, t in enumerate(taus)))
    if not values:
        said = replace(said, steps=None)
    shapes = {id for id, _ in SHAPES}
    for found in (signatures(said), signatures(said, replay(other, replayed))):
        assert sum(id in shapes for id in ids(found)) + ("EY-SERVED-BELOW-REPLAY" in ids(found)) in (1, 2)
        assert all(finding.to_dict() for finding in found)
