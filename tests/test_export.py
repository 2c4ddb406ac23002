"""Export: what each engine reads in config.json, what it cannot express, and what a check of the directory finds.

pytest -q tests/test_export.py
"""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from drafts import make_draft, with_embedding, write_flat, write_speculators
from eyas.cli.export import command
from eyas.conventions import Known
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.draft.dialects.canonical import canonical_config
from eyas.draft.dialects.numbering import sglang_ids, sglang_taps
from eyas.engines.profiles import ENGINES
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.export import NotExpressible, export_draft, find_draft
from eyas.export.check import check_draft
from eyas.features.layout import FeatureMeta
from eyas.features.reader import FeatureSet
from eyas.features.writer import ShardBuffer, ShardWriter
from eyas.target import source
from eyas.target.facts import read_facts


@pytest.fixture
def trained(tmp_path, tiny_target):
    """A float32 draft as training leaves it, in the folder of a run."""
    draft, vocab_map = make_draft(2)
    prints = {"target": source.fingerprint(tiny_target), "tokenizer": source.tokenizer_fingerprint(tiny_target)}
    save_draft(
        draft, vocab_map, tmp_path / "run/draft", facts=read_facts(tiny_target), fingerprints=prints,
        predicted={"tau": 1.7}, provenance={"tokens_seen": 1000},
    )  # fmt: skip
    return tmp_path / "run"


def write_features(
    folder: Path, target: Path, taps: tuple[int, ...] = (2, 4, 5), fingerprint: str | None = None
) -> FeatureSet:
    """Finished features of two random documents."""
    draft, _ = make_draft()
    conventions = draft.conventions.with_(taps=taps)
    meta = FeatureMeta(32, 300, conventions, fingerprint or source.fingerprint(target), "", "")
    lengths, generator = [24, 17], torch.Generator().manual_seed(0)
    buffer = ShardBuffer(meta, lengths)
    for d, n in enumerate(lengths):
        buffer.put(
            d, ids=torch.randint(0, 300, (n,), generator=generator), mask=torch.ones(n), final=torch.zeros(n, 32),
            taps=torch.randn(n, 32 * len(taps), generator=generator), top1=torch.zeros(n), logsumexp=torch.zeros(n),
        )  # fmt: skip
    writer = ShardWriter(folder, meta)
    writer.write(0, ["a", "b"], buffer, "plan")
    writer.finish(1, {"target": meta.target}, {}, {}, 0.0)
    return FeatureSet.open(folder)


def test_every_field_that_an_engine_would_guess_is_written(tmp_path, trained, tiny_target):
    export_draft(trained, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 300, "draft_vocab_size": 120,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "num_aux_hidden_states": 3, "tie_word_embeddings": False,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "hidden_size": 32, "target_hidden_size": 32, "max_position_embeddings": 256, "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "bos_token_id": 1, "eos_token_id": 2,
        "dtype": "bfloat16", "num_hidden_layers": 1, "head_dim": 8,
    }  # fmt: skip
    assert {k: config[k] for k in expected} == expected
    # Numbers where numbers belong: SGLang multiplies target_hidden_size, typed config classes refuse null.
    assert all(v is not None for v in config.values())
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["config.json", "eyas.json", "manifest.json", "model.safetensors"]


def test_transformers_reads_the_config_as_it_was_meant(tmp_path):
    from transformers import AutoConfig

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for i, rope in enumerate(
        [
            {"rope_theta": 1e5},
            {"rope_type": "llama3", "rope_scaling": scaling, "rope_theta": 5e5},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ]
    ):
        draft, vocab_map = make_draft(0, **rope)
        save_draft(draft, vocab_map, tmp_path / str(i))
        read = AutoConfig.from_pretrained(tmp_path / str(i))
        assert read.rope_parameters["rope_theta"] == rope["rope_theta"]
        assert read.rope_parameters["rope_type"] == rope.get("rope_type", "default")
        assert all(read.rope_parameters[k] == v for k, v in rope.get("rope_scaling", {}).items())
        partial = rope.get("partial_rotary_factor", 1.0)  # where transformers looks, and where SGLang does
        assert read.rope_parameters.get("partial_rotary_factor", 1.0) == partial
        assert getattr(read, "partial_rotary_factor", 1.0) == partial
        assert read.eagle_aux_hidden_state_layer_ids == [2, 4, 5] and read.hidden_size == 32
        (tmp_path / str(i) / "eyas.json").unlink()  # and our own reader of the flat dialect
        again = load_draft(tmp_path / str(i))[2]
        assert (again.rope_type, again.rope_theta, again.rope_scaling) == (
            draft.conventions.rope_type, rope["rope_theta"], draft.conventions.rope_scaling,
        )  # fmt: skip


