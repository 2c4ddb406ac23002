"""The whole diagnosis of small saved drafts, on text that they wrote themselves: stories with their endings.

pytest -q tests/test_doctor_diagnosis.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doctoring import Config, D, Patient, Tensors, V, another_run, patient_of, save
from drafts import write_flat
from eyas.decode.acceptance import Acceptance
from eyas.doctor import features_audit
from eyas.doctor import record as recording
from eyas.doctor.diagnosis import diagnose
from eyas.doctor.material import Material
from eyas.doctor.trial import Bench
from eyas.draft.probe import ProbeInputs, answer, write_probe
from eyas.engines.served import from_number
from eyas.features.layout import FeatureMeta
from eyas.features.writer import ShardBuffer, ShardWriter, plan_digest
from eyas.repair.next_step import next_step
from eyas.vocab import VocabMap

TEXT = {"documents": 14, "length": 32}
IDS = "eagle_aux_hidden_state_layer_ids"
GATE, UP = (f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up"))
Diagnosis = dict[str, Any]


@pytest.fixture
def tell(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Diagnosis]:
    """Diagnose a directory with the patient's text in place of what its target would answer."""

    def diagnosis(folder: Path, who: Patient | Material | None, **more: Any) -> Diagnosis:
        def record(*args: Any, **kwargs: Any) -> Material:
            assert who is not None, "nothing is recorded"
            return who if isinstance(who, Material) else who.material

        monkeypatch.setattr(recording, "record", record)
        told = diagnose(folder, **(more := {"target": tiny_target} | more))
        told["next"] = next_step(told, more["target"])
        json.dumps(told, allow_nan=False)
        return told

    return diagnosis


@pytest.fixture(scope="module")
def who(tiny_target: Path) -> Patient:
    return patient_of(tiny_target, text=TEXT)


def errors(told: Diagnosis) -> list[str]:
    return [f["id"] for f in told["findings"] if f["severity"] == "error"]


def confirmed(told: Diagnosis) -> dict[str, Any]:
    return {f["convention"]: f["best"] for f in told["findings"] if f["status"] == "confirmed"}


def healthy(told: Diagnosis) -> bool:
    return told["verdict"] == "healthy" and told["where"] == "none" and not errors(told) and not confirmed(told)


def config(**values: Any) -> Callable[[Tensors, Config], None]:
    return lambda tensors, config: config.update(values)


# ---------------------------------------------------------------- healthy


@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True, "norm_output": True}], ids=str)
def test_a_healthy_draft_is_called_healthy(tell, tmp_path: Path, tiny_target: Path, flags: dict[str, Any]):
    who = patient_of(tiny_target, text=TEXT, **flags)
    told = tell(save(who, tmp_path / "d", tiny_target), who)
    assert healthy(told) and told["summary"].startswith("Your draft is healthy")
    tau = told["tau"]
    assert tau["declared"] == tau["best"] == tau["as_read"]["sglang"] == tau["as_read"]["vllm"] > 1.5
    assert tau["served"] is tau["training"] is None
    assert told["not_evaluated"] == [] and told["next"].startswith("eyas prove ")
    assert {e["verdict"] for e in told["ledger"]} <= {"refuted", "inconclusive"} and len(told["ledger"]) > 30
    assert not any(f["severity"] == "warning" for f in told["findings"])


def test_the_report_is_whole(tell, tmp_path: Path, tiny_target: Path, who: Patient):
    told = tell(save(who, tmp_path / "d", tiny_target, config(**{IDS: [3, 5, 6]})), who)
    assert set(told) >= {
        "verdict", "where", "summary", "findings", "tau", "acceptance", "controls", "ledger", "positions", "map",
        "tensors", "features", "engines", "not_evaluated", "next", "seconds", "peak_mib", "eyas", "draft",
    }  # fmt: skip
    for f in told["findings"]:
        assert set(f) >= {
            "id", "status", "severity", "convention", "declared", "best", "equivalents", "delta_tau", "interval",
            "evidence", "remedy",
        }  # fmt: skip
        assert f["status"] in ("confirmed", "refuted", "inconclusive", "not_evaluated", "static")
        assert f["severity"] in ("error", "warning", "info", "ok")
    rows = told["ledger"]
    assert [e["order"] for e in rows] == list(range(len(rows)))
    taken = [e for e in rows if e["verdict"] == "confirmed"]
    assert [(e["convention"], e["hypothesis"], e["round"]) for e in taken] == [("taps", "2/4/5", 1)]
    assert taken[0]["delta_tau"] == told["findings"][0]["delta_tau"]
    assert told["acceptance"]["best"]["tau"] == told["tau"]["best"]
    low, high = told["acceptance"]["best"]["interval"]
    assert low < told["tau"]["best"] < high
    assert told["map"]["size"] == D and told["map"]["target_size"] == V
    assert told["map"]["points"][:2] == [[0, int(who.vocab_map.ids[0])], [1, int(who.vocab_map.ids[1])]]
    assert {t["name"] for t in told["tensors"]} == set(who.tensors)
    assert told["features"]["documents"] == 14 and told["features"]["share_top1"] == 1.0
    controls = told["controls"]
    assert controls["best"] < controls["declared"] < controls["knows_nothing"] == round(math.log(V), 3)
    assert controls["best"] < min(controls["shuffled_states"], controls["random_draft"], controls["word_frequencies"])
    assert sum(b["rounds"] for b in told["positions"]) == told["acceptance"]["best"]["rounds"]
    assert told["seconds"] >= 0 and told["peak_mib"] > 100


