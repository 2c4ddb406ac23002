"""Engine profiles: what SGLang, vLLM, llama.cpp and OpenVINO make of one directory, a small case for each rule.

tests/real compares them with the real loaders.

pytest -q tests/test_engines_profiles.py
"""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafts import foreign_tensors, make_draft, write_flat, write_speculators
from eyas.draft.files import open_folder
from eyas.engines.profiles import ENGINES, PROFILES, profile
from eyas.engines.reading import Seen
from eyas.errors import BadInput
from eyas.target.facts import TargetFacts, read_facts

IDS = "eagle_aux_hidden_state_layer_ids"
YARN, USUAL = {"factor": 4.0, "original_max_position_embeddings": 64}, 0.1 * math.log(4) + 1


def read(engine: str, folder: Path, facts: TargetFacts | None = None):
    return profile(engine).read(Seen(open_folder(folder), facts))


def edit(folder: Path, drop: tuple[str, ...] = (), **add: torch.Tensor) -> Path:
    """Leave out tensors whose name contains one of `drop`, add others (`__` for a dot)."""
    file = folder / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if not any(d in k for d in drop)}
    save_file(tensors | {k.replace("__", "."): v for k, v in add.items()}, file)
    return folder


@pytest.fixture
def facts(tiny_target) -> TargetFacts:
    return read_facts(tiny_target)


def flat(folder: Path, scheme: str = "midlayer", **changes) -> Path:
    conventions = {k: changes.pop(k) for k in ("norm_before_fc", "fc_norm") if isinstance(changes.get(k), bool)}
    draft, vocab_map = make_draft(1, **conventions)
    return write_flat(folder, draft, vocab_map, scheme, **conventions, **changes)


@pytest.mark.parametrize("scheme", ["midlayer", "layers0", "prefixed", "prefixed_midlayer", "fused"])
def test_which_spellings_each_engine_loads(scheme: str, tmp_path: Path, facts: TargetFacts):
    folder = flat(tmp_path / "d", scheme)
    loads = {engine: read(engine, folder, facts) for engine in ENGINES}
    whole = {e for e, r in loads.items() if r.starts and not [k for k in r.unfilled() if "embed" not in k]}
    assert (
        whole
        == {
            "midlayer": {"sglang", "vllm", "llamacpp", "openvino"},
            "layers0": {"sglang", "vllm", "llamacpp"},
            "prefixed": {"sglang"},
            "prefixed_midlayer": {"sglang"},
            "fused": {"sglang", "vllm"},
        }[scheme]
    )
    if scheme == "layers0":  # seen in the field: nothing but a table in a log
        assert "model.midlayer.self_attn.q_proj.weight" in loads["openvino"].unfilled()


def test_silence_about_missing_tensors(tmp_path: Path, facts: TargetFacts):
    folder = edit(flat(tmp_path / "d"), ("fc.", "k_proj", "v_proj", "norm.weight"))
    for engine, fc in (("sglang", "random numbers, as created"), ("vllm", "uninitialised memory")):
        unfilled = read(engine, folder, facts).unfilled()
        assert unfilled["model.fc.weight"].instead == fc
        assert unfilled["model.norm.weight"].instead.startswith("ones")
        partly = unfilled["model.layers.0.self_attn.qkv_proj.weight"]
        assert (partly.filled, partly.instead) == ("partly", "uninitialised memory for k, v")
    failure = read("llamacpp", folder, facts).failure
    assert failure is not None and "fc.weight" in failure.what


def test_unknown_tensors_are_dropped_or_refused(tmp_path: Path, facts: TargetFacts):
    folder = edit(flat(tmp_path / "d"), foo__weight=torch.zeros(2))
    assert "foo.weight" in read("sglang", folder, facts).dropped
    for engine in ("vllm", "llamacpp"):
        failure = read(engine, folder, facts).failure
        assert failure is not None and failure.error == "ValueError" and "foo.weight" in failure.what


