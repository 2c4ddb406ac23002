"""What an engine would run: equal to what was declared where it reads all of it, and off by what it does not.

pytest -q tests/test_doctor_as_read.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from doctoring import NORM_WEIGHTS, QKV, Config, Patient, Tensors, patient_of, save
from drafts import write_flat
from eyas.doctor.measure import same
from eyas.doctor.readings import Readings
from eyas.doctor.specimen import Specimen
from eyas.doctor.trial import Bench

TEXT = {"documents": 4, "length": 14}
TAPS = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}


def read(folder: Path, target: Path, *engines: str, **launch: Any) -> Readings:
    return Readings.open(folder, target, engines or ("sglang", "vllm"), launch)


def patient(target: Path, **conventions: Any) -> Patient:
    return patient_of(target, text=TEXT, **conventions)


def surprise(who: Patient, *specimens: Specimen) -> list[float]:
    return Bench(who.material, steps=2).surprise(specimens).mean((1, 2)).tolist()


# ---------------------------------------------------------------- what Eyas writes


ALIKE = [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}]
OFF = [
    ({"norm_before_residual": True}, "sglang", {"norm_before_residual": False}),
    ({"norm_before_residual": True}, "vllm", {}),
    ({"norm_output": True}, "llamacpp", {"norm_output": False}),
    ({"sliding_window": 5}, "sglang", {"sliding_window": None}),
    ({"sliding_window": 5}, "vllm", {}),
    ({"layer_input": "state_embedding"}, "vllm", {"layer_input": "embedding_state"}),
    ({"norm_before_head": False}, "sglang", {"norm_before_head": True}),
    ({"qk_norm": True}, "vllm", {}),
    ({"fc_norm": True, "norm_before_residual": True}, "sglang", {"norm_before_residual": False}),
]


@pytest.mark.parametrize("flags", ALIKE, ids=str)
def test_what_eyas_writes_is_run_as_declared(tmp_path: Path, tiny_target: Path, flags: dict[str, Any]):
    who = patient(tiny_target, **flags)
    readings = read(save(who, tmp_path / "d", tiny_target), tiny_target)
    assert readings.declared is not None and readings.refusal == "" and readings.has_target()
    assert set(readings.as_read) == {"sglang", "vllm"} and readings.differences == {"sglang": [], "vllm": []}
    values = surprise(who, who.specimen, readings.declared, *readings.as_read.values())
    assert values[1:] == pytest.approx([values[0]] * 3, abs=1e-5)
    for name, specimen in readings.as_read.items():
        assert same(specimen, readings.declared), name
        assert specimen.changed == {f"as {name} reads it": readings.engines[name].name}
        for tensor, value in readings.declared.tensors.items():
            assert tensor == "t2d" or specimen.tensors[tensor] is value, "nothing is copied"


@pytest.mark.parametrize(("flags", "engine", "off"), OFF, ids=[f"{e}-{'-'.join(f)}" for f, e, _ in OFF])
def test_what_an_engine_does_not_know_it_leaves_out(tmp_path, tiny_target, flags, engine, off):
    who = patient(tiny_target, **flags)
    readings = read(save(who, tmp_path / "d", tiny_target), tiny_target, engine)
    specimen = readings.as_read[engine]
    assert readings.declared is not None
    different = specimen.conventions.differences(readings.declared.conventions)
    assert {name: theirs for name, (theirs, _) in different.items()} == off
    assert same(specimen, readings.declared) is not bool(off)
    healthy, theirs = surprise(who, readings.declared, specimen)
    assert theirs > healthy + 0.02 if off else theirs == pytest.approx(healthy, abs=1e-5)


@pytest.mark.parametrize(("flags", "engine"), [({"hidden_act": "gelu"}, "vllm"), ({"qk_norm": True}, "sglang")])
def test_an_engine_that_does_not_start_runs_nothing(tmp_path, tiny_target, flags, engine):
    readings = read(save(patient(tiny_target, **flags), tmp_path / "d", tiny_target), tiny_target, engine)
    assert readings.as_read == {} and not readings.engines[engine].starts
    assert readings.declared is not None and readings.declared.lacking == ()


@pytest.mark.parametrize("scheme", ["fused", "midlayer", "layers0"])
def test_however_the_tensors_are_named(tmp_path: Path, tiny_target: Path, scheme: str):
    who = patient(tiny_target)
    folder = write_flat(tmp_path / "d", who.draft, who.vocab_map, scheme, **TAPS)
    readings = read(folder, tiny_target, "vllm")
    assert readings.declared is not None and readings.declared.lacking == ()
    specimen = readings.as_read["vllm"]
    assert specimen.lacking == ()
    healthy, declared, theirs = surprise(who, who.specimen, readings.declared, specimen)
    assert declared == pytest.approx(healthy, abs=1e-5)
    assert theirs == pytest.approx(healthy, abs=1e-5)


# ---------------------------------------------------------------- what is missing


def without(*names: str):
    def change(tensors: Tensors, _: Config) -> None:
        for name in names:
            del tensors[name]

    return change


def test_a_norm_that_is_missing_is_ones(tmp_path: Path, tiny_target: Path):
    who = patient(tiny_target)
    readings = read(save(who, tmp_path / "d", tiny_target, without(NORM_WEIGHTS[1])), tiny_target)
    assert readings.declared is not None and readings.declared.lacking == ("midlayer.hidden_norm.weight [32]",)
    for specimen in readings.as_read.values():
        assert specimen.lacking == () and torch.equal(specimen.tensors[NORM_WEIGHTS[1]], torch.ones(32))
        ones = who.specimen.with_(tensors={NORM_WEIGHTS[1]: torch.ones(32)})
        assert surprise(who, specimen) == pytest.approx(surprise(who, ones), abs=1e-5)


@pytest.mark.parametrize("name", ["fc.weight", QKV[1], "lm_head.weight"])
def test_memory_that_nobody_wrote_is_noise(tmp_path: Path, tiny_target: Path, name: str):
    who = patient(tiny_target)
    readings = read(save(who, tmp_path / "d", tiny_target, without(name)), tiny_target, "sglang")
    specimen = readings.as_read["sglang"]
    assert specimen.lacking == () and specimen.tensors[name].shape == who.tensors[name].shape
    assert 0 < float(specimen.tensors[name].std()) < 0.1
    again = read(tmp_path / "d", tiny_target, "sglang").as_read["sglang"]
    assert torch.equal(again.tensors[name], specimen.tensors[name]), "the same noise on every look"
    healthy, theirs = surprise(who, who.specimen, specimen)
    assert theirs > healthy + 0.5
    kept = [n for n in who.tensors if n not in (name, "t2d")]
    assert all(torch.equal(specimen.tensors[n], who.tensors[n]) for n in kept)


def test_the_targets_head_where_the_engine_shares_it(tmp_path: Path, tiny_target: Path):
    """vLLM cuts the first rows of the target's head for a draft that has none."""
    who = patient(tiny_target)
    readings = read(save(who, tmp_path / "d", tiny_target, without("lm_head.weight")), tiny_target, "vllm")
    assert readings.ends is not None
    specimen = readings.as_read["vllm"]
    assert torch.equal(specimen.tensors["lm_head.weight"], readings.ends.head[:120])
    alone = Readings.open(tmp_path / "d", None, ["vllm"], {}, embedding=who.embedding)
    assert "vllm" not in alone.as_read, "what it would run is not known without the target"


