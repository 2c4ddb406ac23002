"""A repaired draft is served by the real engine as the replay of it said.

make test-engines   (EYAS_TEST_DRAFT=DIR: the healthy draft)
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eyas.repair.apply import repair
from eyas.repair.served import served

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "faults"))
from kinds import BY_NAME, Held

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engine_serves_what_was_mended(engine, draft, target, tmp_path):
    broken = Held.read(draft, target)
    for fault in ("d2t subtracted twice", "k <-> v"):
        assert BY_NAME[fault].apply(broken) is not None
    folder = broken.write(tmp_path / "broken")
    before = served(folder, target, engine)
    done = repair(folder, out=tmp_path / "mended", target=target)
    assert done.left == [] and done.plan is not None
    after = served(tmp_path / "mended", target, engine)
    print(f"\n{engine}: served {before['tau']} before, {after['tau']} after, predicted {after['predicted']}")
    assert before["tau"] < 1.1
    assert after["tau"] == pytest.approx(after["predicted"], rel=0.02)
    assert after["tau"] == pytest.approx(served(draft, target, engine)["tau"], rel=0.01)
