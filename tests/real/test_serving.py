"""What a real engine accepts is what `eyas prove` counts: one trained draft, exported, served on the same 24 prompts.

Float32, greedy, four drafted tokens, `ignore_eos`. The draft is that of EYAS_TEST_DRAFT, else of runs/demo/export, else
one that is trained here (about five minutes on two cores).   make test-engines
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.decode.prove import prove, token_ids
from eyas.engines import serving
from eyas.export import NotExpressible, export_draft
from eyas.export.convert import convert
from eyas.prompt_sets import heldout_prompts
from eyas.target.model import Target
from eyas.target.source import resolve_target

pytestmark = pytest.mark.engine
SETS, EACH, K, TOKENS = ("mt_bench", "humaneval", "gsm8k"), 8, 4, 64
SMALL = ("ask.count=null", "regenerate.max_supervised_tokens=12000", "prompts.per_source=250", "extract.heldout=8",
         "train.epochs=3", "prove.prompts=1")  # fmt: skip


@pytest.fixture(scope="session")
def target() -> Path:
    return resolve_target("smollm2")


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """A trained draft as Eyas exports it."""
    root = tmp_path_factory.mktemp("served")
    given = Path(os.environ.get("EYAS_TEST_DRAFT") or "runs/demo/export")
    given = given if given.is_dir() else trained(root / "run")
    export_draft(given, root / "draft", target_dir=target, engines=("sglang", "vllm", "llamacpp"))
    return root / "draft"


@pytest.fixture(scope="session")
def plain_draft(draft: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that OpenVINO can express, which knows no norm before fc: the same, or another."""
    root = tmp_path_factory.mktemp("plain")
    try:
        export_draft(draft, root / "asked", to="openvino", target_dir=target)
        return draft
    except NotExpressible:
        return trained(root / "run", "train.norm_before_fc=false")


def trained(out: Path, *more: str) -> Path:
    """A small run's export."""
    options = [word for setting in (*SMALL, *more) for word in ("--override", setting)]
    subprocess.run([sys.executable, "-m", "eyas", "run", "demo", "--out", out, *options], check=True)
    return out / "export"


@pytest.fixture(scope="session")
def prompts(target: Path) -> list[list[int]]:
    model = Target.load(target, dtype=torch.float32)
    return [token_ids(model, prompt) for name in SETS for prompt in heldout_prompts(name, EACH)]


@pytest.fixture(scope="session")
def reference(draft: Path, target: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Counts of the reference decoder."""
    return counted(draft, target, prompts)


def counted(draft: Path, target: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """As engines count: every round in full."""
    proof = prove(draft, target, {"all": prompts}, k=K, max_new_tokens=TOKENS, ignore_eos=True, timed=0)
    assert proof["lossless"]
    return proof["all_rounds"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engine_accepts_what_the_reference_decoder_does(engine, draft, target, prompts, reference, tmp_path):
    served = serving.answers(engine, target, draft, prompts, tmp_path, K, TOKENS)
    plain = serving.answers(engine, target, None, prompts, tmp_path, K, TOKENS)
    assert served["tokens"] == plain["tokens"]
    tau = 1 + served["accepted"] / served["rounds"]
    assert tau == pytest.approx(reference["tau"], rel=0.005)
    rates = [count / served["rounds"] for count in served["at_least"]]
    assert rates == pytest.approx(reference["unconditional"], abs=0.005)
    assert tau > 1.05, "a draft that is never accepted would agree with everything"


def test_llama_cpp_accepts_what_the_reference_decoder_does(draft, target, prompts, reference, tmp_path):
    environment = serving.environment("llamacpp")
    gguf = tmp_path / "target.gguf"
    subprocess.run(
        [environment.python, environment.programs["convert"], target, "--outtype", "f32", "--outfile", gguf],
        env=environment.environ(), check=True,
    )  # fmt: skip
    taps = tuple(export_draft(draft, tmp_path / "draft", to="llamacpp", target_dir=target).taps)
    converted = convert("llamacpp", tmp_path / "draft", target, tmp_path / "draft.gguf", taps)
    served = serving.answers("llamacpp", gguf, converted, prompts, tmp_path, K, TOKENS)
    plain = serving.answers("llamacpp", gguf, None, prompts, tmp_path, K, TOKENS)
    assert served["tokens"] == plain["tokens"]
    # It cuts each answer's last round at the last token, so that a few accepted ones are not counted.
    assert 1 + served["accepted"] / served["rounds"] == pytest.approx(reference["tau"], rel=0.01)
    assert served["rounds"] == pytest.approx(reference["rounds"], rel=0.01)


def test_openvino_runs_the_same_rounds(plain_draft, target, prompts, tmp_path):
    """The mended taps are those of the draft; with its own default another model runs."""
    environment = serving.environment("openvino")
    converted = tmp_path / "target"
    task = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    program = environment.programs["optimum-cli"]
    subprocess.run(
        [program, "export", "openvino", "-m", target, *task, converted], env=environment.environ(), check=True
    )
    taps = tuple(export_draft(plain_draft, tmp_path / "draft", to="openvino", target_dir=target).taps)
    mended = convert("openvino", tmp_path / "draft", target, tmp_path / "converted", taps)
    served = serving.answers("openvino", converted, mended, prompts, tmp_path, K, TOKENS)
    plain = serving.answers("openvino", converted, None, prompts, tmp_path, K, TOKENS)
    assert served["tokens"] == plain["tokens"]
    assert served["rounds"] == pytest.approx(counted(plain_draft, target, prompts)["rounds"], rel=0.01)