@pytest.mark.parametrize(
    ("changes", "sglang", "vllm", "llamacpp"),
    [
        ({}, (2, 4, 5), (2, 4, 5), (2, 4, 5)),  # everybody's default
        ({IDS: [1, 3, 6]}, (2, 4, 5), (1, 3, 6), (1, 3, 6)),  # SGLang does not look there
        ({"eagle_config": {IDS: [1, 3, 6]}}, (2, 4, 7), (1, 3, 6), (2, 4, 5)),  # three readings of one list
        ({IDS: [2, 4, 7], "eagle_config": {IDS: [1, 3, 6]}}, (2, 4, 7), (2, 4, 7), (2, 4, 7)),  # as Eyas writes it
    ],
)
def test_whose_taps(changes, sglang, vllm, llamacpp, tmp_path: Path, facts: TargetFacts):
    folder = flat(tmp_path / "d", **changes)
    taps = {engine: read(engine, folder, facts).values["taps"] for engine in ("sglang", "vllm", "llamacpp")}
    assert taps == {"sglang": sglang, "vllm": vllm, "llamacpp": llamacpp}
    if not changes:
        assert read("sglang", folder).values["taps"] is None  # the target's depth is not known


@pytest.mark.parametrize(
    ("changes", "engine", "stage", "error"),
    [
        ({"draft_vocab_size": ...}, "sglang", "configuration", "AttributeError"),
        ({"target_hidden_size": None}, "sglang", "configuration", "TypeError"),
        ({"model_type": ...}, "sglang", "configuration", "ValueError"),
        ({"architectures": ["LlamaForCausalLM"]}, "sglang", "weights", "AssertionError"),
        ({"architectures": ["Other"]}, "vllm", "configuration", "ValidationError"),
        ({"eagle_config": {IDS: [1, 3, 7]}}, "sglang", "first request", "RuntimeError"),  # the last block
        ({"eagle_config": {IDS: [1, 1, 3]}}, "sglang", "first request", "RuntimeError"),
        ({IDS: [1, 2, 3, 4]}, "llamacpp", "weights", "RuntimeError"),
        ({"num_aux_hidden_states": 4}, "vllm", "weights", "AssertionError"),
        ({"draft_vocab_size": ...}, "llamacpp", "conversion", "ValueError"),
        ({"draft_vocab_size": None}, "openvino", "conversion", "TypeError"),
    ],
)
def test_what_stops_an_engine(changes, engine, stage, error, tmp_path: Path, facts: TargetFacts):
    failure = read(engine, flat(tmp_path / "d", **changes), facts).failure
    assert failure is not None and (failure.stage, failure.error) == (stage, error)
    assert failure.what


@pytest.mark.parametrize(
    ("table", "beside", "sglang"),
    [
        ({"partial_rotary_factor": 0.5}, {}, {"partial_rotary_factor": 1.0}),  # it looks at the top level alone
        ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}, {}),  # as Eyas writes it
        (
            {"rope_type": "yarn", **YARN, "attention_factor": 1.5},
            {},
            {"rope_scaling": {**YARN, "attention_factor": USUAL}},
        ),
        ({"rope_type": "yarn", **YARN, "attention_factor": USUAL}, {}, {}),
        (
            {"rope_type": "yarn", **YARN, "attn_factor": 2.0},
            {},
            {"rope_scaling": {**YARN, "attention_factor": 2 * USUAL}},
        ),
        # 10000 * (4 * 4 - 3) ** (8 / 6): the base of transformers' formula for a sequence four times the longest.
        (
            {"rope_type": "dynamic", "factor": 4.0},
            {},
            {"rope_type": "default", "rope_scaling": {}, "rope_theta": 305673.5094},
        ),
    ],
)
def test_rope_that_sglang_reads_in_its_own_way(table, beside, sglang, tmp_path: Path, facts: TargetFacts):
    folder = flat(tmp_path / "d", rope_theta=..., rope_parameters={"rope_theta": 10000.0, **table}, **beside)
    theirs, transformers = (read(engine, folder, facts).values for engine in ("sglang", "vllm"))
    for name in ("rope_type", "rope_scaling", "partial_rotary_factor"):
        assert theirs[name] == sglang.get(name, transformers[name]), name
    assert theirs["rope_theta"] == pytest.approx(sglang.get("rope_theta", 10000.0))


