"""Proving a draft, from directories to numbers and exit codes.   pytest -q tests/test_prove.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from eyas.cli.prove import command
from eyas.conventions import Conventions
from eyas.decode import lossless
from eyas.decode import prove as module
from eyas.decode.answers import Answer, Decoded
from eyas.decode.cases import Case, loop_start
from eyas.decode.prove import measure, prove
from eyas.decode.rules import Greedy, Proposal
from eyas.decode.step import ChainDrafter
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.errors import BadInput, EyasError
from eyas.prompts import Prompt
from eyas.target.facts import read_facts
from eyas.target.model import Target
from eyas.vocab import VocabMap

SETS = {
    "words": ["the young hawk", Prompt.single("what is the capital of France?"), [{"role": "user", "content": "add"}]],
    "ids": [[5, 17, 40, 8, 99, 3], [7], [1, 33, 21, 64]],
}


@pytest.fixture(scope="module")
def draft_dir(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    facts = read_facts(tiny_target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        conventions = Conventions(taps=facts.default_taps, num_target_layers=facts.num_layers)
        draft = Draft(DraftShape(32, 32, 64, 2, 1, 16, 300, 100), conventions)
    out = tmp_path_factory.mktemp("prove") / "draft"
    save_draft(draft, VocabMap.from_absolute(torch.arange(100) * 3, 300), out, facts=facts)
    return out


@pytest.fixture(scope="module")
def loaded(tiny_target: Path, draft_dir: Path) -> tuple[Target, ChainDrafter]:
    draft, vocab_map, _ = load_draft(draft_dir, tiny_target)
    return Target.load(tiny_target), ChainDrafter(draft, vocab_map)


class Cheat(Greedy):
    """Accepts the first draft unseen: what a broken verification does."""

    def accept(self, logits: torch.Tensor, proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor]:
        accepted, tokens = super().accept(logits, proposal)
        if proposal.ids.shape[1]:
            tokens = torch.where(accepted[:, None] > 0, tokens, torch.cat([proposal.ids[:, :1], tokens[:, 1:]], 1))
            accepted = accepted.clamp(min=1)
        return accepted, tokens


def test_a_random_draft_is_lossless_and_useless(tiny_target: Path, draft_dir: Path):
    heard: list[int] = []
    result = prove(draft_dir, tiny_target, SETS, k=3, max_new_tokens=12, batch=2, on_answer=heard.append)
    assert result["lossless"] is True
    assert result["compared"] == result["identical"] == 6
    assert sum(heard) == 12
    assert {name: row["prompts"] for name, row in result["tau"].items()} == {"words": 3, "ids": 3}
    for row in result["tau"].values():
        assert row["low"] <= row["tau"] <= row["high"]
        assert row["rounds"] == sum(row["histogram"])
        assert len(row["unconditional"]) == len(row["conditional"]) == 3
    assert result["tau_mean"] == pytest.approx(sum(r["tau"] for r in result["tau"].values()) / 2, abs=1e-4)
    assert 1 <= result["tau_mean"] < 1.5, "a random draft is right by chance only"
    assert result["rounds"] == sum(row["rounds"] for row in result["tau"].values())
    assert result["all_rounds"]["rounds"] >= result["rounds"]
    assert result["speed"]["prompts"] == 2
    assert result["speedup"] > 0
    json.dumps(result, allow_nan=False)


def test_one_by_one_or_side_by_side_counts_the_same(loaded: tuple[Target, ChainDrafter]):
    def numbers(**how):
        result = measure(*loaded, SETS, k=2, max_new_tokens=10, **how)
        return {name: result[name] for name in ("tau_mean", "tau", "per_position", "all_rounds", "identical")}

    assert numbers(batch=1, timed=0) == numbers(batch=16, timed=0) == numbers(batch=2, timed=5)


def test_a_broken_verification_is_shown_with_both_logits(loaded: tuple[Target, ChainDrafter], monkeypatch):
    monkeypatch.setattr(module, "Greedy", Cheat)
    result = measure(*loaded, SETS, k=2, max_new_tokens=10, timed=0)
    assert result["lossless"] is False
    assert result["identical"] + len(result["differences"]) + len(result["near_ties"]) == 6
    target = loaded[0]
    for row in result["differences"]:
        assert row["plain"]["token"] != row["speculative"]["token"]
        assert row["plain"]["logit"] - row["speculative"]["logit"] == pytest.approx(row["gap"], abs=1e-5)
        assert row["gap"] > lossless.NEAR_TIE
        assert row["plain"]["text"] == target.tokenizer.decode([row["plain"]["token"]])
    # The same differences are near-ties to someone who calls any gap near: reported, but no failure.
    monkeypatch.setattr(lossless, "NEAR_TIE", 1e9)
    tolerant = measure(*loaded, SETS, k=2, max_new_tokens=10, timed=0)
    assert tolerant["lossless"] is True
    assert [{**row, "near_tie": False} for row in tolerant["near_ties"]] == result["differences"]


def test_logits_of_a_difference_are_those_of_one_forward(loaded: tuple[Target, ChainDrafter]):
    target = loaded[0]
    case = Case("s", 0, [5, 6, 7], Answer([8, 9, 10]), Answer([8, 9, 11]))
    assert lossless.first_difference(case) == 2
    row = lossless.describe_difference(target, case, 2)
    with torch.no_grad():
        logits = target.model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, -1]
    assert row["plain"]["logit"] == pytest.approx(float(logits[10]), abs=1e-4)
    assert row["speculative"]["logit"] == pytest.approx(float(logits[11]), abs=1e-4)
    assert row["gap"] == pytest.approx(float(logits.max() - torch.minimum(logits[10], logits[11])), abs=1e-4)
    shorter = Case("s", 0, [5], Answer([8, 9]), Answer([8]))
    assert lossless.first_difference(shorter) == 1
    assert lossless.describe_difference(target, shorter, 1)["near_tie"] is False


def test_more_differences_than_are_described_are_not_lossless(loaded: tuple[Target, ChainDrafter], monkeypatch):
    monkeypatch.setattr(module, "Greedy", Cheat)
    monkeypatch.setattr(lossless, "NEAR_TIE", 1e9)
    monkeypatch.setattr(lossless, "SHOWN", 1)
    assert measure(*loaded, SETS, k=2, max_new_tokens=10, timed=0)["lossless"] is False


def test_loops_do_not_inflate_tau(loaded: tuple[Target, ChainDrafter], monkeypatch):
    """An answer of four tokens of text and a cycle of three without end, all of whose loop was drafted rightly."""
    answer = [9, 8, 7, 6] + [1, 2, 3] * 20
    assert loop_start(answer) == 7, "the first time round is text"
    assert loop_start(list(range(60))) is None

    def scripted(target, prompts, drafter=None, **how):
        answers = []
        for _ in prompts:
            accepted = [0, 1, 2, *[4] * 11]  # begin at 1, 2, 4, 7, 12, ... tokens
            ends = torch.tensor([1] + [a + 1 for a in accepted]).cumsum(0)[1:].tolist()
            answers.append(Answer(list(answer), accepted, ends) if drafter is not None else Answer(list(answer)))
        return Decoded(answers, decode_s=1.0)

    monkeypatch.setattr(module, "decode", scripted)
    result = measure(*loaded, {"s": [[5], [6]]}, k=4, max_new_tokens=64)
    assert result["tau"]["s"] | {"low": 0, "high": 0} == {
        "tau": 1.5, "low": 0, "high": 0, "prompts": 2, "rounds": 4, "accepted": 2, "histogram": [2, 2, 0, 0, 0],
        "unconditional": [0.5, 0.0, 0.0, 0.0], "conditional": [0.5, 0.0, None, None], "loops": 2, "left_out": 0,
    }  # fmt: skip
    assert result["all_rounds"]["tau"] == pytest.approx(1 + 47 / 14, abs=1e-4)
    assert result["speedup"] == 1.0


def test_sampling_makes_no_claim_by_token(loaded: tuple[Target, ChainDrafter]):
    result = measure(*loaded, {"ids": SETS["ids"]}, k=2, max_new_tokens=8, temperature=0.8, seed=1)
    assert result["lossless"] is None
    assert result == {**measure(*loaded, {"ids": SETS["ids"]}, k=2, max_new_tokens=8, temperature=0.8, seed=1),
                      **{name: result[name] for name in ("speedup", "speed", "seconds")}}  # fmt: skip


def test_prompts_without_room_are_counted(loaded: tuple[Target, ChainDrafter]):
    long = [4] * 250  # of a context of 256
    result = measure(*loaded, {"s": [long, [5]]}, k=2, max_new_tokens=8)
    assert (result["tau"]["s"]["prompts"], result["tau"]["s"]["left_out"]) == (1, 1)
    with pytest.raises(BadInput, match="set s: none of its 1 prompts leaves 10 tokens"):
        measure(*loaded, {"s": [long]}, k=2, max_new_tokens=8)
    with pytest.raises(BadInput, match="at least 1 draft"):
        measure(*loaded, {"s": [[5]]}, k=0)


# ---------------------------------------------------------------- command line


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the glove", "add(a, b)", "Paris")))
    return path


def call(*args: object):
    return CliRunner().invoke(command, [str(a) for a in args])


def test_command_writes_what_it_prints(tiny_target: Path, draft_dir: Path, prompt_file: Path, tmp_path: Path):
    out = tmp_path / "proof"
    how = ["--target", tiny_target, "--prompts", prompt_file, "--max-new-tokens", 8, "--k", 2, "--limit", 2]
    done = call(draft_dir, *how, "--json", "--out", out, "--strict")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result == json.loads((out / "result.json").read_text())
    assert result["tau"]["chats"]["prompts"] == 2
    assert json.loads((out / "manifest.json").read_text())["counts"]["lossless"] is True

    shown = call(draft_dir, *how).stdout
    assert "Lossless: 2 of 2 answers" in shown
    assert f"{result['tau']['chats']['tau']:.3f}" in shown


def test_exit_codes(tiny_target: Path, draft_dir: Path, prompt_file: Path, monkeypatch):
    how = ["--target", tiny_target, "--prompts", prompt_file, "--max-new-tokens", 8, "--k", 2]
    done = call(draft_dir, *how, "--fail-below", 2.9)
    assert isinstance(done.exception, EyasError)
    assert "below the --fail-below of 2.9" in str(done.exception)
    monkeypatch.setattr(module, "Greedy", Cheat)
    assert call(draft_dir, *how).exit_code == 0, "without --strict it only measures"
    shown = call(draft_dir, *how, "--strict")
    assert isinstance(shown.exception, EyasError)
    assert "DIFFERS: chats prompt 0" in shown.stdout
    assert call(draft_dir, "--sets", "", "--target", tiny_target).exit_code == 2
    assert call(draft_dir, "--prompts", prompt_file, "--prompts", prompt_file, "--target", tiny_target).exit_code == 2
