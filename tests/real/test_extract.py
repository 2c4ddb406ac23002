"""The target's states as vLLM computes them are those that transformers computes, conversation by conversation.

SmolLM2-135M in float32 on its own answers to a few built-in prompts; vLLM runs with chunks of 64 tokens, so that
conversations are computed in pieces and beside each other. Measured: the farthest row of any tap is 1.3e-5 of its norm
away, so 2e-4 is allowed; taps 15 and 16 are 0.17 apart where they are nearest.   make test-engines
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eyas.answers import CONVERSATIONS
from eyas.engines.vllm_states import VllmEngine
from eyas.features.audit import audit
from eyas.features.extract import extract
from eyas.features.likeness import relative
from eyas.features.reader import FeatureSet
from eyas.prompt_sets import training_prompts
from eyas.regenerate import regenerate
from eyas.target.model import Target
from eyas.target.weights import load_ends
from feature_files import changed

pytestmark = pytest.mark.engine
TAPS = [2, 15, 27]
ALLOWED = 2e-4


@pytest.fixture(scope="module")
def conversations(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answers")
    regenerate(training_prompts(0, 12), target, out, max_new_tokens=48)
    return out / CONVERSATIONS


@pytest.fixture(scope="module")
def hf(target: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> FeatureSet:
    out = tmp_path_factory.mktemp("hf") / "features"
    extract(target, conversations, out, TAPS, shard_bytes=2 << 20)
    return FeatureSet.open(out)


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found += [int(stat.parent.name), *descendants(int(stat.parent.name))]
    return found


@pytest.fixture(scope="module")
def vllm(target: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> FeatureSet:
    """Killed once the first shard is there, and run again."""
    out = tmp_path_factory.mktemp("vllm") / "features"
    command = [sys.executable, "-m", "eyas", "extract", conversations, "--target", target, "--taps", "2,15,27", "--out",
               out, "--engine", "vllm", "--shard-mib", "2", "--batch-tokens", "64", "--json"]  # fmt: skip
    process = subprocess.Popen([str(word) for word in command])
    while not (out / "shard-00000.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.05)
    below = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert below and not (out / "manifest.json").exists()
    first = (out / "shard-00000.safetensors").stat().st_mtime_ns
    until = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in below):  # nobody asks vLLM any more, nor must it write
        assert time.monotonic() < until
        time.sleep(0.1)
    said = json.loads(subprocess.run([str(w) for w in command], check=True, capture_output=True, text=True).stdout)
    assert (out / "shard-00000.safetensors").stat().st_mtime_ns == first  # kept
    assert said["shards"] > 2 and not list(out.glob(".eyas-tmp*"))
    return FeatureSet.open(out, verify=True)


def test_features_of_both_agree(hf: FeatureSet, vllm: FeatureSet):
    assert hf.doc_ids == vllm.doc_ids and hf.num_docs >= 8
    same = read = 0
    for i in range(hf.num_docs):
        a, b = hf.document(i), vllm.document(i)
        assert torch.equal(a["ids"], b["ids"]) and torch.equal(a["mask"], b["mask"])
        for name in ("taps", "final"):  # both are rounded to bf16: 2**-8 of a number at most
            far = relative(b[name].float().unflatten(-1, (-1, 576)), a[name].float().unflatten(-1, (-1, 576)))
            assert float(far.max()) < 2**-8
        torch.testing.assert_close(a["logsumexp"], b["logsumexp"], rtol=1e-4, atol=1e-4)
        asked = a["top1"] >= 0
        assert torch.equal(asked, b["top1"] >= 0)
        same, read = same + int((a["top1"] == b["top1"])[asked].sum()), read + int(asked.sum())
    assert read > 200 and same >= 0.995 * read  # a near-tie may fall otherwise
    a, b = hf.document(0)["taps"], vllm.document(1)["taps"]  # a control: another conversation is seen
    n = min(len(a), len(b))
    assert float(relative(b[:n].float(), a[:n].float()).max()) > 0.1


def test_the_audit_acquits_it_and_finds_a_wrong_one(vllm: FeatureSet, target: Path, tmp_path: Path):
    report = audit(vllm.dir, target, "100%")
    assert report["wrong"] == [] and report["worst"]["logsumexp"] < 1e-4

    def later(rows: list[dict[str, torch.Tensor]]) -> None:
        rows[1]["taps"], rows[1]["final"] = rows[1]["taps"].roll(1, 0), rows[1]["final"].roll(1, 0)

    wrong = audit(changed(vllm.dir, tmp_path / "changed", later), target, "100%")["wrong"]
    assert [one["number"] for one in wrong] == [1] and "of the token before" in wrong[0]["what"][0]


def test_before_rounding_and_with_the_last_stream(hf: FeatureSet, target: Path, tmp_path: Path):
    """Streams in float32, the one before the final norm too; the longest conversation fills the context but for one."""
    layers = [0, 2, 15, 16, 27, 30]
    model, ends = Target.load(target), load_ends(target)
    batch = [hf.document(i)["ids"] for i in range(hf.num_docs)]
    with VllmEngine().open(target, layers, max(map(len, batch)), 64, "float32", tmp_path, False) as states:
        came = list(states(batch))
    worst, control = torch.zeros(len(layers)), torch.tensor(torch.inf)
    for sent, (ids, streams) in zip(batch, came, strict=True):
        assert torch.equal(ids, sent.long())
        own, final = model.states(sent[None], taps=layers)
        far = relative(streams, own[0].unflatten(-1, (len(layers), -1)))  # [L, layers]
        worst = torch.maximum(worst, far.amax(0))
        control = torch.minimum(control, relative(streams[1:, 2], streams[1:, 3]).min())  # taps 15 and 16
        assert float(relative(ends.normed(streams[:, -1]), final[0]).max()) < ALLOWED
    print(f"\nfarthest row of taps {layers}: {[f'{x:.1e}' for x in worst.tolist()]}; next tap {float(control):.2g}")
    assert float(worst.max()) < ALLOWED
    assert float(control) > 100 * ALLOWED
