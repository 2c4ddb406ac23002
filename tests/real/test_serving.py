"""What a real engine accepts is what the reference decoder does: one trained draft, the same prompts, every engine.

Float32, greedy, four drafted tokens, `ignore_eos`. The draft is that of EYAS_TEST_DRAFT, else of runs/demo/export, else
one that is trained here (about five minutes on two cores).   make test-engines
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.export import NotExpressible, export_draft
from eyas.measure.asking import How
from eyas.measure.engine import with_engine
from eyas.measure.locate import locate
from eyas.measure.questions import questions_of
from eyas.prompt_sets import heldout_prompts
from eyas.serve import Launch
from eyas.target.source import resolve_target

pytestmark = pytest.mark.engine
SETS, K = ("mt_bench", "humaneval", "gsm8k"), 4
ASKED = {"vllm": (24, 64), "sglang": (8, 48), "llamacpp": (24, 64), "openvino": (24, 64)}  # prompts, tokens of each
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


@pytest.mark.parametrize("engine", ASKED)
def test_the_engine_accepts_what_the_reference_decoder_does(engine, draft, plain_draft, target):
    served = plain_draft if engine == "openvino" else draft
    count, tokens = ASKED[engine]
    sets = {name: heldout_prompts(name, (count + i) // len(SETS)) for i, name in enumerate(SETS)}
    questions, how = questions_of(target, sets, 800), How(tokens)
    assert len(questions) == count
    part = with_engine(Launch(engine, target, served, K), questions, how)
    assert part["errors"] == []
    assert part["lossless"]["lossless"]
    assert part["lossless"]["compared"] == count
    located = locate(served, target, engine, questions, how, K, part["acceptance"])
    rows = {row["row"]: row for row in located["rows"]}
    print(f"\n{engine}: {[(name, row['tau'], row['rounds'], row['accepted']) for name, row in rows.items()]}")
    assert located["falls"] == ""
    assert rows["served"]["tau"] == pytest.approx(rows["reference"]["tau"], rel=0.01)
    assert rows["served"]["tau"] == pytest.approx(rows["as_read"]["tau"], rel=0.01)
    assert rows["served"]["tau"] > 1.05, "a draft that is never accepted would agree with everything"
