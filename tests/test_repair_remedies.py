"""Every fault is undone by a step that is offered against what the doctor says of it, or its finding says why not.

pytest -q tests/test_repair_remedies.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.doctor import groups
from eyas.doctor.checks.weights import about
from eyas.doctor.examine import examine
from eyas.doctor.hypotheses import Context, hypotheses
from eyas.engines.compare import differences
from eyas.engines.profiles import profile
from eyas.engines.reading import Seen
from eyas.repair import remedies_measured, remedies_static
from eyas.repair.operations import OPERATIONS, perform
from eyas.repair.overlay import Overlay
from eyas.repair.remedies import candidates, refusals, steps_for, unrepairable
from eyas.repair.step import Step
from eyas.target.weights import load_ends
from mending import (
    FACTS,
    D,
    V,
    change,
    healthy,
    logits_of,
    right_map,
    same_tensors,
    says_the_same,
    small_target,
    specimen,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "faults"))
from kinds import FAULTS, Held

DIRECTIONS = {"norm_before_fc": True}  # the healthy draft has a norm before fc to lose
FLOAT = 1e-5


def confirmed(convention: str, best: Any, **more: Any) -> dict[str, Any]:
    """As `diagnose` reports a hypothesis that fits better."""
    return {"id": groups.group(convention).id, "status": "confirmed", "severity": "error", "convention": convention,
            "best": best, **more}  # fmt: skip


def static(id_: str, **more: Any) -> dict[str, Any]:
    return {"id": id_, "status": "static", "severity": "error", "convention": None, **more}


def undone_by(overlay: Overlay, good: Overlay, steps: list[Step]) -> Step | None:
    """The first of the alternatives under which the draft says what the healthy one says."""
    for step in steps:
        after = perform(overlay, step).after
        if after.reading is not None and not specimen(after).lacking and says_the_same(after, good):
            return step
    return None


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, and a healthy draft in two styles."""
    folder = tmp_path_factory.mktemp("remedies")
    small_target(folder / "target")
    for style in ("flat", "prefixed"):
        healthy(folder / style, style, **DIRECTIONS)
    return folder


# ---------------------------------------------------------------- the faults of the benchmark