@pytest.mark.parametrize(
    "taps, family, ids",
    [
        ((2, 15, 27), "llama", [1, 14, 26]),
        ((2, 30, 58), "deepseek_v3", [1, 29, 57]),  # an id of 1 in front makes this class add 1
        ((3, 30, 58), "deepseek_v3", [3, 30, 58]),
        ((1, 30, 58), "kimi_k2", None),
        ((1, 9, 24), "gpt_oss", [0, 8, 23]),
        ((2, 4, 36), "gpt_oss", [1, 3, 35]),  # the last block, which Llama-like classes never capture
        ((0, 4, 5), "llama", None),
    ],
)
def test_taps_as_sglang_numbers_them(taps, family, ids):
    assert sglang_ids(taps, family, 36) == ids
    assert ids is None or sglang_taps(ids, family, 36) == taps


OV = "openvino"
CASES = {
    "norm_before_residual": ({"norm_before_residual": True}, {}, {"sglang", OV}),
    "norm_output": ({"norm_output": True}, {}, {"llamacpp", OV}),
    "fc_norm": ({"fc_norm": True}, {}, {"llamacpp", OV}),
    "norm_before_fc": ({"norm_before_fc": True}, {}, {OV}),
    "four taps": ({"taps": (1, 2, 4, 5)}, {"num_taps": 4}, {"llamacpp", OV}),
    "tap 0": ({"taps": (0, 2, 4)}, {}, {"sglang"}),
    "tap n": ({"taps": (2, 4, 8)}, {}, {"sglang"}),
    "one tap": ({"taps": (4,)}, {"num_taps": 1}, {"sglang", "llamacpp", OV}),
    "two layers": ({}, {"num_layers": 2}, {"llamacpp", OV}),
    "full vocabulary": ({}, {"draft_vocab_size": 300}, {OV}),
    "own embedding": ({"embedding": "own"}, {}, {"sglang", OV}),
    "fc bias": ({"fc_bias": True}, {}, {"vllm", "llamacpp", OV}),
    "attention bias": ({"attention_bias": True}, {}, {"sglang", "llamacpp", OV}),
    "short window": ({"sliding_window": 64}, {}, {"sglang", "llamacpp", OV}),  # true of longer sequences
    "wide window": ({"sliding_window": 256}, {}, set()),
    "q/k norms": ({"qk_norm": True}, {}, {"sglang", "llamacpp", OV}),
    "no norm before the head": ({"norm_before_head": False}, {}, set(ENGINES)),
    "constant RoPE offset": ({"rope_offset": 1}, {}, set()),  # a symmetry
    "logit scale": ({"logit_scale": 2.0}, {}, {"sglang", "llamacpp", OV}),
    "plain": ({}, {}, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_an_engine_cannot_express_is_known(name, tmp_path, tiny_target):
    conventions, sizes, expected = CASES[name]
    draft, vocab_map = make_draft(sizes=sizes, **conventions)
    if "embedding" in conventions:
        with_embedding(draft)
    save_draft(draft, vocab_map, tmp_path / "d", facts=read_facts(tiny_target))
    report = export_draft(tmp_path / "d", tmp_path / "out")
    assert {engine for engine, found in report.engines.items() if found} == expected
    for engine, found in report.engines.items():
        assert all(text.startswith(f"{engine}: ") and "; " in text for text in found)  # with a way out


def test_full_vocabulary_has_no_map(tmp_path):
    draft, vocab_map = make_draft(sizes={"draft_vocab_size": 300})
    save_draft(draft, vocab_map, tmp_path / "d")
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "d/model.safetensors"))
    assert json.loads((tmp_path / "d/config.json").read_text())["draft_vocab_size"] == 300


def test_positions_follow_the_target_unless_the_angles_depend_on_them(tiny_target):
    facts = read_facts(tiny_target)
    short, _ = make_draft(max_position=64)
    assert canonical_config(short.shape, short.conventions, facts, "float32")["max_position_embeddings"] == 256
    yarn = short.conventions.with_(rope_type="yarn", rope_scaling={"factor": 4.0})
    assert canonical_config(short.shape, yarn, facts, "float32")["max_position_embeddings"] == 64