def test_an_undertrained_draft_is_not_called_broken(tell, tmp_path: Path, tiny_target: Path):
    """It knows nothing of what follows its first word."""
    who = patient_of(tiny_target, text={**TEXT, "carried": 0.1, "odd": 0.2})
    folder = save(who, tmp_path / "d", tiny_target)
    told = tell(folder, who)
    assert healthy(told) and told["tau"]["declared"] < 2
    assert "undertrained rather than broken; it needs more data" in told["summary"]
    served = tell(folder, who, served=from_number(told["tau"]["declared"] - 0.02))
    assert served["verdict"] == "healthy" and served["where"] == "training"
    assert "it needs more data" in served["summary"] and not errors(served)


# ---------------------------------------------------------------- the founding story


def test_the_founding_story(tell, tmp_path: Path, tiny_target: Path):
    """A right map that begins with zeros, the needless fix, its exact inverse; then the cause that remains."""
    ids = torch.cat([torch.arange(20), torch.arange(20, D) + 7])
    who = patient_of(tiny_target, ids=ids, text=TEXT, norm_before_residual=True)
    assert not who.vocab_map.d2t[:20].any()

    def subtract(tensors: Tensors, _: Config) -> None:
        tensors["d2t"] = tensors["d2t"] - torch.arange(D)

    before = tell(save(who, tmp_path / "right", tiny_target), who, engines=["vllm"])
    assert healthy(before)
    zeros = next(f for f in before["findings"] if f["id"] == "EY-D2T-ZERO-PREFIX")
    assert zeros["severity"] == "ok" and "the first 20 offsets are zero because" in zeros["evidence"]

    fixed = tell(save(who, tmp_path / "fixed", tiny_target, subtract), who, engines=["vllm"])
    assert (fixed["verdict"], fixed["where"]) == ("faulty", "checkpoint")
    assert errors(fixed)[0] == "EY-D2T-TWICE" and confirmed(fixed) == {"d2t": "subtracted twice"}
    first = fixed["findings"][0]
    assert "Measured: the vocabulary map: subtracted twice" in first["evidence"]
    assert "Add arange(D) once" in first["remedy"] and first["delta_tau"] > 0.5 and first["interval"][0] > 0
    assert fixed["tau"]["best"] == before["tau"]["declared"] > fixed["tau"]["declared"] + 0.5
    assert fixed["next"].startswith("eyas repair ") and "EY-D2T-TWICE" in fixed["next"]

    undone = tmp_path / "undone"
    save(who, undone, tiny_target, lambda t, c: t.update(d2t=t["d2t"] - torch.arange(D) + torch.arange(D)))
    after = tell(undone, who, engines=["sglang"])
    assert not any(f["convention"] == "d2t" and f["severity"] in ("error", "warning") for f in after["findings"])
    tried = [e for e in after["ledger"] if e["convention"] == "d2t"]
    assert tried and all(e["verdict"] == "refuted" for e in tried)
    assert (after["verdict"], after["where"]) == ("faulty", "export")
    remains = after["findings"][0]
    assert (remains["id"], remains["convention"]) == ("EY-AS-READ", "norm_before_residual")
    assert remains["evidence"].startswith("sglang would run it with an accept length of ")
    assert after["tau"]["as_read"]["sglang"] < after["tau"]["best"] - 0.3


