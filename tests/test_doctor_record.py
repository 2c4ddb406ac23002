"""What is recorded of a target: its own greedy words, the states that a forward of the same text has, once.

pytest -q tests/test_doctor_record.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.doctor import record as module
from eyas.doctor.material import Material
from eyas.doctor.record import POSITIONS, record, useful_taps
from eyas.errors import BadInput
from eyas.target.facts import read_facts

PROMPTS = ("what is the capital of France?", "def add(a, b):", "the young hawk", "a draft", "the field", "guesses")
TAPS = (0, 2, 5, 8)
TOKENS = 24  # of an answer at most: the tiny target never ends one


@pytest.fixture(scope="module", autouse=True)
def short_answers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOKENS", TOKENS)
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def recorded(target: Path, cache: Path | None, **more: Any) -> tuple[Material, list[str]]:
    told: list[str] = []
    arguments: dict[str, Any] = {"taps": TAPS, "prompts": PROMPTS, "positions": 100, "dtype": "float32"}
    return record(target, **arguments | more, cache=cache, tell=told.append), told


@pytest.fixture(scope="module")
def first(tiny_target: Path, cache: Path) -> Material:
    material, told = recorded(tiny_target, cache)
    assert told == ["recording the target's answers to 6 prompts"]
    return material


def alike(a: Material, b: Material) -> bool:
    same = all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("ids", "offsets", "mask", "choice"))
    return same and a.states.keys() == b.states.keys() and all(torch.equal(a.states[t], b.states[t]) for t in a.states)


def files(cache: Path) -> list[Path]:
    return sorted((cache / "recorded").iterdir())


# ---------------------------------------------------------------- what it holds


def test_answers_are_the_targets_own_and_enough(first: Material, tiny_target: Path):
    assert int(first.mask.sum()) >= 100 and first.share_own == 1.0
    assert first.final_tap == 8 and set(first.states) == set(TAPS)
    assert first.ids.dtype == first.choice.dtype == torch.int64 and first.mask.dtype == torch.bool
    for start, end in zip(first.offsets[:-1].tolist(), first.offsets[1:].tolist(), strict=True):
        mask = first.mask[start:end]
        answer = int(mask.sum())
        assert 3 <= answer <= TOKENS and mask.tolist() == sorted(mask.tolist()), "prompt, then answer"
    assert "greedy answers of the target" in first.source
    assert first.positions > 80


def test_states_and_choices_are_those_of_a_forward(first: Material, tiny_target: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    start, end = int(first.offsets[1]), int(first.offsets[2])
    ids, last = first.ids[None, start:end], []
    # Entry n of hidden_states is normed already, so that the last tap is looked at before the norm.
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    hook.remove()
    states = {**{t: out.hidden_states[t][0] for t in TAPS if t < 8}, 8: last[0][0]}
    used = end - start - 1  # nobody reads the state of the last token
    for tap in TAPS:
        mine = first.states[tap][start:end].float()
        assert torch.allclose(mine[:used], states[tap][:used], atol=0.05, rtol=0.02), tap
    answered = first.mask[start:end].nonzero().squeeze(1)
    choice = out.logits[0].argmax(-1)
    assert first.choice[start:end][answered[:-1]].tolist() == choice[answered[:-1]].tolist()


def test_taps_are_all_where_that_is_cheap(tiny_target: Path):
    facts = read_facts(tiny_target)
    assert useful_taps(facts, [3]) == tuple(range(9))
    assert useful_taps(facts, [7, 3, -1, 9, 3], positions=1 << 24) == (3, 7)
    assert POSITIONS == 4096


# ---------------------------------------------------------------- once


def test_the_second_look_records_nothing(first: Material, tiny_target: Path, cache: Path):
    (file,) = files(cache)
    os.utime(file, (1, 1))
    again, told = recorded(tiny_target, cache)
    assert told == [] and alike(again, first) and again.final_tap == 8
    assert file.stat().st_mtime > 1, "what is used stays"


@pytest.mark.parametrize(
    "other", [{"taps": (2, 5)}, {"prompts": PROMPTS[:5]}, {"positions": 90}, {"dtype": "bfloat16"}], ids=str
)
def test_another_question_is_another_recording(first: Material, tiny_target: Path, cache: Path, other: dict[str, Any]):
    before = set(files(cache))
    material, told = recorded(tiny_target, cache, **other)
    assert len(told) == 1 and len(set(files(cache)) - before) == 1
    if "taps" in other:
        assert set(material.states) == {2, 5}


def test_another_target_is_another_recording(first: Material, tmp_path: Path, cache: Path, make_tiny_target):
    before = len(files(cache))
    material, told = recorded(make_tiny_target(tmp_path / "t", seed=1), cache)
    assert told and len(files(cache)) == before + 1 and not alike(material, first)


@pytest.fixture(scope="module")
def small(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Material, Path]:
    """A recording of two answers, and its file."""
    root = tmp_path_factory.mktemp("small")
    material, _ = recorded(tiny_target, root, positions=20, prompts=PROMPTS[:2])
    return material, files(root)[0]


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "without a tensor"])
def test_a_damaged_recording_is_made_anew(small, tiny_target: Path, tmp_path: Path, damage: str):
    from safetensors.torch import load_file, save_file

    whole, file = small
    broken = tmp_path / "recorded" / file.name
    broken.parent.mkdir()
    content = file.read_bytes()
    if damage == "without a tensor":
        save_file({k: v for k, v in load_file(file).items() if k != "mask"}, broken)
    else:
        broken.write_bytes({"truncated": content[: len(content) // 2], "garbage": b"x" * 999, "empty": b""}[damage])
    again, told = recorded(tiny_target, tmp_path, positions=20, prompts=PROMPTS[:2])
    assert len(told) == 1 and alike(again, whole)
    assert recorded(tiny_target, tmp_path, positions=20, prompts=PROMPTS[:2])[1] == []


def test_the_cache_is_where_the_user_says(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "mine"))
    recorded(tiny_target, None, positions=20, prompts=PROMPTS[:1])
    assert len(files(tmp_path / "mine")) == 1


def test_a_cache_that_cannot_be_written_only_costs_the_next_look(tiny_target, tmp_path, monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "atomic_save_safetensors", full)
    material, _ = recorded(tiny_target, tmp_path, positions=20, prompts=PROMPTS[:1])
    assert material.positions > 0 and files(tmp_path) == []


def test_old_recordings_make_room(tmp_path: Path):
    for i in range(4):
        file = tmp_path / f"{i}.safetensors"
        file.write_bytes(b"x" * 10)
        os.utime(file, (i, i))
    (tmp_path / "note.txt").write_text("kept")
    module._forget_old(tmp_path, most=25)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2.safetensors", "3.safetensors", "note.txt"]


def test_prompts_that_leave_no_room_are_refused(tiny_target: Path, tmp_path: Path):
    with pytest.raises(BadInput, match="none of the prompts leaves room for 24 tokens in 256 positions"):
        recorded(tiny_target, tmp_path, prompts=["the field " * 200])
    assert not (tmp_path / "recorded").exists()