def test_bfloat16_is_rounded_once_and_stays(tmp_path, trained):
    masters = load_draft(trained / "draft")[0].owned_state_dict()
    report = export_draft(trained, tmp_path / "a")
    assert report.dtype == "bfloat16" and report.engines == {e: [] for e in ENGINES}
    stored = load_file(tmp_path / "a/model.safetensors")
    assert all(torch.equal(stored[k], v.bfloat16()) for k, v in masters.items())
    assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
    export_draft(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    export_draft(trained, tmp_path / "c", dtype="float32")
    assert all(torch.equal(load_file(tmp_path / "c/model.safetensors")[k], v) for k, v in masters.items())
    eyas = json.loads((tmp_path / "b/eyas.json").read_text())  # what training declared travels along
    assert eyas["predicted"] == {"tau": 1.7} and eyas["provenance"] == {"tokens_seen": 1000}
    assert eyas["target"]["facts"]["max_position"] == 256 and eyas["conventions"]["how"]["taps"] == "declared"


def test_foreign_drafts_become_canonical(tmp_path, tiny_target):
    draft, vocab_map = make_draft(3, norm_before_fc=True, norm_before_residual=True, norm_output=True)
    flat = write_flat(tmp_path / "flat", *make_draft(4), scheme="fused")
    nested = write_speculators(tmp_path / "spec", draft, vocab_map)
    for folder, dialect in ((flat, "flat"), (nested, "speculators")):
        before, its_map, conventions = load_draft(folder, tiny_target)
        report = export_draft(folder, tmp_path / f"out-{dialect}", target_dir=tiny_target)
        assert report.dialect == dialect and any("no probe" in note for note in report.notes)
        after, again, kept = load_draft(tmp_path / f"out-{dialect}", tiny_target)
        assert kept.differences(conventions) == {} and torch.equal(again.ids, its_map.ids)
        assert kept.known("taps") is conventions.known("taps")  # a guess stays a guess
        for name, tensor in before.owned_state_dict().items():
            assert torch.equal(after.owned_state_dict()[name], tensor)  # kept as they were stored
        assert check_draft(tmp_path / f"out-{dialect}").problems == []
    with pytest.raises(NotExpressible, match="norm_before_residual is true, it runs false"):
        export_draft(nested, tmp_path / "no", engines=("vllm", "sglang"), target_dir=tiny_target)
    assert not (tmp_path / "no").exists()
    export_draft(nested, tmp_path / "yes", engines=("vllm",), target_dir=tiny_target)


def test_the_probe_is_recorded_from_features_and_travels(tmp_path, trained, tiny_target):
    features = write_features(tmp_path / "features", tiny_target)
    report = export_draft(trained, tmp_path / "out", target_dir=tiny_target, features=features)
    assert report.probe_rows > 0
    check = check_draft(tmp_path / "out")
    assert check.ok and check.probe.choices == 5 * report.probe_rows
    again = export_draft(
        tmp_path / "out", tmp_path / "again", dtype="float32"
    )  # from the probe, without target or features
    assert again.probe_rows == report.probe_rows and check_draft(tmp_path / "again").ok
    (tmp_path / "out").rename(trained / "export")  # a run lends the probe of its export
    assert export_draft(trained, tmp_path / "third").probe_rows == report.probe_rows
    copied = [p.name for p in (tmp_path / "third").glob("*.safetensors")]
    assert copied == ["model.safetensors"]  # engines load every *.safetensors beside the model


def test_features_and_targets_of_others_are_refused(tmp_path, trained, tiny_target, make_tiny_target):
    other = write_features(tmp_path / "f1", tiny_target, fingerprint="0" * 64)
    with pytest.raises(Mismatch, match="made with target 0000"):
        export_draft(trained, tmp_path / "out", target_dir=tiny_target, features=other)
    shifted = write_features(tmp_path / "f2", tiny_target, taps=(1, 4, 5))
    with pytest.raises(Mismatch, match=r"taps \[1, 4, 5\]"):
        export_draft(trained, tmp_path / "out", target_dir=tiny_target, features=shifted)
    twin = make_tiny_target(tmp_path / "twin", seed=1)
    with pytest.raises(Mismatch, match="was trained for target"):
        export_draft(trained, tmp_path / "out", target_dir=twin)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "edit, words",
    [
        ({"norm_before_residual": True}, "config.json makes norm_before_residual = True, declared is False"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}, r"makes taps = (3, 5, 6), declared is (2, 4, 5)"),
        ({"rope_parameters": {"rope_theta": 1.0, "rope_type": "default"}}, "makes rope_theta = 1.0"),
        ({"max_position_embeddings": 128}, "makes max_position = 128"),
    ],
)
def test_a_check_reads_the_config_as_engines_do(tmp_path, trained, edit, words):
    export_draft(trained, tmp_path / "out")
    file = tmp_path / "out/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **edit}))
    assert any(words in problem for problem in check_draft(tmp_path / "out").problems)


