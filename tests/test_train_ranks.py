"""Two processes train to what one trains to, whoever began: DDP, FSDP2, after a kill, and through torchrun.

pytest -q tests/test_train_ranks.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import BadInput, EyasError
from eyas.train import checkpoints, loop
from eyas.train.batches import make_batch, plan_steps, share_step, supervised_rows
from eyas.train.objective import ttt_loss
from eyas.train.ranks import Ranks
from test_draft_model import make
from test_train_curve import IDS, batches
from training import SETTINGS, Material, die, exit_code_of, material, records, run

TOLERANCE = 2e-5
"""Of a tensor's largest number. Sums in another order, through six steps, differ by 7e-7 (three processes: 3.3e-6)."""


@pytest.fixture(scope="module")
def m(tiny_target, tmp_path_factory) -> Material:
    torch.set_num_threads(1)
    return material(tiny_target, tmp_path_factory)


@pytest.fixture(scope="module")
def alone(m, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    run(m, out)
    return out


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return str(s.getsockname()[1])


def one_of(rank: int, world: int, port: str, work, *args) -> None:
    """The body of one process of several, as torchrun would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "MASTER_ADDR": "localhost", "MASTER_PORT": port}  # fmt: skip
    torch.set_num_threads(1)
    work(*args)


def together(world: int, work, *args) -> list[int]:
    """Exit codes of `world` connected processes; when one dies the others are killed, as torchrun does."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    port = free_port()
    processes = [context.Process(target=one_of, args=(rank, world, port, work, *args)) for rank in range(world)]
    for process in processes:
        process.start()
    multiprocessing.connection.wait([p.sentinel for p in processes], 120)
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()
    return [int(p.exitcode or 0) for p in processes]


def train_two(m: Material, out: Path, changes: dict) -> None:
    run(m, out, **changes)


def dying(m: Material, out: Path, changes: dict, step: int) -> None:
    """Both processes train; rank 0 dies in `step`."""
    if os.environ["RANK"] == "0":
        real = loop.Run.optimize

        def optimize(self, docs):
            if self.step + 1 == step:
                die()
            return real(self, docs)

        loop.Run.optimize = optimize  # type: ignore[method-assign]
    run(m, out, **changes)


def assert_near(out: Path, alone: Path) -> None:
    """The same run but for the order of sums."""
    for name in ("draft/model.safetensors", "checkpoints/step-000006/optimizer.safetensors"):
        ours, theirs = load_file(out / name), load_file(alone / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            if key.startswith("rng."):
                continue
            expected = theirs[key].float()
            scale = TOLERANCE * float(expected.abs().max())
            torch.testing.assert_close(tensor.float(), expected, rtol=0, atol=scale, msg=f"{name}: {key} differs")
    for one, other in zip(records(out), records(alone), strict=True):
        assert [one[k] for k in ("step", "tokens", "rows")] == [other[k] for k in ("step", "tokens", "rows")]
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-3)
        assert one.get("predicted", {}).get("rounds") == other.get("predicted", {}).get("rounds")
    ours, theirs = (json.loads((p / "manifest.json").read_text()) for p in (out, alone))
    assert ours["counts"]["supervised_rows_seen"] == theirs["counts"]["supervised_rows_seen"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_two_processes_train_to_what_one_trains_to(m, alone, tmp_path, kind, optimizer):
    expected = alone
    if optimizer != "muon":
        expected = tmp_path / "alone"
        run(m, expected, optimizer=optimizer)
    out = tmp_path / "run"
    assert together(2, train_two, m, out, {"parallel": kind, "optimizer": optimizer}) == [0, 0]
    assert_near(out, expected)


def test_three_processes_of_which_some_have_nothing_to_do(m, alone, tmp_path):
    """Steps of this plan hold one to four documents, and one document has nothing that is supervised."""
    out = tmp_path / "run"
    assert together(3, train_two, m, out, {}) == [0, 0, 0]
    assert_near(out, alone)


@pytest.mark.parametrize(("first", "then"), [("ddp", "one"), ("fsdp", "one"), ("one", "fsdp"), ("fsdp", "ddp")])
def test_a_killed_run_goes_on_with_another_number_of_processes(m, alone, tmp_path, first, then):
    out = tmp_path / "run"
    if first == "one":
        os.environ["RANK"] = "0"
        try:
            assert exit_code_of(dying, m, out, {}, 5) == -9
        finally:
            del os.environ["RANK"]
    else:
        assert -9 in together(2, dying, m, out, {"parallel": first}, 5)
    assert checkpoints.steps(out / "checkpoints") == [2, 4]
    assert not (out / "manifest.json").exists()
    if then == "one":
        run(m, out)
    else:
        assert together(2, train_two, m, out, {"parallel": then}) == [0, 0]
    assert_near(out, alone)


@pytest.mark.slow
def test_torchrun_trains_and_only_one_process_speaks(m, alone, tmp_path):
    m.vocab_map.save(tmp_path / "map.safetensors")
    given = {"--vocab": tmp_path / "map.safetensors", "--target": m.target, "--held-out": m.held_out.dir, "--seed": 3,
             "--out": tmp_path / "run"}  # fmt: skip
    options = [f"{name}={value}" for name, value in given.items()]
    options += [f"--set={name}={value}" for name, value in SETTINGS.items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [*torchrun, "-m", "eyas", "train", str(m.features.dir), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the draft is in") == 1, done.stdout
    assert_near(tmp_path / "run", alone)
    refused = subprocess.run([*command, "--seed=4"], capture_output=True, text=True, timeout=400)
    assert refused.returncode != 0
    assert "eyas: " in refused.stderr and "seed was 3, now 4" in refused.stderr


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shares_hold_every_document_once_and_equally_many_batches(world):
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    plan = plan_steps(lengths, 400, 100, seed=1)
    for _ in range(40):
        step = next(plan)
        shares = [share_step(step, lengths, 100, rank, world) for rank in range(world)]
        assert sorted(d for share in shares for batch in share for d in batch) == sorted(d for b in step for d in b)
        assert len({len(share) for share in shares}) == 1
        tokens = [sum(int(lengths[b].sum()) for b in share if b) for share in shares]
        assert max(tokens) - min(tokens) <= max(int(lengths[b].max()) for b in step)
        assert all(len(b) <= 1 or int(lengths[b].sum()) <= 100 for share in shares for b in share)
    assert share_step([[5], [7]], lengths, 100, 0, 1) == [[5], [7]], "one process works as if there were no shares"


def test_supervised_rows_are_those_of_the_batch(m):
    docs = list(range(len(m.features.doc_lengths)))
    for some in (docs, docs[1:2], docs[:3]):
        assert torch.equal(supervised_rows(m.features, some, 4), make_batch(m.features, some).weights(4))
    assert not supervised_rows(m.features, [], 4).any()


# ---------------------------------------------------------------- refusals


def test_what_cannot_work_is_said(m, tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"--device cuda:1 would put all 2 processes on one GPU; say --device cuda"):
        Ranks(0, 2).device("cuda:1")
    assert Ranks(1, 2, 1).device("cuda") == "cuda:1"
    assert Ranks(1, 2, 1).device("cpu") == "cpu"
    monkeypatch.setattr(Ranks, "all_same", lambda self, value: False)
    with pytest.raises(EyasError, match="Put --out on a file system that all machines see"):
        run(m, tmp_path / "run")


# ---------------------------------------------------------------- recomputation


def loss_of(draft, recompute):
    batch, head_rows = next(batches(1))
    draft_of = torch.full((50,), -1)
    draft_of[IDS] = torch.arange(len(IDS))
    return ttt_loss(draft, batch, head_rows, draft_of, steps=5, decay=0.8, denominators=batch.weights(5).clamp(min=1),
                    chunk=16, recompute=recompute)[0]  # fmt: skip


@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}])
def test_recomputation_changes_no_bit_of_the_gradients(flags):
    found = []
    for recompute in (False, True):
        draft = make(flags, dtype=torch.float32)
        loss_of(draft, recompute).backward()
        found.append({n: p.grad for n, p in draft.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    assert all(float(g.abs().max()) > 0 for g in found[0].values())


def test_each_step_keeps_less_with_recomputation():
    """Bytes that autograd keeps for the backward pass."""
    kept = []
    for recompute in (False, True):
        seen: dict[int, int] = {}

        def pack(tensor, seen=seen):
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(make(dtype=torch.float32), recompute)
        assert loss.requires_grad
        kept.append(sum(seen.values()))
    assert kept[1] < 0.5 * kept[0], kept
