"""Requests that the target writes itself: where they begin, which are used, and that nothing but the settings decides.

pytest -q tests/test_ask.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer

from eyas.artifacts import read_manifest
from eyas.ask import JOURNAL, PROMPTS, Asking, ask, place_of_user, usable
from eyas.chat import render
from eyas.cli.ask import command
from eyas.errors import BadInput
from eyas.journal import Journal
from eyas.prompts import load_prompts
from eyas.target.answering import run_all
from eyas.target.generate import Generator
from eyas.target.model import Target
from eyas.target.requests import Request

N = 60
QUICK = Asking(openings=["what is", "", "def add"], max_new_tokens=60, top_k=300, slots=16)


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / PROMPTS).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def asked(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("asked")
    ask(tiny_target, out, N, QUICK)
    return out


def test_a_message_is_begun_exactly_where_the_template_puts_a_users(tiny_target: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    before, ends = place_of_user(tokenizer)
    assert tokenizer.decode(before) == "<|im_start|>user\n"
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>"]
    said = tokenizer("a hawk", add_special_tokens=False)["input_ids"]
    rendered = render(tokenizer, [{"role": "user", "content": "a hawk"}])
    assert rendered[: len(before) + len(said) + 1] == before + said + ends


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('system first') }}{% endif %}",
    ],
)
def test_a_template_without_such_a_place_is_refused(tiny_target: Path, template: str):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    tokenizer.chat_template = template
    with pytest.raises(BadInput, match="cannot ask"):
        place_of_user(tokenizer)


def test_messages_begin_with_their_openings_and_read_back_as_prompts(asked: Path):
    texts = [row["prompt"] for row in rows(asked)]
    assert len(texts) >= 10
    assert sum(text.startswith("what is") for text in texts) >= 3
    assert sum(text.startswith("def add") for text in texts) >= 3
    assert len(set(texts)) == len(texts)
    assert [p.text for p in load_prompts(asked / PROMPTS).prompts] == texts
    counts = read_manifest(asked)["counts"]
    assert counts["prompts"] == len(texts)
    assert sum(n for name, n in counts.items() if name != "shortened") == N


def test_neither_neighbours_nor_an_earlier_kill_change_a_message(tiny_target: Path, asked: Path, tmp_path: Path):
    ask(tiny_target, tmp_path / "narrow", N, replace(QUICK, slots=3))
    assert (tmp_path / "narrow" / PROMPTS).read_bytes() == (asked / PROMPTS).read_bytes()

    # As a kill leaves it: a journal with some messages, in no order, and no manifest.
    class Killed(Exception):
        pass

    def die(_: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Killed

    left = 7
    with pytest.raises(Killed):
        ask(tiny_target, tmp_path / "killed", N, QUICK, die)
    assert (tmp_path / "killed" / JOURNAL).exists()
    told: list[int] = []
    ask(tiny_target, tmp_path / "killed", N, QUICK, told.append)
    assert sum(told) == N - 7
    assert (tmp_path / "killed" / PROMPTS).read_bytes() == (asked / PROMPTS).read_bytes()
    assert not (tmp_path / "killed" / JOURNAL).exists()
    told.clear()
    ask(tiny_target, tmp_path / "killed", N, QUICK, told.append)
    assert told == [], "a finished folder is left alone"


def test_other_settings_do_not_mix(tiny_target: Path, tmp_path: Path):
    journal = Journal(tmp_path / JOURNAL, {"schema": "eyas-ask/1", "seed": 1})
    journal.close()
    with pytest.raises(BadInput, match="other settings"):
        ask(tiny_target, tmp_path, 3, QUICK)


def test_what_is_left_out():
    messages = [
        ("  What is a hawk? ", "stop"),
        ("What is a hawk?", "stop"),
        ("hi", "stop"),
        ("la la la la la la la la", "loop"),
        ("I keep a hawk. It eats 3.5 mice a day, and so", "length"),
        ("no end of this sentence in 3.5 sight", "length"),
        ("def f(x):\n    return x\nprint(", "length"),
    ]
    prompts, counts = usable(messages)
    assert [p.text for p in prompts] == ["What is a hawk?", "I keep a hawk.", "def f(x):\n    return x"]
    assert counts == {
        "prompts": 3, "shortened": 2, "duplicates": 1, "too_short": 1, "repetition": 1, "endless": 1,
    }  # fmt: skip


def test_top_k_draws_from_the_likeliest_only_and_in_their_proportion(tiny_target: Path):
    """2,000 first tokens at temperature 1 from the 4 likeliest; total variation below 0.06."""
    target = Target.load(tiny_target)
    ids, k, n = [5, 6, 7], 4, 2000
    with torch.no_grad():
        logits = target.model(torch.tensor([ids])).logits[0, -1]
    best = logits.topk(k)
    wanted = torch.zeros_like(logits).scatter_(0, best.indices, best.values.softmax(-1))
    generator = Generator(target, slots=64, max_new_tokens=1, temperature=1.0, top_k=k)
    drawn = [a.ids[0] for a in run_all(generator, [Request(i, ids, i) for i in range(n)])]
    shares = torch.bincount(torch.tensor(drawn), minlength=len(logits)) / n
    assert set(drawn) <= set(best.indices.tolist())
    assert float((shares - wanted).abs().sum() / 2) < 0.06
    with pytest.raises(BadInput, match="top_k"):
        Generator(target, top_k=0)


def test_the_command(tiny_target: Path, tmp_path: Path):
    out = tmp_path / "asked"
    how = ["--target", str(tiny_target), "--out", str(out), "--max-new-tokens", "60", "--opening", "what is"]
    done = CliRunner().invoke(command, ["--count", "6", *how, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["prompts"] == len(rows(out))
    assert CliRunner().invoke(command, ["--count", "0", *how]).exit_code == 2