SEEN = "seen in the files"
MEASURED: dict[str, tuple[str, Any]] = {
    "d2t shuffled": ("d2t", "sorted offsets"),
    "d2t rolled by one": ("d2t", "sorted offsets"),
    "taps one on": ("taps", [2, 4, 5]),
    "taps one back": ("taps", [2, 4, 5]),
    "taps the first three": ("taps", [2, 4, 5]),
    "highest tap is the last layer": ("taps", [2, 4, 5]),
    "taps doubled": ("taps", [2, 4, 5]),
    "norm_before_residual flipped": ("norm_before_residual", False),
    "norm_output flipped": ("norm_output", False),
    "hidden_norm <-> norm": ("norm_names", "hidden_norm <-> norm"),
    "norm weights minus one": ("rms_norm_offset", True),
    "k <-> v": ("qkv", "k_proj <-> v_proj"),
    "gate <-> up": ("gate_up", "gate_proj <-> up_proj"),
    "halves of qkv": ("layer_input", "state_embedding"),
    "rotary pairs interleaved": ("rope_layout", "interleaved"),
    "o_proj transposed": ("transposed", "o_proj"),
    "fc transposed": ("transposed", "fc"),
    "slices of fc 2 1 0": ("slice_order", [5, 4, 2]),
    "slices of fc 0 2 1": ("slice_order", [2, 5, 4]),
    "hidden_act gelu": ("hidden_act", "silu"),
    "rope_theta 100": ("rope_theta", 10000.0),
    "rope_theta 10,000,000": ("rope_theta", 10000.0),
    "rope_scaling linear 8": ("rope_type", "default"),
    "positions that stand still": ("rope_step", 1),
    "random embedding stored": ("embedding", "target"),
    "fc under another name": ("name of fc", "fusion.weight"),
    "hidden_norm under another name": ("name of hidden_norm", "midlayer.h_norm.weight"),
}
"""What trials confirm: convention and best."""
STATIC: dict[str, str] = {
    "d2t absolute": "EY-D2T-ABSOLUTE",
    "d2t subtracted twice": "EY-D2T-TWICE",
    "d2t arange": "EY-D2T-ARANGE",
    "d2t zeros": "EY-D2T-ZEROS",
    "d2t truncated": "EY-D2T-SIZE",
    "d2t out of range": "EY-D2T-T2D",  # in a vocabulary as small as this one
    "d2t duplicates": "EY-D2T-DUPLICATE",
    "d2t as floats": "EY-D2T-DTYPE",
    "t2d of another map": "EY-D2T-T2D",
    "taps out of range": "EY-TAPS-RANGE",
    "one tap too many": "EY-TAPS-COUNT",
    "norm before fc unflagged": "EY-NORM-UNFLAGGED",
    "tied": "EY-TIED-PRUNED",
    "wrong number of heads": "EY-TENSOR-SHAPE",
    "draft_vocab_size absent": "EY-VOCAB-UNNAMED",
    "vocab_size of another target": "EY-VOCAB-TARGET",
}
"""What the files prove, or show."""
REFERENCED: dict[str, dict[str, Any]] = {
    "d2t and t2d missing": static("EY-D2T-MISSING"),
    "d2t of another run": confirmed("d2t", "another map", id="EY-D2T-OTHER"),
    "d2t of another vocabulary": confirmed("d2t", "another map", id="EY-D2T-OTHER"),
    "norm before fc dropped": confirmed("norm_before_fc", True),
    "all norms ones": static("EY-NORM-UNTRAINED"),
    "head missing": static("EY-HEAD-MISSING"),
    "head untrained": static("EY-TENSOR-FRESH", convention="head"),
    "down_proj missing": static("EY-TENSOR-MISSING"),
    "fc untrained": static("EY-TENSOR-FRESH", convention="tensor fc"),
    "NaN in fc": static("EY-TENSOR-NAN", convention="tensor fc"),
}
"""What is lost: a reference brings it back, nothing else does."""
REAL = [f for f in FAULTS if not f.harmless and not f.launch and f.data is None]


def put_in(here: Path, folder: Path, fault: Any, style: str) -> Overlay:
    held = Held.read(here / style, here / "target").copy()
    other = torch.randperm(V, generator=torch.Generator().manual_seed(8))[:D].sort().values
    assert fault.apply(replace_map(held, other)) is not None, "it does not apply to this draft"
    return Overlay.of(held.write(folder), FACTS)


def replace_map(held: Held, other: torch.Tensor) -> Held:
    held.other_map = other
    return held


def test_each_fault_of_the_benchmark_is_decided_about():
    assert {f.name for f in REAL} == MEASURED.keys() | STATIC.keys() | REFERENCED.keys()


@pytest.mark.parametrize("style", ["flat", "prefixed"])
@pytest.mark.parametrize("fault", REAL, ids=lambda f: f.name)
def test_each_fault_is_undone(here: Path, tmp_path: Path, fault: Any, style: str):
    overlay, good = put_in(here, tmp_path / "d", fault, style), Overlay.of(here / style, FACTS)
    target, reference = here / "target", here / "prefixed"
    if fault.name in STATIC:
        shown = {f.id: f.to_dict() for f in examine(tmp_path / "d", FACTS)}
        assert STATIC[fault.name] in shown, list(shown)
        finding = shown[STATIC[fault.name]]
        offered = steps_for(finding, overlay, target=target)
        done = undone_by(overlay, good, offered)
        guessed = ("t2d of another map", "d2t out of range", "taps out of range", "one tap too many")
        assert done is not None and (done == offered[0] or fault.name in guessed)
        assert done.sure == (fault.name not in guessed)
        if fault.name in ("tied", "draft_vocab_size absent"):
            assert perform(overlay, done).after.config == good.config | {"eagle_config": overlay.config["eagle_config"]}
    elif fault.name in MEASURED:
        finding = confirmed(*MEASURED[fault.name])
        offered = steps_for(finding, overlay, target=target)
        done = undone_by(overlay, good, offered)
        fc_alone = fault.name.startswith("slices of fc")  # the fault left the norm before fc as it was
        assert done == offered[1 if fc_alone else 0] and done.sure != fc_alone
        if fault.name not in ("random embedding stored", "norm weights minus one"):
            assert same_tensors(perform(overlay, done).after, good)
    else:
        finding = REFERENCED[fault.name]
        done = undone_by(overlay, good, steps_for(finding, overlay, reference=reference))
        assert done is not None and done.sure
        without = steps_for(finding, overlay)
        assert undone_by(overlay, good, without) is None
        if not without:
            assert unrepairable(finding)


