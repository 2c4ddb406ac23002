"""From prompts to conversations: what is kept, what is set aside, and that a kill changes nothing.

pytest -q tests/test_regenerate.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from eyas.answers import CONVERSATIONS, JOURNAL, SET_ASIDE
from eyas.artifacts import read_manifest
from eyas.dialogue import Dialogue, Reply, answer_seed, pseudo_ids
from eyas.errors import BadInput
from eyas.journal import Journal
from eyas.prompts import Prompt, Prompts
from eyas.regenerate import regenerate
from eyas.work import Ledger

QUICK = {"max_new_tokens": 56, "slots": 16}
FILES = (CONVERSATIONS, SET_ASIDE)


NUMBERS = (3, 32, 30, 0, 1, 2, 4, 5, 6, 7, 8, 9)  # among these the tiny target has a loop and answers that end


def asked(count: int = len(NUMBERS)) -> list[Prompt]:
    words = ["hawk", "glove", "field", "draft", "token", "Paris", "France", "add"]
    return [Prompt.single(f"{words[n % 8]} {n}", id=f"q{i}", source="s") for i, n in enumerate(NUMBERS[:count])]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def once(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run."""
    out = tmp_path_factory.mktemp("once")
    regenerate(asked(), tiny_target, out, **QUICK)
    return out


# ------------------------------------------------------------------------------------------------ local


def test_every_prompt_ends_in_one_of_the_two_files_in_order(once: Path):
    kept, aside = rows(once / CONVERSATIONS), rows(once / SET_ASIDE)
    ids = [p.id for p in asked()]
    assert sorted([r["id"] for r in kept + aside], key=ids.index) == ids
    assert [r["id"] for r in kept] == [i for i in ids if i in {r["id"] for r in kept}]
    assert {r["reason"] for r in aside} <= {"repetition", "empty"}
    counts = read_manifest(once)["counts"]
    assert (counts["prompts"], counts["kept"]) == (len(NUMBERS), len(kept))
    assert sum(counts["set_aside"].values()) == len(aside)
    assert aside, "a random model repeats itself"
    assert len(kept) >= 5
    assert not (once / JOURNAL).exists()


def test_token_ids_are_those_of_prompt_and_answer(once: Path, tiny_target: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    kept = rows(once / CONVERSATIONS)
    for row in kept:
        *question, answer = row["messages"]
        text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == row["prompt_token_ids"]
        assert tokenizer.decode(row["response_token_ids"], skip_special_tokens=True) == answer["content"]
        assert (row["response_token_ids"][-1] == 2) == (row["finish"] == "stop")
        assert row["seed"] is None, "greedy"
        assert row["source"] == "s"
    tokens = sum(len(r["response_token_ids"]) for r in kept)
    assert read_manifest(once)["counts"]["supervised_tokens"] == tokens


def test_a_finished_run_is_left_alone(once: Path, tiny_target: Path):
    before = (once / CONVERSATIONS).stat().st_mtime_ns
    assert regenerate(asked(), tiny_target, once, **QUICK) == read_manifest(once)["counts"]
    assert (once / CONVERSATIONS).stat().st_mtime_ns == before


def test_killed_and_resumed_is_the_same_bytes(once: Path, tiny_target: Path, tmp_path: Path):
    """SIGKILL once something is in the journal; the torn line a kill may leave is added by hand."""
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[3]); from pathlib import Path\n"
        "from test_regenerate import QUICK, asked\n"
        "from eyas.regenerate import regenerate\n"
        "import eyas.journal as j; old = j.Journal.append\n"
        "def slow(self, record): old(self, record); self.flush(); time.sleep(0.2)\n"
        "j.Journal.append = slow\n"
        "regenerate(asked(), Path(sys.argv[1]), Path(sys.argv[2]), **QUICK)\n"
    )
    out = tmp_path / "out"
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen([sys.executable, "-c", script, tiny_target, out, here], env=environment)
    journal = out / JOURNAL
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= 5:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / CONVERSATIONS).exists(), "nothing stands under its final name yet"
    done = journal.read_bytes().count(b"\n") - 1
    assert 4 <= done < len(NUMBERS)
    with open(journal, "ab") as file:
        file.write(b'{"id": "q11", "asked": "to')
    counts = regenerate(asked(), tiny_target, out, **QUICK)
    assert counts["resumed"] == done
    for name in FILES:
        assert (out / name).read_bytes() == (once / name).read_bytes()