def test_without_a_map_draft_ids_are_target_ids(tmp_path: Path, tiny_target: Path):
    who = patient(tiny_target)
    readings = read(save(who, tmp_path / "d", tiny_target, without("d2t")), tiny_target)
    assert readings.declared is not None
    assert torch.equal(readings.declared.ids, who.vocab_map.ids), "t2d tells it"
    for specimen in readings.as_read.values():
        assert torch.equal(specimen.ids, torch.arange(120))


def test_a_stored_embedding_is_read_by_vllm_and_not_by_sglang(tmp_path: Path, tiny_target: Path):
    who = patient(tiny_target)
    table = torch.randn(300, 32, generator=torch.Generator().manual_seed(4))

    def store(tensors: Tensors, _: Config) -> None:
        tensors["embed_tokens.weight"] = table

    readings = read(save(who, tmp_path / "d", tiny_target, store), tiny_target)
    assert readings.declared is not None and readings.declared.conventions.embedding == "own"
    by_vllm, by_sglang = readings.as_read["vllm"].embedding, readings.as_read["sglang"].embedding
    assert by_vllm is not None and torch.equal(by_vllm, table)
    assert by_sglang is not None and torch.equal(by_sglang.float(), who.embedding)
    declared, vllm, sglang, healthy = surprise(
        who, readings.declared, readings.as_read["vllm"], readings.as_read["sglang"], who.specimen
    )
    assert vllm == pytest.approx(declared, abs=1e-5) and sglang == pytest.approx(healthy, abs=1e-5)
    assert declared > healthy + 0.1