def test_a_step_says_what_it_is_against(here: Path, tmp_path: Path):
    fault = next(f for f in FAULTS if f.name == "d2t subtracted twice")
    overlay = put_in(here, tmp_path / "d", fault, "flat")
    finding = next(f.to_dict() for f in examine(tmp_path / "d", FACTS) if f.id == "EY-D2T-TWICE")
    assert steps_for(finding, overlay) == [Step("add-arange", why="EY-D2T-TWICE")]
    both = confirmed("d2t", "subtracted twice", id="EY-D2T-TWICE")
    assert [str(s) for s in steps_for(both, overlay)] == ["add-arange", "set-map-form (form = subtracted twice)"]


def test_what_is_not_said_for_certain_is_left_alone(here: Path):
    facts = replace(FACTS, max_position=256)
    overlay = Overlay.of(here / "flat", facts)
    for status in ("inconclusive", "refuted", "not_evaluated"):
        assert candidates(confirmed("d2t", "absolute") | {"status": status}, overlay) == []
    for severity in ("ok", "info"):
        assert candidates(static("EY-ROPE-UNNAMED", severity=severity), overlay) == []
    found = [f.to_dict() for f in examine(here / "flat", facts)]
    assert [s for f in found for s in steps_for(f, overlay, target=here / "target") if s.sure] == []
    why = refusals(static("EY-D2T-ABSOLUTE"), overlay)
    assert "d2t is right as it stands" in why["absolute-to-offset"]


# ---------------------------------------------------------------- hypotheses and steps say the same

IMPOSSIBLE = ("norm_before_head", "state_shift", "label_shift", "rope_step", "embedding_scale")


@pytest.mark.parametrize("style", ["eyas", "flat", "fused", "speculators"])
def test_a_step_makes_of_the_files_what_the_hypothesis_makes_of_the_specimen(here: Path, tmp_path: Path, style: str):
    ends = load_ends(here / "target")
    folder = healthy(tmp_path / "d", style, **(DIRECTIONS if style in ("eyas", "flat") else {}))
    overlay = Overlay.of(folder, FACTS)
    base = specimen(overlay)
    context = Context(FACTS, base.embedding, ends.head, frozenset(range(9)))
    seen: dict[str, int] = {}
    for h in hypotheses(base, context):
        finding = confirmed(h.group, h.value)
        offered = steps_for(finding, overlay, target=here / "target")
        if not offered:
            possible = h.group in IMPOSSIBLE or (style == "speculators" and h.group == "norm_output")
            assert possible and unrepairable(finding), (h.group, h.label)
            continue
        wanted, after = h.apply(base), perform(overlay, offered[0]).after
        got = specimen(after)
        assert torch.equal(wanted.ids, got.ids), (h.group, h.label)
        assert torch.allclose(logits_of(wanted), logits_of(got), atol=FLOAT), (h.group, h.label, str(offered[0]))
        seen[h.group] = seen.get(h.group, 0) + 1
    assert seen.keys() >= {
        "taps", "slice_order", "norm_before_residual", "hidden_act", "rms_norm_offset", "rope_theta", "head",
        "norm_names", "layer_input", "gate_up", "qkv", "transposed", "rope_layout",
    }  # fmt: skip
    assert sum(seen.values()) >= 30