def test_a_check_finds_one_flipped_bit(tmp_path, trained):
    export_draft(trained, tmp_path / "out")
    assert check_draft(tmp_path / "out").ok
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    tensors["midlayer.mlp.up_proj.weight"].view(torch.int16)[7, 7] ^= 1
    save_file(tensors, file)
    problems = check_draft(tmp_path / "out").problems
    assert len(problems) == 1 and "midlayer.mlp.up_proj.weight is not what" in problems[0]
    save_file({**tensors, "embed_tokens.weight": torch.zeros(300, 32)}, file)
    assert any("embed_tokens.weight is not declared" in p for p in check_draft(tmp_path / "out").problems)


def test_finding_the_draft_of_a_run(tmp_path, trained):
    assert find_draft(trained) == trained / "draft" and find_draft(trained / "draft") == trained / "draft"
    with pytest.raises(BadInput, match="no draft there"):
        find_draft(tmp_path)


def run(*args: object):
    return CliRunner().invoke(command, [str(a) for a in args])


def test_the_command(tmp_path, trained, tiny_target):
    write_features(tmp_path / "features", tiny_target)
    done = run(trained, "--out", tmp_path / "out", "--for", "sglang,vllm,llamacpp", "--target", tiny_target,
               "--features", tmp_path / "features", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert not any(report["engines"].values()) and report["probe_rows"] > 0
    checked = run("--check", tmp_path / "out")
    assert checked.exit_code == 0 and "as exported" in checked.stdout
    (tmp_path / "out/config.json").write_text(
        (tmp_path / "out/config.json").read_text().replace('"fc_norm": false', '"fc_norm": true')
    )
    checked = run("--check", tmp_path / "out", "--json")
    assert checked.exit_code == 1 and json.loads(checked.stdout)["ok"] is False
    assert run("--check", tmp_path / "out", "--out", tmp_path).exit_code == 2
    assert run(trained).exit_code == 2


def test_refusals_have_their_exit_codes(tmp_path):
    draft, vocab_map = make_draft(norm_before_residual=True)
    save_draft(draft, vocab_map, tmp_path / "d")
    refused = run(tmp_path / "d", "--out", tmp_path / "out", "--for", "sglang")
    assert isinstance(refused.exception, NotExpressible) and refused.exception.exit_code == 3
    unknown = run(tmp_path / "d", "--out", tmp_path / "out", "--for", "ollama")
    assert isinstance(unknown.exception, BadInput) and "known are sglang, vllm, llamacpp" in str(unknown.exception)
    named = run(tmp_path / "d", "--out", tmp_path / "out")  # nobody asked for SGLang: written, and named
    assert named.exit_code == 0 and "sglang: cannot run it as trained" in named.stdout
    assert load_draft(tmp_path / "out")[2].known("norm_before_residual") is Known.DECLARED


def test_a_probe_that_does_not_come_again_stops_the_export(tmp_path, trained, tiny_target):
    features = write_features(tmp_path / "features", tiny_target)
    export_draft(trained, tmp_path / "out", target_dir=tiny_target, features=features)
    export_draft(
        tmp_path / "out", tmp_path / "copy", to="speculators", dtype="keep"
    )  # the same choices, otherwise spelled
    assert check_draft(tmp_path / "copy").ok
    other, its_map = make_draft(7)
    save_draft(other, its_map, tmp_path / "other", facts=read_facts(tiny_target))
    (tmp_path / "other/eyas").mkdir()
    (tmp_path / "out/eyas/probe.safetensors").rename(tmp_path / "other/eyas/probe.safetensors")
    with pytest.raises(EyasError, match="recorded choices are others after the export"):
        export_draft(tmp_path / "other", tmp_path / "no", dtype="keep")
    assert not (tmp_path / "no").exists()
