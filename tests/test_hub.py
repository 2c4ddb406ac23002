"""Drafts to the hub and back, by huggingface_hub's own client over HTTP against a hub on this machine.

pytest -q tests/test_hub.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from huggingface_hub import constants

from drafts import make_draft, with_embedding, write_flat, write_speculators
from eyas import cli
from eyas.cli.export import command as export_command
from eyas.draft.checkpoint import save_draft
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.export.push import Destination
from eyas.hub import is_id
from eyas.report.card import About, card, hub_name, proof_of
from eyas.target.facts import read_facts
from fake_hub import READ_TOKEN, TOKEN, FakeHub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as started:
        yield started


@pytest.fixture(scope="module")
def draft(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As training leaves it: with what it predicted, and what it learnt from."""
    model, vocab_map = make_draft()
    with_embedding(model)
    out = tmp_path_factory.mktemp("hub") / "draft"
    data = {"documents": 1101, "tokens": 151_953, "supervised_tokens": 87_694, "coverage": 0.954}
    predicted = {"accept_length": 1.89, "draft_tokens": 3}
    save_draft(model, vocab_map, out, facts=read_facts(tiny_target), predicted=predicted, fingerprints={},
               provenance={"steps": 693, "tokens_seen": 303_906, "data": data})  # fmt: skip
    return out


@dataclass
class Said:
    stdout: str
    stderr: str


