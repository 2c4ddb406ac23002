"""Rows of any source: tables, saved datasets with their splits, ids.   pytest -q tests/test_rows.py

A saved dataset is written here as the package `datasets` lays it out (5.2.0): Arrow streams, state.json that names them
in order, dataset_dict.json that names splits. The package itself is not needed to read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from eyas.artifacts import read_manifest
from eyas.errors import BadInput
from eyas.features.count import make_vocab
from eyas.features.extract import extract
from eyas.gather import split_conversations
from eyas.prompts import load_prompts
from eyas.rows import content, read_rows


def talk(n: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"add {n}"}, {"role": "assistant", "content": f"the hawk {n}", **more}]
    return {"id": f"t{n}", "messages": messages}


TALKS = [talk(0), talk(1, name="Ann"), *(talk(n) for n in range(2, 7))]


def stream(file: Path, rows: list[dict[str, Any]], writer: Any = arrow.ipc.new_stream) -> Path:
    table = arrow.Table.from_pylist(rows)
    with arrow.OSFile(str(file), "wb") as handle, writer(handle, table.schema) as out:
        out.write_table(table, max_chunksize=2)
    return file


def saved(folder: Path, *shards: list[dict[str, Any]]) -> Path:
    """As Dataset.save_to_disk leaves it. The names tell another order than state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{len(shards) - i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        stream(folder / name, rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], "_split": None}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def several(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    """As DatasetDict.save_to_disk leaves it."""
    for name, rows in splits.items():
        saved(folder / name, rows)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def ids(source: str | Path) -> list[str]:
    return [row["id"] for _, _, row in read_rows(source)]


def test_a_saved_dataset_comes_in_the_order_of_its_state(tmp_path: Path):
    assert ids(saved(tmp_path / "d", TALKS[:2], TALKS[2:])) == [t["id"] for t in TALKS]
    assert [p.text for p in load_prompts(tmp_path / "d").prompts] == [f"add {n}" for n in range(7)]


def test_splits_are_chosen_by_name(tmp_path: Path):
    folder = several(tmp_path / "d", train=TALKS[:3], test=TALKS[3:])
    assert ids(folder) == ids(f"{folder}@train") == ["t0", "t1", "t2"]
    assert ids(f"{folder}@test") == ["t3", "t4", "t5", "t6"]
    with pytest.raises(BadInput, match="no split 'dev'; choose one of train, test"):
        ids(f"{folder}@dev")
    assert ids(several(tmp_path / "one", only=TALKS[:1])) == ["t0"]
    with pytest.raises(BadInput, match="no split `train`; choose one of a, b"):
        ids(several(tmp_path / "two", a=TALKS[:1], b=TALKS[1:2]))
    with pytest.raises(BadInput, match="no splits to choose from"):
        ids(f"{saved(tmp_path / 'plain', TALKS)}@test")


def test_arrow_files_of_both_kinds_and_damaged_ones(tmp_path: Path):
    assert ids(stream(tmp_path / "a.arrow", TALKS)) == [t["id"] for t in TALKS]
    assert ids(stream(tmp_path / "b.arrow", TALKS, arrow.ipc.new_file)) == [t["id"] for t in TALKS]
    whole = (tmp_path / "a.arrow").read_bytes()
    for name, data in (("c", whole[: len(whole) // 2]), ("d", b"ARROW1"), ("e", b""), ("f", b"no arrow at all")):
        (tmp_path / f"{name}.arrow").write_bytes(data)
        with pytest.raises(BadInput, match=rf"{name}\.arrow cannot be read as Arrow"):
            ids(tmp_path / f"{name}.arrow")
    folder = saved(tmp_path / "saved", TALKS)
    for text in ("{}", "[]", '{"_data_files": []}', '{"_data_files": "x"}', "no"):
        (folder / "state.json").write_text(text)
        with pytest.raises(BadInput, match="not what `datasets` saves"):
            ids(folder)


def test_no_file_outside_the_folder_is_read(tmp_path: Path):
    folder = saved(tmp_path / "saved", TALKS[:1])
    stream(tmp_path / "secret.arrow", TALKS[1:])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../secret.arrow"}]}))
    with pytest.raises(BadInput, match=r"secret\.arrow"):
        ids(folder)


def test_features_and_vocabulary_of_a_dataset_are_those_of_the_same_lines(tiny_target: Path, tmp_path: Path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(t) + "\n" for t in TALKS))
    parquet.write_table(arrow.Table.from_pylist(TALKS), tmp_path / "table.parquet")
    sources = [lines, tmp_path / "table.parquet", saved(tmp_path / "saved", TALKS[:2], TALKS[2:]),
               f"{several(tmp_path / 'both', train=TALKS[:1], test=TALKS)}@test"]  # fmt: skip
    wrote = []
    for number, source in enumerate(sources):
        extract(tiny_target, source, tmp_path / f"f{number}", progress=False)
        manifest = read_manifest(tmp_path / f"f{number}")
        wrote.append({k: v for k, v in manifest["files"].items() if k.endswith(".safetensors")})
    assert wrote[0] and wrote == [wrote[0]] * 4
    digests = [make_vocab(source, tmp_path / f"v{number}", 200, target_dir=tiny_target).digest
               for number, source in enumerate(sources[:3])]  # fmt: skip
    assert len(set(digests)) == 1
    parts = [split_conversations(Path(source), 2, 0, tmp_path / f"s{n}") for n, source in enumerate(sources)]
    assert parts == [parts[0]] * 4
    dealt = [(tmp_path / f"s{n}" / "train.jsonl").read_text().splitlines() for n in range(4)]
    assert [[json.loads(line)["id"] for line in part] for part in dealt] == [
        [json.loads(line)["id"] for line in dealt[0]]
    ] * 4


def test_a_changed_dataset_is_another_input(tmp_path: Path):
    folder = several(tmp_path / "d", train=TALKS[:3], test=TALKS[3:])
    before = content(folder)
    assert content(f"{folder}@test") not in (None, before)
    stream(next((folder / "train").glob("*.arrow")), TALKS[:2])
    assert content(folder) != before
    assert content("owner/name") is None
