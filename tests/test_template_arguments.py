"""Arguments of the chat template: alike for answers, states and proof.  pytest -q tests/test_template_arguments.py"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from conftest import CHATML
from drafts import make_draft, with_embedding
from eyas.answers import CONVERSATIONS, template_arguments
from eyas.artifacts import read_manifest
from eyas.cli.extract import command as extract_command
from eyas.cli.regenerate import command as regenerate_command
from eyas.decode.cases import make_cases
from eyas.draft.checkpoint import save_draft
from eyas.errors import Mismatch
from eyas.features.extract import extract
from eyas.prompts import Prompt
from eyas.regenerate import regenerate
from eyas.target.facts import read_facts
from eyas.target.model import Target

QUICK = {"max_new_tokens": 24, "slots": 4}
BRIEF = {"brief": True}
PROMPTS = [Prompt.single(f"add {n}", id=f"q{n}") for n in (3, 32, 30, 1)]


@pytest.fixture(scope="module")
def target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose template writes more where it is asked to."""
    folder = tmp_path_factory.mktemp("brief") / "target"
    shutil.copytree(tiny_target, folder)
    (folder / "chat_template.jinja").write_text("{% if brief %}{{ 'the ' }}{% endif %}" + CHATML)
    return folder


def first_ids(file: Path) -> list[int]:
    return json.loads(file.read_text().splitlines()[0])["prompt_token_ids"]


def test_the_target_answers_what_the_template_was_told_and_extract_goes_by_it(target: Path, tmp_path: Path):
    regenerate(PROMPTS, target, tmp_path / "plain", **QUICK)
    regenerate(PROMPTS, target, tmp_path / "brief", **QUICK, template_kwargs=BRIEF)
    plain, brief = (tmp_path / name / CONVERSATIONS for name in ("plain", "brief"))
    longer = len(first_ids(brief)) - len(first_ids(plain))
    assert longer > 0
    assert first_ids(brief)[longer:] == first_ids(plain)
    assert read_manifest(tmp_path / "brief")["config"]["template_kwargs"] == BRIEF
    # A server that gives no ids leaves the messages: they are rendered as they were answered.
    without = [{**json.loads(line), "prompt_token_ids": None, "response_token_ids": None}
               for line in brief.read_text().splitlines()]  # fmt: skip
    brief.write_text("".join(json.dumps(row) + "\n" for row in without))
    counts = extract(target, brief, tmp_path / "features", progress=False)
    assert read_manifest(tmp_path / "features")["config"]["template_kwargs"] == BRIEF
    shutil.copy(brief, tmp_path / "moved.jsonl")  # without its manifest nobody knows
    other = extract(target, tmp_path / "moved.jsonl", tmp_path / "others", progress=False)
    assert counts["tokens"] - other["tokens"] == longer * len(without)


def test_other_arguments_than_those_of_the_answers_are_refused(target: Path, tmp_path: Path):
    regenerate(PROMPTS, target, tmp_path, **QUICK, template_kwargs=BRIEF)
    answers = tmp_path / CONVERSATIONS
    assert template_arguments(answers, None) == template_arguments(answers, BRIEF) == BRIEF
    with pytest.raises(Mismatch, match=r"was answered with .*True.*, not .*1\.5"):
        template_arguments(answers, {"brief": 1.5})
    assert template_arguments(tmp_path / "other.jsonl", {"brief": 1.5}) == {"brief": 1.5}


def test_both_verbs_and_the_proof_take_them(target: Path, tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p.to_row()) + "\n" for p in PROMPTS))
    out = tmp_path / "answers"
    arguments = [str(tmp_path / "prompts.jsonl"), "--target", str(target), "--out", str(out), "--max-new-tokens", "8"]
    done = CliRunner().invoke(regenerate_command, [*arguments, "--template-arg", "brief=true"], catch_exceptions=False)
    assert done.exit_code == 0
    answers = [str(out / CONVERSATIONS), "--target", str(target), "--show", "--json"]
    shown = json.loads(CliRunner().invoke(extract_command, answers, catch_exceptions=False).stdout)
    assert shown["conversations"][0]["ids"][: len(first_ids(out / CONVERSATIONS))] == first_ids(out / CONVERSATIONS)
    refused = CliRunner().invoke(extract_command, [*answers, "--template-arg", "brief=false"])
    assert isinstance(refused.exception, Mismatch)

    loaded = Target.load(target)
    plain, _ = make_cases(loaded, {"own": PROMPTS}, 8)
    brief, _ = make_cases(loaded, {"own": PROMPTS}, 8, BRIEF)
    assert brief[0].ids == first_ids(out / CONVERSATIONS) != plain[0].ids


def test_prove_says_what_it_was_told(target: Path, tmp_path: Path):
    from eyas.cli.prove import command

    draft, vocab_map = make_draft()
    with_embedding(draft)
    save_draft(draft, vocab_map, tmp_path / "draft", facts=read_facts(target))
    (tmp_path / "p.jsonl").write_text(json.dumps(PROMPTS[0].to_row()) + "\n")
    result = CliRunner().invoke(
        command,
        [str(tmp_path / "draft"), "--target", str(target), "--prompts", str(tmp_path / "p.jsonl"), "--timed", "0",
         "--max-new-tokens", "4", "--template-arg", "brief=true", "--json"],
        catch_exceptions=False,
    )  # fmt: skip
    assert json.loads(result.stdout)["settings"]["template_kwargs"] == BRIEF