def test_a_suspicious_map_that_is_right_is_acquitted(tell, tmp_path: Path, tiny_target: Path, who: Patient):
    """A head whose rows are in another order: out of order, and right as declared."""
    order = torch.randperm(D, generator=torch.Generator().manual_seed(2))

    def permute(tensors: Tensors, _: Config) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
        tensors["d2t"] = who.vocab_map.ids[order] - torch.arange(D)

    told = tell(save(who, tmp_path / "d", tiny_target, permute), who)
    [found] = [f for f in told["findings"] if f["id"] == "EY-D2T-UNSORTED"]
    assert (found["status"], found["severity"]) == ("refuted", "ok") and "right as declared" in found["evidence"]
    assert "d2t" not in confirmed(told)


# ---------------------------------------------------------------- faults in a directory


def two_at_once(tensors: Tensors, config: Config) -> None:
    tensors[GATE], tensors[UP] = tensors[UP], tensors[GATE]
    config[IDS] = [1, 3, 4]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (two_at_once, {"gate_up": "gate_proj <-> up_proj", "taps": [2, 4, 5]}),
        (lambda t, c: t.update({"fusion.weight": t.pop("fc.weight")}), {"name of fc": "fusion.weight"}),
        (lambda t, c: t.update({"embed_tokens.weight": torch.randn(V, 32)}), {"embedding": "target"}),
    ],
    ids=["two", "name", "embedding"],
)
def test_a_fault_is_the_first_finding(tell, tmp_path: Path, tiny_target: Path, who: Patient, change, wanted):
    told = tell(save(who, tmp_path / "d", tiny_target, change), who)
    assert confirmed(told) == wanted
    assert (told["verdict"], told["where"]) == ("faulty", "checkpoint")
    assert [f["convention"] for f in told["findings"][: len(wanted)]] == list(confirmed(told))
    right = Acceptance.merged(Bench(who.material).acceptance(who.specimen), 4).tau
    assert told["tau"]["best"] == round(right, 4) > told["tau"]["declared"]
    assert "the accept length goes from" in told["summary"]


def test_another_runs_map_beside_another_fault(tell, tmp_path: Path, tiny_target: Path):
    """Both are told, and the best reading is measured with both undone."""
    who = patient_of(tiny_target, text={"documents": 24, "length": 40})
    other = VocabMap.from_absolute(another_run(who.vocab_map.ids, 10, 1), V)

    def change(tensors: Tensors, config: Config) -> None:
        tensors["d2t"], tensors["t2d"] = other.d2t, other.t2d
        config[IDS] = [3, 5, 6]

    told = tell(save(who, tmp_path / "d", tiny_target, change), who, engines=["vllm"])
    assert set(errors(told)) == {"EY-MEASURED-TAPS", "EY-D2T-OTHER"}
    assert confirmed(told) == {"taps": [2, 4, 5], "d2t": "another map"}
    assert told["tau"]["best"] > told["tau"]["declared"] + 0.5
    starts = {e["from"] for e in told["ledger"]}
    assert starts == {"declared", "the map that fits"}


def test_a_tensor_that_is_missing_is_why_nothing_is_known(tell, tmp_path: Path, tiny_target: Path, who: Patient):
    told = tell(save(who, tmp_path / "d", tiny_target, lambda t, c: t.pop("fc.weight")), who)
    assert errors(told) == ["EY-TENSOR-MISSING", "EY-MEASURED-NOTHING"]
    assert (told["verdict"], told["where"]) == ("faulty", "checkpoint")
    assert told["tau"]["declared"] == 1.0 and not told["summary"].startswith("EY-MEASURED")


def test_weights_that_nobody_trained(tell, tmp_path: Path, tiny_target: Path, who: Patient):
    generator = torch.Generator().manual_seed(0)

    def change(tensors: Tensors, _: Config) -> None:
        tensors.update(
            {n: torch.randn(t.shape, generator=generator) * 0.02 for n, t in tensors.items() if t.dim() == 2}
        )

    folder, run = save(who, tmp_path / "d", tiny_target, change), tmp_path / "run"
    told = tell(folder, who, budget=0.3)
    assert "EY-MEASURED-NOTHING" in errors(told) and told["where"] == "training"
    assert not [name for name in confirmed(told) if name is not None], "better by chance is no diagnosis"
    run.mkdir()
    (run / "eyas.json").write_text(json.dumps({"predicted": {"accept_length": 2.4}}))
    lost = tell(folder, who, training=run, budget=0.3)
    assert lost["where"] == "export" and lost["tau"]["training"] == 2.4


