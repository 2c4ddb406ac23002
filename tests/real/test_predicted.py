"""What the doctor predicts for an engine is what the engine serves: healthy, and with faults that serve in silence.

The replay *as the engine reads the directory* against the engine's own counts: the same prompts, the same rounds,
float32, four drafted tokens.   make test-engines   (EYAS_TEST_DRAFT=DIR: the healthy draft)
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_serving import TOKENS, K, draft, prompts, target  # noqa: F401 - fixtures

from eyas.decode.acceptance import Acceptance
from eyas.doctor.material import Material
from eyas.doctor.readings import Readings
from eyas.doctor.record import answers
from eyas.doctor.trial import Bench
from eyas.engines import serving
from eyas.target.facts import read_facts

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "faults"))
from kinds import BY_NAME, Held

pytestmark = pytest.mark.engine
VLLM = ("taps one back", "norm_before_residual flipped", "norm_output flipped", "k <-> v", "head missing",
        "random embedding stored", "d2t rolled by one")  # fmt: skip
SGLANG = ("taps one back", "norm_output flipped")


@pytest.fixture(scope="session")
def material(target: Path, prompts: list[list[int]]) -> Material:  # noqa: F811
    """Answers long enough that every round an engine counts is whole: it counts those begun before the last token."""
    layers = read_facts(target).num_layers
    taps = tuple(range(layers + 1))
    return answers(target, prompts, taps, tokens=TOKENS + K - 1, ends=False, dtype="float32")


@pytest.mark.parametrize(
    ("engine", "fault"),
    [(engine, fault) for engine, faults in (("vllm", VLLM), ("sglang", SGLANG)) for fault in ("healthy", *faults)],
)
def test_what_is_served_is_what_was_predicted(engine, fault, draft, target, prompts, material, tmp_path):  # noqa: F811
    held = Held.read(draft, target)
    if fault != "healthy":
        assert BY_NAME[fault].apply(held) is not None
    folder = held.write(tmp_path / "draft")
    specimen = Readings.open(folder, target, [engine], {}).as_read[engine]
    predicted = Acceptance.merged(Bench(material, torch.float32).acceptance(specimen, K), K)
    served = serving.answers(engine, target, folder, prompts, tmp_path, K, TOKENS)
    tau = 1 + served["accepted"] / served["rounds"]
    ours = f"{predicted.tau:.4f} ({predicted.rounds} rounds, {predicted.accepted} accepted)"
    ours = f"{predicted.tau:.4f} ({predicted.rounds} rounds, {predicted.accepted} accepted)"
    print(f"\n{engine}, {fault}: predicted {ours}, served {tau:.4f} ({served['rounds']}, {served['accepted']})")
    assert predicted.tau == pytest.approx(tau, rel=0.02)
