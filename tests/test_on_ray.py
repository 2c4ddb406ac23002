"""Stages on Ray end in the same bytes as without, whoever dies on the way. One local Ray serves the whole module.

pytest -q tests/test_on_ray.py
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from eyas.answers import CONVERSATIONS, JOURNAL, SET_ASIDE
from eyas.cli import cli
from eyas.cli.workers import engine_names
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.features.extract import extract
from eyas.features.reader import FeatureSet
from eyas.on_ray import Cluster
from eyas.prompts import Prompt
from eyas.regenerate import regenerate
from spreading import Complains, ShardsWithOneDeath

ray = pytest.importorskip("ray")
SMALL = {"taps": [2, 4, 5], "shard_bytes": 60 * (3 * 32 + 32) * 2}


@pytest.fixture(scope="module")
def address():
    patch = pytest.MonkeyPatch()
    here = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    patch.setenv("PYTHONPATH", os.pathsep.join(here))  # for workers, which import tests/spreading.py
    patch.setenv("RAY_worker_niceness", "0")  # at Ray's 15 a busy machine would never let them import torch
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20,
        logging_level="error",
    )  # fmt: skip
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    patch.undo()


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"id": f"c{i}", "prompt_token_ids": [5, 6, 7 + i], "response_token_ids": [8 + i] * (25 + i) + [2]}
        for i in range(9)
    ]
    path = tmp_path_factory.mktemp("conversations") / "conversations.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture(scope="module")
def plain(tiny_target: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stage writes without Ray."""
    out = tmp_path_factory.mktemp("plain") / "features"
    assert extract(tiny_target, conversations, out, **SMALL)["shards"] >= 5
    return out


def same(one: Path, other: Path) -> None:
    names = sorted(p.name for p in one.glob("shard*"))
    assert names == sorted(p.name for p in other.glob("shard*"))
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (one, other)]
    for manifest in manifests:
        del manifest["created"], manifest["duration_s"]
    assert manifests[0] == manifests[1]
    assert not list(other.glob(".eyas-tmp*"))


def test_a_lost_workers_shards_are_redone(address, tiny_target, conversations, plain, tmp_path):
    (tmp_path / "marks").mkdir()

    def spread(worker, how, pieces):
        return Cluster().spread(ShardsWithOneDeath, (how, tmp_path / "marks"), pieces)

    extract(tiny_target, conversations, tmp_path / "out", spread=spread, **SMALL)
    same(plain, tmp_path / "out")
    assert (tmp_path / "marks" / "died").exists()
    assert len((tmp_path / "marks" / "1").read_text()) == 2  # made by the one that died, and again


def test_a_killed_driver_goes_on(address, tiny_target, conversations, plain, tmp_path):
    """A driver of its own on the same cluster, by the command line; killed after its first shard is in the index."""
    out = tmp_path / "out"
    command = [
        "extract", str(conversations), "--target", str(tiny_target), "--taps", "2,4,5", "--out", str(out),
        "--shard-mib", str(SMALL["shard_bytes"] / 2**20), "--engine", "ray", "--ray-address", address,
    ]  # fmt: skip
    driver = subprocess.Popen([sys.executable, "-m", "eyas", *command], stderr=subprocess.PIPE)
    while not (out / "shards.json").exists():
        assert driver.poll() is None, driver.stderr.read().decode()[-2000:]
        time.sleep(0.01)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    assert not (out / "manifest.json").exists()
    listed = json.loads((out / "shards.json").read_text())["shards"]
    stamps = {e["name"]: (out / e["name"]).stat().st_mtime_ns for e in listed}
    assert 0 < len(stamps) < FeatureSet.open(plain).manifest["counts"]["shards"]
    # the same command, now as a second driver in this process, which is connected already
    assert CliRunner().invoke(cli, command, catch_exceptions=False).exit_code == 0
    same(plain, out)
    assert all((out / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())  # kept, not made again


def test_answers_are_those_of_one_process(address, tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.regenerate.PIECE", 4)
    prompts = [
        Prompt.single(f"{word} {n}", id=f"q{n}{word}", source="s") for n in (0, 3, 32) for word in ("hawk", "add")
    ]
    quick = {"max_new_tokens": 24, "slots": 16, "temperature": 0.7, "seed": 3}
    one = regenerate(prompts, tiny_target, tmp_path / "one", **quick)
    other = regenerate(prompts, tiny_target, tmp_path / "other", spread=Cluster(workers=2).spread, **quick)
    for name in (CONVERSATIONS, SET_ASIDE):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert one["kept"] == other["kept"] > 0 and not (tmp_path / "other" / JOURNAL).exists()


def test_what_a_worker_says_reaches_the_user(address):
    with pytest.raises(Mismatch, match=r"piece 1 does not fit \(worker on "):
        list(Cluster().spread(Complains, None, [1]))
    assert list(Cluster().spread(Complains, None, [])) == []


def test_regenerate_asks_again_until_there_is_enough(tiny_target, tmp_path, monkeypatch):
    """Without Ray, its pieces done here: the limit is met by prompts in their order, as by one process."""
    rounds = []

    def spread(worker, how, pieces):
        rounds.append(len(pieces))
        work = worker(how)
        return (work(piece) for piece in reversed(pieces))

    monkeypatch.setattr("eyas.regenerate.PIECE", 2)
    prompts = [Prompt.single(f"glove {n}", id=f"q{n}", source="s") for n in range(12)]
    quick = {"max_new_tokens": 24, "slots": 16, "max_supervised_tokens": 60}
    regenerate(prompts, tiny_target, tmp_path / "one", **quick)
    regenerate(prompts, tiny_target, tmp_path / "other", spread=spread, **quick)
    assert rounds and rounds[0] < 6
    for name in (CONVERSATIONS, SET_ASIDE):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    with pytest.raises(BadInput, match="record no states"):
        regenerate(prompts, tiny_target, tmp_path / "x", spread=spread, record_states=True)


def test_who_computes_and_where():
    known = ("hf", "vllm")
    assert [engine_names(t, known) for t in ("hf", "vllm", "ray", "vllm,ray", "ray,hf")] == [
        ("hf", False), ("vllm", False), ("hf", True), ("vllm", True), ("hf", True),
    ]  # fmt: skip
    for wrong in ("sglang", "hf,vllm", "ray,ray", "", "hf,hf"):
        assert CliRunner().invoke(cli, ["extract", "x", "--out", "y", "--engine", wrong]).exit_code == 2
    assert CliRunner().invoke(cli, ["regenerate", "x", "--out", "y", "--workers", "2"]).exit_code == 2


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_does_not_answer_is_named_at_once(scheme: str):
    unasked = SimpleNamespace(is_initialized=lambda: False)  # the module's own Ray is connected and would be used
    with socket.socket() as free:  # bound, and nobody listens
        free.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{free.getsockname()[1]}"
        refused = pytest.raises(EyasError, match=f"no Ray cluster answers at --ray-address {address}.*ray start --head")
        with refused, Cluster(address=address)._connected(unasked):
            pass
