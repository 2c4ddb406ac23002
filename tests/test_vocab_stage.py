"""The vocab stage and its command, on real feature folders.   pytest -q tests/test_vocab_stage.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.artifacts import read_manifest
from eyas.cli.vocab import command
from eyas.conventions import Conventions
from eyas.digests import sha256_file
from eyas.errors import BadInput, Mismatch
from eyas.features import count
from eyas.features.count import count_supervised, make_vocab
from eyas.features.layout import FeatureMeta
from eyas.features.writer import ShardBuffer, ShardWriter, plan_digest
from eyas.target.source import tokenizer_fingerprint
from eyas.target.tokens import special_ids, token_ids
from eyas.vocab import VocabMap

V, H = 300, 4


def write_features(
    folder: Path,
    docs: list[tuple[list[int], list[int]]],
    target: str = "a" * 64,
    vocab: int = V,
    tokenizer: str = "b" * 64,
) -> Path:
    """One shard a document: (ids, mask)."""
    meta = FeatureMeta(H, vocab, Conventions(taps=(1, 2, 4), num_target_layers=6), target, tokenizer, "c" * 64)
    writer = ShardWriter(folder, meta)
    for k, (ids, mask) in enumerate(docs):
        rows, n = [torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.uint8)], len(ids)
        buffer = ShardBuffer(meta, [n])
        states = {"taps": torch.zeros(n, 3 * H), "final": torch.zeros(n, H)}
        teacher = {"top1": torch.full((n,), -1), "logsumexp": torch.zeros(n)}
        buffer.put(0, ids=rows[0], mask=rows[1], **states, **teacher)
        writer.write(k, [f"d{k}"], buffer, plan_digest(meta, [(f"d{k}", *rows)]))
    writer.finish(len(docs), {}, {"meta": meta.to_dict()}, {}, 0.0)
    return folder


@pytest.fixture
def features(tmp_path: Path) -> Path:
    return write_features(tmp_path / "features", [([9, 40, 40, 41], [0, 1, 1, 1]), ([9, 40, 200], [0, 1, 1])])


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    return write_features(tmp_path / "heldout", [([9, 40, 77, 250, 41], [0, 1, 1, 1, 1])])


def test_the_stage_counts_cuts_and_reports(features: Path, held_out: Path, tmp_path: Path):
    report = make_vocab(features, tmp_path / "vocab", 4, always=[299], held_out=held_out)
    made = VocabMap.load(tmp_path / "vocab")
    assert made.ids.tolist() == [40, 41, 200, 299]
    assert (report.supervised_tokens, report.observed, report.filled, report.always) == (5, 3, 1, 1)
    assert report.coverage == 1.0
    assert report.held_out_coverage == 0.5
    manifest = read_manifest(tmp_path / "vocab")
    assert manifest["stage"] == "vocab"
    assert manifest["files"] == {"vocab.safetensors": sha256_file(tmp_path / "vocab" / "vocab.safetensors")}
    assert manifest["counts"]["coverage"] == 1.0


def test_fewer_observed_ids_than_asked_for_fill_up_with_the_lowest(features: Path, tmp_path: Path):
    report = make_vocab(features, tmp_path / "vocab", 6)
    assert VocabMap.load(tmp_path / "vocab").ids.tolist() == [0, 1, 2, 40, 41, 200]
    assert report.filled == 3


def test_a_finished_stage_is_skipped_until_something_changes(features: Path, tmp_path: Path):
    out = tmp_path / "vocab"
    first = make_vocab(features, out, 4)
    written = (out / "vocab.safetensors").stat().st_mtime_ns
    again = make_vocab(features, out, 4)
    assert again.skipped
    assert (out / "vocab.safetensors").stat().st_mtime_ns == written
    assert {**again.to_dict(), "skipped": False} == first.to_dict()
    assert not make_vocab(features, out, 5).skipped
    write_features(features, [([9, 40, 40, 42], [0, 1, 1, 1]), ([9, 40, 200], [0, 1, 1])])
    assert not make_vocab(features, out, 5).skipped
    assert 42 in VocabMap.load(out).ids.tolist()


def test_a_map_is_cut_again_from_its_own_counts(features: Path, held_out: Path, tmp_path: Path):
    make_vocab(features, tmp_path / "large", 6, always=[299])
    report = make_vocab(tmp_path / "large", tmp_path / "small", 2, held_out=held_out)
    assert VocabMap.load(tmp_path / "small").ids.tolist() == [40, 299]
    assert report.coverage == 3 / 5
    assert report.held_out_coverage == 1 / 4
    file = make_vocab(tmp_path / "large" / "vocab.safetensors", tmp_path / "from_file", 2)
    assert file.digest == report.digest


def test_what_does_not_belong_together_is_refused(features: Path, tmp_path: Path):
    other = write_features(tmp_path / "other", [([1, 2], [0, 1])], target="f" * 64)
    with pytest.raises(Mismatch, match="made with target"):
        make_vocab(features, tmp_path / "vocab", 4, held_out=other)
    make_vocab(features, tmp_path / "map", 4)
    wider = write_features(tmp_path / "wider", [([1, 2], [0, 1])], vocab=V + 1)
    with pytest.raises(Mismatch, match=r"301 ids.*300"):
        make_vocab(tmp_path / "map", tmp_path / "vocab", 4, held_out=wider)
    with pytest.raises(BadInput, match="expected 1 to 300"):
        make_vocab(features, tmp_path / "vocab", 301)
    with pytest.raises(BadInput, match="is missing"):
        make_vocab(tmp_path / "nowhere", tmp_path / "vocab", 4)
    assert not (tmp_path / "vocab").exists(), "a refusal leaves nothing behind"


def test_the_command_prints_what_a_person_or_a_program_reads(tiny_target: Path, tmp_path: Path):
    docs = [([9, 40, 40, 41], [0, 1, 1, 1]), ([9, 40, 200], [0, 1, 1])]
    features = write_features(tmp_path / "features", docs, tokenizer=tokenizer_fingerprint(tiny_target))
    arguments = [str(features), "--size", "8", "--out", str(tmp_path / "vocab"), "--target", str(tiny_target)]
    result = CliRunner().invoke(command, [*arguments, "--always-id", "123", "--json"], catch_exceptions=False)
    told = json.loads(result.stdout)
    assert told["size"] == 8
    assert told["always"] == 4  # the three specials of the tiny target, and 123
    assert set(VocabMap.load(tmp_path / "vocab").ids.tolist()) >= {0, 1, 2, 123, 40, 41, 200}
    result = CliRunner().invoke(command, [*arguments, "--always-token", "<|im_end|>"], catch_exceptions=False)
    assert "8 of the target's 300 ids" in result.stdout
    assert "covers 100.00% of the supervised tokens counted" in result.stdout
    assert (
        CliRunner().invoke(command, [str(features), "--size", "4", "--out", "x", "--always-token", "a"]).exit_code == 2
    )


def test_special_ids_are_those_in_use(tmp_path: Path):
    """Reserved tokens, of which some vocabularies have hundreds, do not crowd a small draft vocabulary."""
    added = [(0, "<s>"), (1, "</s>"), (2, "<think>"), (3, "<reserved_0>"), (4, "<|turn|>"), (5, "<img>")]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": i, "content": c} for i, c in added]}))
    extra = {"additional_special_tokens": ["<|turn|>"], "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**extra, "extra_special_tokens": {"image": "<img>"}}))
    (tmp_path / "chat_template.jinja").write_text("{{ '<think>' }}")
    config = {
        "model_type": "unknown_x",
        "hidden_size": 4,
        "vocab_size": 9,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [8, 1]}))
    assert special_ids(tmp_path) == (0, 1, 2, 4, 5, 8)


def test_ids_of_a_text(tiny_target: Path, tmp_path: Path):
    assert token_ids(tiny_target, "<|im_end|>") == (2,)
    assert len(token_ids(tiny_target, "zq")) == 2
    with pytest.raises(BadInput, match="makes no token"):
        token_ids(tiny_target, "")
    with pytest.raises(BadInput, match=r"no tokenizer\.json"):
        token_ids(tmp_path, "a")


class _Features:
    """Shards, as FeatureSet shows them."""

    dir = Path("features")

    class meta:
        vocab_size = 6

    def __init__(self, *rows: tuple[list[int], list[int]]):
        self._rows = rows
        self.shards = [Path("abcdef"[k]) for k in range(len(rows))]

    def shard(self, index: int) -> dict[str, torch.Tensor]:
        ids, mask = self._rows[index]
        return {"ids": torch.tensor(ids, dtype=torch.int32), "mask": torch.tensor(mask, dtype=torch.uint8)}


def test_only_supervised_tokens_are_counted():
    counts = count_supervised(_Features(([1, 2, 2, 5], [0, 1, 1, 1]), ([2, 3], [1, 0])))
    assert counts.tolist() == [0, 0, 3, 0, 0, 1]
    with pytest.raises(BadInput, match="no token is supervised"):
        count_supervised(_Features(([1], [0]), ([2], [0])))
    with pytest.raises(BadInput, match="ids run from 6 to 6"):
        count_supervised(_Features(([6], [1]), ([2], [0])))


@settings(max_examples=60, deadline=None)
@given(
    shards=st.lists(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 1])), max_size=20), max_size=6),
    counted=st.integers(1, 25),
)
def test_counts_do_not_depend_on_how_tokens_are_gathered(shards: list[list[tuple[int, int]]], counted: int):
    """Shards larger than one bincount are cut, smaller ones gathered; id 0 is an id like any other."""
    wanted = [sum(m for shard in shards for i, m in shard if i == token) for token in range(6)]
    features = _Features(*(([i for i, _ in shard], [m for _, m in shard]) for shard in shards))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count, "COUNTED", counted)
        if any(wanted):
            assert count_supervised(features).tolist() == wanted
        else:
            with pytest.raises(BadInput, match="no token is supervised"):
                count_supervised(features)


@pytest.mark.parametrize("counted", [2, 3, 100])
def test_ids_out_of_range_are_refused_with_their_shard(counted: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(count, "COUNTED", counted)
    good = ([1, 0], [1, 1])
    with pytest.raises(BadInput, match=r"b: ids run from 1 to 9, the target's end at 5"):
        count_supervised(_Features(good, ([3, 9, 1, 200], [1, 1, 1, 0])))
    with pytest.raises(BadInput, match=r"b: ids run from -7 to 3"):
        count_supervised(_Features(good, ([3, 2, -7, -9], [1, 1, 1, 0])))
    with pytest.raises(BadInput, match=r"a: ids run from 2147483647 to 2147483647"):
        count_supervised(_Features(([2**31 - 1], [1]), good))
    # What is not supervised is not counted, whatever it is; any mask but 0 supervises.
    assert count_supervised(_Features(good, ([3, 2, -7, 200], [1, 2, 0, 0]))).tolist() == [1, 1, 1, 1, 0, 0]


def test_answers_of_conversations_are_counted_before_any_extraction(tiny_target: Path, tmp_path: Path):
    rows = [{"prompt_token_ids": [1, 2], "response_token_ids": [40, 40, 41]},
            {"prompt_token_ids": [40, 2], "response_token_ids": [200, 40]}, {"nothing": 1}]  # fmt: skip
    talks = tmp_path / "talks.jsonl"
    talks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadInput, match=r"talks\.jsonl, line 3 .*--skip-bad"):
        make_vocab(talks, tmp_path / "vocab", 4, target_dir=tiny_target)
    report = make_vocab(talks, tmp_path / "vocab", 4, target_dir=tiny_target, skip_bad=True)
    assert report.set_aside == {"malformed": 1}
    assert VocabMap.load(tmp_path / "vocab").counts[[2, 40, 41, 200]].tolist() == [0, 3, 1, 1]
    assert (report.supervised_tokens, report.observed) == (5, 3)
    assert make_vocab(talks, tmp_path / "vocab", 4, target_dir=tiny_target, skip_bad=True).skipped
    talks.write_text(json.dumps(rows[1]) + "\n")
    assert not make_vocab(talks, tmp_path / "vocab", 4, target_dir=tiny_target).skipped
    with pytest.raises(BadInput, match=r"talks\.jsonl.*--target"):
        make_vocab(talks, tmp_path / "vocab", 4)
    asked = ["--size", "4", "--target", str(tiny_target), "--out", str(tmp_path / "other"), "--json"]
    told = CliRunner().invoke(command, [str(talks), *asked], catch_exceptions=False)
    assert json.loads(told.stdout)["supervised_tokens"] == 2
