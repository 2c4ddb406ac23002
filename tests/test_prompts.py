"""Every layout of a prompt file becomes the same prompts; what is malformed is named.

pytest -q tests/test_prompts.py
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from eyas.errors import BadInput, EyasError
from eyas.prompts import Prompt, load_prompts, read_prompts

ASK = {"role": "user", "content": "Why?"}


def write(path: Path, *rows) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?"},
        {"prompt": [ASK]},
        {"messages": [ASK]},
        {"messages": json.dumps([ASK])},
        {"messages": [ASK, {"role": "assistant", "content": "Because."}]},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        {"conversations": [{"role": "user", "content": "Why?"}]},
        {"conversations": [{"from": "gpt", "value": "Hi, I can help!"}, {"from": "human", "value": "Why?"}]},
        {"turns": ["Why?"]},
    ],
)
def test_every_layout_gives_the_same_prompt(tmp_path: Path, row: dict):
    (prompt,) = load_prompts(write(tmp_path / "p.jsonl", {"id": 7, "source": "s", **row})).prompts
    assert prompt == Prompt("7", ((ASK,),), None, "s")


def test_each_answer_in_a_dialogue_is_a_turn_to_regenerate(tmp_path: Path):
    rows = [
        {"conversations": [
            {"from": "system", "value": "Be brief."}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "x"},
            {"from": "human", "value": "b"}, {"from": "gpt", "value": "y"}, {"from": "human", "value": "c"},
        ]},
        {"turns": ["d", "e"]},
    ]  # fmt: skip
    first, second = load_prompts(write(tmp_path / "p.jsonl", *rows)).prompts
    user = lambda text: {"role": "user", "content": text}  # noqa: E731
    assert first.turns == (({"role": "system", "content": "Be brief."}, user("a")), (user("b"),), (user("c"),))
    assert second.turns == ((user("d"),), (user("e"),))
    assert second.messages == [user("d")]


def test_tools_and_tool_calls_stay(tmp_path: Path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    result = {"role": "tool", "content": "42", "tool_call_id": "1"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"messages": [ASK, call, result, {"role": "assistant", "content": "42!"}], "tools": json.dumps(tools)}
    (prompt,) = load_prompts(write(tmp_path / "p.jsonl", row)).prompts
    assert prompt.tools == tools
    assert prompt.turns == ((ASK, {**call, "content": ""}, result),)


def test_what_is_written_is_read_back(tmp_path: Path):
    rows = [
        {"id": "a", "prompt": "Why?"},
        {"id": "b", "turns": ["One?", "Two?"], "source": "x"},
        {"id": "c", "messages": [{"role": "system", "content": "s"}, ASK], "tools": [{"name": "f"}]},
    ]
    prompts = load_prompts(write(tmp_path / "p.jsonl", *rows)).prompts
    again = load_prompts(write(tmp_path / "q.jsonl", *(p.to_row() for p in prompts))).prompts
    assert again == prompts


def test_ids_are_given_or_follow_from_the_content(tmp_path: Path):
    file = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b", "id": 0}, {"question_id": 81, "turns": ["c"]})
    a, b, c = load_prompts(file).prompts
    assert (len(a.id), b.id, c.id) == (16, "0", "81")
    assert load_prompts(write(tmp_path / "other.jsonl", {"prompt": "a"})).prompts[0].id == a.id


def test_duplicates_are_left_out_and_counted_and_ids_made_distinct(tmp_path: Path):
    rows = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "a"}, {"id": 1, "prompt": "b"}, {"id": 1, "prompt": "c"}]
    loaded = load_prompts(write(tmp_path / "p.jsonl", *rows))
    assert [(p.id, p.text) for p in loaded.prompts] == [("1", "a"), ("1~2", "b"), ("1~3", "c")]
    assert (loaded.duplicates, loaded.renamed) == (1, 2)


MALFORMED = {
    "not json": ("{'prompt'", "not JSON"),
    "a list": ([1], "a JSON list"),
    "no known key": ({"text": "a"}, "an object with `text`"),
    "empty prompt": ({"prompt": "  "}, "`prompt` is empty"),
    "number": ({"prompt": 3}, "`prompt` is a int"),
    "empty messages": ({"messages": []}, "`messages` is an empty list"),
    "not an object": ({"messages": ["hello"]}, r"`messages`\[0\] is a str"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "a"}]}, "role 'wizard'"),
    "unknown from": ({"conversations": [{"from": "elf", "value": "a"}]}, "from 'elf'"),
    "user without words": ({"messages": [{"role": "user", "content": ""}]}, "has no content"),
    "nobody asks": ({"messages": [{"role": "system", "content": "a"}]}, "no message of the user"),
    "tools": ({"prompt": "a", "tools": {"name": "f"}}, "`tools` is a dict"),
    "turns": ({"turns": ["a", 2]}, "`turns` holds something else"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_line_is_named(tmp_path: Path, name: str):
    line, words = MALFORMED[name]
    file = write(tmp_path / "p.jsonl", {"prompt": "good"}, line, {"prompt": "also good"})
    with pytest.raises(BadInput, match=f"p.jsonl, line 2: .*{words}"):
        load_prompts(file)
    loaded = load_prompts(file, skip_bad=True)
    assert [p.text for p in loaded.prompts] == ["good", "also good"]
    (bad,) = loaded.bad
    assert (bad.file, bad.line) == (str(file), 2)


def test_nothing_usable_and_no_such_file(tmp_path: Path):
    with pytest.raises(BadInput, match="no prompt can be used"):
        load_prompts(write(tmp_path / "p.jsonl", "", "{}"), skip_bad=True)
    with pytest.raises(BadInput, match="no such file"):
        load_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(BadInput, match="holds no prompt file"):
        load_prompts(tmp_path / "p.jsonl" if (tmp_path / "p.jsonl").is_dir() else _empty(tmp_path))


def _empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_parquet_gzip_json_array_and_folders(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = [
        {"id": "1", "messages": [{"role": "user", "content": "a", "name": None}], "tools": None},
        {"id": "2", "messages": [{"role": "user", "content": "b", "name": "Ann"}], "tools": None},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "1.parquet")
    with gzip.open(tmp_path / "2.jsonl.gz", "wt") as file:
        file.write(json.dumps({"id": "3", "prompt": "c"}) + "\n")
    (tmp_path / "3.json").write_text(json.dumps([{"id": "4", "prompt": "d"}]))
    prompts = load_prompts(tmp_path).prompts
    assert [(p.id, p.text) for p in prompts] == [("1", "a"), ("2", "b"), ("3", "c"), ("4", "d")]
    assert prompts[0].messages == [{"role": "user", "content": "a"}], "the nulls of other rows are no fields"
    assert prompts[1].messages == [{"role": "user", "content": "b", "name": "Ann"}]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(BadInput, match="cannot be read as Parquet"):
        load_prompts(tmp_path / "bad.parquet")


def test_limit_counts_distinct_prompts(tmp_path: Path):
    file = write(tmp_path / "p.jsonl", *({"prompt": t} for t in "aabcd"))
    assert [p.text for p in load_prompts(file, limit=2).prompts] == ["a", "b"]
    assert len(list(read_prompts(file))) == 5


def test_a_dataset_id_needs_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EyasError, match=r"pip install 'eyas\[datasets\]'"):
        load_prompts("someone/questions")


def test_a_dataset_id_is_read(monkeypatch: pytest.MonkeyPatch):
    asked = []

    class Datasets:
        @staticmethod
        def load_dataset(name, config, split):
            asked.append((name, config, split))
            return [{"prompt": "a"}, {"prompt": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert [p.text for p in load_prompts("someone/questions").prompts] == ["a", "b"]
    load_prompts("someone/questions:easy@test")
    assert asked == [("someone/questions", None, "train"), ("someone/questions", "easy", "test")]
