"""A plan's numbers are those of the code: parameters of the module, bytes of the layout, counts of the family.

pytest -q tests/test_plan.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from eyas.cli.plan import command
from eyas.conventions import Conventions
from eyas.draft.model import Draft
from eyas.errors import BadInput
from eyas.plan import counts, formula
from eyas.plan.hardware import hardware
from eyas.plan.memory import extraction_memory, training_memory
from eyas.plan.target import plan_target
from eyas.plan.whole import Job, make_plan
from eyas.report.plan_text import plan_text
from eyas.train.muon import orthogonalise
from eyas.train.settings import TrainSettings
from eyas.train.start import draft_shape
from training import Material, material


@pytest.fixture(scope="module")
def m(tiny_target, tmp_path_factory) -> Material:
    return material(tiny_target, tmp_path_factory)


@pytest.fixture(scope="module")
def kimi():
    return plan_target("kimi-k2.5")


# ---------------------------------------------------------------- formulas


def test_a_line_shows_what_it_computed():
    found = formula.line("states", "B", "2*T*H + rest", T=3, H=7168, rest=13)
    assert found.result == 2 * 3 * 7168 + 13
    assert found.filled == "2*3*7,168 + 13"
    assert found.shown == "43.02 kB"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(59, "s", "59.0 s"), (7200, "s", "2.0 h"), (3.441e13, "B", "34.41 TB"), (1190970368, "", "1,190,970,368"),
     (12.5, "$", "$12.50"), (0.25, "", "0.25")],
)  # fmt: skip
def test_amounts_read_well(value, unit, text):
    assert formula.amount(value, unit) == text


# ---------------------------------------------------------------- counts against the code


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_layers": 3}, {"norm_before_fc": False}, {"norm_before_fc": False, "fc_norm": True},
     {"intermediate_size": 40}],
)  # fmt: skip
def test_parameters_are_those_of_the_module(m, settings):
    chosen, facts = TrainSettings(**settings), plan_target(str(m.target)).facts
    shape = draft_shape(chosen, facts, 150, 3)
    c = Conventions(taps=(2, 4, 5), norm_before_fc=chosen.norm_before_fc, fc_norm=chosen.fc_norm)
    with torch.device("meta"):
        draft = Draft(shape, c)
    assert counts.draft_parameters(shape, chosen)["parameters"].result == sum(p.numel() for p in draft.parameters())
    inside = [tuple(p.shape) for n, p in draft.named_parameters() if p.ndim == 2 and n != "lm_head.weight"]
    assert sorted(inside) == sorted(counts.matrices(shape))


def test_bytes_are_those_on_disk(m):
    """The files themselves: their headers and offsets are the rest, and less than a tenth even of tiny states."""
    found = counts.feature_bytes(32, 3, m.features.num_tokens)
    assert found["one token"].result == m.features.meta.bytes_per_token()
    written = sum(path.stat().st_size for path in m.features.shards)
    assert 0 <= written - found["features"].result < 0.1 * written


@pytest.mark.parametrize("shape", [(24, 64), (40, 24), (30, 30), (16, 40)])
def test_muons_operations_are_those_of_its_products(shape):
    """Counted by torch's own counter of products."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        orthogonalise(torch.randn(shape), dtype=torch.float32)
    assert counts.muon_flops(shape) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_operations_of_a_step_are_those_of_its_products(m):
    """Torch counts the products of a whole step; ours leave out the attention's tiles, which it does not see alike.

    All but two documents' tokens are supervised here, so the share is counted, not guessed.
    """
    from torch.utils.flop_counter import FlopCounterMode

    from eyas.train.inputs import prepare
    from eyas.train.loop import Run

    settings = TrainSettings(steps=1, ttt_steps=3, batch_tokens=10_000, optimizer="adamw", start="target")
    given = prepare(m.features, m.target, m.vocab_map, None, settings, 0)
    given.initialise()
    run = Run(given, settings, 0, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        sums, _ = run.optimize([list(range(m.features.num_docs))])
    tokens = m.features.num_tokens
    rows = float(sums.rows.sum()) / settings.ttt_steps / tokens
    section = counts.training_flops(given.draft.shape, settings, 12, rows, tokens, 1)
    planned = (section["one token"].result - section["attention"].result) * tokens
    # The first step has more rows than the mean of three, which the teacher and the keys of step 0 follow.
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.15)


# ---------------------------------------------------------------- targets


def test_kimi_is_what_its_makers_say(kimi):
    """1T parameters, 32B at work with embedding and head (their card), 595 GB of files in int4."""
    assert kimi.parameters == pytest.approx(1.03e12, rel=0.01)
    ends = 2 * kimi.facts.hidden_size * kimi.facts.vocab_size
    assert kimi.active + ends == pytest.approx(32.9e9, rel=0.01)
    assert kimi.stored_bytes == pytest.approx(595e9, rel=0.01)
    assert (kimi.key_width, kimi.value_width) == (192, 128)


def test_a_draft_for_latent_attention_has_heads_as_wide_as_its_values(kimi):
    shape = draft_shape(TrainSettings(), kimi.facts, 32_000)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (64, 64, 128)
    assert counts.draft_parameters(shape, TrainSettings())["parameters"].result == pytest.approx(1.2e9, rel=0.02)


def test_a_folders_parameters_and_bytes_are_its_own(m):
    found = plan_target(str(m.target))
    assert found.folder == m.target and found.experts == 0
    assert found.parameters * 4 == pytest.approx(found.stored_bytes, rel=0.05)


