"""Prompts of several sources become one file; conversations are dealt the same way every time.

pytest -q tests/test_gather.py
"""

import json
from pathlib import Path

import pytest

from eyas.config import validate
from eyas.errors import BadInput
from eyas.gather import collect_prompts, prompt_inputs, set_names, split_conversations

LONG = "how do I teach a young hawk to come back to the glove when it sees a field full of mice"


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *values: dict) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "a": write(tmp_path / "a.jsonl", *({"id": str(i), "prompt": f"What is {i} plus {i}?"} for i in range(8))),
        "b": write(
            tmp_path / "b.jsonl",
            {"id": "0", "messages": [{"role": "user", "content": "Who flies?"}]},
            {"id": "1", "prompt": "What is 3 plus 3?"},  # asked in a.jsonl, too
            {"id": "2", "prompt": LONG + ", please?"},  # 13 words of the held-out one
        ),
        "held": write(
            tmp_path / "held.jsonl", {"id": "q", "prompt": LONG.upper() + "!"}, {"id": "r", "prompt": "Why?"}
        ),
    }


def configured(files: dict[str, str], **prompts):
    return validate(
        {"prompts": {"sources": [files["a"], files["b"]], **prompts}, "prove": {"sets": [files["held"]], "prompts": 2}}
    )


def test_sources_are_merged_without_duplicates_and_without_what_is_held_out(tmp_path: Path, files):
    out = tmp_path / "out"
    counts = collect_prompts(configured(files), out)
    train = rows(out / "train.jsonl")
    assert counts == {"prompts": 9, "to_prove_on": 2, "overlapping": 1}
    texts = [row.get("prompt") for row in train]
    assert sorted(texts) == sorted([f"What is {i} plus {i}?" for i in range(8)] + ["Who flies?"])
    assert len({row["id"] for row in train}) == 9, "two sources have the same ids"
    assert [row["prompt"] for row in rows(out / "held.jsonl")] == [LONG.upper() + "!", "Why?"]


def test_the_order_is_a_shuffle_by_the_seed_and_the_limit_takes_its_beginning(tmp_path: Path, files):
    orders = {}
    for name, values in (("s0", {}), ("again", {}), ("limited", {"limit": 3})):
        collect_prompts(configured(files, **values), tmp_path / name)
        orders[name] = [row["id"] for row in rows(tmp_path / name / "train.jsonl")]
    other = validate({**configured(files).model_dump(), "seed": 1})
    collect_prompts(other, tmp_path / "s1")
    orders["s1"] = [row["id"] for row in rows(tmp_path / "s1" / "train.jsonl")]
    assert orders["s0"] == orders["again"]
    assert orders["limited"] == orders["s0"][:3]
    assert orders["s1"] != orders["s0"]
    assert sorted(orders["s1"]) == sorted(orders["s0"])


def test_inputs_change_with_the_content_of_a_file(files):
    before = prompt_inputs(configured(files))
    assert set(before) == set(files.values())
    Path(files["b"]).write_text('{"prompt": "Else?"}\n')
    after = prompt_inputs(configured(files))
    assert {name for name in before if before[name] != after[name]} == {files["b"]}


def test_two_sets_of_one_name_are_refused(files):
    config = validate({"prove": {"sets": [files["held"], "elsewhere/held.jsonl"]}})
    with pytest.raises(BadInput, match="'held' is taken twice"):
        set_names(config)


def conversations(path: Path, count: int) -> Path:
    write(path, *({"id": f"c{i // 2}", "messages": [], "n": i} for i in range(count)))
    return path


def test_a_split_deals_each_line_once_keeps_ids_together_and_is_repeatable(tmp_path: Path):
    given = conversations(tmp_path / "c.jsonl", 60)
    counts = split_conversations(given, 5, 0, tmp_path / "one")
    train, held = rows(tmp_path / "one" / "train.jsonl"), rows(tmp_path / "one" / "heldout.jsonl")
    assert counts == {"train": 50, "held_out": 10}
    assert sorted(row["n"] for row in train + held) == list(range(60))
    assert not {row["id"] for row in train} & {row["id"] for row in held}
    assert [row["n"] for row in train] == sorted(row["n"] for row in train)
    split_conversations(given, 5, 0, tmp_path / "two")
    assert (tmp_path / "one" / "heldout.jsonl").read_bytes() == (tmp_path / "two" / "heldout.jsonl").read_bytes()
    split_conversations(given, 5, 1, tmp_path / "three")
    assert (tmp_path / "one" / "heldout.jsonl").read_bytes() != (tmp_path / "three" / "heldout.jsonl").read_bytes()


def test_at_most_a_fifth_is_held_out(tmp_path: Path):
    counts = split_conversations(conversations(tmp_path / "c.jsonl", 20), 64, 0, tmp_path / "out")
    assert counts == {"train": 16, "held_out": 4}


def test_too_few_conversations_are_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="4 conversations; at least 5"):
        split_conversations(conversations(tmp_path / "c.jsonl", 8), 1, 0, tmp_path / "out")


@pytest.mark.parametrize("line", ["{", "[1]", '"text"'])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str):
    path = conversations(tmp_path / "c.jsonl", 20)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BadInput, match=r"c\.jsonl, line 21: expected a JSON object"):
        split_conversations(path, 1, 0, tmp_path / "out")


def test_longer_prompts_than_asked_for_are_left_out_and_counted(tmp_path: Path, files):
    everything = collect_prompts(configured(files), tmp_path / "all")
    short = collect_prompts(configured(files, max_chars=10), tmp_path / "short")
    texts = [row["prompt"] for row in rows(tmp_path / "short" / "train.jsonl")]
    assert texts and all(len(text) <= 10 for text in texts)
    assert short["prompts"] + short["too_long"] >= everything["prompts"] > short["prompts"]


def test_the_targets_own_prompts_are_one_more_source_and_none_drowns_another(tmp_path: Path, files):
    own = tmp_path / "own.jsonl"
    asked = [f"Tell me about hawk number {i}." for i in range(40)] + [LONG.upper()]
    own.write_text("".join(json.dumps({"id": f"o{i}", "prompt": text}) + "\n" for i, text in enumerate(asked)))
    counts = collect_prompts(configured(files), tmp_path / "all", own)
    assert counts == {"prompts": 49, "to_prove_on": 2, "overlapping": 2}, "what is proven on is left out of it, too"
    few = collect_prompts(configured(files, per_source=3), tmp_path / "few", own)
    texts = [row["prompt"] for row in rows(tmp_path / "few" / "train.jsonl")]
    whole = [row["prompt"] for row in rows(tmp_path / "all" / "train.jsonl")]
    assert few["prompts"] == len(texts)
    assert sum(text in asked for text in texts) == 3
    assert 3 < len(texts) <= 9
    assert texts == [text for text in whole if text in texts], "the same order"