def test_the_token_limit_follows_the_order_of_the_prompts(once: Path, tiny_target: Path, tmp_path: Path):
    kept = rows(once / CONVERSATIONS)
    sizes = [len(r["response_token_ids"]) for r in kept]
    limit = sum(sizes[:3]) + 1  # reached by the fourth
    for slots in (1, 16):
        out = tmp_path / str(slots)
        counts = regenerate(asked(), tiny_target, out, max_new_tokens=56, slots=slots, max_supervised_tokens=limit)
        assert rows(out / CONVERSATIONS) == kept[:4]
        assert counts["supervised_tokens"] == sum(sizes[:4])
        last = int(kept[3]["id"][1:])
        assert [r["id"] for r in rows(out / SET_ASIDE)] == [
            r["id"] for r in rows(once / SET_ASIDE) if int(r["id"][1:]) < last
        ]


def test_sampled_answers_carry_their_seed_and_come_again(tiny_target: Path, tmp_path: Path):
    few = asked(6)
    one = tmp_path / "one"
    regenerate(few, tiny_target, one, temperature=1.0, seed=5, **QUICK)
    other = tmp_path / "other"
    regenerate(few[::-1], tiny_target, other, temperature=1.0, seed=5, max_new_tokens=56, slots=1)
    first = {r["id"]: r for r in rows(one / CONVERSATIONS)}
    assert first
    assert first == {r["id"]: r for r in rows(other / CONVERSATIONS)}
    assert all(r["seed"] == answer_seed(5, i) for i, r in first.items())
    assert len({r["seed"] for r in first.values()}) == len(first)


def test_several_turns_on_the_own_history(tiny_target: Path, tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    turns = tuple(({"role": "user", "content": text},) for text in ("hawk?", "and the glove?", "why?"))
    prompts = [Prompt(f"t{i}", turns[: 1 + i % 3], None, "s") for i in range(4)]
    prompts += [Prompt(f"u{i}", (({"role": "user", "content": f"{i}"},), turns[1]), None, "s") for i in range(12)]
    regenerate(prompts, tiny_target, tmp_path, temperature=1.5, seed=3, max_new_tokens=56, slots=16)
    kept = rows(tmp_path / CONVERSATIONS)
    several = [r for r in kept if sum(m["role"] == "assistant" for m in r["messages"]) > 1]
    assert several, "some first answers ended by themselves"
    for row in several:
        ids = row["prompt_token_ids"] + row["response_token_ids"]
        assert row["supervised"][-1] == [len(row["prompt_token_ids"]), len(ids)]
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        said = [tokenizer.decode(ids[a:b], skip_special_tokens=True) for a, b in row["supervised"]]
        assert said == answers[-len(said) :]
    for row in kept:  # what was cut off ends the conversation
        assert row["messages"][-1]["role"] == "assistant"


def test_too_long_a_prompt_is_set_aside(tiny_target: Path, tmp_path: Path):
    long = Prompt.single("hawk " * 300, id="long")
    regenerate([long, *asked(2)], tiny_target, tmp_path, **QUICK)
    first = rows(tmp_path / SET_ASIDE)[0]
    assert (first["id"], first["reason"]) == ("long", "too_long")
    assert "256 positions" in first["detail"]


def test_other_settings_in_the_same_folder_are_refused(tiny_target: Path, tmp_path: Path):
    Journal(tmp_path / JOURNAL, {"schema": "eyas-regenerate/1", "seed": 1}).close()
    with pytest.raises(BadInput, match="other settings"):
        regenerate(asked(2), tiny_target, tmp_path, **QUICK)
    with pytest.raises(BadInput, match="no prompt"):
        regenerate([], tiny_target, tmp_path, **QUICK)
    with pytest.raises(BadInput, match="--base-url"):
        regenerate(asked(2), None, tmp_path, **QUICK)


def test_the_command(tiny_target: Path, tmp_path: Path):
    from eyas.cli.regenerate import command

    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(p.to_row()) + "\n" for p in asked(4)) + '{"prompt": 3}\n')
    arguments = [str(file), "--target", str(tiny_target), "--out", str(tmp_path / "out"), "--max-new-tokens", "12"]
    refused = CliRunner().invoke(command, arguments)
    assert isinstance(refused.exception, BadInput)
    assert "line 5" in str(refused.exception)
    result = CliRunner().invoke(command, [*arguments, "--skip-bad", "--json"], catch_exceptions=False)
    counts = json.loads(result.stdout)
    assert (counts["prompts"], counts["malformed"]) == (4, 1)
    aside = rows(tmp_path / "out" / SET_ASIDE)
    assert (aside[0]["reason"], aside[0]["source"]) == ("malformed", f"{file}:5")


