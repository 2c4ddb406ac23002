"""A canary passes with the real engines as they are, and no fault of a launch or of a config gets by it.

One canary for SmolLM2-135M, made here (minutes) or taken from EYAS_TEST_CANARY.   make test-engines
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from targets import moved

from eyas.canary.check import Judged, verdict
from eyas.canary.make import DRAFT, make, read
from eyas.canary.served import served
from eyas.target.source import resolve_target

pytestmark = pytest.mark.engine
Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="session")
def target() -> Path:
    return resolve_target("smollm2")


@pytest.fixture(scope="session")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("EYAS_TEST_CANARY")
    out = Path(given) if given else tmp_path_factory.mktemp("canary") / "canary"
    if not given:
        make(target, out, tell=print)
    return out


def edited(made: Path, out: Path, edit: Edit, drop: str = "") -> Path:
    """The draft as a config that somebody else wrote has it; `drop`: a tensor that got lost."""
    shutil.copytree(made / DRAFT, out)
    config = json.loads((out / "config.json").read_text())
    edit(config)
    (out / "config.json").write_text(json.dumps(config))
    if drop:
        tensors = {name: t for name, t in load_file(out / "model.safetensors").items() if name != drop}
        save_file(tensors, out / "model.safetensors")
    return out


def asked(engine: str, made: Path, target: Path, draft: Path, **how: Any) -> Judged:
    canary = read(made)
    judged = verdict(canary, served(canary, engine, target, draft, **how))
    print(f"\n{judged}")
    return judged


def _taps(shift: tuple[int, int, int]) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        name = "eagle_aux_hidden_state_layer_ids"
        config[name] = [a + b for a, b in zip(config[name], shift, strict=True)]
        nested = config["eagle_config"]
        nested[name] = [a + b for a, b in zip(nested[name], shift, strict=True)]

    return edit


def _theta(config: dict[str, Any]) -> None:
    config.pop("rope_theta"), config.pop("rope_parameters")


FAULTS: dict[str, tuple[Edit, str]] = {
    "taps one on": (_taps((1, 1, 1)), ""),
    "taps one back": (_taps((-1, -1, -1)), ""),
    "first tap one on": (_taps((1, 0, 0)), ""),
    "middle tap one back": (_taps((0, -1, 0)), ""),
    "last tap one on": (_taps((0, 0, 1)), ""),
    "max_position_embeddings 64": (lambda c: c.update(max_position_embeddings=64), ""),
    "rope_theta dropped": (_theta, ""),
    "norm_before_residual": (lambda c: c.update(norm_before_residual=True), ""),
    "norm_output": (lambda c: c.update(norm_output=True), ""),
    "norm_before_fc": (lambda c: c.update(norm_before_fc=True), ""),
    "d2t dropped": (lambda c: None, "d2t"),
    "hidden_norm dropped": (lambda c: None, "midlayer.hidden_norm.weight"),
    "head dropped": (lambda c: None, "lm_head.weight"),
}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "openvino"])
def test_every_engine_passes(engine, made, target):
    assert asked(engine, made, target, made / DRAFT).verdict == "pass"


def test_bfloat16_is_a_near_miss_at_worst(made, target):
    judged = asked("vllm", made, target, made / DRAFT, dtype="bfloat16")
    assert judged.verdict in ("pass", "near")


@pytest.mark.parametrize("fault", FAULTS)
def test_vllm_with_a_fault_does_not_pass(fault, made, target, tmp_path):
    edit, drop = FAULTS[fault]
    judged = asked("vllm", made, target, edited(made, tmp_path / "draft", edit, drop))
    assert judged.verdict == "fail"
    assert judged.tau < 0.7 * judged.expected


def test_eagle_instead_of_eagle3_does_not_pass(made, target):
    judged = asked("sglang", made, target, made / DRAFT, extra=("--speculative-algorithm", "EAGLE"))
    assert judged.verdict == "fail" and judged.tau < 1.1  # a few drafts are right by chance: 4 of 2,064 were


ENDS = """{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 4, "max_model_len": 64}"""


def test_positions_that_end_in_the_launch_do_not_pass(made, target):
    config = ENDS.replace("DRAFT", str(made / DRAFT))
    assert asked("vllm", made, target, made / DRAFT, extra=("--speculative-config", config)).verdict == "fail"


def test_another_target_does_not_pass(made, target, tmp_path):
    """Its weights moved by a tenth of their spread: what a fine-tune does."""
    assert asked("vllm", made, moved(target, tmp_path / "target"), made / DRAFT).verdict == "fail"