def test_vllms_class_with_norms_on_the_heads(tmp_path: Path, facts: TargetFacts):
    draft = make_draft(1, qk_norm=True)
    assert read("vllm", write_flat(tmp_path / "llama", *draft), facts).failure is not None
    named = read("vllm", write_flat(tmp_path / "named", *draft, architectures=["Eagle3Qwen3ForCausalLM"]), facts)
    nested = write_speculators(tmp_path / "nested", *draft)
    edit_layer(nested, model_type="qwen3")
    assert named.values["qk_norm"] and read("vllm", nested, facts).values["qk_norm"]
    # A layer of that type is always normed: where nothing is stored, by ones.
    plain = write_speculators(tmp_path / "plain", *make_draft(1))
    edit_layer(plain, model_type="qwen3")
    unfilled = read("vllm", plain, facts).unfilled()
    assert unfilled["model.layers.0.self_attn.q_norm.weight"].instead.startswith("ones")
    edit_layer(plain, model_type="mistral")
    assert read("vllm", plain, facts).failure.error == "ValidationError"


def edit_layer(folder: Path, **fields: str) -> None:
    """Write over fields of a speculators config's layer."""
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"] |= fields
    (folder / "config.json").write_text(json.dumps({**config, "speculators_config": {}}))


def test_flags_and_their_tensors(tmp_path: Path, facts: TargetFacts):
    said = flat(tmp_path / "said", fc_norm=True)
    assert all(read(e, said, facts).values["fc_norm"] for e in ("sglang", "vllm"))
    forgotten = write_flat(tmp_path / "forgotten", *make_draft(1, fc_norm=True))
    read_ = read("sglang", forgotten, facts)
    assert not read_.values["fc_norm"] and "fc_norm.0.weight" in read_.dropped
    assert read("vllm", forgotten, facts).failure is not None
    before = write_flat(tmp_path / "before", *make_draft(1, norm_before_fc=True))
    assert "input_norm.weight" in read("vllm", before, facts).dropped  # the one name that it forgives
    legacy = write_flat(tmp_path / "legacy", *make_draft(1, fc_norm=True), "legacy_norms", fc_norm=True)
    assert not [k for k in read("sglang", legacy, facts).unfilled() if "fc_norm" in k]


def test_norm_before_residual_depends_on_engine_and_style(tmp_path: Path, facts: TargetFacts):
    folder = flat(tmp_path / "d", norm_before_residual=True)
    assert read("sglang", folder, facts).values.get("norm_before_residual", False) is False
    assert read("vllm", folder, facts).values["norm_before_residual"] is True
    silent = write_speculators(tmp_path / "s", *make_draft(1), norm_before_residual=..., speculators_config={})
    assert read("vllm", silent, facts).values["norm_before_residual"] is True  # its default for this style
    assert read("vllm", flat(tmp_path / "f"), facts).values["norm_before_residual"] is False
    failure = read("sglang", silent, facts).failure
    assert failure is not None and "model_type" in failure.what