def test_declared_otherwise_than_trained(here: Path, tmp_path: Path):
    """Where eyas.json alone is wrong, it alone is changed."""
    for name, wrong, right in (("rms_norm_offset", True, False), ("layer_input", "state_embedding", "embedding_state")):
        overlay = Overlay.of(healthy(tmp_path / name, "eyas", **{name: wrong}), FACTS)
        (step,) = steps_for(confirmed(name, right), overlay)
        done = perform(overlay, step)
        assert step.operation == "declare" and not done.tensors
        assert getattr(done.after.reading.conventions, name) == right


def test_a_scaling_of_the_targets(tmp_path: Path):
    scaled = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    facts = replace(FACTS, rope_theta=500.0, rope_parameters=scaled)
    overlay = Overlay.of(healthy(tmp_path / "d", "flat"), facts)
    (step,) = steps_for(confirmed("rope_type", "linear"), overlay)
    c = perform(overlay, step).after.reading.conventions
    assert (c.rope_type, dict(c.rope_scaling), c.rope_theta) == ("linear", {"factor": 4.0}, 500.0)
    assert steps_for(confirmed("rope_type", "linear"), replace(overlay, facts=None)) == []
    assert "--target" in str(unrepairable(confirmed("rope_type", "linear")))


def test_embeddings(here: Path, tmp_path: Path):
    table = torch.randn(V, 32, generator=torch.Generator().manual_seed(2))
    folder = change(healthy(tmp_path / "d", "eyas"), lambda t, c: t.update({"embed_tokens.weight": table}))
    overlay = Overlay.of(folder, FACTS)
    (own,) = steps_for(confirmed("embedding", "own"), overlay)
    assert perform(overlay, own).after.reading.conventions.embedding == "own"
    drop, copy = steps_for(confirmed("embedding", "target"), overlay, target=here / "target")
    assert "embed_tokens.weight" not in perform(overlay, drop).after.tensors and copy.sure is False
    for id_ in ("EY-EMBED-FRESH", "EY-EMBED-SHAPE"):
        assert steps_for(static(id_, convention="embedding"), overlay)[0].operation == "drop-embedding"
    (scaled,) = steps_for(confirmed("embedding_scale", 2.0), overlay)
    assert torch.equal(perform(overlay, scaled).after.ref("embed_tokens.weight").load(), table * 2)


def test_one_tensor_of_the_reference(here: Path, tmp_path: Path):
    def inject(tensors: dict[str, torch.Tensor], _: Any) -> None:
        tensors["midlayer.mlp.up_proj.weight"] = torch.zeros(48, 32)

    overlay = Overlay.of(change(healthy(tmp_path / "d", "flat", **DIRECTIONS), inject), FACTS)
    for finding in (
        confirmed("tensor up_proj", "the reference's"),
        static("EY-TENSOR-ZERO", convention=about("midlayer.mlp.up_proj.weight")),
    ):
        (step,) = steps_for(finding, overlay, reference=here / "prefixed")
        assert same_tensors(perform(overlay, step).after, Overlay.of(here / "flat", FACTS))
        assert steps_for(finding, overlay) == [] and "--reference" in str(unrepairable(finding))


def test_maps_of_a_reference_by_name(here: Path, tmp_path: Path):
    torch.save(right_map().ids, tmp_path / "ids.pt")
    overlay = Overlay.of(
        change(healthy(tmp_path / "d", "flat"), lambda t, c: t.update(d2t=torch.arange(D) + 60)), FACTS
    )
    (step,) = steps_for(confirmed("d2t", "ids of ids.pt"), overlay, reference=tmp_path / "ids.pt")
    assert step.arguments["read_as"] == "ids"
    assert same_tensors(perform(overlay, step).after, Overlay.of(healthy(tmp_path / "good", "flat"), FACTS))


# ---------------------------------------------------------------- other findings


