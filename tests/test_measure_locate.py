"""Where it falls: the verdict from the rows, and the rows themselves against the decoder.

pytest -q tests/test_measure_locate.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.decode.answers import decode, open_batch
from eyas.decode.step import ChainDrafter
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.errors import BadInput
from eyas.measure.asking import How, Question
from eyas.measure.counting import FITTING, WHOLE
from eyas.measure.locate import LOOSE, OTHER_TEXT, ROWS, judged, locate
from eyas.target.facts import read_facts
from eyas.target.model import Target
from fitting import fitted_draft, greedy_texts, random_draft

PROMPTS = [[1, 40, 50, 60], [1, 7, 99, 200, 31], [1, 120, 121]]
QUESTIONS = [Question("s", i, tuple(p)) for i, p in enumerate(PROMPTS)]
K, LIMIT = 4, 22
ORDER = list(ROWS)

# ---------------------------------------------------------------- the verdict

SOUND = {"training": 1.6, "declared": 1.5, "as_read": 1.5, "served": 1.5}


@pytest.mark.parametrize("row", ["declared", "as_read", "served"])
def test_the_first_row_that_falls_is_the_place(row: str):
    taus = SOUND | dict.fromkeys(ORDER[ORDER.index(row) :], 1.2)
    assert judged(taus, True)[0] == row
    assert judged(taus, False)[0] == row
    assert judged(taus | {"served": 1.01}, True)[0] == row, "whatever falls after it"


def test_no_row_falls():
    for exact in (True, False):
        fallen, says = judged(SOUND, exact)
        assert fallen == "" and says.startswith("No row falls")
    assert judged({}, True)[0] == "" and judged({"served": 1.4}, True)[0] == ""


def test_rows_that_are_not_known_are_passed_over():
    assert judged({"training": None, "declared": 1.5, "as_read": None, "served": 1.3}, True)[0] == "served"
    assert judged({"training": 1.9, "declared": None, "as_read": None, "served": 1.3}, True)[0] == "served"
    assert judged(dict.fromkeys(ORDER), True)[0] == ""


def test_how_much_is_less():
    """Exact: a hundredth of tau; else a tenth of the accepted drafts; of training a quarter, its text was another."""
    assert judged({"as_read": 1.5, "served": 1.49}, True)[0] == ""
    assert judged({"as_read": 1.5, "served": 1.48}, True)[0] == "served"
    assert judged({"as_read": 1.5, "served": 1 + 0.5 * (1 - LOOSE) + 0.01}, False)[0] == ""
    assert judged({"as_read": 1.5, "served": 1 + 0.5 * (1 - LOOSE) - 0.01}, False)[0] == "served"
    assert judged({"training": 2.0, "declared": 1 + OTHER_TEXT + 0.01}, True)[0] == ""
    assert judged({"training": 2.0, "declared": 1 + OTHER_TEXT - 0.01}, True)[0] == "declared"


def test_more_than_was_read_is_another_model_too():
    for above, row in (("as_read", "served"), ("declared", "as_read")):
        fallen, says = judged({above: 1.5, row: 1.53}, True)
        assert fallen == row and "two different models" in says
        assert judged({above: 1.5, row: 1.53}, False)[0] == "", "in bf16 that means nothing"
    assert judged({"training": 1.5, "declared": 2.5}, True)[0] == "", "its text was another"


# ---------------------------------------------------------------- the rows


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def draft(target: Target, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that knows the target's answers half."""
    folder = tmp_path_factory.mktemp("fitted") / "draft"
    made, vocab_map = fitted_draft(target, PROMPTS, greedy_texts(target, PROMPTS, LIMIT + K + 4))
    save_draft(made, vocab_map, folder, facts=read_facts(tiny_target))
    return folder