def test_a_config_that_contradicts_itself_is_diagnosed_all_the_same(tell, tmp_path, tiny_target, who):
    told = tell(save(who, tmp_path / "d", tiny_target, config(**{IDS: [2, 4, 5, 8]})), who)
    assert "EY-TAPS-COUNT" in errors(told) and told["tau"]["declared"] > 1.5


ODD: dict[str, tuple[Callable[[Tensors, Config], Any], str]] = {
    "no number": (lambda t, c: t.update({"fc.weight": t["fc.weight"] * float("nan")}), "EY-TENSOR-NAN"),
    "quantised": (lambda t, c: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "EY-TENSOR-DTYPE"),
    "three dimensions": (lambda t, c: t.update({"lm_head.weight": t["lm_head.weight"][None]}), "EY-TENSOR-SHAPE"),
    "next to nothing": (lambda t, c: [t.pop(n) for n in list(t) if "fc" not in n], "EY-TENSOR-MISSING"),
    "huge offsets": (lambda t, c: t.update(d2t=t["d2t"] + 2**62), "EY-D2T-RANGE"),
    "offsets of one number": (lambda t, c: t.update(d2t=torch.tensor(3)), "EY-D2T-DTYPE"),
    "no offsets": (lambda t, c: t.update(d2t=torch.zeros(0, dtype=torch.int64)), "EY-D2T-SIZE"),
    "a short embedding": (lambda t, c: t.update({"embed_tokens.weight": torch.randn(290, 32)}), ""),
    "a flat embedding": (lambda t, c: t.update({"embed_tokens.weight": torch.randn(300)}), ""),
    "two layers": (config(num_hidden_layers=2), "EY-TENSOR-MISSING"),
    "other heads": (config(num_attention_heads=8), "EY-TENSOR-SHAPE"),
    "another width": (config(hidden_size=64), "EY-TENSOR-SHAPE"),
    "another target": (config(vocab_size=1000), "EY-VOCAB-TARGET"),
    "an impossible epsilon": (config(rms_norm_eps=0), "EY-READ"),
    "layers beyond the target": (config(**{IDS: [2, 4, 99]}), "EY-TAPS-RANGE"),
    "one layer": (lambda t, c: (c.update({IDS: [4]}), t.update({"fc.weight": t["fc.weight"][:, :32]})), ""),
}


@pytest.mark.parametrize("name", ODD)
def test_nothing_is_so_odd_that_the_diagnosis_fails(tell, tmp_path: Path, tiny_target: Path, who: Patient, name: str):
    change, id_ = ODD[name]
    told = tell(save(who, tmp_path / "d", tiny_target, change), who, budget=1e-6)
    assert id_ in [*errors(told), ""]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, {"rope_type": "default"}),
        ({"hidden_act": "swish2"}, {"hidden_act": "silu"}),
    ],
)
def test_what_no_engine_can_compute_is_read_otherwise(tell, tmp_path, tiny_target, who, values, wanted):
    """Nothing can be run as declared; under another reading everything can."""
    told = tell(save(who, tmp_path / "d", tiny_target, config(**values)), who)
    assert confirmed(told) == wanted
    assert told["tau"]["declared"] == 1.0 and told["tau"]["best"] > 2


# ---------------------------------------------------------------- what else is given


@pytest.mark.parametrize(("served", "where"), [(1.0, "engine"), (1.3, "engine"), (2.8, "none")])
def test_what_is_served_against_what_is_replayed(tell, tmp_path, tiny_target, who, served, where):
    told = tell(save(who, tmp_path / "d", tiny_target), who, served=from_number(served))
    assert told["where"] == where and told["tau"]["served"] == served
    assert told["verdict"] == ("healthy" if where == "none" else "faulty")
    alone = tell(tmp_path / "d", who, served=from_number(served), static=True)
    assert alone["where"] == "unknown" and alone["tau"]["served"] == served


def test_far_less_than_training_predicted_is_the_data(tell, tmp_path: Path, tiny_target: Path):
    who = patient_of(tiny_target, text={**TEXT, "carried": 0.1})
    folder = save(who, tmp_path / "d", tiny_target)
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps({"tau_mean": 4.9}))
    told = tell(folder, who, training=run)
    assert told["where"] == "data" and told["tau"]["training"] == 4.9 and not errors(told)
    missing = tell(folder, who, training=tmp_path / "no")
    assert any("what training predicted" in m["what"] for m in missing["not_evaluated"])
    assert any(f["id"] == "EY-NOT-EVALUATED" for f in missing["findings"])