def test_layer_ids_in_the_wrong_places(tmp_path: Path):
    ids = "eagle_aux_hidden_state_layer_ids"
    facts = replace(FACTS, max_position=256)
    places: dict[str, tuple[Any, ...]] = {
        "EY-TAPS-TOP-ONLY": ([1, 4, 6], ..., True),
        "EY-TAPS-NESTED-ONLY": (..., [1, 3, 4], True),
        "EY-TAPS-SAME-TWICE": ([1, 4, 6], [1, 4, 6], True),
        "EY-TAPS-UNNAMED": (..., ..., False),
        "EY-TAPS-KIND": ("2,4,5", ..., False),
    }
    for id_, (top, inner, sure) in places.items():

        def inject(tensors: Any, config: dict[str, Any], top: Any = top, inner: Any = inner) -> None:
            del config[ids], config["eagle_config"]
            config.update({} if top is ... else {ids: top})
            config.update({} if inner is ... else {"eagle_config": {ids: inner}})

        folder = change(healthy(tmp_path / id_, "flat"), inject)
        overlay = Overlay.of(folder, facts)
        finding = next(f.to_dict() for f in examine(folder, facts) if f.id == id_)
        step = steps_for(finding, overlay)[0]
        after = perform(overlay, step).after
        taps = (1, 4, 6) if isinstance(top, list) else (2, 4, 5)
        assert step.sure == sure and after.reading.conventions.taps == taps
        for engine in ("sglang", "vllm", "llamacpp"):
            assert profile(engine).read(Seen(after.folder, facts, {})).conventions.taps == taps


def test_configs(tmp_path: Path):
    def injected(config: dict[str, Any]) -> None:
        config.update(architectures=["Nobody"], use_cache=None, draft_vocab_size=None, hidden_act="gelu")

    folder = change(healthy(tmp_path / "d", "flat"), lambda t, c: injected(c))
    overlay = Overlay.of(folder, replace(FACTS, max_position=512))
    found = {f.id: f.to_dict() for f in examine(folder, overlay.facts)}
    wanted = {
        "EY-ARCHITECTURE": {"architectures": ["LlamaForCausalLMEagle3"]},
        "EY-CONFIG-NULL": {"draft_vocab_size": D},
        "EY-POSITION-SHORT": {"max_position_embeddings": 512},
        "EY-ACTIVATION": {"hidden_act": "silu"},
    }
    for id_, values in wanted.items():
        step = steps_for(found[id_], overlay)[0]
        after = perform(overlay, step).after
        assert values.items() <= after.config.items() and step.sure == (id_ != "EY-ACTIVATION")
        assert "use_cache" not in after.config or id_ != "EY-CONFIG-NULL"


def test_a_norm_that_is_flagged_and_missing(here: Path, tmp_path: Path):
    folder = change(healthy(tmp_path / "d", "flat", **DIRECTIONS), lambda t, c: t.pop("input_norm.weight"))
    overlay = Overlay.of(folder, FACTS)
    finding = next(f.to_dict() for f in examine(folder, FACTS) if f.id == "EY-NORM-MISSING")
    first, *guesses = steps_for(finding, overlay, reference=here / "prefixed")
    assert same_tensors(perform(overlay, first).after, Overlay.of(here / "flat", FACTS)) and first.sure
    assert [g.operation for g in guesses] == ["set-flag", "norm-of-ones"] and not any(g.sure for g in guesses)


def test_an_unknown_tensor(here: Path, tmp_path: Path):
    folder = change(healthy(tmp_path / "d", "flat"), lambda t, c: t.update({"medusa.weight": torch.ones(3, 3)}))
    overlay = Overlay.of(folder, FACTS)
    finding = next(f.to_dict() for f in examine(folder, FACTS) if f.id == "EY-TENSOR-UNKNOWN")
    (step,) = steps_for(finding, overlay)
    assert step.operation == "drop-tensors" and not step.sure
    folder = change(healthy(tmp_path / "e", "flat"), lambda t, c: t.update({"fusion.weight": t.pop("fc.weight")}))
    found = {f.id: f.to_dict() for f in examine(folder, FACTS)}
    for id_ in ("EY-TENSOR-UNKNOWN", "EY-TENSOR-MISSING"):
        (step,) = steps_for(found[id_], Overlay.of(folder, FACTS))
        assert step == Step("rename", {"name": "fusion.weight", "to": "fc.weight"}, id_, sure=False)


