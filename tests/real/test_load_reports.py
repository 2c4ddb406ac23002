"""The reports of the real loaders can be relied on: what is known of each engine for certain is what they say.

pytest -q -m engine tests/real/test_load_reports.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from variants import VARIANTS, build_target

from eyas.engines.environment import ready

pytestmark = pytest.mark.engine
ENGINES = ("sglang", "vllm", "llamacpp")
QKV = [f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"]
ASKED = (
    "flat", "only_q", "no_hidden_norm", "unknown_key", "taps_both", "taps_top_level", "taps_nested", "own_embedding",
    "no_lm_head", "absolute_d2t",
)  # fmt: skip


@pytest.fixture(scope="module")
def load_reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, dict[str, Any]]]:
    """Engine -> variant -> what its loader reports; each engine is started once."""
    root = tmp_path_factory.mktemp("reports")
    target = build_target(root / "target")
    drafts = [VARIANTS[name](root / name) for name in ASKED]
    known: dict[str, dict[str, dict[str, Any]]] = {}

    def ask(name: str) -> dict[str, dict[str, Any]]:
        if name not in known:
            environment = ready(name)
            assert environment is not None, f"run `eyas engines setup {name}` (make test-engines does)"
            known[name] = dict(zip(ASKED, environment.load_report(drafts, target), strict=True))
        return known[name]

    return ask


@pytest.mark.parametrize("name", ENGINES)
def test_the_plain_draft_loads_whole(name: str, load_reports):
    report = load_reports(name)["flat"]
    assert report["raises"] is None
    unfilled = {key for key, p in report["parameters"].items() if p["filled"] != "whole"}
    assert unfilled <= {"model.embed_tokens.weight"}, "the embedding is the target's"
    assert report["ignored"] in (["t2d"], [])
    assert report["captured"] == [2, 4, 5]
    used = {key for p in report["parameters"].values() for key in p["keys"]}
    assert "midlayer.self_attn.q_proj.weight" in used and "lm_head.weight" in used


@pytest.mark.parametrize("name", ENGINES)
def test_every_variant_is_reported(name: str, load_reports):
    for variant, report in load_reports(name).items():
        assert report["engine"] == name, variant
        if report["raises"]:
            assert set(report["raises"]) == {"type", "stage", "message"}, variant
        else:
            assert report["parameters"], variant


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_parts_of_a_fused_projection_are_told_apart(name: str, load_reports):
    reports = load_reports(name)
    projection = "model.layers.0.self_attn.qkv_proj.weight"
    whole, part = (reports[variant]["parameters"][projection] for variant in ("flat", "only_q"))
    assert sorted(whole["keys"]) == sorted(QKV) and whole["filled"] == "whole"
    assert part["keys"] == QKV[:1] and part["filled"] == "partly" and part["created"] == "uninitialised"
    norm = reports["no_hidden_norm"]["parameters"]["model.layers.0.hidden_norm.weight"]
    assert (norm["filled"], norm["created"]) == ("not", "ones")


def test_an_unknown_key_is_ignored_refused_or_cannot_be_converted(load_reports):
    assert "foo.weight" in load_reports("sglang")["unknown_key"]["ignored"]
    assert load_reports("vllm")["unknown_key"]["raises"]["stage"] == "weights"
    assert load_reports("llamacpp")["unknown_key"]["raises"]["stage"] == "convert"


def test_taps_are_counted_as_each_engine_counts(load_reports):
    captured = {name: load_reports(name)["taps_both"]["captured"] for name in ENGINES}
    assert captured == {name: [1, 3, 6] for name in ENGINES}
    assert load_reports("sglang")["taps_top_level"]["captured"] == [2, 4, 5]
    assert load_reports("llamacpp")["taps_nested"]["captured"] == [2, 4, 5]
    assert load_reports("vllm")["taps_nested"]["captured"] == [1, 3, 6]


def test_embedding_and_head_are_shared_as_each_engine_shares(load_reports):
    sglang, vllm = load_reports("sglang"), load_reports("vllm")
    assert sglang["own_embedding"]["shared"]["embedding"] and not vllm["own_embedding"]["shared"]["embedding"]
    assert vllm["no_lm_head"]["shared"]["head"] and not sglang["no_lm_head"]["shared"]["head"]
    assert (
        sglang["flat"]["hot_token_id"]
        == vllm["flat"]["draft_id_to_target_id"]
        == load_reports("llamacpp")["flat"]["d2t"]
    )