def test_a_reference_gives_back_map_and_tensor(tell, tmp_path: Path, tiny_target: Path, who: Patient):
    copy = save(who, tmp_path / "copy", tiny_target)

    def change(tensors: Tensors, _: Config) -> None:
        tensors["midlayer.mlp.down_proj.weight"] = torch.randn(32, 48, generator=torch.Generator().manual_seed(1)) * 0.2

    told = tell(save(who, tmp_path / "d", tiny_target, change), who, reference=copy)
    assert confirmed(told) == {"tensor down_proj": "the reference's"}

    def strange(tensors: Tensors, _: Config) -> None:
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(8))[:D].sort().values
        tensors["d2t"], tensors["t2d"] = ids - torch.arange(D), torch.isin(torch.arange(V), ids)

    torch.save({"d2t": who.vocab_map.d2t}, tmp_path / "vocab_mapping.pt")
    mapped = tell(save(who, tmp_path / "m", tiny_target, strange), who, reference=tmp_path / "vocab_mapping.pt")
    assert confirmed(mapped) == {"d2t": "offsets of vocab_mapping.pt"}
    other = patient_of(tiny_target, 7, text={"documents": 2, "length": 8})
    run = tell(copy, who, reference=write_flat(tmp_path / "other", other.draft, other.vocab_map), budget=1e-6)
    assert any("it is another run" in m["what"] for m in run["not_evaluated"])


def features(folder: Path, who: Patient, taps: tuple[int, ...]) -> Path:
    """The patient's text as a folder of Eyas's own features."""
    c = replace(who.draft.conventions, taps=taps, how={})
    meta, m = FeatureMeta(32, V, c, "a" * 64, "b" * 64, "c" * 64), who.material
    lengths = m.offsets.diff().tolist()
    states = torch.cat([m.states[t] for t in taps], -1).bfloat16()
    rows = {"ids": m.ids.int(), "mask": m.mask.to(torch.uint8), "taps": states, "top1": m.choice.int(),
            "final": torch.zeros(len(m.ids), 32).bfloat16(), "logsumexp": torch.zeros(len(m.ids))}  # fmt: skip
    docs = [{name: x[a:b] for name, x in rows.items()} for a, b in zip(m.offsets, m.offsets[1:], strict=False)]
    writer, buffer = ShardWriter(folder, meta), ShardBuffer(meta, lengths)
    for i, doc in enumerate(docs):
        buffer.put(i, **doc)
    names = [f"d{i}" for i in range(len(docs))]
    digest = plan_digest(meta, [(n, d["ids"], d["mask"]) for n, d in zip(names, docs, strict=True)])
    writer.write(0, names, buffer, digest)
    writer.finish(1, {"conversations": "x"}, {"shard_bytes": 1}, {"documents": len(docs)}, 0.1)
    return folder


def test_recorded_features_in_place_of_the_target(tell, monkeypatch, tmp_path: Path, tiny_target: Path, who: Patient):
    monkeypatch.setattr(
        features_audit, "audit", lambda *_: []
    )  # the states are the draft's invention, not the target's
    draft = save(who, tmp_path / "d", tiny_target, config(norm_before_residual=True))
    told = tell(draft, None, features=features(tmp_path / "f", who, (2, 4, 5)))
    assert confirmed(told) == {"norm_before_residual": False}
    assert told["features"]["source"] == str(tmp_path / "f")
    assert any("layers other than those of the features" in m["what"] for m in told["not_evaluated"])
    assert {e["hypothesis"] for e in told["ledger"] if e["convention"] == "taps"} == set()
    other = tell(draft, None, features=features(tmp_path / "g", who, (1, 2, 3)))
    assert any("the states of layers [4, 5] were not recorded" in m["what"] for m in other["not_evaluated"])


def test_time_that_is_over_is_said(tell, tmp_path: Path, tiny_target: Path, who: Patient):
    told = tell(save(who, tmp_path / "d", tiny_target, config(**{IDS: [3, 5, 6]})), who, budget=1e-6)
    assert told["ledger"] == [] and confirmed(told).get("taps") is None
    assert any("the time was over" in m["what"] for m in told["not_evaluated"])


