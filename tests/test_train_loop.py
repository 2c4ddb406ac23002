"""Training runs: exact resume after SIGKILL, refusals, and what a run must be able to train.

pytest -q tests/test_train_loop.py
"""

from __future__ import annotations

import errno
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import BadInput, EyasError, Mismatch
from eyas.machine import no_denormals
from eyas.target.weights import load_ends
from eyas.train import checkpoints, loop, objective, record
from eyas.train.loop import Run
from eyas.vocab import VocabMap
from training import SETTINGS, Material, die, exit_code_of, material, records, run


@pytest.fixture(scope="module")
def m(tiny_target, tmp_path_factory) -> Material:
    torch.set_num_threads(1)
    return material(tiny_target, tmp_path_factory)


@pytest.fixture(scope="module")
def whole(m, tmp_path_factory) -> Path:
    """An uninterrupted run: what every other must equal. Read only."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(m, out)
    return out


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "draft" / "model.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: weights, optimizer, metrics."""
    assert records(a) == records(b)
    for name in ("draft/model.safetensors", "checkpoints/step-000006/draft.safetensors",
                 "checkpoints/step-000006/optimizer.safetensors", "draft/eyas.json", "draft/config.json"):  # fmt: skip
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def test_a_run_leaves_what_it_says(m, whole):
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["stage"] == "train"
    assert manifest["counts"]["steps"] == 6
    assert manifest["counts"]["predicted"]["draft_tokens"] == 2
    assert [r["step"] for r in records(whole)] == [1, 2, 3, 4, 5, 6]
    assert ["predicted" in r for r in records(whole)] == [False, False, True, False, False, True]
    assert checkpoints.steps(whole / "checkpoints") == [4, 6]
    assert list((whole / "tensorboard").glob("events*"))
    before = (whole / "manifest.json").stat().st_mtime_ns
    assert run(m, whole) == manifest["counts"]
    assert (whole / "manifest.json").stat().st_mtime_ns == before, "a finished, unchanged run is left as it is"


# ---------------------------------------------------------------- resume


def killed(m: Material, out: Path, owner, name: str, calls: int) -> None:
    """The body of a process that is killed when `owner.name` is called for the `calls`-th time."""
    torch.set_num_threads(1)
    seen, real = [], getattr(owner, name)

    def instead(*args, **kwargs):
        seen.append(0)
        if len(seen) == calls:
            die()
        return real(*args, **kwargs)

    setattr(owner, name, instead)
    run(m, out)


def torn(self, values, tokens):
    """A record of which only half reaches the disk."""
    self.log.write('{"step":5,"loss":[1.')
    self.log.flush()
    die()


def tear(m: Material, out: Path) -> None:
    record.Recorder.step = torn  # type: ignore[method-assign]
    run(m, out)


# Where a run dies, in the order in which one run goes through them: owner, name, call.
DEATHS = {
    "before the first step": (loop.Run, "optimize", 1),
    "in the first step, after Muon and before AdamW": (torch.optim.AdamW, "step", 1),
    "while the first checkpoint is written": (checkpoints, "atomic_write_json", 1),
    "after the first checkpoint was renamed": (checkpoints, "steps", 3),
    "in a step after the first checkpoint": (loop.Muon, "step", 2),
    "in a measurement on held-out features": (loop, "predict_accept_length", 1),
    "while old checkpoints are removed": (checkpoints.shutil, "rmtree", 2),
    "after the last step, before the draft is written": (loop, "save_draft", 1),
    "before the manifest is written": (loop, "write_manifest", 1),
}


@pytest.mark.slow
def test_a_run_killed_at_every_moment_ends_in_the_same_bits(m, whole, tmp_path):
    out = tmp_path / "run"
    for moment, (owner, name, calls) in DEATHS.items():
        assert exit_code_of(killed, m, out, owner, name, calls) == -9, f"was not killed {moment}"
        assert not (out / "manifest.json").exists()
        for step in checkpoints.steps(out / "checkpoints"):
            held = {p.name for p in (out / "checkpoints" / f"step-{step:06d}").iterdir()}
            assert held == {checkpoints.WEIGHTS, checkpoints.OPTIMIZER, checkpoints.STATE}, moment
        if moment == "in a step after the first checkpoint":
            assert exit_code_of(tear, m, out) == -9
            assert not (out / "metrics.jsonl").read_text().endswith("\n")
    run(m, out)
    assert_same_run(out, whole)
    assert not list(out.rglob(".eyas-tmp-*"))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(m, whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "manifest.json").unlink()
    for damage in ("flip a bit", "truncate", "remove"):
        file = out / "checkpoints" / "step-000006" / checkpoints.WEIGHTS
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes({"flip a bit": content, "truncate": content[:100], "remove": b""}[damage])
        held = checkpoints.latest(out / "checkpoints", json.loads((file.parent / "state.json").read_text())["identity"])
        assert held is not None
        assert held.step == 4
        assert "step-000006" in held.damaged[0]
    run(m, out)
    assert_same_run(out, whole)
    for step in (4, 6):
        (out / "checkpoints" / f"step-{step:06d}" / checkpoints.STATE).write_text("{")
    (out / "manifest.json").unlink()
    with pytest.raises(EyasError, match=r"no checkpoint can be read: step-000006.*Remove the folder"):
        run(m, out)