def test_a_target_may_be_made_of_sizes():
    sizes = {"hidden_size": "64", "num_hidden_layers": "8", "num_attention_heads": "4", "vocab_size": "500",
             "intermediate_size": "96"}  # fmt: skip
    found = plan_target(None, sizes)
    assert (found.facts.hidden_size, found.facts.num_layers, found.folder) == (64, 8, None)
    with pytest.raises(BadInput, match="num_hidden_layers"):
        plan_target(None, {"hidden_size": "64"})
    changed = plan_target("kimi-k2.5", {"num_hidden_layers": "2"})
    assert changed.facts.num_layers == 2


def test_an_unknown_target_is_refused_with_the_way_out():
    with pytest.raises(BadInput, match=r"kimi-k2\.5.*--size"):
        plan_target("nobody/nothing")


# ---------------------------------------------------------------- the plan


def job(kimi, **changes) -> Job:
    return dataclasses.replace(Job(target=kimi, tokens=600_000_000), **changes)


def test_the_story_is_warned_of(kimi):
    """35 TB of states, a target that does not fit, an optimizer that outweighs its step, steps fewer than served."""
    plan = make_plan(job(kimi, served=7), hardware("h100", devices=4, price_per_hour=2.0))
    assert plan["Features on disk"]["features"].result == pytest.approx(34.4e12, rel=0.01)
    text = "\n".join(plan.warnings)
    for part in ("34.41 TB", "does not fit", "The optimizer works", "5 steps and served with 7", "28,672 unknowns"):
        assert part in text
    time = plan["Time and cost"]
    assert time["cost"].result == pytest.approx(
        (4 * time["extraction"].result + time["training, on one device"].result) / 1800
    )


def test_a_modest_plan_has_no_warnings(m):
    plan = make_plan(
        Job(target=plan_target(str(m.target)), tokens=100_000, draft_vocab=150, served=5, length=40),
        hardware("cpu", flops=1e11, memory=16e9),
    )
    assert plan.warnings == ()
    more = dataclasses.replace(plan.job, draft_vocab=200, observed=180)
    assert "180 distinct" in "\n".join(make_plan(more, plan.hardware).warnings)


def test_memory_follows_what_is_chosen(kimi):
    def at_most(**settings) -> float:
        chosen = TrainSettings(**settings)
        shape = draft_shape(chosen, kimi.facts, 32_000)
        return training_memory(kimi, shape, chosen, 0.5, 64, 1e8, 2000)["at most"].result

    full = at_most()
    assert at_most(train_head=False) < full - 2e9  # no gradient, no moments, no second copy of 0.9 GB each
    assert at_most(optimizer="adamw") > full + 3e9
    assert at_most(train_head=False) < 17.5e9 < full
    assert at_most(batch_tokens=8192, micro_tokens=4096) > full
    one, two = (extraction_memory(kimi, 3, n, 2, 1e9, on_cpu=False)["at most"].result for n in (2048, 4096))
    assert 594e9 < one < two < 600e9


def test_the_printed_plan_shows_formulas_with_their_values(kimi):
    text = plan_text(make_plan(job(kimi), hardware("h200", devices=8)))
    assert "2*H*(q + 2*kv) = 2*7,168*(8,192 + 2*8,192)" in text
    assert "1.19B parameters" in text and "$" not in text
    assert max(map(len, (line for line in text.splitlines() if "  = " not in line and "  =" not in line))) <= 130


# ---------------------------------------------------------------- the command


def invoke(*args: str):
    return CliRunner().invoke(command, list(args), catch_exceptions=False)


def test_json_of_counted_features(m):
    result = invoke("--target", str(m.target), "--features", str(m.features.dir), "--draft-vocab", "150",
                    "--flops", "1e11", "--json")  # fmt: skip
    found = json.loads(result.output)
    assert found["tokens"] == m.features.num_tokens
    assert found["supervised"] == pytest.approx(m.features.supervised_tokens / m.features.num_tokens)
    assert found["draft"]["draft_vocab_size"] == 150
    assert {s["title"] for s in found["sections"]} >= {"Features on disk", "Time and cost"}


def test_counted_conversations(m, tmp_path: Path):
    from training import conversations

    file = tmp_path / "c.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in conversations(12, 1)))
    found = json.loads(invoke("--target", str(m.target), "--conversations", str(file), "--flops", "1e11",
                              "--draft-vocab", "150", "--json").output)  # fmt: skip
    assert found["tokens"] == m.features.num_tokens


def test_calibration_runs_the_real_code(m, monkeypatch):
    """It counts what it ran, and the plan uses its rates; how fast this machine is, is nobody's business here."""
    from eyas.plan.calibrate import calibrate

    settings = TrainSettings(batch_tokens=60, ttt_steps=2)
    given: dict = {
        "length": 20,
        "supervised": 0.6,
        "taps": None,
        "draft_vocab": 150,
        "batch_tokens": 64,
    }
    for features in (None, m.features):
        found = calibrate(m.target, settings, features=features, seconds=0.1, **given)
        assert found.tokens_run > 0 and found.steps_run > 0 and 20 < found.step_tokens <= 60
        assert min(found.load.wall, found.token.wall, found.step.wall) > 0
    chosen = Job(target=plan_target(str(m.target)), tokens=10_000, draft_vocab=150, length=20, settings=settings)
    machine = hardware("cpu", flops=1e11, memory=16e9)
    found = dataclasses.replace(found, step=dataclasses.replace(found.step, wall=2.0), step_tokens=50.0)
    time = make_plan(chosen, machine, found)["Time and cost"]
    assert time["training"].result == pytest.approx(3 * 10_000 / 50 * 2.0 + found.begin.wall, rel=0.05)


def test_without_text_there_is_nothing_to_plan(m):
    result = CliRunner().invoke(command, ["--target", str(m.target)])
    assert result.exit_code == 2 and "--tokens" in result.output