def test_text_that_is_too_little(tell, tmp_path: Path, tiny_target: Path):
    """Said, not failed on: no document with an answer, one document, none in which a round fits."""
    for documents, length, why in ((5, 7, "no document"), (1, 30, "one document")):
        who = patient_of(tiny_target, text={"documents": documents, "length": length})
        told = tell(save(who, tmp_path / why, tiny_target), who)
        assert told["tau"]["declared"] is None and any(why in m["what"] for m in told["not_evaluated"])
        assert "Nothing was replayed" in told["summary"]
    short = patient_of(tiny_target, text={"documents": 20, "length": 8})
    told = tell(save(short, tmp_path / "short", tiny_target, config(**{IDS: [3, 5, 6]})), short)
    assert confirmed(told) == {"taps": [2, 4, 5]} and told["tau"] == told["tau"] | {"declared": None, "best": None}
    assert told["findings"][0]["delta_tau"] is None


def test_few_of_many_documents_hold_an_answer(tell, tmp_path: Path, tiny_target: Path, who: Patient):
    """Those are looked at, whichever they are."""
    m, keep = who.material, {12, 13}
    lengths = [32 if i in keep else 4 for i in range(14)]
    rows = torch.cat([torch.arange(32 * i, 32 * i + n) for i, n in enumerate(lengths)])
    crowd = replace(
        m, ids=m.ids[rows], mask=m.mask[rows], choice=m.choice[rows], states={t: x[rows] for t, x in m.states.items()},
        offsets=torch.tensor([0, *lengths]).cumsum(0),
    )  # fmt: skip
    many = crowd.first([i % 14 for i in range(0, 14 * 5, 1)])
    told = tell(save(who, tmp_path / "d", tiny_target), many)
    assert told["verdict"] == "healthy" and told["tau"]["declared"] > 1.3


# ---------------------------------------------------------------- the probe alone


def probed(folder: Path, who: Patient, documents: int = 6) -> Path:
    m = who.material
    n = int(m.offsets[documents])
    taps = torch.cat([m.states[t][:n] for t in who.draft.conventions.taps], -1)
    needed = m.ids[:n].unique()
    inputs = ProbeInputs(m.ids[:n], m.offsets[: documents + 1], taps, needed, who.embedding[needed])
    (folder / "eyas").mkdir()
    write_probe(folder, inputs, answer(who.draft, who.vocab_map, inputs))
    return folder


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (None, {}),
        (lambda t, c: t.update(d2t=t["d2t"] - torch.arange(D)), {"d2t": "subtracted twice"}),
        (lambda t, c: t.update({GATE: t[UP], UP: t[GATE]}), {"gate_up": "gate_proj <-> up_proj"}),
    ],
    ids=["healthy", "map", "tensors"],
)
def test_a_probe_is_enough_for_trials(tell, tmp_path: Path, tiny_target: Path, change, wanted):
    who = patient_of(tiny_target, text={"documents": 6, "length": 48})
    told = tell(probed(save(who, tmp_path / "d", tiny_target, change), who), None, target=None)
    assert confirmed(told) == wanted
    assert told["verdict"] == ("faulty" if wanted else "healthy")
    assert told["features"]["source"].endswith("eyas/probe.safetensors")
    assert told["tau"]["declared"] is None, "a chain reads words whose embedding is not in the probe"
    assert any("accept lengths" in m["what"] and m["supply"] == "--target T" for m in told["not_evaluated"])
    assert told["controls"]["best"] < 2.5


def test_without_target_features_and_probe_the_files_are_all(tell, tmp_path: Path, tiny_target: Path, who: Patient):
    told = tell(save(who, tmp_path / "d", tiny_target), None, target=None)
    assert told["verdict"] == "healthy" and "Nothing was replayed" in told["summary"]
    assert any(m["supply"] == "--target T" for m in told["not_evaluated"])
    assert told["tau"]["declared"] is None and "ledger" not in told
    assert told["next"] == f"eyas doctor {tmp_path / 'd'} --target TARGET"


# ---------------------------------------------------------------- it touches nothing


def test_nothing_is_written_to_the_draft(tell, tmp_path: Path, tiny_target: Path, who: Patient):
    folder = probed(save(who, tmp_path / "d", tiny_target), who)
    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def state() -> dict[str, tuple[bytes, int]]:
        files = (p for root in (tmp_path, tiny_target) for p in root.rglob("*") if p.is_file())
        return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}

    before = state()
    told = [tell(folder, who, **more) for more in ({}, {"static": True}, {"target": None}, {})]
    assert state() == before
    first, last = ({k: v for k, v in t.items() if k not in ("seconds", "peak_mib")} for t in (told[0], told[-1]))
    assert first == last, "the same directory twice is the same diagnosis"