@pytest.fixture(scope="module")
def mapped(target: Target, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for every second id, as OpenVINO needs a map."""
    folder = tmp_path_factory.mktemp("mapped") / "draft"
    made, _ = fitted_draft(target, PROMPTS, greedy_texts(target, PROMPTS, LIMIT + K + 4))
    half, vocab_map = random_draft(target, size=150)
    with torch.no_grad():
        for name, parameter in half.named_parameters():
            known = made.get_parameter(name)
            parameter.copy_(known[vocab_map.ids] if name == "lm_head.weight" else known)
    save_draft(half, vocab_map, folder, facts=read_facts(tiny_target))
    return folder


def located(draft: Path, folder: Path, engine: str, served: Any = None, how: How | None = None, **more: Any) -> Any:
    return locate(draft, folder, engine, QUESTIONS, how or How(LIMIT), K, served, **more)


def counts(found: Any) -> dict[str, tuple[Any, Any]]:
    return {row["row"]: (row["rounds"], row["accepted"]) for row in found["rows"]}


def whole(target: Target, draft: Path, folder: Path) -> tuple[int, int]:
    """Rounds and accepted drafts of the decoder, as vLLM and SGLang count."""
    module, vocab_map, _ = load_draft(draft, folder, dtype=torch.float32)
    done = decode(target, PROMPTS, ChainDrafter(module, vocab_map), k=K, max_new_tokens=LIMIT)
    return sum(len(a.accepted) for a in done.answers), sum(sum(a.accepted) for a in done.answers)


def fits(target: Target, draft: Path, folder: Path) -> tuple[int, int]:
    """The same of an engine that drafts min(K, what is left but for the target's own token), round by round."""
    module, vocab_map, _ = load_draft(draft, folder, dtype=torch.float32)
    each: list[int] = []
    for prompt in PROMPTS:
        batch, length = open_batch(target, [prompt], ChainDrafter(module, vocab_map)), 1
        while length < LIMIT:
            accepted, _ = batch.step(min(K, LIMIT - length - 1))
            each.append(int(accepted[0]))
            length += each[-1] + 1
    return len(each), sum(each)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_declared_read_and_decoded_are_the_same_rounds(engine: str, target: Target, draft: Path, tiny_target: Path):
    expected = whole(target, draft, tiny_target)
    assert expected[1] > 10, "a draft that is never accepted would agree with everything"
    tau = round(1 + expected[1] / expected[0], 4)
    served = {"tau": tau, "rounds": expected[0], "accepted": expected[1], "rule": WHOLE}
    found = located(draft, tiny_target, engine, served)
    rows = counts(found)
    assert {rows[name] for name in ("declared", "as_read", "reference", "served")} == {expected}
    assert {row["tau"] for row in found["rows"][1:]} == {tau}
    assert found["falls"] == "" and found["engine"] == engine
    assert [row["row"] for row in found["rows"]] == ["training", "declared", "as_read", "reference", "served"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_answers_that_end_by_themselves(engine: str, target: Target, draft: Path, tiny_target: Path, tmp_path: Path):
    """The last round is whole on both sides, whatever of it lies behind the end of the answer."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    texts = greedy_texts(target, PROMPTS, LIMIT)
    end = texts[0][9]
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": end}))
    module, vocab_map, _ = load_draft(draft, folder, dtype=torch.float32)
    loaded = Target.load(folder, dtype=torch.float32)
    done = decode(loaded, PROMPTS, ChainDrafter(module, vocab_map), k=K, max_new_tokens=LIMIT, eos_ids=[end])
    assert any(a.finish == "stop" for a in done.answers)
    expected = (sum(len(a.accepted) for a in done.answers), sum(sum(a.accepted) for a in done.answers))
    assert expected != whole(target, draft, tiny_target)
    rows = counts(located(draft, folder, engine, None, How(LIMIT, ignore_eos=False)))
    assert rows["declared"] == rows["as_read"] == rows["reference"] == expected


def test_prompts_that_the_target_cannot_hold_are_not_left_out_in_silence(draft: Path, tiny_target: Path):
    some = [*QUESTIONS, Question("s", 9, tuple([1, 40] * 120))]
    found = locate(draft, tiny_target, "vllm", some, How(LIMIT), K, None, reference=False)
    assert [row["tau"] for row in found["rows"][1:3]] == [None, None]
    assert "does not hold all prompts" in found["rows"][1]["why"]


@pytest.mark.parametrize("engine", ["llamacpp", "openvino"])
def test_engines_that_draft_only_what_fits(engine: str, target: Target, mapped: Path, tiny_target: Path):
    expected = fits(target, mapped, tiny_target)
    assert expected != whole(target, mapped, tiny_target), "else the rule would not matter here"
    tau = round(1 + expected[1] / expected[0], 4)
    served = {"tau": tau, "rounds": expected[0], "accepted": expected[1], "rule": FITTING}
    rows = counts(located(mapped, tiny_target, engine, served))
    assert rows["declared"] == rows["reference"] == rows["served"] == expected
    assert rows["as_read"] == expected, "as the export for this engine is read"


def test_served_less_is_found(draft: Path, tiny_target: Path, target: Target):
    rounds, accepted = whole(target, draft, tiny_target)
    less = {"tau": 1 + 0.8 * accepted / rounds, "rounds": rounds, "accepted": round(0.8 * accepted), "rule": WHOLE}
    found = located(draft, tiny_target, "vllm", less, reference=False)
    assert found["falls"] == "served" and "reference" not in counts(found)
    assert located(draft, tiny_target, "vllm", less, dtype="bfloat16", reference=False)["falls"] == "served"
    more = less | {"tau": 1 + 1.2 * accepted / rounds}
    assert located(draft, tiny_target, "vllm", more, reference=False)["falls"] == "served"
    bound = located(draft, tiny_target, "vllm", more | {"at_most": True}, reference=False)
    assert bound["falls"] == "", "a bound above is none"


def test_a_server_that_did_not_say(draft: Path, tiny_target: Path):
    found = located(draft, tiny_target, "vllm", None, reference=False)
    assert found["rows"][-1] | {"tau": None, "why": "the server did not say"} == found["rows"][-1]
    assert found["falls"] == ""


def test_what_training_predicted_is_the_first_row(draft: Path, tiny_target: Path, tmp_path: Path):
    (tmp_path / "summary.json").write_text(json.dumps({"predicted": {"accept_length": 4.9}}))
    found = located(draft, tiny_target, "vllm", None, training=tmp_path, reference=False)
    assert found["rows"][0]["tau"] == 4.9 and found["falls"] == "declared"
    lost = located(draft, tiny_target, "vllm", None, training=tmp_path / "nowhere", reference=False)
    assert lost["rows"][0]["tau"] is None and "no directory" in lost["rows"][0]["why"]
    assert "--training" in located(draft, tiny_target, "vllm", None, reference=False)["rows"][0]["why"]


def test_a_directory_that_the_engine_reads_otherwise(draft: Path, tiny_target: Path, tmp_path: Path, target: Target):
    """Other taps in config.json than in eyas.json: as declared it is right, as vLLM reads it it is not."""
    folder = tmp_path / "draft"
    shutil.copytree(draft, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    changed = json.dumps(config).replace("[2, 4, 5]", "[1, 3, 4]")
    if changed == json.dumps(config):
        config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
        changed = json.dumps(config)
    file.write_text(changed)
    found = located(folder, tiny_target, "vllm", None, reference=False)
    rows = counts(found)
    assert rows["declared"] == whole(target, draft, tiny_target) and rows["as_read"][1] < rows["declared"][1]
    assert found["falls"] == "as_read" and "export it for this engine" in found["says"]


def test_sampled_text_is_not_replayed(draft: Path, tiny_target: Path):
    found = located(draft, tiny_target, "vllm", {"tau": 1.4, "rule": WHOLE}, How(LIMIT, temperature=0.7))
    assert all(row["tau"] is None and "ask greedily" in row["why"] for row in found["rows"][1:3])
    assert "sampled" in found["rows"][3]["why"] and found["falls"] == ""


def test_a_draft_that_is_not_there(tiny_target: Path, tmp_path: Path):
    with pytest.raises(BadInput, match="nowhere"):
        located(tmp_path / "nowhere", tiny_target, "vllm", None)
