"""Flags of a launch that do not fit each other, the draft or the target.   pytest -q tests/test_doctor_launch.py"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafts import make_draft
from eyas.doctor.case import Case
from eyas.doctor.checks import launch as family
from eyas.doctor.checks.launch import length
from eyas.doctor.examine import examine
from eyas.doctor.finding import Finding, Severity
from eyas.draft.checkpoint import save_draft
from eyas.engines.launch import options
from eyas.errors import BadInput
from eyas.target.facts import TargetFacts, read_facts


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on five steps of its own, as its eyas.json says."""
    model, vocab_map = make_draft()
    settings_of = {"settings": {"ttt_steps": 5}}
    return save_draft(model, vocab_map, tmp_path_factory.mktemp("launch") / "my-draft", provenance=settings_of)


@pytest.fixture
def facts(tiny_target: Path) -> TargetFacts:
    return read_facts(tiny_target)


SGLANG = "python -m sglang.launch_server --model-path t --speculative-algorithm EAGLE3 "
SGLANG += "--speculative-draft-model-path {draft} --speculative-num-steps 3 --speculative-eagle-topk 1 "
SGLANG += "--speculative-num-draft-tokens 4"
VLLM = """vllm serve t --speculative-config '{"method": "eagle3", "model": "{draft}", "num_speculative_tokens": 4}'"""
LLAMA = "llama-server -m t.gguf --model-draft d.gguf --spec-type draft-eagle3 --spec-draft-n-max 3"


def of(draft: Path, line: str, facts: TargetFacts | None = None) -> list[Finding]:
    return list(family.check(Case.open(draft, facts, launch=options(line.replace("{draft}", str(draft))))))


@pytest.mark.parametrize("line", ["", SGLANG, VLLM, LLAMA, SGLANG.replace("model-path {", "model {")])
def test_a_right_launch(draft: Path, facts: TargetFacts, line: str):
    assert of(draft, line, facts) == []
    assert of(draft, line) == []


FAULTS = [
    ("EY-LAUNCH-ALGORITHM", SGLANG.replace("EAGLE3", "EAGLE")),
    ("EY-LAUNCH-ALGORITHM", SGLANG.replace("EAGLE3", "eagle")),
    ("EY-LAUNCH-ALGORITHM", SGLANG.replace("EAGLE3", "NEXTN")),
    ("EY-LAUNCH-ALGORITHM", SGLANG.replace("--speculative-algorithm EAGLE3", "--speculative-algo=EAGLE")),
    ("EY-LAUNCH-ALGORITHM", SGLANG.replace("--speculative-algorithm EAGLE3", "")),
    ("EY-LAUNCH-NO-DRAFT", SGLANG.replace("--speculative-draft-model-path {draft}", "")),
    ("EY-LAUNCH-OTHER-DRAFT", SGLANG.replace("{draft}", "/models/another")),
    ("EY-LAUNCH-STEPS", SGLANG.replace("draft-tokens 4", "draft-tokens 24")),  # sgl-project/SpecForge#310
    ("EY-LAUNCH-STEPS", SGLANG.replace("--speculative-num-steps 3", "")),
    ("EY-LAUNCH-STEPS", SGLANG.replace("topk 1", "topk 2").replace("draft-tokens 4", "draft-tokens 12")),
    ("EY-LAUNCH-STEPS", SGLANG.replace("topk 1", "topk 4") + " --page-size 64 --attention-backend trtllm_mha"),
    ("EY-LAUNCH-BEYOND-TRAINING", SGLANG.replace("steps 3", "steps 7").replace("tokens 4", "tokens 8")),
    ("EY-LAUNCH-TOKEN-MAP", SGLANG + " --speculative-token-map map.pt"),
    ("EY-LAUNCH-RELAXED", SGLANG + " --speculative-accept-threshold-single 0.5"),
    ("EY-LAUNCH-DUMMY", SGLANG + " --speculative-draft-load-format dummy"),
    ("EY-LAUNCH-CONTEXT", SGLANG + " --context-length 1000000"),
    ("EY-LAUNCH-DTYPE", SGLANG + " --dtype half"),
    ("EY-LAUNCH-ROTATED", SGLANG.replace("--model-path t", "--model-path Qwen3-QuaRot-W8A8")),
    ("EY-LAUNCH-JSON", VLLM.replace("'", "")),
    ("EY-LAUNCH-JSON", VLLM.replace('"model": "{draft}"', '"model": {draft}')),
    ("EY-LAUNCH-ALGORITHM", VLLM.replace('"eagle3"', '"eagle"')),  # vllm-project/recipes#347
    ("EY-LAUNCH-ALGORITHM", VLLM.replace('"method": "eagle3", ', "")),
    ("EY-LAUNCH-ALGORITHM", "vllm serve t --spec-method eagle --spec-model {draft} --spec-tokens 4"),
    ("EY-LAUNCH-ALGORITHM", VLLM.replace('"method": "eagle3", ', "") + " --speculative-config.method eagle"),
    ("EY-LAUNCH-NO-DRAFT", VLLM.replace('"model": "{draft}", ', "")),
    ("EY-LAUNCH-OTHER-DRAFT", VLLM.replace("{draft}", "org/some-eagle3")),
    ("EY-LAUNCH-STEPS", VLLM.replace(', "num_speculative_tokens": 4', "")),
    ("EY-LAUNCH-BEYOND-TRAINING", VLLM.replace("tokens\": 4", "tokens\": 8")),
    ("EY-LAUNCH-CONTEXT", VLLM.replace("4}", '4, "max_model_len": 16}')),
    ("EY-LAUNCH-DUMMY", VLLM.replace("4}", '4, "rejection_sample_method": "synthetic"}')),
    ("EY-LAUNCH-CONTEXT", VLLM + " --max-model-len 128k"),
    ("EY-LAUNCH-ALGORITHM", LLAMA.replace("--spec-type draft-eagle3 ", "")),
    ("EY-LAUNCH-BEYOND-TRAINING", LLAMA.replace("max 3", "max 16")),
]  # fmt: skip


