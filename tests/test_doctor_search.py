"""The search: nothing is taken from a healthy draft, faults are found alone and together, a compensation is given back.

pytest -q tests/test_doctor_search.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from doctoring import FAULTS, Patient, make_patient
from eyas.doctor import search as module
from eyas.doctor.hypotheses import Context, Hypothesis
from eyas.doctor.search import DEPTH, LEAK, Found, Search
from eyas.doctor.specimen import Specimen
from eyas.doctor.trial import Bench

TEXT = {"documents": 12, "length": 26}


@cache
def patient(**conventions: Any) -> Patient:
    return make_patient(text=TEXT, **conventions)


def search(who: Patient, **context: Any) -> Search:
    return Search(Bench(who.material, steps=2), replace(who.context, **context))


def names(found: Found) -> list[tuple[str, str]]:
    return [(h.group, h.label) for h in found.taken]


# ---------------------------------------------------------------- on drafts


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}], ids=str)
def test_of_a_healthy_draft_nothing_is_taken(flags):
    who = patient(**flags)
    base = who.specimen
    found = search(who, embedding=who.embedding).run("declared", base)
    assert found.taken == [] and found.best is found.base is base and found.complete
    assert found.ledger == found.last and len(found.ledger) > 30
    assert {e.verdict for e in found.ledger} <= {"refuted", "inconclusive"}
    assert sum(e.verdict == "refuted" for e in found.ledger) > 0.85 * len(found.ledger)
    gains = [e.gain.mean for e in found.ledger]
    assert gains == sorted(gains, reverse=True) and {e.start for e in found.ledger} == {"declared"}
    assert search(who).pairs(found).taken == []


SINGLE = [
    "d2t subtracted twice", "taps one on", "slices of fc 2 1 0", "norm_output unsaid", "fc_norm unsaid",
    "halves of q, k, v", "o_proj transposed", "rotary pairs", "rope_type",
    "states one token on", "fc under another name, transposed",
]  # fmt: skip


@pytest.mark.parametrize("name", SINGLE)
def test_a_fault_is_found_and_nothing_else(name: str):
    fault = FAULTS[name]
    who = patient(**fault.patient)
    found = search(who, **fault.context(who)).run("declared", fault.inject(who))
    assert names(found) == [(fault.group, fault.label)]
    assert found.best.changed == {fault.group: fault.label}
    taken = [e for e in found.ledger if e.verdict == "taken"]
    assert [e.hypothesis for e in taken] == found.taken and taken[0].round == 1 and taken[0].gain.real
    assert {e.round for e in found.last} == {2}, "why it is the best: what was tried from there"
    assert not any(e.verdict == "better" for e in found.last)


K, V = "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight"
TOGETHER: list[tuple[str, Callable[[Specimen], Specimen], set[tuple[str, str]]]] = [
    ("d2t absolute", lambda s: s.with_(conventions={"norm_before_residual": True}),
     {("d2t", "absolute"), ("norm_before_residual", "false")}),
    ("taps one on", lambda s: s.with_(tensors={K: s.tensors[V], V: s.tensors[K]}),
     {("taps", "2/4/5"), ("qkv", "k_proj <-> v_proj")}),
    ("o_proj transposed", lambda s: s.with_(conventions={"rope_theta": 5e5}, label_shift=1),
     {("transposed", "o_proj"), ("rope_theta", "10000"), ("label_shift", "+0")}),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "wanted"), TOGETHER, ids=[f for f, *_ in TOGETHER])
def test_several_faults_at_once_are_all_found(first, second, wanted):
    who = patient()
    found = search(who).run("declared", second(FAULTS[first].inject(who)))
    assert set(names(found)) == wanted and len(found.taken) == len(wanted)
    bench = Bench(who.material, steps=2)
    assert torch.allclose(*bench.surprise([found.best, who.specimen]), atol=1e-4)


@pytest.mark.parametrize("other", ["fc transposed", "fc under another name"])
def test_two_faults_of_which_neither_shows_alone(other: str):
    """A map that is wrong hides a tensor that does not fit, and the other way round."""
    who, second = patient(), FAULTS[other]
    ill = FAULTS["d2t absolute in another order"].inject(who)
    ill = replace(second.inject(who), ids=ill.ids).with_(tensors={"d2t": ill.tensors["d2t"]})
    looking = search(who)
    alone = looking.run("declared", ill)
    assert alone.taken == []
    found = looking.pairs(alone)
    assert set(names(found)) == {(second.group, second.label), ("d2t", "sorted absolute")}
    notes = {e.note for e in found.ledger if e.verdict == "taken"}
    assert notes == {"two at once: neither helps without the other"}
    assert found.base is ill and found.best.changed.keys() == {second.group, "d2t"}


# ---------------------------------------------------------------- on a table of what is known


@dataclass(frozen=True)
class Toy:
    """Stands for a specimen: what was switched on."""

    on: frozenset[str] = frozenset()
    odd: bool = False
    """States that were not recorded."""

    @property
    def body(self) -> object:
        return self.on


@dataclass
class Table:
    """Stands for a bench: nats by what is on. 20 documents that differ, alike for all."""

    nats: dict[str, float]
    calls: list[int] = field(default_factory=list)
    document: torch.Tensor = field(default_factory=lambda: torch.arange(20).repeat_interleave(5))

    def surprise(self, toys: Iterable[Toy]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        noise = 0.05 * torch.rand(100, 1, generator=generator)
        rows = [self.nats["".join(sorted(t.on))] * (1 + noise) for t in toys]
        self.calls.append(len(rows))
        return torch.stack(rows)

    def has_states(self, toy: Toy) -> bool:
        return not toy.odd

    def nothing(self, toy: Toy) -> float:
        return 6.0


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch):
    """Search on a table. groups: switch -> group; switches go on, and off again."""

    def made(nats: dict[str, float], groups: dict[str, str] | None = None, deadline: float = math.inf) -> Search:
        switches = sorted({c for key in nats for c in key})
        nats = {
            "".join(some): nats.get("".join(some), 6.0)
            for n in range(len(switches) + 1)
            for some in itertools.combinations(switches, n)
        }

        def hypotheses(base: Toy, context: Context) -> Iterable[Hypothesis]:
            for s in switches:
                group = (groups or {}).get(s, s)
                if s in base.on:
                    yield Hypothesis(group, "off", False, lambda t, s=s: replace(t, on=t.on - {s}))
                else:
                    yield Hypothesis(group, "on", True, lambda t, s=s: replace(t, on=t.on | {s}))

        monkeypatch.setattr(module, "hypotheses", hypotheses)
        return Search(Table(nats), Context(), deadline)  # type: ignore[arg-type]

    return made


def run(searching: Search) -> Found:
    return searching.run("declared", Toy())  # type: ignore[arg-type]


def verdicts(found: Found) -> list[tuple[int, str, str, str]]:
    return [(e.round, e.hypothesis.group, e.hypothesis.label, e.verdict) for e in found.ledger]


def test_the_best_is_taken_first_and_the_rest_stays_in_the_ledger(play):
    found = run(play({"": 5, "a": 4, "b": 3, "ab": 2, "c": 5.5, "bc": 4, "abc": 4}))
    assert names(found) == [("b", "on"), ("a", "on")] and found.complete
    told = verdicts(found)
    assert told[:4] == [(1, "b", "on", "better"), (1, "a", "on", "better"), (1, "c", "on", "refuted"),
                        (1, "b", "on", "taken")]  # fmt: skip
    assert (2, "a", "on", "taken") in told and (3, "c", "on", "refuted") in told
    assert [e.round for e in found.last] == [3, 3, 3]


def test_a_compensation_is_given_back(play):
    """c helps as long as a and b are wrong, and means nothing once they are right."""
    found = run(play({"": 5, "c": 4, "a": 4.5, "b": 4.6, "ac": 3, "bc": 3.5, "ab": 1, "abc": 1}))
    assert names(found) == [("a", "on"), ("b", "on")]
    assert found.best == Toy(frozenset("ab"))
    reversed_ = [e for e in found.ledger if e.verdict == "reversed"]
    assert [e.hypothesis.group for e in reversed_] == ["c"] and "compensation" in reversed_[0].note
    assert not reversed_[0].gain.real


def test_a_way_over_a_wrong_step(play):
    """To b and c alone there is no single step; by way of a there is, and a is given back."""
    found = run(play({"": 5, "a": 4, "b": 5.5, "c": 5, "ab": 3, "ac": 4, "abc": 2, "bc": 1}))
    assert names(found) == [("b", "on"), ("c", "on")]


def test_a_step_there_and_back_is_no_step(play):
    """A pair that is found together, and a later step that turns one of the two back: neither is told."""
    groups = {"a": "qkv", "b": "gate_up", "c": "rope_theta"}
    found = run(searching := play({"": 5.9, "ab": 4, "abc": 2, "bc": 1}, groups))
    assert found.taken == []
    found = searching.pairs(found)
    assert found.best == Toy(frozenset("bc"))
    assert sorted(names(found)) == [("gate_up", "on"), ("rope_theta", "on")]
    given_back = [(e.hypothesis.group, e.hypothesis.label) for e in found.ledger if e.verdict == "reversed"]
    assert given_back == [("qkv", "on"), ("qkv", "off")]


def test_pairs_are_for_drafts_that_know_nothing(play):
    groups = {"a": "qkv", "b": "gate_up"}
    found = run(searching := play({"": 5.9, "ab": 1}, groups))
    assert found.taken == []
    told: list[str] = []
    assert names(searching.pairs(found, told.append)) == [("qkv", "on"), ("gate_up", "on")]
    assert told[0] == "trying 1 pairs of hypotheses"
    found = run(searching := play({"": 3.0, "ab": 1}, groups))
    assert searching.pairs(found).taken == [], "it knows too much for that"
    for same in ({"a": "qkv", "b": "qkv"}, {"a": "hidden_act", "b": "gate_up"}):
        found = run(searching := play({"": 5.9, "ab": 1}, same))
        assert searching.pairs(found).taken == [], "of two groups, both of those that are tried in pairs"


def test_it_stops_at_its_depth(play):
    nats = {"abcdef"[:n]: 5.0 - 0.5 * n for n in range(7)}
    found = run(play(nats))
    assert len(found.taken) == DEPTH and {e.round for e in found.ledger} == set(range(1, DEPTH + 1))


@pytest.mark.parametrize(("gain", "taken"), [(LEAK - 0.05, []), (LEAK + 0.05, [("state_shift", "on")])])
def test_states_of_another_token_must_win_more(play, gain: float, taken: list):
    assert names(run(play({"": 3.0, "a": 3.0 - gain}, {"a": "state_shift"}))) == taken
    assert names(run(play({"": 3.0, "a": 3.0 - gain}))) == [("a", "on")]


def test_what_has_no_states_is_left_out(play, monkeypatch: pytest.MonkeyPatch):
    searching = play({"": 5, "a": 1})
    monkeypatch.setattr(Table, "has_states", lambda self, toy: not toy.on)
    found = run(searching)
    assert found.taken == [] and found.ledger == [] and found.complete


def clock(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: next(ticks) * step)


def test_the_deadline(play, monkeypatch: pytest.MonkeyPatch):
    """No trial begins after it, and what is left out is not passed over in silence."""
    nats = {"": 5, "a": 4, "b": 3, "ab": 1}
    searching = play(nats, deadline=-1.0)
    clock(monkeypatch, 1.0)
    found = run(searching)
    assert found.taken == [] and found.ledger == [] and not found.complete
    assert searching.bench.calls == [1]  # type: ignore[attr-defined]  # the base alone
    searching = play(nats, deadline=2.5)  # two trials of the first round and no more
    clock(monkeypatch, 1.0)
    found = run(searching)
    assert names(found) == [("b", "on")] and not found.complete
    searching = play(nats, deadline=100.0)
    clock(monkeypatch, 0.1)
    assert len(run(searching).taken) == 2
    late = play({"": 5.9, "ab": 1}, {"a": "qkv", "b": "gate_up"}, deadline=2.5)
    clock(monkeypatch, 1.0)
    found = run(late)
    assert found.complete
    assert late.pairs(found).taken == [] and not found.complete


def test_what_is_not_certain_gets_a_second_look_on_more_text(play):
    class Noisy(Table):
        """The same, with so little text that a gain of 0.3 is not certain."""

        def surprise(self, toys: Iterable[Toy]) -> torch.Tensor:
            toys = list(toys)
            swing = torch.where(self.document % 2 == 0, 1.5, -1.5)[:, None]
            return super().surprise(toys) + torch.stack([swing * len(t.on) for t in toys])

    nats = {"": 4.0, "a": 3.7}
    search = play(nats)
    exact, search.bench = search.bench, Noisy(search.bench.nats)
    found = search.run("declared", Toy())
    assert [e.verdict for e in found.ledger] == ["inconclusive"] and found.ledger[0].gain.mean > 0.02
    search.wide = exact
    found = search.run("declared", Toy())
    assert [h.group for h in found.taken] == ["a"]
    assert found.ledger[1].verdict == "taken" and found.ledger[1].gain.real