def test_heads_and_embeddings(tmp_path: Path, facts: TargetFacts):
    tied = read("sglang", flat(tmp_path / "tied", tie_word_embeddings=True), facts)
    assert "lm_head.weight" in tied.dropped and tied.values["head"] == "target_rows"
    headless = edit(flat(tmp_path / "headless"), ("lm_head",))
    assert read("sglang", headless, facts).unfilled()["lm_head.weight"].instead == "uninitialised memory"
    assert read("vllm", headless, facts).values["head"] == "target_rows"
    full, its_map = make_draft(1, {"draft_vocab_size": 300})
    borrowed = edit(write_flat(tmp_path / "b", full, its_map, draft_vocab_size=None), ("lm_head", "d2t", "t2d"))
    assert read("sglang", borrowed, facts).values["head"] == "target"
    own = edit(flat(tmp_path / "own"), embed_tokens__weight=torch.zeros(300, 32))
    assert {e: read(e, own, facts).values["embedding"] for e in ENGINES} == {
        "sglang": "target", "vllm": "own", "llamacpp": "own", "openvino": "target",
    }  # fmt: skip


def test_maps(tmp_path: Path, facts: TargetFacts):
    folder = edit(flat(tmp_path / "none"), ("d2t", "t2d"))
    assert read("sglang", folder, facts).values["d2t"] == "none"
    assert "draft_id_to_target_id" in read("vllm", folder, facts).unfilled()
    draft, vocab_map = make_draft(1)
    tensors = foreign_tensors(draft, vocab_map) | {"d2t": vocab_map.ids}
    twice = flat(tmp_path / "absolute")
    save_file(tensors, twice / "model.safetensors")
    failure = read("llamacpp", twice, facts).failure
    assert failure is not None and "out of range" in failure.what
    assert read("sglang", twice, facts).starts  # in silence


def test_rope_and_sizes_as_transformers_fills_them(tmp_path: Path, facts: TargetFacts):
    bare = read("vllm", flat(tmp_path / "bare", rope_theta=..., rms_norm_eps=..., max_position_embeddings=...), facts)
    assert (bare.values["rope_theta"], bare.values["rms_norm_eps"], bare.values["max_position"]) == (
        10000.0,
        1e-6,
        2048,
    )
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    both = flat(tmp_path / "both", rope_theta=5e5, rope_scaling=scaled, rope_parameters={"rope_theta": 1.0})
    values = read("sglang", both, facts).values  # the old table wins, with the theta beside it
    assert (values["rope_type"], values["rope_theta"], values["rope_scaling"]["factor"]) == ("llama3", 5e5, 8.0)
    short = flat(tmp_path / "short", max_position_embeddings=64)
    failure = read("sglang", short, facts).failure
    assert failure is not None and "--context-length 64" in failure.way_out
    assert any("--max-model-len 64" in need for need in read("vllm", short, facts).needs)


def test_targets_that_nobody_saw_hooked(tmp_path: Path, facts: TargetFacts):
    folder = flat(tmp_path / "d")
    assert read("sglang", folder, facts).needs == ()
    odd = dataclasses.replace(facts, model_type="mamba9")
    assert any("mamba9" in need for need in read("sglang", folder, odd).needs)


def test_profiles_by_name():
    assert [p.name for p in PROFILES] == ["sglang 0.5.23", "vllm 0.32.0", "llamacpp b11434", "openvino 2026.4.1"]
    assert profile("sglang@0.5.23") is profile("sglang")
    with pytest.raises(BadInput, match=r"sglang 0\.4 is not known; Eyas knows 0\.5\.23"):
        profile("sglang@0.4")
    with pytest.raises(BadInput, match="unknown engine 'ollama'; known are sglang, vllm"):
        profile("ollama")


def test_a_config_of_nonsense_ends_in_a_reading(tmp_path: Path, facts: TargetFacts):
    folder = flat(tmp_path / "d")
    good = json.loads((folder / "config.json").read_text())
    for name in good:
        for value in (None, "x", -1, [], {}, 1e300, True):
            (folder / "config.json").write_text(json.dumps({**good, name: value}))
            for engine in ENGINES:
                read_ = read(engine, folder, facts)
                assert read_.starts or read_.failure.what, (name, value, engine)