# ------------------------------------------------------------------------------------------------ parts


def dialogue(*texts: str) -> Dialogue:
    return Dialogue(0, Prompt("p", tuple(({"role": "user", "content": t},) for t in texts)), None)


def test_outcomes_of_a_reply():
    keep = dialogue("a").take(Reply("fine", "stop", [5, 2], [1, 5]))
    assert keep and keep.conversation and keep.tokens == 2
    assert dialogue("a").take(Reply(" \n", "stop", [5, 2], [1, 5])).reason == "empty"
    assert dialogue("a").take(Reply("x" * 9, "loop", [5] * 9, [1, 5])).reason == "repetition"
    cut = dialogue("a").take(Reply("la " * 40, "length", [5, 6] * 40, [1, 5]))
    assert (cut.reason, cut.answer) == ("repetition", "la " * 40)
    assert dialogue("a").take(Reply("la " * 40, "length")).reason == "repetition", "found in the text without ids"
    assert dialogue("a").take(Reply("la " * 40, "stop", [5, 6] * 40, [1, 5])).conversation


def test_a_second_turn_needs_a_whole_first_answer():
    two = dialogue("a", "b")
    assert two.take(Reply("one", "stop", [5, 2], [1, 3])) is None
    assert [m["role"] for m in two.messages] == ["user", "assistant", "user"]
    done = two.take(Reply("two", "length", [6, 6], [1, 3, 5, 2, 9]))
    assert done.conversation["prompt_token_ids"] == [1, 3, 5, 2, 9]
    assert done.conversation["supervised"] == [[2, 4], [5, 7]]
    assert done.tokens == 4
    cut = dialogue("a", "b").take(Reply("one", "length", [5, 7], [1, 3]))
    assert [m["role"] for m in cut.conversation["messages"]] == ["user", "assistant"]
    assert cut.conversation["finish"] == "length"


def test_a_history_that_the_template_rewrote_is_not_supervised():
    two = dialogue("a", "b")
    two.take(Reply("<think>hm</think>one", "stop", [7, 8, 5, 2], [1, 3]))
    done = two.take(Reply("two", "stop", [6, 2], [1, 3, 5, 2, 9]))
    assert done.conversation["supervised"] == [[5, 7]]
    assert done.tokens == 2


def test_ledger_counts_in_the_order_of_the_prompts():
    def outcome(tokens: int):
        return dialogue("a").take(Reply("x", "stop", [5] * tokens, [1]))

    ledger = Ledger(4, 10)
    ledger.put(2, outcome(9))
    assert (ledger.end, ledger.complete) == (0, False)
    ledger.put(0, outcome(4))
    ledger.put(1, outcome(5))
    assert (ledger.end, ledger.tokens, ledger.complete) == (3, 18, True)
    assert not Ledger(1, None).complete


def test_pseudo_ids_repeat_where_the_text_does():
    ids = pseudo_ids("The car is red. The car is red. ")
    assert ids[: len(ids) // 2] == ids[len(ids) // 2 :]
    assert len(set(pseudo_ids("one two, three"))) == 5


def test_journal_survives_torn_lines(tmp_path: Path):
    path = tmp_path / "j"
    journal = Journal(path, {"a": 1})
    journal.append({"id": 1})
    journal.append({"id": 2})
    journal.close()
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = Journal(path, {"a": 1})
        again.append({"id": 3})
        again.close()
        ids = [json.loads(line)["id"] for line in path.read_text().splitlines()[1:]]
        assert ids == [*range(1, 1 + whole[:cut].count(b"\n") - 1 if cut > 8 else 1), 3], cut


def test_the_prompts_object_brings_its_counts(tiny_target: Path, tmp_path: Path):
    counts = regenerate(Prompts(asked(2), duplicates=3, renamed=1), tiny_target, tmp_path, max_new_tokens=4)
    assert (counts["duplicates"], counts["renamed"], counts["malformed"]) == (3, 1, 0)
