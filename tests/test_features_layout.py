"""Shards on disk: what is written is read back without a copy, and damage is named, never read over."""

import json

import pytest
import torch
from safetensors import safe_open

from eyas.conventions import Conventions
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.features.layout import SCHEMA, FeatureMeta, dump_index, read_index, shard_name, teacher_rows
from eyas.features.reader import FeatureSet, map_safetensors
from eyas.features.writer import ShardBuffer, ShardWriter, plan_digest, plan_shards

META = FeatureMeta(8, 50, Conventions(taps=(1, 2, 4), num_target_layers=6), "a" * 64, "b" * 64, "c" * 64)


def document(length, seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[length // 2 :] = 1
    return {
        "ids": torch.randint(0, 50, (length,), generator=g, dtype=torch.int32),
        "mask": mask,
        "taps": torch.randn(length, 24, generator=g).bfloat16(),
        "final": torch.randn(length, 8, generator=g).bfloat16(),
        "top1": torch.randint(0, 50, (length,), generator=g, dtype=torch.int32),
        "logsumexp": torch.randn(length, generator=g),
    }


def write_set(folder, lengths=(5, 9, 3, 7, 11), shard_tokens=14, finish=True):
    docs = [document(n, seed) for seed, n in enumerate(lengths)]
    writer = ShardWriter(folder, META)
    plan = plan_shards(lengths, META.bytes_per_token(), shard_tokens * META.bytes_per_token())
    made = []
    for k, part in enumerate(plan):
        digest = plan_digest(META, [(f"d{i}", docs[i]["ids"], docs[i]["mask"]) for i in part])
        if writer.kept(k, digest):
            continue
        buffer = ShardBuffer(META, [lengths[i] for i in part])
        for i in reversed(part):  # any order
            buffer.put(i - part.start, **docs[i])
        writer.write(k, [f"d{i}" for i in part], buffer, digest)
        made.append(k)
    if finish:
        writer.finish(len(plan), {"conversations": "x"}, {"shard_bytes": 1}, {"documents": len(lengths)}, 0.1)
    return docs, made


def test_what_was_written_is_read_back(tmp_path):
    docs, made = write_set(tmp_path)
    features = FeatureSet.open(tmp_path, verify=True)
    assert made == [0, 1, 2]
    assert features.doc_lengths.tolist() == [5, 9, 3, 7, 11]
    assert features.num_tokens == 35
    assert features.supervised_tokens == sum(int(d["mask"].sum()) for d in docs)
    assert features.doc_ids == ["d0", "d1", "d2", "d3", "d4"]
    assert features.conventions == META.conventions
    for i, doc in enumerate(docs):
        assert features.doc_id(i) == f"d{i}"
        read = features.document(i)
        assert set(read) == set(doc)
        for name, values in doc.items():
            assert read[name].dtype == values.dtype
            assert torch.equal(read[name], values), (i, name)
    with pytest.raises(IndexError):
        features.document(5)


def test_documents_are_views_of_the_mapped_file(tmp_path):
    write_set(tmp_path)
    features = FeatureSet.open(tmp_path)
    shard = features.shard(0)
    doc = features.document(1)
    start = int(shard["offsets"][1])
    assert doc["taps"].data_ptr() == shard["taps"].data_ptr() + start * 24 * 2
    doc["taps"][0, 0] = 7.0  # private mapping: the file does not change
    assert FeatureSet.open(tmp_path, verify=True).document(1)["taps"][0, 0] != 7.0


def test_shards_are_plain_safetensors_that_say_whose_they_are(tmp_path):
    docs, _ = write_set(tmp_path)
    with safe_open(tmp_path / shard_name(0), "pt") as file:
        told = json.loads(file.metadata()["eyas"])
        assert torch.equal(file.get_tensor("ids"), torch.cat([docs[0]["ids"], docs[1]["ids"]]))
    assert told["schema"] == SCHEMA
    assert told["documents"] == ["d0", "d1"]
    assert FeatureMeta.from_dict(told["meta"]) == META


def test_a_killed_run_keeps_finished_shards_and_redoes_damaged_ones(tmp_path):
    write_set(tmp_path, finish=False)
    with pytest.raises(BadInput, match="not finished"):
        FeatureSet.open(tmp_path)
    assert write_set(tmp_path)[1] == []  # everything was kept
    path = tmp_path / shard_name(1)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(EyasError, match=r"shard-00001.*eyas extract"):
        FeatureSet.open(tmp_path)
    assert write_set(tmp_path)[1] == [1]
    FeatureSet.open(tmp_path, verify=True)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    FeatureSet.open(tmp_path)  # same size: only a verification sees it
    with pytest.raises(EyasError, match="checksum"):
        FeatureSet.open(tmp_path, verify=True)
    assert write_set(tmp_path)[1] == [1]
    path.unlink()
    with pytest.raises(EyasError, match="missing"):
        FeatureSet.open(tmp_path)
    assert write_set(tmp_path)[1] == [1]


def test_a_shorter_plan_removes_what_the_longer_one_left(tmp_path):
    write_set(tmp_path)
    write_set(tmp_path, lengths=(5, 9))
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [shard_name(0)]
    assert FeatureSet.open(tmp_path, verify=True).num_docs == 2


def test_truncated_files_are_named(tmp_path):
    write_set(tmp_path)
    path = tmp_path / shard_name(0)
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(EyasError, match="shard-00000"):
            map_safetensors(path)


def test_features_of_another_target_are_refused_naming_both_sides(tmp_path):
    write_set(tmp_path)
    features = FeatureSet.open(tmp_path)
    features.check(target="a" * 64, tokenizer="b" * 64, template="c" * 64, taps=(1, 2, 4))
    with pytest.raises(Mismatch, match=r"target aaaaaaaaaaaaaaaa.*target dddddddddddddddd"):
        features.check(target="d" * 64)
    with pytest.raises(Mismatch, match=r"taps \[1, 2, 4\].*taps \[1, 2, 3\]"):
        features.check(taps=[1, 2, 3])
    with pytest.raises(Mismatch, match="tokenizer"):
        features.check(tokenizer="d" * 64)
    with pytest.raises(Mismatch, match="template"):
        features.check(template="d" * 64)


def test_plan_covers_every_document_once_in_order():
    lengths = [5, 100, 1, 1, 1, 7, 30]
    plan = plan_shards(lengths, bytes_per_token=10, shard_bytes=80)
    assert [i for part in plan for i in part] == list(range(7))
    assert [list(p) for p in plan] == [[0], [1], [2, 3, 4], [5], [6]]
    assert plan_shards([], 10) == []


def test_teacher_rows_are_exactly_those_that_the_contract_reads():
    """Every (row, step) with w(i,k) = m_{i+1} ... m_{i+2+k} = 1 reads the teacher at i+1+k; nothing else is read."""
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1], dtype=torch.uint8)
    read = set()
    for i in range(len(mask)):
        for k in range(8):
            span = range(i + 1, i + 3 + k)
            if span[-1] < len(mask) and all(mask[j] for j in span):
                read.add(i + 1 + k)
    stored = set(teacher_rows(mask).nonzero().flatten().tolist())
    first_choices = {1, 6, 8}  # the token before each answer
    assert stored == read | first_choices
    assert not read & first_choices


def test_index_of_another_schema_is_refused():
    assert read_index(dump_index(META, []), "shards.json") == (META, {})
    with pytest.raises(BadInput, match="eyas-features/0"):
        read_index(dump_index(META, []).replace(SCHEMA, "eyas-features/0"), "shards.json")
    with pytest.raises(BadInput, match=r"shards\.json"):
        read_index("[1, 2]", "shards.json")


def test_a_buffer_with_a_missing_document_cannot_be_written():
    buffer = ShardBuffer(META, [3, 4])
    buffer.put(0, **document(3, 0))
    with pytest.raises(ValueError, match=r"\[1\]"):
        buffer.complete()
