"""A dry run at tiny sizes: a nested target that was made up, its states, and every later command on them, unchanged.

pytest -q tests/test_plan_synthetic.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from eyas.cli.plan import command
from eyas.errors import BadInput, Mismatch
from eyas.features.passes import teacher_of_ends
from eyas.features.reader import FeatureSet
from eyas.plan.synthetic import documents_of, synthetic_features, synthetic_target
from eyas.plan.target import planned_config
from eyas.target import head
from eyas.target.facts import read_facts
from eyas.target.head import greedy_of
from eyas.target.weights import load_ends

SIZES = {
    "hidden_size": "32", "vocab_size": "700", "num_hidden_layers": "8", "num_attention_heads": "4",
    "num_key_value_heads": "4", "intermediate_size": "48", "v_head_dim": "8", "eos_token_id": "699",
}  # fmt: skip


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dry")
    sizes = [part for name, value in SIZES.items() for part in ("--size", f"{name}={value}")]
    result = CliRunner().invoke(
        command, ["--target", "kimi-k2.5", *sizes, "--synthetic", str(out), "--documents", "14", "--length", "30",
                  "--draft-vocab", "120", "--json"], catch_exceptions=False,
    )  # fmt: skip
    told = json.loads(result.output)
    assert told["features"]["documents"] == 14 and len(told["next"]) == 4
    return out


def test_the_target_is_nested_as_the_real_one(dry):
    config = json.loads((dry / "target/config.json").read_text())
    assert config["model_type"] == "kimi_k25" and config["text_config"]["hidden_size"] == 32
    assert "eyas_synthetic" in config
    ends = load_ends(dry / "target")
    assert ends.embedding.shape == ends.head.shape == (700, 32)
    assert ends.head.dtype is torch.bfloat16 and not torch.equal(ends.head, ends.embedding)
    assert float(ends.head.float().std()) == pytest.approx(0.024, rel=0.2)


def test_states_say_what_the_head_says(dry):
    """top1 and logsumexp are those of the stored state, and the token that follows is mostly the choice."""
    features, ends = FeatureSet.open(dry / "features"), load_ends(dry / "target")
    right = rows = 0
    for d in range(features.num_docs):
        part = features.document(d)
        read = part["top1"] >= 0
        logits = ends.logits(part["final"][read])
        # The state is rounded before the teacher reads it, so that both are of the same numbers.
        torch.testing.assert_close(part["logsumexp"][read], logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert torch.equal(part["top1"][read].long(), logits.argmax(-1))
        right += int((part["top1"][:-1][read[:-1]] == part["ids"][1:][read[:-1]]).sum())
        rows += int(read.sum())
    # Among 700 random rows in 32 dimensions some lie close to the one that is wanted; in 7,168 hardly any.
    assert right > 0.6 * rows > 50


def test_ids_follow_zipfs_law():
    """Half of the tokens come from a few ids, and most ids that occur at all are rare; answers are of the share."""
    documents = list(documents_of(20_000, 60, 200, 0.4))
    ids = torch.cat([d.ids for d in documents])
    counts = torch.bincount(ids.long(), minlength=20_000).sort(descending=True).values
    assert counts[:200].sum() > 0.35 * len(ids) and (counts > 0).sum() > 2_000
    assert sum(int(d.mask.sum()) for d in documents) / len(ids) == pytest.approx(0.4, abs=0.02)
    assert len({len(d) for d in documents}) > 20
    with pytest.raises(BadInput, match="prompt and an answer"):
        list(documents_of(100, 3, 4, 0.1))


def test_map_training_export_and_doctor_run_on_it(dry):
    """The commands that `--synthetic` names, as they stand; only the numbers of steps and ids are smaller."""
    import shlex

    from eyas.cli import cli

    runner = CliRunner()
    lines = [
        f"vocab {dry}/features --size 120 --target {dry}/target --out {dry}/vocab",
        f"train {dry}/features --vocab {dry}/vocab --target {dry}/target --held-out {dry}/heldout --out {dry}/run "
        "--set steps=2 --set train_head=false --set ttt_steps=2 --set batch_tokens=100",
        f"export {dry}/run {dry}/draft --for vllm,sglang --target {dry}/target",
        f"doctor {dry}/draft --target {dry}/target --static --json",
    ]
    for text in lines:
        result = runner.invoke(cli, shlex.split(text), catch_exceptions=False)
        assert result.exit_code == 0, result.output
    config = json.loads((dry / "draft/config.json").read_text())
    assert (config["vocab_size"], config["draft_vocab_size"], config["head_dim"]) == (700, 120, 8)
    records = [json.loads(line) for line in (dry / "run/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2 and all(torch.isfinite(torch.tensor(r["loss"])).all() for r in records)


def test_a_second_call_changes_nothing_and_another_config_is_refused(dry):
    config = planned_config("kimi-k2.5", SIZES)
    before = (dry / "target/model.safetensors").stat().st_mtime_ns
    synthetic_target(dry / "target", config)
    assert (dry / "target/model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(Mismatch, match="another target"):
        synthetic_target(dry / "target", planned_config("kimi-k2.5", {**SIZES, "vocab_size": "701"}))


def test_a_killed_writer_leaves_no_target(dry, tmp_path, monkeypatch):
    """config.json comes last: without it the folder is no target, and the same call makes it whole."""
    from eyas.plan import synthetic

    config = planned_config("kimi-k2.5", SIZES)
    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "_write_tokenizer", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            synthetic_target(tmp_path / "t", config)
    assert not (tmp_path / "t/config.json").exists()
    assert read_facts(synthetic_target(tmp_path / "t", config)).hidden_size == 32
    again = (tmp_path / "t/model.safetensors").read_bytes()
    assert again == (dry / "target/model.safetensors").read_bytes()
    one = synthetic_features(tmp_path / "f", tmp_path / "t", documents=14, length=30)
    assert one.manifest["files"] == FeatureSet.open(dry / "features").manifest["files"]


@pytest.mark.parametrize("part", [1, 64, 10_000])
def test_a_head_in_parts_says_the_same(dry, part, monkeypatch):
    """Against all logits at once; in parts of one id, of some, of all. Ties go to the lowest id."""
    monkeypatch.setattr(head, "HEAD_BLOCK", part)
    monkeypatch.setattr(head, "LOGIT_BYTES", 4 * max(part, 1) * 3)  # three rows at a time
    ends = load_ends(dry / "target")
    final = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)) * 30
    final[3] = 0  # all logits alike
    top1, logsumexp = teacher_of_ends(ends, final)
    expected, total = greedy_of(ends.logits, final, 700)
    assert torch.equal(top1.long(), expected) and int(top1[3]) == 0
    torch.testing.assert_close(logsumexp, total)
    assert all(len(t) == 0 for t in teacher_of_ends(ends, final[:0]))