def test_newer_damaged_checkpoints_do_not_crowd_out_good_ones(tmp_path):
    for step in (2, 9):
        checkpoints.save(tmp_path, step, {"w": torch.ones(1)}, {}, {"identity": {}}, keep=1)
    (tmp_path / "step-000009" / checkpoints.STATE).unlink()
    checkpoints.save(tmp_path, 2, {"w": torch.ones(1)}, {}, {"identity": {}}, keep=1)
    assert checkpoints.steps(tmp_path) == [2]


def test_another_run_in_the_same_folder_is_refused_by_name(m, whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    with pytest.raises(Mismatch, match=r"settings.lr was 0.001, now 0.003.*--init-from"):
        run(m, out, lr=3e-3)
    with pytest.raises(Mismatch, match="seed was 3, now 4"):
        run(m, out, seed=4)
    with pytest.raises(Mismatch, match=r"inputs\.vocab_map was"):
        run(m, out, vocab_map=VocabMap.from_t2d(~m.vocab_map.t2d))
    run(m, out, save_every=1, keep=5)  # when to save changes nothing else
    assert weights(out).keys() == weights(whole).keys()


def test_metrics_are_cut_at_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\nnot json\n{"step":3}\n[4]\n{"step":4,"lo\xff')
    record.cut_metrics(path, 2)
    assert path.read_text() == '{"step":1}\n{"step":2}\n'
    record.cut_metrics(tmp_path / "none", 2)


def test_two_runs_at_once_in_one_folder_are_refused(m, tmp_path):
    from eyas.locks import inside

    with inside(tmp_path), pytest.raises(EyasError, match="is being written by process"):
        run(m, tmp_path)


# ---------------------------------------------------------------- failures


def test_a_full_disk_while_saving_leaves_the_earlier_checkpoint(m, whole, tmp_path, monkeypatch):
    real = checkpoints.atomic_write_json
    calls = []

    def full(path, value):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, value)

    out = tmp_path / "run"
    monkeypatch.setattr(checkpoints, "atomic_write_json", full)
    with pytest.raises(EyasError, match=r"step-000004.*disk is full.*run the same command again"):
        run(m, out)
    assert checkpoints.steps(out / "checkpoints") == [2]
    assert not list(out.rglob(".eyas-tmp-*"))
    run(m, out)
    assert_same_run(out, whole)


def test_a_gradient_that_is_not_finite_stops_the_run_and_says_what_to_do(m, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        loss, sums = real(*args, **kwargs)
        return loss * float("nan"), sums

    real = objective.ttt_loss
    monkeypatch.setattr(objective, "ttt_loss", broken)
    with pytest.raises(EyasError, match=r"not finite at step 1. Lower train.lr \(now 0.001\).*another --out"):
        run(m, tmp_path / "a")
    document = m.features.document

    def with_nan(i):
        part = dict(document(i))
        if i == 5:
            part["taps"] = torch.full_like(part["taps"], float("nan"))
        return part

    monkeypatch.setattr(m.features, "document", with_nan)
    with pytest.raises(EyasError, match=r"document '1-5'.*NaN or infinite taps. Extract again without it"):
        run(m, tmp_path / "b", batch_tokens=10_000)


# ---------------------------------------------------------------- what can be trained


def test_accumulated_gradients_equal_one_large_batch(m, tmp_path):
    """The same documents in one step, at once and in parts. Tolerance: sums of float32 in another order."""
    run(m, tmp_path / "one", steps=1, batch_tokens=10_000, micro_tokens=10_000, warmup=0.0, optimizer="adamw")
    run(m, tmp_path / "many", steps=1, batch_tokens=10_000, micro_tokens=30, warmup=0.0, optimizer="adamw")
    one, many = records(tmp_path / "one")[0], records(tmp_path / "many")[0]
    assert one["rows"] == many["rows"] > 50
    assert one["gradient_norm"] == pytest.approx(many["gradient_norm"], rel=1e-4, abs=2e-4)
    assert one["loss"] == pytest.approx(many["loss"], abs=2e-4)
    assert one["accuracy"] == pytest.approx(many["accuracy"], abs=0.02)
    first = {n: (tmp_path / n / "checkpoints" / "step-000001" / checkpoints.OPTIMIZER) for n in ("one", "many")}
    a, b = load_file(first["one"]), load_file(first["many"])
    moments = [name for name in a if name.endswith("exp_avg")]  # after one step: the clipped gradient, times 1 - beta
    assert len(moments) == 14
    for name in moments:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-6)


def test_bfloat16_stays_close_to_float32(m, whole, tmp_path):
    """Tolerance: 8 bits of mantissa in every product, six steps: two percent of the loss."""
    run(m, tmp_path / "run", dtype="bfloat16")
    for a, b in zip(records(tmp_path / "run"), records(whole), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)
        assert a["rows"] == b["rows"]
    assert {t.dtype for n, t in weights(tmp_path / "run").items() if n.endswith("weight")} == {torch.float32}


def test_a_precision_left_to_the_machine_is_recorded_as_what_it_was(m, tmp_path, monkeypatch):
    """Two machines must not go on with each other's run as if it were the same."""
    monkeypatch.setattr("eyas.machine.native_bfloat16", lambda device: True)
    run(m, tmp_path / "auto", dtype="auto", steps=2)
    run(m, tmp_path / "named", dtype="bfloat16", steps=2)
    assert weights(tmp_path / "auto").keys() == weights(tmp_path / "named").keys()
    for name, tensor in weights(tmp_path / "auto").items():
        assert torch.equal(tensor, weights(tmp_path / "named")[name]), name
    monkeypatch.setattr("eyas.machine.native_bfloat16", lambda device: False)
    with pytest.raises(Mismatch, match="dtype"):
        run(m, tmp_path / "auto", dtype="auto", steps=2)


def test_two_layers_every_id_and_the_output_norm_train_and_overfit(m, tmp_path):
    """A draft of two layers over the full vocabulary, its normed state fed back, learns on twelve answers.

    The target is random, so its own entropy (5.07 nats) bounds the loss from below; step 0 starts close to that, since
    the regression has as many unknowns as there are rows.
    """
    everything = VocabMap.identity(m.vocab_map.target_size)
    run(
        m,
        tmp_path / "run",
        num_layers=2,
        norm_output=True,
        vocab_map=everything,
        steps=25,
        save_every=25,
        held_out=None,
        batch_tokens=10_000,
        micro_tokens=10_000,
        lr=0.03,
        head_lr=0.01,
        intermediate_size=64,
    )
    first, last = records(tmp_path / "run")[0], records(tmp_path / "run")[-1]
    assert all(5.07 < b < a - 0.4 for a, b in zip(first["loss"][1:], last["loss"][1:], strict=True))
    assert all(b > a + 0.2 for a, b in zip(first["accuracy"][1:], last["accuracy"][1:], strict=True))
    assert "layers.1.self_attn.q_proj.weight" in weights(tmp_path / "run")
    assert "d2t" not in weights(tmp_path / "run")


def test_long_documents_and_documents_without_rows_pass(m, tmp_path):
    """Every document is longer than micro_tokens, one has a single supervised token; the head is not trained."""
    docs = [m.features.document(i) for i in range(12)]
    assert min(len(d["ids"]) for d in docs) > 3
    expected = [int(d["mask"].sum()) - 1 for d in docs]  # rows of one answer at step 0
    assert sorted(expected)[0] == 0
    run(m, tmp_path / "run", batch_tokens=3, micro_tokens=3, steps=12, train_head=False, start="target", ttt_steps=2)
    told = records(tmp_path / "run")
    assert (told[-1]["rows"], told[-1]["tokens"]) == (sum(expected), m.features.num_tokens)
    idle = [b for a, b in pairwise([{"rows": 0}, *told]) if a["rows"] == b["rows"]]
    assert [(r["gradient_norm"], r["loss"]) for r in idle] == [(0.0, [0.0, 0.0])]
    head = weights(tmp_path / "run")["lm_head.weight"]
    torch.testing.assert_close(head, load_ends(m.target).head[m.vocab_map.ids].float(), rtol=0, atol=0)


def test_settings_used_by_these_tests_are_settings():
    from eyas.train.settings import TrainSettings

    assert set(SETTINGS) <= set(TrainSettings.model_fields)
    with pytest.raises(ValueError, match="exclude each other"):
        TrainSettings(norm_before_fc=True, fc_norm=True)


def test_a_device_that_is_not_there_is_named(m, tmp_path):
    with pytest.raises(BadInput, match="'nonsense' cannot be used here"):
        run(m, tmp_path, device="nonsense")


def test_training_computes_no_denormals_and_leaves_them_to_others(m, tmp_path, monkeypatch):
    """On a CPU they make a step several times as long; but hypothesis, for one, refuses to work without them."""
    with no_denormals():
        left_out = smallest() == 0  # not every CPU can; all must train, and be afterwards as before
    assert left_out == torch.set_flush_denormal(False), "left out wherever PyTorch says that the CPU can"
    seen = []
    optimize = Run.optimize

    def watched(self, step):
        seen.append(smallest() == 0)
        return optimize(self, step)

    monkeypatch.setattr(Run, "optimize", watched)
    run(m, tmp_path / "run", steps=2)
    assert seen == [left_out, left_out]
    assert smallest() > 0
    monkeypatch.setattr(Run, "optimize", lambda self, step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(m, tmp_path / "failing", steps=2)
    assert smallest() > 0


def smallest() -> float:
    """A number that only a denormal can hold."""
    return float(torch.tensor([1e-30]) * 1e-10)
