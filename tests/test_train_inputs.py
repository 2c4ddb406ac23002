"""Starting from a given draft, and everything that is refused before training begins.

pytest -q tests/test_train_inputs.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from drafts import write_flat
from eyas.cli.train import command
from eyas.conventions import Known
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.errors import BadInput, Mismatch
from eyas.features.reader import FeatureSet
from eyas.target.facts import read_facts
from eyas.target.weights import load_ends
from eyas.train import loop
from eyas.train.batches import make_batch
from eyas.train.objective import ttt_loss
from eyas.train.settings import TrainSettings
from eyas.train.start import new_draft
from eyas.vocab import VocabMap
from training import Material, material, records, run


@pytest.fixture(scope="module")
def m(tiny_target, tmp_path_factory) -> Material:
    torch.set_num_threads(1)
    return material(tiny_target, tmp_path_factory)


def given(m: Material, out: Path, vocab_map: VocabMap | None = None, **conventions) -> Path:
    """A small random draft for the tiny target, as a canonical directory."""
    torch.manual_seed(5)
    vocab_map = vocab_map or m.vocab_map
    like = new_draft(TrainSettings(intermediate_size=16), read_facts(m.target), m.features, vocab_map)
    told = {"norm_before_fc": False, **conventions}
    draft = Draft(like.shape, like.conventions.with_(**told))
    for name, p in draft.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.2)
    return save_draft(draft, vocab_map, out, facts=read_facts(m.target))


# ---------------------------------------------------------------- going on from a draft


def test_going_on_keeps_map_shape_and_conventions(m, tmp_path):
    source = given(m, tmp_path / "draft", VocabMap.from_t2d(~m.vocab_map.t2d), fc_norm=True, norm_output=True,
                   norm_before_residual=True, mask_shift=0)  # fmt: skip
    run(m, tmp_path / "run", init_from=str(source), vocab_map=None, intermediate_size=None)
    draft, kept, c = load_draft(tmp_path / "run" / "draft", m.target)
    assert torch.equal(kept.t2d, ~m.vocab_map.t2d)
    assert (c.fc_norm, c.norm_output, c.norm_before_residual, c.norm_before_fc) == (True, True, True, False)
    assert draft.shape.intermediate_size == 16
    assert (c.mask_shift, c.teacher) == (2, "whole_vocabulary"), "declared as Eyas trains, whatever it was before"
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "run" / "draft" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = [name for name in after if after[name].is_floating_point() and not torch.equal(before[name], after[name])]
    assert len(moved) == len(after) - 2, "all but d2t and t2d were trained"
    assert max(float((after[n] - before[n]).abs().max()) for n in moved) < 0.2, "from where the draft was"
    again = run(m, tmp_path / "run", init_from=str(source), vocab_map=None, intermediate_size=None)
    assert again["steps"] == 6


def test_the_first_step_is_what_its_conventions_say(m, tmp_path):
    """The loss of step 1 is that of the given weights under the given conventions, and another one without them."""
    losses = {}
    for flag in ("norm_output", "norm_before_residual"):
        source = given(m, tmp_path / flag, **{flag: True})
        out = tmp_path / f"run-{flag}"
        run(m, out, init_from=str(source), vocab_map=None, steps=1, batch_tokens=10_000, micro_tokens=10_000,
            intermediate_size=None, held_out=None)  # fmt: skip
        draft, _, _ = load_draft(source, m.target)
        batch = make_batch(m.features, range(m.features.num_docs))
        ends = load_ends(m.target)
        for asked in (True, False):
            draft.conventions = draft.conventions.with_(**{flag: asked})
            draft.midlayer.norm_before_residual = draft.conventions.norm_before_residual
            _, sums = ttt_loss(draft, batch, ends.head[m.vocab_map.ids], m.vocab_map.to_draft(torch.arange(300)),
                                  steps=3, decay=0.8, denominators=batch.weights(3))  # fmt: skip
            losses[asked] = [round(float(v), 4) for v in (sums.loss / sums.rows)]
        assert records(out)[0]["loss"] == pytest.approx(losses[True], abs=2e-4), flag
        assert losses[False] != pytest.approx(losses[True], abs=2e-3), flag


def test_a_foreign_draft_is_readable(m, tmp_path):
    draft, vocab_map, _ = load_draft(given(m, tmp_path / "own"), m.target)
    source = write_flat(tmp_path / "flat", draft, vocab_map)
    run(m, tmp_path / "run", init_from=str(source), vocab_map=None, intermediate_size=None, steps=1)
    assert load_draft(tmp_path / "run" / "draft", m.target)[1].digest() == m.vocab_map.digest()


def test_the_logit_scale_of_a_draft_is_honoured(m, tmp_path):
    """Logits are scaled in the loss exactly as `Draft.logits` scales them."""
    draft, _, _ = load_draft(given(m, tmp_path / "d", logit_scale=0.25), m.target)
    assert draft.conventions.logit_scale == 0.25
    batch, steps = make_batch(m.features, [0, 3]), 1
    head = load_ends(m.target).head[m.vocab_map.ids]
    draft_of = m.vocab_map.to_draft(torch.arange(300))
    loss, _ = ttt_loss(draft, batch, head, draft_of, steps=steps, decay=1.0, denominators=batch.weights(steps))
    draft.lm_head.weight.data *= 0.25
    draft.conventions = draft.conventions.with_(logit_scale=1.0)
    same, _ = ttt_loss(draft, batch, head, draft_of, steps=steps, decay=1.0, denominators=batch.weights(steps))
    torch.testing.assert_close(loss, same)


@pytest.mark.parametrize("told", [{"norm_before_head": False}, {"token_shift": 2}, {"token_shift": 0}])
def test_conventions_that_the_objective_does_not_honour_are_refused(m, tmp_path, told):
    source = given(m, tmp_path / "draft", **told)
    with pytest.raises(BadInput, match=f"cannot be trained on: .*{next(iter(told))}"):
        run(m, tmp_path / "run", init_from=str(source), vocab_map=None, intermediate_size=None)


def test_settings_that_a_given_draft_contradicts_are_refused(m, tmp_path):
    source = given(m, tmp_path / "draft")
    with pytest.raises(Mismatch, match=r"size = 24, the draft has 16; norm_output = True, the draft has F"):
        run(m, tmp_path / "run", init_from=str(source), vocab_map=None, intermediate_size=24, norm_output=True)
    with pytest.raises(Mismatch, match=r"vocabulary map of 150 ids .* another of 150 .*Leave --vocab out"):
        run(m, tmp_path / "run", init_from=str(source), vocab_map=VocabMap.from_t2d(~m.vocab_map.t2d))
    run(m, tmp_path / "run", init_from=str(source), intermediate_size=16, steps=1)  # the same map and width again


@pytest.mark.parametrize(
    "change", [{"norm_output": True}, {"norm_before_residual": True}, {"rope_step": 0, "hidden_act": "relu"}]
)
def test_a_given_draft_can_go_over_to_other_conventions(m, tmp_path, change):
    """Its first step is what its weights are worth under them, as if the file had said so all along; it ends so."""
    losses = []
    for name, told, asked in (("asked", {}, change), ("told", change, {})):
        source, out = given(m, tmp_path / name, **told), tmp_path / f"run-{name}"
        run(m, out, init_from=str(source), vocab_map=None, intermediate_size=None, steps=1, change=asked)
        losses.append(records(out)[0]["loss"])
        _, _, c = load_draft(out / "draft", m.target)
        assert {key: getattr(c, key) for key in change} == change
    run(
        m,
        tmp_path / "as-it-is",
        init_from=str(source.with_name("asked")),
        vocab_map=None,
        intermediate_size=None,
        steps=1,
    )
    assert losses[0] == losses[1] != records(tmp_path / "as-it-is")[0]["loss"]


def test_a_draft_without_the_norm_before_its_head_can_be_trained_with_it(m, tmp_path):
    source = given(m, tmp_path / "draft", norm_before_head=False)
    run(m, tmp_path / "run", init_from=str(source), vocab_map=None, intermediate_size=None, steps=1,
        change={"norm_before_head": True})  # fmt: skip
    assert load_draft(tmp_path / "run" / "draft", m.target)[2].norm_before_head


@pytest.mark.parametrize(
    ("change", "told"),
    [({"fc_norm": True}, "change.fc_norm: .* train a new one without --init-from"),
     ({"norm_output": "yes"}, "change.norm_output = 'yes': .* has False"), ({"sliding_window": 1.5}, "has None"),
     ({"hidden_act": "tanhish"}, "'tanhish'")],
)  # fmt: skip
def test_a_change_that_needs_other_weights_or_makes_no_sense_is_refused(m, tmp_path, change, told):
    source = given(m, tmp_path / "draft")
    with pytest.raises(BadInput, match=told):
        run(m, tmp_path / "run", init_from=str(source), vocab_map=None, intermediate_size=None, change=change)
    with pytest.raises(ValueError, match="goes with init_from"):
        TrainSettings(change=change)


# ---------------------------------------------------------------- artifacts that do not belong together


def changed(features: FeatureSet, **meta) -> FeatureSet:
    return FeatureSet(features.dir, features.manifest, features.entries, dataclasses.replace(features.meta, **meta))


def test_features_of_another_target_or_other_taps_are_refused_naming_both_sides(m, tmp_path):
    other = changed(m.features, target="f" * 64)
    with pytest.raises(Mismatch, match=rf"made with target {'f' * 16}, but target {m.features.meta.target[:16]}"):
        run(m, tmp_path / "run", features=other)
    with pytest.raises(Mismatch, match=f"made with target {'f' * 16}"):
        run(m, tmp_path / "run", held_out=changed(m.held_out, target="f" * 64))
    c = m.features.conventions
    with pytest.raises(Mismatch, match=r"made with taps \[1, 4, 5\], but taps \[2, 4, 5\]"):
        run(m, tmp_path / "run", held_out=changed(m.held_out, conventions=c.with_(taps=(1, 4, 5))))
    with pytest.raises(Mismatch, match=r"taps \[2, 4, 5\], but taps \[1, 4, 6\]"):
        source = given(m, tmp_path / "draft", taps=(1, 4, 6))
        run(m, tmp_path / "run", init_from=str(source), vocab_map=None, intermediate_size=None)
    with pytest.raises(Mismatch, match="stored pre_norm"):
        run(m, tmp_path / "run", features=changed(m.features, conventions=c.with_(final_state="pre_norm")))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_maps_and_held_out_features_that_do_not_fit_are_refused(m, tmp_path):
    with pytest.raises(BadInput, match="needs a vocabulary map: give --vocab"):
        run(m, tmp_path, vocab_map=None)
    with pytest.raises(Mismatch, match=r"for 299 target ids, .* has 300"):
        run(m, tmp_path, vocab_map=VocabMap.identity(299))
    with pytest.raises(BadInput, match="the very features that are trained on"):
        run(m, tmp_path, held_out=m.features)


def test_a_folder_that_is_not_a_training_run_is_left_alone(m, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"no training run writes \(notes.txt\)"):
        run(m, tmp_path)
    with pytest.raises(BadInput, match="is a file; choose a folder"):
        run(m, tmp_path / "notes.txt")
    with pytest.raises(BadInput, match="what `eyas extract` wrote"):
        run(m, m.features.dir)
    own = tmp_path / "own"
    (own / "draft").mkdir(parents=True)
    (own / "draft" / "model.bin").write_text("somebody's")
    with pytest.raises(BadInput, match="files that Eyas did not write"):
        run(m, own)
    other = tmp_path / "other"
    other.mkdir()
    (other / "manifest.json").write_text(
        json.dumps({"schema": "eyas-manifest/1", "stage": "vocab", "files": {}, "inputs": {}, "counts": {}})
    )
    with pytest.raises(BadInput, match="what `eyas vocab` wrote"):
        run(m, other)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_head_with_bias_and_soft_cap_makes_the_teacher(m):
    """Rows of the teacher sum to at most one, and to the share of the draft ids in the whole distribution."""
    ends = load_ends(m.target)
    facts = dataclasses.replace(ends.facts, logit_softcap=3.0, logit_scale=0.5)
    bias = torch.linspace(-2, 2, 300)
    ends = dataclasses.replace(ends, facts=facts, head_bias=bias)
    final = torch.randn(4, 32)
    whole = ends.logits(final)
    holder = type("R", (), {"given": type("G", (), {"facts": facts, "ends": ends}), "device": "cpu"})
    ids = m.vocab_map.ids
    finish = loop.Run._logits_of(holder, ids)
    torch.testing.assert_close(finish(final @ ends.head[ids].T.float()), whole[:, ids])


# ---------------------------------------------------------------- the command


def test_settings_are_shown_and_read(tmp_path):
    config = tmp_path / "recipe.yaml"
    config.write_text("train:\n  steps: 7\n  lr: 0.5\n")
    call = CliRunner().invoke
    shown = call(command, ["--show-settings", "--config", str(config), "--set", "lr=2e-3"])
    assert shown.exit_code == 0, shown.output
    assert "steps = 7 " in shown.output
    assert "lr = 0.002 " in shown.output
    assert "Passes over the features" in shown.output
    as_json = json.loads(call(command, ["--show-settings", "--json", "--set", "steps=9"]).output)
    assert as_json["steps"] == 9
    assert set(as_json) == set(TrainSettings.model_fields)
    missing = call(command, ["FEATURES", "--target", "t"])
    assert missing.exit_code == 2
    assert "Missing option '--out'" in missing.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "lr"], "expected NAME=VALUE"),
        (["--set", "lr=fast"], "lr = 'fast'"),
        (["--set", "speed=1"], "there is no setting 'speed'"),
        (["--set", "fc_norm=true"], "exclude each other.*--show-settings"),
        (["--config", "missing.yaml"], "missing.yaml cannot be read"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(BadInput, match=message):
        CliRunner().invoke(command, ["--show-settings", *arguments], catch_exceptions=False)


def test_the_command_trains_and_prints_one_object(m, tmp_path):
    m.vocab_map.save(tmp_path / "vocab.safetensors")
    arguments = [str(m.features.dir), "--target", str(m.target), "--vocab", str(tmp_path / "vocab.safetensors"),
                 "--held-out", str(m.held_out.dir), "--out", str(tmp_path / "run"), "--set", "steps=1",
                 "--set", "eval_draft_tokens=2"]  # fmt: skip
    result = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    printed = json.loads(result.stdout)
    assert printed["steps"] == 1
    assert printed["predicted"]["rounds"] > 0
    assert load_draft(printed["draft"], m.target)[1].digest() == m.vocab_map.digest()
    assert Known.DECLARED is load_draft(printed["draft"], m.target)[2].known("norm_output")
    told = CliRunner().invoke(command, arguments, catch_exceptions=False).output
    assert "1 steps over" in told
    assert "predicted accept length 1." in told


def test_a_draft_that_owns_its_embedding_keeps_it(m, tmp_path):
    """Half as wide as its target, as llama.cpp and vLLM allow it: the embedding is its own, and stays."""
    torch.manual_seed(1)
    like = new_draft(TrainSettings(), read_facts(m.target), m.features, m.vocab_map)
    shape = DraftShape(**{**like.shape.to_dict(), "hidden_size": 16, "intermediate_size": 24})
    draft = Draft(shape, like.conventions.with_(embedding="own"))
    table = torch.randn(300, 16)
    draft.set_embedding(table)
    source = save_draft(draft, m.vocab_map, tmp_path / "draft", facts=read_facts(m.target))
    run(m, tmp_path / "run", init_from=str(source), vocab_map=None, intermediate_size=None, steps=2)
    kept = load_draft(tmp_path / "run" / "draft", m.target)[0]
    assert kept.embed_tokens is not None
    assert torch.equal(kept.embed_tokens.weight, table)
    assert kept.conventions.embedding == "own"
