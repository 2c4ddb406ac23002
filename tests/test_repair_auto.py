"""The loop: faults of small drafts with a target are found and mended until the draft is what it was before them.

The target's text is one that the healthy draft wrote itself (doctoring.py), so what it is worth is known.
    pytest -q tests/test_repair_auto.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from changing import leftovers, state
from doctoring import D, Patient, V, another_run, patient_of, save
from eyas.decode.acceptance import Acceptance
from eyas.doctor import record as recording
from eyas.doctor.diagnosis import diagnose
from eyas.doctor.finding import Severity
from eyas.doctor.trial import Bench
from eyas.errors import BadInput
from eyas.repair import auto
from eyas.repair.apply import Repaired, repair
from eyas.repair.auto import Mended, mend
from eyas.repair.history import history, revert
from eyas.repair.overlay import Overlay
from eyas.repair.step import Step
from eyas.repair.trials import Judged, Seen, Trials
from eyas.vocab import VocabMap
from mending import Config, Tensors, healthy

TEXT = {"documents": 14, "length": 32}
IDS = "eagle_aux_hidden_state_layer_ids"
K, VALUE = (f"midlayer.self_attn.{x}_proj.weight" for x in "kv")
GATE, UP, DOWN = (f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
Fault = Callable[[Tensors, Config], Any]
Change = Callable[..., Repaired]


def swap(a: str, b: str) -> Fault:
    return lambda t, c: t.update({a: t[b], b: t[a]})


def config(**values: Any) -> Fault:
    return lambda t, c: c.update(values)


def both(*faults: Fault) -> Fault:
    return lambda t, c: [fault(t, c) for fault in faults]


def turned(*names: str) -> Fault:
    return lambda t, c: t.update({name: t[name].T.contiguous() for name in names})


def reversed_slices(t: Tensors, c: Config) -> None:
    t["fc.weight"] = torch.cat(t["fc.weight"].chunk(3, 1)[::-1], 1)


def twice(t: Tensors, c: Config) -> None:
    t["d2t"] = t["d2t"] - torch.arange(D)


def lost(*names: str) -> Fault:
    return lambda t, c: t.update({name: t[name] * float("nan") for name in names})


def two_heads(t: Tensors, c: Config) -> None:
    """16 numbers a head would do as well, by the shapes."""
    c.pop("head_dim")
    c.update(num_attention_heads=2)


def misspelled(t: Tensors, c: Config) -> None:
    t.update({"fusion.weight": t.pop("fc.weight"), "midlayer.mlp.w2.weight": t.pop(DOWN)})


@pytest.fixture(scope="module")
def who(tiny_target: Path) -> Patient:
    return patient_of(tiny_target, text=TEXT)


@pytest.fixture
def mended(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Repair with the patient's text in place of what its target would answer."""

    def run(who: Patient, folder: Path, **more: Any) -> Repaired:
        monkeypatch.setattr(recording, "record", lambda *a, **o: who.material)
        done = repair(folder, **{"target": tiny_target} | more)
        json.dumps(done.to_dict(), allow_nan=False)
        return done

    return run


def tau(who: Patient) -> float:
    return float(Acceptance.merged(Bench(who.material).acceptance(who.specimen), 4).tau)


def steps(done: Repaired) -> list[str]:
    return [] if done.plan is None else [step.operation for step in done.plan.steps]


# ---------------------------------------------------------------- faults


FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "k <-> v, d2t subtracted twice": (both(swap(K, VALUE), twice), {"swap", "add-arange"}),
    "norm_output said": (config(norm_output=True), {"set-flag"}),
    "a flag, taps, gate <-> up": (
        both(config(norm_before_residual=True, **{IDS: [3, 5, 6]}), swap(GATE, UP)),
        {"set-flag", "write-taps", "swap"},
    ),
    "two that are misshapen": (turned(DOWN, K), {"transpose"}),
    "two names": (misspelled, {"rename"}),
    "sizes of which two fit": (two_heads, {"sizes-from-tensors"}),
    "taps that cannot be": (config(**{IDS: [2, 4, 5, 8]}), {"write-taps"}),
    "marks of another map": (lambda t, c: t.update(t2d=t["t2d"].roll(1)), {"t2d-from-d2t"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_draft_is_what_it_was(tmp_path: Path, tiny_target: Path, who: Patient, mended: Change, name: str):
    change, operations = FAULTS[name]
    good = save(who, tmp_path / "good", tiny_target)
    broken = save(who, tmp_path / "broken", tiny_target, change)
    first = state(broken)
    done = mended(who, broken, in_place=True)
    assert done.left == [] and set(steps(done)) == operations
    assert done.tau[1] == pytest.approx(tau(who), rel=0.01) and done.tau[1] >= done.tau[0]
    mine, theirs = load_file(broken / "model.safetensors"), load_file(good / "model.safetensors")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert {row["verdict"] for row in done.ledger} <= {"kept", "refuted"}
    kept = [s for row in done.ledger if row["verdict"] == "kept" for s in row["steps"]]
    assert kept == [s.to_dict() for s in done.plan.steps], "what was kept is what was done, in its order"
    [record] = history(broken)
    assert record["entry"]["ledger"] == done.ledger and record["entry"]["tau"] == list(done.tau)
    revert(broken)
    assert state(broken) == first and leftovers(broken) == []


def test_of_several_guesses_the_one_that_fits_is_kept(tmp_path: Path, tiny_target: Path, who: Patient, mended: Change):
    """By the shapes alone, and as the first that makes the draft run, the wrong one would be."""
    done = mended(who, save(who, tmp_path / "d", tiny_target, two_heads))
    said = {row["steps"][0]["arguments"]["head_dim"]: row["verdict"] for row in done.ledger}
    assert said == {16: "refuted", 8: "kept"} and "head_dim = 8" in done.ledger[0]["why"]
    assert done.out is None and not (tmp_path / "d" / ".eyas").exists(), "neither out nor in_place"


def test_norms_go_with_their_slices_only_where_that_fits(tmp_path: Path, tiny_target: Path, mended: Change):
    """Either is better than what is there, and one of them is right."""
    who = patient_of(tiny_target, text=TEXT, fc_norm=True)
    done = mended(who, save(who, tmp_path / "d", tiny_target, reversed_slices), budget=5.0)
    assert [step.arguments.get("norms") for step in done.plan.steps] == [False]
    assert done.tau[1] == pytest.approx(tau(who), rel=0.01)


def test_what_only_a_reference_knows(tmp_path: Path, tiny_target: Path, mended: Change):
    who = patient_of(tiny_target, text={"documents": 24, "length": 32})
    other = VocabMap.from_absolute(another_run(who.vocab_map.ids, 10, 1), V)
    right = save(who, tmp_path / "right", tiny_target)

    def change(t: Tensors, c: Config) -> None:
        t.update(d2t=other.d2t, t2d=other.t2d)
        lost(DOWN)(t, c)

    broken = save(who, tmp_path / "broken", tiny_target, change)
    alone = mended(who, broken, budget=0.5)
    assert alone.plan is None and alone.left[0]["finding"] == "EY-TENSOR-NAN" and DOWN in alone.left[0]["evidence"]
    assert all("--reference" in row["why"] for row in alone.left)
    done = mended(who, broken, reference=right, out=tmp_path / "out")
    assert done.left == [] and done.tau[1] == pytest.approx(tau(who), rel=0.01)
    mine, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(right / "model.safetensors")
    assert all(torch.equal(mine[n], theirs[n]) for n in theirs)


def test_a_head_that_knows_nothing_is_not_kept(tmp_path: Path, tiny_target: Path, who: Patient, mended: Change):
    """The target's rows are less surprised than no head at all, and know no word of the text."""
    broken = save(who, tmp_path / "d", tiny_target, lambda t, c: t.pop("lm_head.weight"))
    done = mended(who, broken, in_place=True)
    assert done.plan is None and not (broken / ".eyas").exists()
    assert [row["verdict"] for row in done.ledger] == ["refuted"]
    assert "no more of the text than how often each token comes" in done.ledger[0]["why"]
    left = {row["finding"]: row["why"] for row in done.left}
    assert "was tried and dropped" in left["EY-HEAD-MISSING"] and "--reference" in left["EY-HEAD-MISSING"]


# ---------------------------------------------------------------- engines, and no target


def test_engines_that_are_named(tmp_path: Path, tiny_target: Path, mended: Change):
    """What no file can say to an engine is named and left; what can be folded into the weights is."""
    who = patient_of(tiny_target, text=TEXT, norm_before_residual=True)
    folder = save(who, tmp_path / "flag", tiny_target)
    done = mended(who, folder, engines=["sglang"], in_place=True)
    assert done.plan is None and not (folder / ".eyas").exists()
    [left] = done.left
    assert left["finding"] == "EY-AS-READ" and "choose another engine" in left["why"]

    who = patient_of(tiny_target, text=TEXT, rms_norm_offset=True)
    folder = save(who, tmp_path / "offset", tiny_target)
    done = mended(who, folder, engines=["vllm"], in_place=True)
    assert steps(done) == ["fold"] and done.left == [] and done.tau[0] == done.tau[1]


def test_without_a_target_only_what_files_prove_is_mended(tmp_path: Path, tiny_target: Path, who: Patient):
    broken = save(who, tmp_path / "d", tiny_target, both(swap(K, VALUE), twice))
    done = repair(broken, in_place=True)
    assert steps(done) == ["add-arange"] and done.tau == (None, None) and done.left == []
    odd = save(who, tmp_path / "e", tiny_target, two_heads)
    done = repair(odd)
    assert done.plan is None and {row["verdict"] for row in done.ledger} == {"refuted"}
    assert "only a replay could tell whether it is right: give --target" in done.left[0]["why"]


def test_a_healthy_draft_is_left_alone(tmp_path: Path, tiny_target: Path, who: Patient, mended: Change):
    good = save(who, tmp_path / "good", tiny_target)
    first = state(good)
    done = mended(who, good, in_place=True)
    assert (done.plan, done.out, done.left, done.ledger) == (None, None, [], [])
    assert done.tau[0] == done.tau[1] == pytest.approx(tau(who), abs=1e-4) and state(good) == first
    with pytest.raises(BadInput, match="does not find EY-MEASURED-TAPS"):
        mended(who, good, finding="EY-MEASURED-TAPS", in_place=True)


def test_only_one_of_two_measured_faults(tmp_path: Path, tiny_target: Path, who: Patient, mended: Change):
    broken = save(who, tmp_path / "d", tiny_target, both(swap(K, VALUE), config(norm_before_residual=True)))
    done = mended(who, broken, finding="EY-MEASURED-RESIDUAL")
    assert steps(done) == ["set-flag"] and done.tau[1] > done.tau[0] + 0.1
    [left] = done.left
    assert (left["finding"], left["why"]) == ("EY-MEASURED-QKV", "it was not asked for")


def test_a_plan_is_judged_on_the_same_text(tmp_path: Path, tiny_target: Path, who: Patient, mended: Change):
    """What mends nothing that can be measured is no worse; what spoils the draft is refused."""
    broken = save(who, tmp_path / "d", tiny_target, config(tie_word_embeddings=True))
    plan = mended(who, broken).plan
    done = mended(who, broken, plan=plan, out=tmp_path / "out")
    assert done.left == [] and done.tau[0] == done.tau[1] > 2
    from eyas.errors import EyasError
    from eyas.repair.plan import make_plan

    bad = make_plan(Overlay.of(tmp_path / "out"), [Step("swap", {"a": K, "b": VALUE})])
    with pytest.raises(EyasError, match=r"makes the draft worse .the draft is more surprised, by"):
        mended(who, tmp_path / "out", plan=bad, in_place=True)
    forced = mended(who, tmp_path / "out", plan=bad, in_place=True, force=True)
    assert forced.tau[1] < forced.tau[0] and "worse: the draft is more surprised" in forced.forced[0]


def test_a_diagnosis_that_was_just_made_is_not_made_again(
    tmp_path: Path, tiny_target: Path, who: Patient, mended: Change, monkeypatch: pytest.MonkeyPatch
):
    broken = save(who, tmp_path / "d", tiny_target, swap(K, VALUE))
    monkeypatch.setattr(recording, "record", lambda *a, **o: who.material)
    first = diagnose(broken, target=tiny_target)
    asked: list[Any] = []
    monkeypatch.setattr(auto, "diagnose", lambda *a, **o: asked.append(a) or diagnose(*a, **o))
    done = mended(who, broken, first=first)
    assert steps(done) == ["swap"] and len(asked) == 1 and done.tau[0] == first["tau"]["declared"]


# ---------------------------------------------------------------- the loop by itself: faults are numbers in config.json


class Made(Trials):
    """A draft whose surprise is 4 nats, less what is right in its config."""

    worth: Callable[[Mapping[str, Any]], float]
    shown: Callable[[Mapping[str, Any]], Sequence[str]] = staticmethod(lambda c: ())

    def of(self, overlay: Overlay) -> Judged:
        from eyas.doctor.evidence import Paired

        documents = torch.arange(8).repeat_interleave(4)
        self._paired, self._frequent = Paired(documents), 9.0
        noise = torch.rand(32, 2, generator=torch.Generator().manual_seed(1)) * 0.01
        value = type(self).worth(overlay.config)
        seen = tuple(Seen(id_, "", Severity.ERROR, id_) for id_ in type(self).shown(overlay.config))
        return Judged(seen, True, surprise={"declared": noise + 4 - value}, nothing=5.0)


def finding(id_: str, status: str = "confirmed") -> dict[str, Any]:
    return {"id": id_, "status": status, "severity": "error", "convention": None, "best": 1, "evidence": id_}


def write(id_: str, key: str, value: Any, sure: bool = True) -> Step:
    return Step("write-fields", {"values": {"config.json": {f"/{key}": value}}}, id_, sure)


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mended]:
    draft = healthy(tmp_path / "draft", "flat")

    def run(
        worth: Callable[[Mapping[str, Any]], float], said: Callable[[Mapping[str, Any]], list[dict[str, Any]]],
        remedies: Mapping[str, Sequence[Step]], shown: Callable[[Mapping[str, Any]], Sequence[str]] = lambda c: (),
    ) -> Mended:  # fmt: skip
        monkeypatch.setattr(Made, "worth", staticmethod(worth), raising=False)
        monkeypatch.setattr(Made, "shown", staticmethod(shown))
        monkeypatch.setattr(auto, "Trials", Made)
        monkeypatch.setattr(
            auto, "diagnose", lambda f, **o: {"findings": said(f.config), "tau": {"declared": worth(f.config)}}
        )
        monkeypatch.setattr(auto, "candidates", lambda f, overlay, **o: list(remedies.get(f["id"], ())))
        return mend(Overlay.of(draft))

    return run


def open_(*ids: str) -> Callable[[Mapping[str, Any]], list[dict[str, Any]]]:
    """A finding for each field that is not 1 yet."""
    return lambda c: [finding(f"EY-{id_.upper()}") for id_ in ids if c.get(id_) != 1]


def test_what_does_not_help_is_dropped_and_the_next_one_tried(loop):
    out = loop(
        lambda c: float(c.get("a") == 1) - float(c.get("a") == 2), open_("a"),
        {"EY-A": [write("EY-A", "a", 2), write("EY-A", "b", 1), write("EY-A", "a", 1)]},
    )  # fmt: skip
    assert [row["verdict"] for row in out.ledger] == ["refuted", "refuted", "kept"] and out.left == []
    assert "more surprised, by 1.000" in out.ledger[0]["why"] and "does not help" in out.ledger[1]["why"]
    assert [d.step.arguments["values"]["config.json"] for d in out.done] == [{"/a": 1}]
    assert [f["id"] for f in out.findings] == ["EY-A"] and len(out.diagnoses) == 2


def test_what_was_hidden_is_tried_again(loop):
    """b helps only once a is right, and a is told of only later."""
    out = loop(
        lambda c: float(c.get("a") == 1) * (1 + float(c.get("b") == 1)), open_("b", "a"),
        {"EY-A": [write("EY-A", "a", 1, sure=False)], "EY-B": [write("EY-B", "b", 1)]},
    )  # fmt: skip
    assert [(row["round"], row["finding"], row["verdict"]) for row in out.ledger] == [
        (1, "EY-B", "refuted"), (1, "EY-A", "kept"), (2, "EY-B", "kept")
    ]  # fmt: skip
    assert out.left == [] and out.tau == (0.0, 2.0)


def test_faults_that_hide_each_other_beside_a_remedy_that_is_wrong(loop):
    """a and b together, c spoils all."""
    out = loop(
        lambda c: float(c.get("a") == c.get("b") == 1) - 2 * float(c.get("c") == 1), open_("a", "b", "c"),
        {f"EY-{x.upper()}": [write(f"EY-{x.upper()}", x, 1)] for x in "abc"},
    )  # fmt: skip
    assert {d.step.why for d in out.done} == {"EY-A", "EY-B"}
    assert [row["finding"] for row in out.left] == ["EY-C"] and "more surprised" in out.left[0]["why"]
    assert len(out.ledger) < 12


def test_a_step_that_two_findings_ask_for_is_done_once(loop):
    """A swap that is done twice is none."""
    exchange = Step("swap", {"a": K, "b": VALUE}, "EY-A")
    out = loop(lambda c: 1.0, lambda c: [finding("EY-A", "static"), finding("EY-B", "static")],
               {"EY-A": [exchange], "EY-B": [replace(exchange, why="EY-B")]})  # fmt: skip
    assert [d.step.operation for d in out.done][:1] == ["swap"] and len(out.ledger[0]["steps"]) == 1
    assert out.ledger[0]["finding"] == "EY-A, EY-B"


def test_what_went_with_another_is_not_mended_again(loop):
    """Both show the same fault; the step against the first takes the second with it."""
    out = loop(
        lambda c: 1.0, lambda c: [finding("EY-A", "static"), finding("EY-B", "static")] if c.get("a") != 1 else [],
        {"EY-A": [write("EY-A", "a", 1, sure=False), write("EY-A", "a", 1)], "EY-B": [write("EY-B", "z", 1, False)]},
        shown=lambda c: ["EY-A", "EY-B"] if c.get("a") != 1 else [],
    )  # fmt: skip
    assert [row["finding"] for row in out.ledger] == ["EY-A"] and out.left == []


def test_it_ends(loop):
    """A finding that never goes, though each step measures better; the last diagnosis is of what came of it."""
    count = lambda c: c.get("a") if isinstance(c.get("a"), int) else 0  # noqa: E731
    steps: list[Step] = []

    class Endless(list[Step]):
        def __iter__(self):
            steps.append(write("EY-A", "a", len(steps) + 1))
            return iter(steps[-1:])

    out = loop(lambda c: 0.1 * count(c), lambda c: [finding("EY-A")], {"EY-A": Endless()})
    assert len(out.done) == auto.ROUNDS and len(out.diagnoses) == auto.ROUNDS + 1
    assert out.tau[1] == pytest.approx(0.1 * count(out.after.config))
    assert [row["finding"] for row in out.left] == ["EY-A"]


def test_of_guesses_that_fit_alike_the_likelier_is_kept(loop):
    guesses = [write("EY-A", "a", value, sure=False) for value in (3, 1, 2)]
    out = loop(lambda c: {3: 0.5, 1: 1.0, 2: 1.005}.get(c.get("a"), 0.0), open_("a"), {"EY-A": guesses})
    assert [(r["steps"][0]["arguments"]["values"]["config.json"]["/a"], r["verdict"]) for r in out.ledger] == [
        (3, "refuted"), (2, "refuted"), (1, "kept")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "operations"),
    [
        (twice, {"add-arange"}),
        (config(norm_output=True), {"set-flag"}),
        (config(rope_interleave=False), {"write-fields"}),
    ],
    ids=["map", "flag", "rotary pairs"],
)
def test_a_latent_draft_is_mended_too(
    tmp_path: Path, tiny_target: Path, mended: Change, change: Fault, operations: set[str]
):
    """Kimi's and DeepSeek's kind."""
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 2, "qk_rope_head_dim": 8, "v_head_dim": 5}
    who = patient_of(tiny_target, text=TEXT, sizes=sizes)
    broken = save(who, tmp_path / "broken", tiny_target, change)
    done = mended(who, broken, in_place=True)
    assert (done.left, set(steps(done))) == ([], operations)
    assert done.tau[1] == pytest.approx(tau(who), rel=0.01)
    assert done.tau[1] > done.tau[0] + 0.1