def test_a_full_vocabulary(tmp_path: Path):
    def inject(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = torch.randn(V, 32)
        tensors["d2t"], tensors["t2d"] = torch.arange(V).flip(0), torch.ones(V, dtype=torch.bool)
        config["draft_vocab_size"] = V

    folder = change(healthy(tmp_path / "d", "flat"), inject)
    finding = next(f.to_dict() for f in examine(folder, FACTS) if f.id == "EY-D2T-FULL")
    assert [s.operation for s in steps_for(finding, Overlay.of(folder, FACTS))] == ["drop-maps"]


def test_what_an_engine_reads_otherwise(tmp_path: Path):
    """An Eyas draft whose config.json somebody edited: eyas.json knows better."""

    def inject(tensors: Any, config: dict[str, Any]) -> None:
        config.update(norm_output=True, rope_theta=50.0, eagle_aux_hidden_state_layer_ids=[3, 5, 6])
        config["rope_parameters"]["rope_theta"] = 50.0

    folder = change(healthy(tmp_path / "d", "eyas"), inject)
    overlay = Overlay.of(folder, FACTS)
    for _ in range(3):
        read = profile("vllm").read(Seen(overlay.folder, FACTS, {}))
        first = differences(overlay.reading, read)[0]
        for finding in (
            static("EY-ENGINE", evidence=f"vllm: {first.text}"),
            confirmed(first.what, None, id="EY-AS-READ"),
        ):
            (step,) = steps_for(finding, overlay)
        overlay = perform(overlay, step).after
    read = profile("vllm").read(Seen(overlay.folder, FACTS, {}))
    assert differences(overlay.reading, read) == []
    assert "another engine" in str(unrepairable(static("EY-ENGINE")))


def test_every_remedy_names_operations_that_exist(here: Path, tmp_path: Path):
    overlay = Overlay.of(here / "flat", FACTS)
    for id_ in remedies_static.REMEDIES:
        for step in candidates(
            static(id_, convention="tensor fc"), overlay, target=here / "target", reference=here / "flat"
        ):
            assert step.operation in OPERATIONS and step.why == id_
    for name in remedies_measured.REMEDIES:
        assert name in groups.GROUPS


UNREPAIRABLE = [
    "EY-LAUNCH-ALGORITHM", "EY-SERVED-CLIFF", "EY-FEATURES-SHIFT", "EY-MEASURED-NOTHING", "EY-MEASURED-BLIND",
    "EY-D2T-OTHER", "EY-D2T-T2D", "EY-TENSOR-NAN", "EY-WIDTH-TARGET", "EY-FILES-BESIDE", "EY-NORM-UNTRAINED",
]  # fmt: skip


@pytest.mark.parametrize("id_", UNREPAIRABLE)
def test_what_no_operation_mends_has_a_reason_and_a_way_out(here: Path, id_: str):
    finding = static(id_)
    why = str(unrepairable(finding))
    assert len(why) > 40 and not why.endswith(".") and ":" in why
    overlay = Overlay.of(here / "flat", FACTS)
    assert not [s for s in steps_for(finding, overlay) if s.sure]


def test_training_conventions_have_no_repair(here: Path):
    overlay = Overlay.of(here / "flat", FACTS)
    for name, best in (("state_shift", 1), ("label_shift", -1), ("rope_step", 0), ("norm_before_head", False)):
        finding = confirmed(name, best)
        assert steps_for(finding, overlay) == [] and "train" in str(unrepairable(finding))
    assert unrepairable(confirmed("norm_output", True)) is None


def test_nothing_was_written(here: Path):
    assert sorted(p.name for p in (here / "flat").iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(here / "flat" / "model.safetensors").keys() == Overlay.of(here / "flat", FACTS).tensors.keys()