@pytest.mark.parametrize(("id", "line"), FAULTS, ids=[f"{i}-{id}" for i, (id, _) in enumerate(FAULTS)])
def test_a_fault_is_named(draft: Path, facts: TargetFacts, id: str, line: str):
    found = of(draft, line, facts)
    assert [finding.id for finding in found] == [id]
    assert found[0].evidence and found[0].consequence and found[0].remedy
    assert found[0].severity is not Severity.OK


def test_the_context_served_settles_the_draft_s_positions(draft: Path, facts: TargetFacts):
    longer = replace(facts, max_position=1 << 20)
    most = Case.open(draft).number("max_position_embeddings")
    assert "EY-POSITION-SHORT" in [f.id for f in examine(draft, longer)]
    found = of(draft, f"{SGLANG} --context-length {most}", longer)
    assert [(f.id, f.severity) for f in found] == [("EY-LAUNCH-CONTEXT", Severity.OK)]


def test_a_target_with_latent_attention(draft: Path, facts: TargetFacts):
    """sgl-project/sglang#23490."""
    latent = replace(facts, raw={**facts.raw, "kv_lora_rank": 512})
    found = of(draft, SGLANG + " --attention-backend trtllm_mla", latent)
    assert [(f.id, f.severity) for f in found] == [("EY-LAUNCH-MLA", Severity.WARNING)]
    assert of(draft, SGLANG + " --speculative-draft-attention-backend trtllm_mha", latent) == []
    assert of(draft, VLLM, latent) == []


def test_a_rotated_target_is_seen_without_a_launch(draft: Path, facts: TargetFacts):
    """vllm-project/vllm-ascend#5974."""
    turned = replace(facts, raw={**facts.raw, "quantization_config": {"quant_method": "spinquant"}})
    assert [f.id for f in of(draft, "", turned)] == ["EY-LAUNCH-ROTATED"]


def test_the_same_draft_under_other_paths(draft: Path, tmp_path: Path):
    link = tmp_path / "elsewhere"
    link.symlink_to(draft)
    assert of(draft, SGLANG.replace("{draft}", str(link))) == []
    assert of(link, SGLANG.replace("{draft}", str(draft))) == []
    assert of(draft, SGLANG.replace("{draft}", "/on/another/machine/my-draft/")) == []
    cached = tmp_path / "models--org--fast-eagle3" / "snapshots" / "0123abcd"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(draft)
    assert of(cached, VLLM.replace("{draft}", "org/fast-eagle3")) == []


def test_the_launch_reaches_examine(draft: Path):
    found = examine(draft, launch=options(SGLANG.replace("EAGLE3", "EAGLE").replace("{draft}", str(draft))))
    assert found[0].id == "EY-LAUNCH-ALGORITHM"


def test_lengths():
    said = [length(value) for value in (4096, "8k", "8K", "1.5k", "auto", True, None, "-1", "9" * 99)]
    assert said == [4096, 8000, 8192, 1500, None, None, None, None, None]


NAMES = st.sampled_from(
    ["speculative-algorithm", "speculative-algo", "speculative-draft-model-path", "speculative-num-steps", "dtype",
     "speculative-eagle-topk", "speculative-num-draft-tokens", "speculative-config", "speculative-config.method",
     "model", "spec-model", "spec-type", "spec-draft-n-max", "context-length", "max-model-len", "page-size",
     "load-format", "attention-backend", "speculative-accept-threshold-acc"]
)  # fmt: skip
SAID = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["EAGLE3", "a/b", "~0"])
VALUES = SAID | st.dictionaries(st.sampled_from(["method", "model", "num-speculative-tokens"]), SAID)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, VALUES))
def test_no_launch_breaks_it(draft: Path, flags: dict):
    for finding in family.check(Case.open(draft, launch=flags)):
        assert finding.to_dict()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NAMES.map("--{}".format) | st.text(max_size=6), max_size=8).map(" ".join))
def test_no_command_line_breaks_it(draft: Path, line: str):
    try:
        flags = options(line)
    except BadInput:
        return
    list(family.check(Case.open(draft, launch=flags)))
