"""`eyas chat` in the terminal: who says what, one round in words, and nothing that steers the terminal.

pytest -q tests/test_chat_cli.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from eyas.chat import render
from eyas.cli.chat import command
from eyas.decode.answers import decode
from eyas.decode.step import ChainDrafter
from eyas.decode.talk import Guess, Look
from eyas.draft.checkpoint import save_draft
from eyas.report.talk_text import Marks, explained, harmless, telling
from eyas.talk import Local
from eyas.target.facts import read_facts
from eyas.target.model import Target
from fitting import fitted_draft, greedy_texts
from test_talk import Client

SAY = "the young hawk"


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target)


@pytest.fixture(scope="module")
def asked(target: Target) -> list[int]:
    return render(target.tokenizer, [{"role": "user", "content": SAY}], None, add_generation_prompt=True)


@pytest.fixture(scope="module")
def draft(target: Target, asked: list[int]):
    return fitted_draft(target, [asked], greedy_texts(target, [asked]))


@pytest.fixture(scope="module")
def folder(tiny_target: Path, draft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chat") / "draft"
    save_draft(*draft, out, facts=read_facts(tiny_target))
    return out


def call(folder: Path, target: Target, *args: object, **how):
    given = [folder, "--target", target.dir, "--k", 3, "--max-new-tokens", 20, *args]
    return CliRunner().invoke(command, [str(a) for a in given], **how)


def test_who_said_what_is_what_decode_counts(folder: Path, target: Target, draft, asked: list[int]):
    done = call(folder, target, "--say", SAY, "--say", "and?", "--json", "--explain")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    answer = decode(target, [asked], ChainDrafter(*draft), k=3, max_new_tokens=20, eos_ids=target.facts.eos_ids)
    turn, expected = printed["turns"][0], answer.answers[0]
    assert turn["tokens"] == expected.tokens
    own = [True, *(x for a in expected.accepted for x in [False] * a + [True])]
    assert turn["own"] == own[: len(expected.tokens)]
    assert False in turn["own"]
    counted = expected.accepted[:-1]
    assert (turn["rounds"], turn["accepted"]) == (len(counted), sum(counted))
    assert turn["tau"] == pytest.approx(1 + turn["accepted"] / turn["rounds"], abs=1e-4)
    assert turn["drafted"] == 3 * turn["rounds"]
    assert printed["turns"][1]["say"] == "and?"
    assert printed["settings"]["k"] == 3

    # The explained round: its odds are what the model says to the text before it.
    round_ = turn["explained"]
    before = asked + turn["tokens"][: 1 + sum(a + 1 for a in expected.accepted[: round_["round"] - 1])]
    odds = target.model(torch.tensor([before])).logits[0, -1].softmax(-1)
    first = round_["guesses"][0]
    assert round_["last"] == before[-1]
    assert first["target_odds"] == pytest.approx(float(odds[first["token"]]), abs=1e-4)
    assert first["likeliest"] == int(odds.argmax())


def test_words_are_marked_without_colours(folder: Path, target: Target):
    plain = json.loads(call(folder, target, "--say", SAY, "--json").stdout)["turns"][0]
    done = call(folder, target, "--say", SAY, "--explain", color=True)
    assert "\x1b" not in done.stdout, "not a terminal: no colours"
    assert "‹drafted and accepted›, the rest said by the target itself" in done.stdout
    answer, _, rest = done.stdout.partition(f"> {SAY}\n")[2].partition("\n[")
    assert "‹" in answer
    assert re.sub("[‹›]", "", answer) == harmless(target.tokenizer.decode(plain["tokens"]))
    assert f"τ {plain['tau']:.2f} ({plain['accepted']} of {plain['drafted']} drafts accepted" in rest
    assert "Round " in rest
    assert "the target read them all in one forward" in rest
    tree = call(folder, target, "--say", SAY, "--explain", "--topk", 2, "--nodes", 4)
    assert "drafted as a tree" in tree.stdout
    assert "└─ " in tree.stdout
    assert " * " in tree.stdout


def test_a_conversation_by_hand(folder: Path, target: Target):
    lines = [
        "/explain",
        SAY,
        "/explain 1",
        "/explain 999",
        "",
        "/help",
        "and?",
        "/reset",
        "/explain",
        "/quit",
        "not read",
    ]
    done = call(folder, target, input="\n".join(lines) + "\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("[τ ") == 2
    assert "so far" in done.stdout
    assert "Round 1 (greedy)" in done.stdout
    assert "it has rounds 1 to" in done.stdout
    assert done.stdout.count("no round of it was seen from inside") == 2
    assert "No command /help" in done.stdout
    assert "A new conversation." in done.stdout
    assert call(folder, target, input="hi").exit_code == 0, "the end of the input ends the conversation"


def test_an_interrupt_ends_the_answer_only(folder: Path, target: Target, monkeypatch):
    original = Local.rounds

    def interrupted(self, ids, limit):
        for number, done in enumerate(original(self, ids, limit)):
            if number == 2:
                raise KeyboardInterrupt
            yield done

    monkeypatch.setattr(Local, "rounds", interrupted)
    done = call(folder, target, input=f"{SAY}\nand?\n")
    assert done.exit_code == 0
    assert done.stdout.count("interrupted]") == 2


def test_what_cannot_be_answered_does_not_end_the_conversation(folder: Path, target: Target):
    done = call(folder, target, input=f"{'long ' * 300}\n{SAY}\n")
    assert done.exit_code == 0
    assert "no room for an answer" in done.stderr
    assert done.stdout.count("[τ ") == 1


def test_nothing_of_a_model_steers_the_terminal():
    nasty = "a\x1b[31mred\x07\r\x9b2J\x7f\u202eevil\nnext\ttab"
    assert harmless(nasty) == "a[31mred2Jevil\nnext\ttab"
    assert Marks(False).pieces([(nasty, False), ("b", False), ("c\x1b", True)]) == "‹a[31mred2Jevil\nnext\ttabb›c"
    shown = Marks(True).pieces([(nasty, False)])
    assert re.sub(r"\x1b\[(32|0)m", "", shown) == harmless(nasty)
    guess = Guess(1, 0, 7, 0.5, 0.25, 8, 0.5, accepted=False)
    look = Look(6, (guess,), 8, 0.5, token_known=False, temperature=0.0, tree=False)
    text = explained(look, 1, lambda token: f"\x1b]0;{token}\x07", Marks(False))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert "'\\x1b]0;8\\x07' (50.0%)" in text
    assert "the draft gave it 50.0%" in text
    assert "to the draft's it gives 25.0%" in text
    assert "no draft could have named it" in text


def test_colours_are_asked_for():
    marks = Marks(True)
    drafted, own = marks.piece("a", False), marks.piece("a", True)
    assert drafted != own
    assert "\x1b[" in drafted
    assert "\x1b[" in own
    assert marks.piece("a", None) == "a"


def test_the_telling_round():
    def look(*accepted: bool, tree: bool = False) -> Look:
        guesses = tuple(Guess(i, i - 1, 1, 0.5, 0.5, 1, 0.5, a) for i, a in enumerate(accepted, start=1))
        return Look(1, guesses, 2, 0.5, True, 0.0, tree)

    assert telling([look(False, False), look(True, True), look(True, False)]) == 2
    assert telling([look(False, False), look(True, True)]) == 1
    assert telling([None]) is None


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_chain_in_words(temperature: float):
    guesses = (
        Guess(1, 0, 10, 0.8, 0.6, 10, 0.6, True),
        Guess(2, 1, 11, 0.5, 0.2, 20, 0.7, False),
        Guess(3, 2, 12, 0.4, 0.1, 20, 0.7, False),
    )
    look = Look(9, guesses, 20, 0.7, True, temperature, tree=False)
    lines = explained(look, 2, str, Marks(False)).splitlines()
    assert lines[0].startswith("Round 2 (sampling at temperature 0.5)." if temperature else "Round 2 (greedy).")
    if temperature:
        assert "accepted with probability 75.0%: and it was" in lines[1]
        assert "accepted with probability 40.0%: and it was not" in lines[2]
        assert "beyond the draft" in lines[4]
    else:
        assert "The target says the same (60.0%): accepted." in lines[1]
        assert "The target says '20' (70.0%; to the draft's it gives 20.0%): rejected." in lines[2]
    assert "Not looked at" in lines[3]
    assert "2 tokens: 1 accepted and 1 its own" in lines[4]


# ---------------------------------------------------------------- served


def served(monkeypatch, target: Target, client: Client, *args: object, **how):
    import eyas.serve.client

    monkeypatch.setattr(eyas.serve.client, "Client", lambda url, **_: client)
    given = ["--url", "http://127.0.0.1:1", "--target", target.dir, *args]
    return CliRunner().invoke(command, [str(a) for a in given], **how)


def test_an_engine_answers(monkeypatch, target: Target, asked: list[int]):
    a, b, c, d = (target.tokenizer(x, add_special_tokens=False)["input_ids"][0] for x in "abcd")
    client = Client([(a,), (b, c, d), (a,), (b, c)])
    done = served(monkeypatch, target, client, "--say", SAY)
    assert done.exit_code == 0, done.output
    assert "a‹bc›da‹b›c\n[τ 2.00 (2 drafts accepted in 2 rounds) · 7 tokens" in done.stdout
    assert client.asked[0]["ids"] == asked
    assert client.closed
    quiet = json.loads(served(monkeypatch, target, Client([(a,), (b, c), (d,)]), "--say", SAY, "--json").stdout)
    assert quiet["turns"][0]["own"] == [True, False, True, True]
    assert quiet["tau"] == 2.0
    single = Client([(a,), (b,), (c,)], by_round=False)
    done = served(monkeypatch, target, single, "--explain", input=f"{SAY}\n")
    assert "abc\n[llamacpp sends single tokens: which were drafted cannot be seen" in done.stdout
    assert "no round of it was seen from inside" in done.stdout
    assert json.loads(served(monkeypatch, target, single, "--say", SAY, "--json").stdout)["tau"] is None


def test_rounds_that_arrive_together_are_told_by_the_servers_count(monkeypatch, target: Target):
    counts = {"num_spec_steps": 5, "num_accepted_draft_tokens": 2}
    done = served(monkeypatch, target, Client([(65,), (66, 67, 68), (69,)], counts=counts), "--say", SAY)
    assert "τ 3.00 (2 drafts accepted in 1 round)" in done.stdout
    assert "the server counts τ 1.40, 2 in 5 rounds, the last included; some rounds arrived together" in done.stdout
    counts = {"num_spec_steps": 2, "num_accepted_draft_tokens": 2}
    done = served(monkeypatch, target, Client([(65,), (66, 67, 68), (69,)], counts=counts), "--say", SAY, "--json")
    counted = json.loads(done.stdout)["turns"][0]["counted_by_server"]
    assert (counted["rounds"], counted["accepted"]) == (2, 2)


def test_usage(folder: Path, target: Target):
    runner = CliRunner()
    assert runner.invoke(command, []).exit_code == 2
    assert runner.invoke(command, [str(folder), "--url", "http://127.0.0.1:1"]).exit_code == 2
    assert runner.invoke(command, ["--url", "http://127.0.0.1:1", "--topk", "2"]).exit_code == 2
    assert runner.invoke(command, [str(folder), "--json"]).exit_code == 2