class Online:
    """`eyas`, as if it had been started with these variables, which huggingface_hub reads once."""

    def __init__(self, hub: FakeHub, home: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
        self.hub, self.home, self.patch, self.capsys = hub, home, patch, capsys

    def __call__(self, *args: str | Path, code: int = 0, **variables: str) -> Said:
        with self.patch.context() as patch:
            patch.setenv("HF_TOKEN", variables.get("HF_TOKEN", ""))
            patch.setattr(constants, "HF_TOKEN_PATH", str(self.home / "token"))
            patch.setattr(constants, "ENDPOINT", variables.get("HF_ENDPOINT", self.hub.url))
            template = variables.get("HF_ENDPOINT", self.hub.url) + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr(constants, "HF_HUB_CACHE", str(self.home / "hub"))
            patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the other way to upload
            patch.setattr(constants, "HF_HUB_OFFLINE", bool(variables.get("HF_HUB_OFFLINE")))
            with pytest.raises(SystemExit) as left:
                cli.main([*map(str, args)])
        said = Said(*self.capsys.readouterr())
        assert left.value.code == code, said.stderr
        return said


@pytest.fixture
def eyas(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Online:
    return Online(hub, tmp_path / "home", monkeypatch, capsys)


# ---------------------------------------------------------------- up, and down again


def test_the_variables_of_the_hub_are_its_own(hub: FakeHub, tiny_target: Path, tmp_path: Path):
    """HF_ENDPOINT, HF_HOME and HF_TOKEN, read by a process of its own."""
    hub.put("org/private", write_speculators(tmp_path / "draft", *make_draft()), private=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    call = [sys.executable, "-m", "eyas", "inspect", "org/private", "--json"]
    result = subprocess.run(call, capture_output=True, text=True, check=True, env=environment)
    assert json.loads(result.stdout)["path"] == "org/private"
    assert (tmp_path / "home" / "hub" / "models--org--private").is_dir()


def test_a_draft_goes_up_and_comes_back_the_same(hub: FakeHub, eyas: Online, draft: Path, tmp_path: Path):
    out = tmp_path / "mine"
    told = json.loads(
        eyas("export", draft, out, "--push-to-hub", "me/mine", "--private", "--revision", "v1", "--base-model",
             "org/target", "--json", HF_TOKEN=TOKEN).stdout
    )  # fmt: skip
    repo = hub.repos["me/mine"]
    assert repo.private
    assert repo.branches["main"] == {}
    assert repo.messages == ["mine, exported by Eyas"]
    assert told["pushed"] | {"commit": "", "url": ""} == {"repo": "me/mine", "revision": "v1", "commit": "", "url": ""}
    assert told["pushed"]["commit"] == repo.sha("v1")
    local = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert repo.branches["v1"] == local
    assert {"README.md", "config.json", "eyas.json", "manifest.json", "model.safetensors"} == set(local)
    assert set(hub.cards) == {local["README.md"].decode()}
    assert not hub.unknown

    # From the hub, once; from its cache ever after; HF_HOME is where it lies.
    seen = json.loads(eyas("inspect", "me/mine@v1", "--json", HF_TOKEN=TOKEN).stdout)
    assert (seen["path"], seen["dialect"]) == ("me/mine@v1", "eyas")
    snapshot = tmp_path / "home" / "hub" / "models--me--mine" / "snapshots" / repo.sha("v1")
    assert {p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file()} == set(local)
    before = len(hub.asked)
    verified = json.loads(eyas("verify", "me/mine@v1", "--json", HF_HUB_OFFLINE="1").stdout)
    assert verified["ok"] and verified["path"] == "me/mine@v1"
    assert len(hub.asked) == before


def test_pushing_again_makes_a_second_commit_and_other_weights_stop_it(hub: FakeHub, eyas: Online, draft: Path,
                                                                      tmp_path: Path):  # fmt: skip
    push = ("export", draft, tmp_path / "out", "--push-to-hub", "me/mine")
    eyas(*push, HF_TOKEN=TOKEN)
    eyas(*push, HF_TOKEN=TOKEN)
    assert len(hub.repos["me/mine"].messages) == 2
    hub.repos["me/mine"].branches["main"]["model-00001-of-00002.safetensors"] = b"old"
    refused = eyas(*push, HF_TOKEN=TOKEN, code=2).stderr
    assert "weights that would stay beside the pushed ones (model-00001-of-00002.safetensors)" in refused
    assert "exists and is public" in eyas(*push, "--private", HF_TOKEN=TOKEN, code=2).stderr


@pytest.mark.parametrize(
    ("variables", "code", "words"),
    [
        ({"HF_HUB_OFFLINE": "1", "HF_TOKEN": TOKEN}, 1, "HF_HUB_OFFLINE forbids it; unset"),
        ({}, 1, "no token; run `hf auth login`, or set HF_TOKEN"),
        ({"HF_TOKEN": "hf_wrong"}, 1, "Invalid user token"),
        ({"HF_TOKEN": TOKEN, "HF_ENDPOINT": "http://127.0.0.1:9"}, 1, "the hub cannot be reached"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(
    eyas: Online, hub: FakeHub, draft: Path, tmp_path: Path, variables: dict[str, str], code: int, words: str
):
    result = eyas("export", draft, tmp_path / "out", "--push-to-hub", "me/mine", code=code, **variables)
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert not hub.repos


def test_a_token_that_only_reads_is_told_so(eyas: Online, draft: Path, tmp_path: Path):
    result = eyas("export", draft, tmp_path / "out", "--push-to-hub", "me/mine", code=1, HF_TOKEN=READ_TOKEN)
    assert "may not write to me/mine" in result.stderr


@pytest.mark.parametrize("name", ["mine", "me/", "/mine", "a/b/c", "me/mine@v1"])
def test_a_destination_is_owner_and_name(name: str):
    with pytest.raises(BadInput, match="expected OWNER/NAME"):
        Destination(name)


@pytest.mark.parametrize("options", [["--private"], ["--revision", "v1"], ["--proof", "x"], ["--base-model", "a/b"]])
def test_options_of_the_hub_and_the_card_go_with_them(options: list[str], draft: Path, tmp_path: Path):
    result = CliRunner().invoke(export_command, [str(draft), str(tmp_path / "out"), *options])
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- down


def test_only_safe_files_are_fetched_and_bin_where_there_is_nothing_else(hub: FakeHub, eyas: Online, tmp_path: Path):
    model, vocab_map = make_draft()
    both = write_speculators(tmp_path / "both", model, vocab_map)
    for name in ("pytorch_model.bin", "modeling.py", "optimizer.pt"):
        (both / name).write_bytes(b"never")
    hub.put("org/both", both)
    old = write_flat(tmp_path / "old", model, vocab_map, container="bin", eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    (old / "custom.py").write_text("raise SystemExit")
    hub.put("org/old", old)

    def fetched() -> set[str]:
        return {path.rpartition("/")[2] for method, path in hub.asked if "/resolve/" in path}

    assert json.loads(eyas("inspect", "org/both", "--json").stdout)["dialect"] == "speculators"
    assert fetched() == {"config.json", "model.safetensors"}
    hub.asked.clear()
    eyas("inspect", "org/old")
    assert fetched() == {"config.json", "pytorch_model.bin"}


def test_a_draft_that_is_nowhere_is_told_with_the_way_out(hub: FakeHub, eyas: Online, tmp_path: Path):
    hub.put("org/empty", {"README.md": b"later"})
    assert "the hub has no such draft" in eyas("inspect", "org/absent", code=2).stderr
    assert "has no config.json, so it is no draft" in eyas("inspect", "org/empty", code=2).stderr
    assert "org/empty has no revision 'v9'" in eyas("inspect", "org/empty@v9", code=2).stderr
    offline = eyas("inspect", "org/never", code=1, HF_HUB_OFFLINE="1").stderr
    assert "not in the hub cache" in offline and "unset HF_HUB_OFFLINE" in offline
    unreachable = eyas("verify", "org/never", code=1, HF_ENDPOINT="http://127.0.0.1:9").stderr
    assert "check the network, or name a local folder" in unreachable
    in_place = eyas("repair", "org/empty", "--auto", "--in-place", code=2).stderr
    assert "no config.json" in in_place


def test_what_was_fetched_is_not_repaired_in_place(hub: FakeHub, eyas: Online, tmp_path: Path):
    hub.put("org/both", write_speculators(tmp_path / "both", *make_draft()))
    assert "give --out NEW" in eyas("repair", "org/both", "--auto", "--in-place", code=2).stderr


def test_a_target_is_fetched_by_the_same_client(hub: FakeHub, eyas: Online, tiny_target: Path, draft: Path):
    hub.put("org/target", tiny_target)
    hub.put("org/draft", draft)
    report = json.loads(eyas("doctor", "org/draft", "--target", "org/target", "--static", "--json").stdout)
    assert report["draft"] == "org/draft"
    assert "models--org" not in report["next"], "the cache's path instead of the user's words"
    assert any(path.endswith("/resolve/" + hub.repos["org/target"].sha("main") + "/tokenizer.json")
               for _, path in hub.asked)  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("org/draft", True), ("org/draft@v1", True), ("o-r.g/d_1.2", True), ("org/draft@feature/x", True),
        ("draft", False), ("./draft", False), ("/abs/draft", False), ("a/b/c", False), ("~/draft", False),
        ("org/draft.gguf", False), ("org/", False), ("../draft", False), ("here/draft", False),
    ],
)  # fmt: skip
def test_what_is_an_id_and_what_a_path(spec: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_id(spec) is expected


# ---------------------------------------------------------------- the card


PROOF: dict[str, Any] = {
    "tau_mean": 1.656, "lossless": True, "identical": 48, "compared": 48,
    "settings": {"k": 4, "temperature": 0.0, "dtype": "float32"},
    "tau": {"gsm8k": {"tau": 1.841, "low": 1.72, "high": 1.98, "prompts": 16, "rounds": 1527},
            "none": {"tau": None, "low": None, "high": None, "prompts": 0, "rounds": 0}},
}  # fmt: skip


def exported(draft: Path, out: Path, *options: str) -> str:
    result = CliRunner().invoke(export_command, [str(draft), str(out), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return (out / "README.md").read_text() if (out / "README.md").exists() else ""


def proof(folder: Path, weights: str) -> Path:
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(PROOF))
    (folder / "manifest.json").write_text(json.dumps({"inputs": {"draft/model.safetensors": weights, "target": "t"}}))
    return folder


def test_a_card_says_what_the_files_say(draft: Path, tmp_path: Path):
    from eyas.digests import sha256_file

    assert exported(draft, tmp_path / "plain") == ""
    weights = sha256_file(tmp_path / "plain" / "model.safetensors")
    shown = proof(tmp_path / "proof", weights)
    text = exported(draft, tmp_path / "out", "--card", "--proof", str(shown), "--base-model", "org/target")
    _, front, body = text.split("---\n", 2)
    told = yaml.safe_load(front)
    assert (told["base_model"], told["library_name"], told["pipeline_tag"]) == ("org/target", "eyas", "text-generation")
    assert {"eagle3", "speculative-decoding"} <= set(told["tags"])
    for words in (
        "# out", "after 2, 4 and 5 blocks", "| taps | 2, 4, 5 | declared |", "120 of the target's 300 ids",
        "1,101 conversations, 151,953 tokens, 87,694 of them supervised", "covers 95.4% of the tokens",
        "693 optimizer steps over 303,906 tokens", "predicted an accept length of 1.890", "3 tokens drafted",
        "**1.656**", "| gsm8k | 1.841 | 1.72–1.98 | 16 | 1,527 |", "48 of 48 answers", "vllm serve org/target",
        "sglang.launch_server", "--speculative-num-steps 4", "eyas verify DRAFT",
    ):  # fmt: skip
        assert words in body, words
    assert "none" not in body.split("| prompts |")[1].split("\n\n")[0]
    # It disturbs nothing: the directory is checked as before, also once somebody has edited it, and replaced by Eyas.
    (tmp_path / "out" / "README.md").write_text("mine")
    checked = CliRunner().invoke(export_command, ["--check", str(tmp_path / "out")])
    assert checked.exit_code == 0, checked.output
    exported(draft, tmp_path / "out", "--card")


def test_the_card_claims_nothing_that_is_not_known(draft: Path):
    eyas = json.loads((draft / "eyas.json").read_text())
    text = card({**eyas, "predicted": None, "provenance": {}, "engines": {"vllm": ["it knows no x"], "other": []}},
                About("out"))  # fmt: skip
    assert "base_model" not in text
    for words in ("accept length of", "## Training", "## Accept length", "vllm serve", "None"):
        assert words not in text, words
    assert "**vllm** does not run it as it was trained: it knows no x" in text
    assert hub_name("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert hub_name("org/target@v2") == "org/target"
    assert hub_name("./folder") is None and hub_name(None) is None


def test_a_proof_is_of_this_draft_or_refused(draft: Path, tmp_path: Path):
    other = proof(tmp_path / "other", "0" * 64)
    with pytest.raises(Mismatch, match="measured other weights than these"):
        proof_of(other, draft, draft)
    with pytest.raises(BadInput, match="expected a folder that `eyas prove --out` wrote"):
        proof_of(tmp_path / "nothing", draft, draft)
    run = tmp_path / "run"
    run.mkdir()
    proof(run / "prove", "0" * 64)
    assert proof_of(None, run, draft) is None, "another draft's, in the folder of the run"
    assert proof_of(None, tmp_path, draft) is None
    result = CliRunner().invoke(export_command, [str(draft), str(tmp_path / "out"), "--card", "--proof", str(other)])
    assert isinstance(result.exception, EyasError)
    assert not (tmp_path / "out").exists()
