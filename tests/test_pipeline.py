"""`eyas run`: killed in each stage and started again it ends in the same artifacts; what is done is skipped.

pytest -q tests/test_pipeline.py
"""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eyas.config import load_config
from eyas.errors import BadInput
from eyas.pipeline import run
from killing import PLACES

STAGES = "target ask prompts regenerate split extract heldout vocab train export prove".split()
WORDS = "the young hawk sits on a glove and looks at its field what is four plus five who flies over France".split()


def sentences(count: int, words: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choice(WORDS) for _ in range(words)) for _ in range(count)]


@pytest.fixture(scope="module")
def recipe(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of seconds: 24 prompts, a draft of 12 steps."""
    folder = tmp_path_factory.mktemp("recipe")
    for name, count in (("ask", 24), ("held", 3)):
        rows = [json.dumps({"id": f"{name}{i}", "prompt": text}) for i, text in enumerate(sentences(count, 7, count))]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    values = {
        "name": "tiny",
        "target": {"source": str(tiny_target)},
        "ask": {"count": 16, "max_new_tokens": 60, "top_k": 300, "openings": ["what is", "the young hawk"]},
        "prompts": {"sources": [str(folder / "ask.jsonl")]},
        "regenerate": {"max_new_tokens": 16, "slots": 16},
        "extract": {"heldout": 4, "batch_tokens": 512},
        "vocab": {"size": 100},
        "train": {"steps": 12, "batch_tokens": 512, "save_every": 3, "eval_every": 6, "ttt_steps": 2},
        "prove": {"sets": [str(folder / "held.jsonl")], "prompts": 3, "max_new_tokens": 8, "draft_tokens": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def attempts(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Runs that were killed at each of PLACES in turn until one finished, and one that was not; see killing.py."""
    out = tmp_path_factory.mktemp("runs")
    script = Path(__file__).with_name("killing.py")
    done = subprocess.run([sys.executable, str(script), str(recipe), str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(PLACES) + 2, done.stderr
    return out, told


def artifacts(run_dir: Path) -> dict[str, str]:
    """Name -> SHA-256 of all files that the stages' manifests list, but for those that hold times."""
    timed = {"train/metrics.jsonl", "prove/result.json"}
    found = {}
    for stage in STAGES:
        files = json.loads((run_dir / stage / "manifest.json").read_text())["files"]
        found |= {f"{stage}/{name}": digest for name, digest in files.items()}
    return {name: digest for name, digest in found.items() if name not in timed}


def test_every_place_was_reached_and_every_attempt_got_further(attempts):
    _, told = attempts
    assert [attempt["signal"] for attempt in told] == [9] * len(PLACES) + [0, 0]
    assert [attempt["exit"] for attempt in told] == [0] * len(told)
    assert {stage for stage, _, _ in PLACES} >= set(STAGES)
    finished = [len(attempt["lines"]) for attempt in told[:-1]]
    assert finished == sorted(finished)
    assert [line.split()[0] for line in told[-2]["lines"]] == STAGES
    assert all("unchanged" in line for line in told[-2]["lines"]), "the last attempt had all but the summary"
    assert not any("unchanged" in line for line in told[-1]["lines"])


def test_killed_in_each_stage_it_ends_in_the_same_artifacts(attempts):
    out, _ = attempts
    killed, whole = artifacts(out / "killed"), artifacts(out / "whole")
    assert killed == whole
    for name in ("train/draft/model.safetensors", "extract/shard-00000.safetensors", "export/eyas/probe.safetensors"):
        assert (out / "killed" / name).read_bytes() == (out / "whole" / name).read_bytes()
    assert not list((out / "killed").rglob(".eyas-tmp*")), "a killed run left something behind"


def test_both_end_in_the_same_numbers(attempts):
    out, _ = attempts
    killed, whole = (json.loads((out / name / "summary.json").read_text()) for name in ("killed", "whole"))
    for name in ("tau_mean", "tau", "per_position", "lossless", "supervised_tokens", "training", "vocabulary"):
        assert killed[name] == whole[name]
    assert whole["lossless"] is True
    assert list(whole["tau"]) == ["held"]
    assert whole["tau"]["held"]["prompts"] == 3
    assert 1 <= whole["tau_mean"] <= 3
    assert whole["seconds"] > 0
    assert 0.1 < whole["peak_memory_gib"] < 4
    losses = [json.loads(line)["loss"] for line in (out / "killed/train/metrics.jsonl").read_text().splitlines()]
    assert losses == [json.loads(line)["loss"] for line in (out / "whole/train/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 12


@pytest.fixture
def finished(attempts, tmp_path: Path) -> Path:
    """A copy of the finished run, to change."""
    return Path(shutil.copytree(attempts[0] / "whole", tmp_path / "run"))


def redone(recipe: Path, folder: Path, *overrides: str) -> list[str]:
    lines: list[str] = []
    run(load_config(recipe, overrides), folder, say=lines.append)
    assert [line.split()[0] for line in lines] == STAGES
    return [line.split()[0] for line in lines if "unchanged" not in line]


def test_a_change_redoes_what_depends_on_it(recipe: Path, finished: Path):
    before = json.loads((finished / "summary.json").read_text())
    assert redone(recipe, finished) == []
    again = json.loads((finished / "summary.json").read_text())
    assert again == before
    assert redone(recipe, finished, "prove.max_new_tokens=6") == ["prove"]
    # The same weights in another precision: prove sees another draft, training does not.
    assert redone(recipe, finished, "prove.max_new_tokens=6", "export.dtype=float32") == ["export", "prove"]


def test_damaged_results_are_made_again(recipe: Path, finished: Path):
    before = artifacts(finished)
    (finished / "vocab" / "vocab.safetensors").unlink()
    assert redone(recipe, finished) == ["vocab"], "what comes after sees the same map"
    assert artifacts(finished) == before


def test_a_run_says_where_its_prompts_are_missing(recipe: Path, tmp_path: Path):
    config = load_config(recipe, ["prompts.sources=[nowhere.jsonl]"])
    with pytest.raises(BadInput, match=r"nowhere\.jsonl: no such file"):
        run(config, tmp_path / "run", say=lambda line: None)
    assert not (tmp_path / "run" / "summary.json").exists()
