"""What a real engine accepts is what the reference decoder does: one trained draft, the same prompts, every engine.

Float32, greedy, four drafted tokens, `ignore_eos`. The draft is that of EYAS_TEST_DRAFT, else of runs/demo/export, else
one that is trained here (about five minutes on two cores).   make test-engines
"""

from __future__ import annotations

import pytest

from eyas.measure.asking import How
from eyas.measure.engine import with_engine
from eyas.measure.locate import locate
from eyas.measure.questions import questions_of
from eyas.prompt_sets import heldout_prompts
from eyas.serve import Launch

pytestmark = pytest.mark.engine
SETS, K = ("mt_bench", "humaneval", "gsm8k"), 4
ASKED = {"vllm": (24, 64), "sglang": (8, 48), "llamacpp": (24, 64), "openvino": (24, 64)}  # prompts, tokens of each


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
