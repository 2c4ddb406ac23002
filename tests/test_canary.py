"""A canary for a tiny random target: everything accepted as trained, next to nothing otherwise; and the verdicts.

pytest -q tests/test_canary.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from eyas.canary import start
from eyas.canary.check import Heard, of_file, verdict
from eyas.canary.make import DRAFT, make, read
from eyas.canary.train import LEFT
from eyas.cli.canary import command
from eyas.decode.acceptance import Acceptance
from eyas.doctor.readings import Readings
from eyas.doctor.record import answers
from eyas.doctor.trial import Bench
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.vocab import VocabMap

K, ROUNDS, COUNT = 2, 4, 2
TEXTS = ("the young hawk", "what is the capital of France?", "def add(a, b):")
SMALL: dict[str, Any] = {
    "steps": 300, "k": K, "rounds": ROUNDS, "count": COUNT,
    "prompts": [[{"role": "user", "content": t}] for t in TEXTS],
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("canary") / "canary"
    make(tiny_target, out, **SMALL)
    return out


@pytest.fixture(scope="module")
def canary(made: Path) -> dict[str, Any]:
    return read(made)


def heard(canary: dict[str, Any], **changes: Any) -> Heard:
    """What a healthy deployment gives, changed."""
    e = canary["expected"]
    tokens = tuple(tuple(p["tokens"]) for p in canary["prompts"])
    each = ((K,) * ROUNDS,) * COUNT
    values = {"rounds": e["rounds"], "accepted": e["accepted"], "at_least": tuple(e["at_least"]), "tokens": tokens,
              "each": each, "engine": "vllm", "k": K}  # fmt: skip
    return Heard(**(values | changes))


# ---------------------------------------------------------------- what is made


def test_everything_is_accepted_as_trained_and_every_way_of_counting_agrees(canary):
    e = canary["expected"]
    assert e["rounds"] == ROUNDS * COUNT and e["accepted"] == K * e["rounds"]
    assert e["tau"] == K + 1 and e["at_least"] == [e["rounds"]] * K
    assert canary["tokens"] == 1 + ROUNDS * (K + 1), "no round is cut off"


def test_every_neighbour_fails(canary):
    assert len(canary["neighbours"]) > 30
    left = [n["name"] for n in canary["neighbours"] if n["unconditional"][n["since"]] > LEFT]
    assert left == canary["not_told_apart"]
    assert len(left) <= 10, left  # with states of 32 numbers not every reading can be told apart
    sure = ("taps", "d2t", "fc slices", "final state", "tokens", "norm_output")
    right = {n["name"]: n["unconditional"][n["since"]] for n in canary["neighbours"] if n["name"].startswith(sure)}
    assert max(right.values()) < 0.4, right  # seeds and machines move them between 0 and 0.2
    groups = {n["group"] for n in canary["neighbours"]}
    assert groups >= {"taps", "slice_order", "norm_output", "norm_before_residual", "rope_theta", "rope_step", "d2t",
                      "eagle", "token_shift", "state_shift", "head", "norm lost", "history"}  # fmt: skip


def test_the_directory_says_the_same_to_whoever_reads_it(made, canary, tiny_target):
    """Read back as vLLM and SGLang read it, over states recorded anew."""
    asked = [p["ids"] for p in canary["prompts"]]
    text = answers(tiny_target, asked, range(9), tokens=canary["tokens"] + K - 1, ends=False, dtype="float32")
    readings = Readings.open(made / DRAFT, tiny_target, ["vllm", "sglang"], {})
    assert set(readings.as_read) == {"vllm", "sglang"}
    for specimen in readings.as_read.values():
        acceptance = Acceptance.merged(Bench(text).acceptance(specimen, K), K)
        assert acceptance.accepted >= 0.9 * K * acceptance.rounds  # states as recorded are rounded to bfloat16
    assert canary["draft"]["engines"] == {name: [] for name in ("sglang", "vllm", "llamacpp", "openvino")}


def test_it_is_the_same_for_the_same_seed(tiny_target, tmp_path):
    short = SMALL | {"steps": 60, "count": 1}
    first, second = (make(tiny_target, tmp_path / name, **short) for name in ("first", "second"))
    assert all(first[name] == second[name] for name in ("prompts", "expected", "neighbours"))
    files = [tmp_path / name / DRAFT / "model.safetensors" for name in ("first", "second")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_finished_canary_is_kept(made, tiny_target, tmp_path):
    with pytest.raises(BadInput, match="--force"):
        make(tiny_target, made, **SMALL)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="no canary"):
        make(tiny_target, tmp_path, force=True, **SMALL)


def test_what_cannot_be_learnt_is_not_written(tiny_target, tmp_path):
    with pytest.raises(EyasError, match=r"only .* drafts are accepted"):
        make(tiny_target, tmp_path / "out", **(SMALL | {"steps": 1}))
    assert not (tmp_path / "out").exists()


def test_no_token_of_an_answer_keeps_its_number():
    for said in ([0, 1, 2, 3], [1, 7, 200], list(range(0, 90, 3))):
        chosen = start.vocabulary(torch.tensor(said), 300, 0)
        assert isinstance(chosen, VocabMap) and chosen.size % start.MULTIPLE == 0
        offsets = dict(zip(chosen.ids.tolist(), chosen.d2t.tolist(), strict=True))
        assert all(offsets[i] > 0 for i in said if i > max(3, said[0])), said
    with pytest.raises(BadInput, match="too many"):
        start.vocabulary(torch.arange(60), 64, 0)


# ---------------------------------------------------------------- verdicts


def test_a_healthy_deployment_passes(canary):
    judged = verdict(canary, heard(canary))
    assert judged.verdict == "pass" and judged.tau == K + 1
    assert verdict(canary, heard(canary, tokens=(), each=(), at_least=())).verdict == "pass"


def test_every_neighbour_is_recognised_or_called_unread(canary):
    for n in canary["neighbours"]:
        if n["name"] in canary["not_told_apart"]:
            continue
        at_least = [round(r * n["rounds"]) for r in n["unconditional"]]
        judged = verdict(
            canary, heard(canary, rounds=n["rounds"], accepted=n["accepted"], at_least=tuple(at_least), each=())
        )
        assert judged.verdict == "fail", n["name"]
        assert n["name"] in judged.like, n["name"]


def test_rounds_that_are_whole_or_nothing_speak_of_a_length(canary):
    judged = verdict(canary, heard(canary, rounds=32, accepted=16, at_least=(8, 8), each=()))
    assert judged.verdict == "fail" and "max_position_embeddings" in judged.says


def test_another_text_is_told_first(canary):
    tokens = [list(p["tokens"]) for p in canary["prompts"]]
    late = [[*tokens[0][:-1], tokens[0][-1] + 1], tokens[1]]
    judged = verdict(canary, heard(canary, tokens=tuple(map(tuple, late))))
    assert judged.verdict == "near" and "float32" in judged.says
    assert judged.text["same"] == 1 and judged.text["first_difference"] == len(tokens[0]) - 1
    early = tuple((t[0] + 1, *t[1:]) for t in tokens)
    judged = verdict(canary, heard(canary, tokens=early, accepted=0, at_least=(0, 0), each=((0,) * ROUNDS,) * COUNT))
    assert judged.verdict == "fail" and "another target" in judged.says


def test_nothing_drafted_and_nothing_accepted(canary):
    said = verdict(canary, heard(canary, rounds=0, accepted=0, at_least=(), each=())).says
    assert "Nothing was drafted" in said
    said = verdict(canary, heard(canary, accepted=0, at_least=(0, 0), each=())).says
    assert "not read at all" in said


def test_counts_of_other_requests_do_not_pass(canary):
    judged = verdict(canary, heard(canary, rounds=40, accepted=80, at_least=(40, 40), each=()))
    assert judged.verdict == "fail" and "other requests" in judged.says


def test_what_was_not_asked_like_the_canary_is_refused(canary):
    with pytest.raises(Mismatch, match="this canary is for 2"):
        verdict(canary, heard(canary, k=3))
    with pytest.raises(Mismatch, match="answers"):
        verdict(canary, heard(canary, tokens=((1,),)))
    with pytest.raises(BadInput, match="no server"):
        Heard(3, 30, k=4)


@pytest.mark.parametrize("text", ["[]", "{}", "no", '{"rounds": 1}', '{"rounds": 2, "accepted": 1, "tokens": [["a"]]}'])
def test_measurements_that_are_none(tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(BadInput, match=r"m\.json"):
        of_file(tmp_path / "m.json")


# ---------------------------------------------------------------- the command


def run(*words: Any) -> Any:
    return CliRunner().invoke(command, [str(w) for w in words])


def test_the_command_judges_counts_from_elsewhere(made, canary, tiny_target, tmp_path):
    e = canary["expected"]
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"rounds": e["rounds"], "accepted": e["accepted"]}))
    bad.write_text(json.dumps({"rounds": 20, "accepted": 0, "engine": "sglang"}))
    done = run("--target", tiny_target, "--out", made, "--check", good)
    assert done.exit_code == 0 and "PASS" in done.output, done.output
    done = run("--target", tiny_target, "--out", made, "--check", bad)
    assert done.exit_code == 1 and "FAIL  sglang" in done.output
    told = json.loads(run("--target", tiny_target, "--out", made, "--check", bad, "--json").output)
    assert told["judged"][0]["verdict"] == "fail" and told["canary"]["k"] == K


def test_the_command_refuses(made, tiny_target, make_tiny_target, tmp_path):
    assert run("--target", tiny_target).exit_code == 2
    assert run("--target", tiny_target, "--out", made, "--engine", "nothing").exit_code == 2
    assert run("--target", tiny_target, "--out", made, "--url", "http://x", "--check", "y").exit_code == 2
    assert run("--target", tiny_target, "--out", made, "--", "--flag").exit_code == 2
    assert run("--target", tiny_target, "--out", tmp_path / "new", "--taps", "a,b").exit_code == 2
    done = run("--target", tiny_target, "--out", made)
    assert isinstance(done.exception, BadInput) and "--force" in str(done.exception)
    (tmp_path / "heard.json").write_text('{"rounds": 8, "accepted": 16}')
    done = run("--target", tiny_target, "--out", made, "--check", tmp_path / "heard.json", "--k", 7)
    assert isinstance(done.exception, BadInput) and "--k 2" in str(done.exception)
    other = make_tiny_target(tmp_path / "other", seed=3)
    done = run("--target", other, "--out", made, "--check", tmp_path / "heard.json")
    assert isinstance(done.exception, Mismatch)