def test_layers_in_another_numbering(tmp_path: Path, tiny_target: Path):
    who = patient(tiny_target)

    def change(_: Tensors, config: Config) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = [3, 5, 6]

    readings = read(save(who, tmp_path / "d", tiny_target, change), tiny_target)
    slices = {name: s.slices for name, s in readings.as_read.items()}
    assert slices["vllm"] == (3, 5, 6)
    healthy, theirs = surprise(who, who.specimen, readings.as_read["vllm"])
    assert theirs > healthy + 0.5


# ---------------------------------------------------------------- readings as a whole


def test_a_config_that_contradicts_itself_is_read_without_the_contradiction(tmp_path: Path, tiny_target: Path):
    who = patient(tiny_target)

    def change(_: Tensors, config: Config) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5, 8]

    readings = read(save(who, tmp_path / "d", tiny_target, change), tiny_target)
    assert readings.case.reading is None and readings.case.refusal
    assert readings.salvaged == "eagle_aux_hidden_state_layer_ids" and readings.declared is not None
    assert readings.declared.slices == (2, 4, 5), "the default of its target"


def test_without_a_target_nothing_can_be_run(tmp_path: Path, tiny_target: Path):
    who = patient(tiny_target)
    folder = save(who, tmp_path / "d", tiny_target)
    readings = Readings.open(folder, None, ["vllm@0.32.0"], {})
    assert not readings.has_target() and readings.named == ("vllm",) and set(readings.engines) == {"vllm"}
    assert readings.declared is not None and readings.declared.lacking == ("the target's embedding",)
    given = Readings.open(folder, None, [], {}, embedding=who.embedding)
    assert given.has_target() and given.named == () and set(given.engines) == {"sglang", "vllm"}


def test_sameness_is_of_what_runs(tiny_target: Path):
    base = patient(tiny_target).specimen
    rounded = {n: t.bfloat16() for n, t in base.tensors.items() if t.is_floating_point()}
    assert same(base, base.with_(tensors={"fc.weight": base.tensors["fc.weight"].clone(), "x": torch.ones(1)}))
    assert same(base.with_(tensors=rounded), base), "the second is compared in the first one's dtype"
    assert same(base, base.with_(conventions={"max_position": 9, "d2t": "absolute", "teacher": "draft_vocabulary"}))
    for other in (
        base.with_(slices=(2, 5, 4)), base.with_(state_shift=1), base.with_(ids=base.ids.flip(0)),
        base.with_(conventions={"rope_theta": 7.0}), base.with_(embedding=None),
        base.with_(tensors={"fc.weight": base.tensors["fc.weight"] + 1e-3}),
    ):  # fmt: skip
        assert not same(base, other)
