"""States that an engine computes become the same features, and what an engine gets wrong is told with its conversation.

The engine here is the target itself behind the interface; vLLM's is in tests/real/test_extract.py.
pytest -q tests/test_features_states.py
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from eyas.engines import vllm_states
from eyas.engines.vllm_states import VllmEngine
from eyas.errors import BadInput, EyasError
from eyas.features.extract import extract
from eyas.features.reader import FeatureSet
from eyas.features.states import fill_from_states
from eyas.target.model import Target

TAPS = [2, 4, 5]


def rows(count: int = 6) -> list[dict]:
    return [
        {"id": f"c{i}", "prompt_token_ids": [5, 6, 7 + i], "response_token_ids": [8 + i] * (4 + i) + [2]}
        for i in range(count)
    ]


@dataclass(frozen=True)
class Itself:
    """The target, asked as an engine is asked."""

    spoil: str = ""
    spare = 1

    def told(self):
        return {"name": "itself"}

    @contextlib.contextmanager
    def open(self, folder, layers, longest, batch_tokens, dtype, scratch, trust_remote_code):
        target = Target.load(folder)
        assert scratch.is_dir()
        (scratch / "file").write_bytes(b"x")

        def states(batch):
            out = []
            for ids in batch:
                assert len(ids) <= longest
                streams, _ = target.states(ids[None].long(), taps=layers)
                out.append((ids.long(), streams[0].unflatten(-1, (len(layers), -1)).clone()))
            if self.spoil == "order":
                out[0], out[1] = out[1], out[0]
            if self.spoil == "ids":
                out[1][0][3] += 1
            if self.spoil == "short":
                out[1] = (out[1][0], out[1][1][:-1])
            if self.spoil == "nan":
                out[1][1][2] = torch.nan
            if self.spoil == "zero":
                out[1][1][4:] = 0
            if self.spoil == "few":
                out.pop()
            return iter(out)

        yield states


@pytest.mark.parametrize("taps", [TAPS, [0, 3, 8]])
def test_an_engine_gives_the_features_of_the_target(tiny_target: Path, tmp_path: Path, taps: list[int]):
    extract(tiny_target, rows(), tmp_path / "hf", taps, shard_bytes=1 << 12)
    counts = extract(tiny_target, rows(), tmp_path / "engine", taps, shard_bytes=1 << 12, engine=Itself())
    one, other = FeatureSet.open(tmp_path / "hf"), FeatureSet.open(tmp_path / "engine", verify=True)
    assert counts["shards"] > 2 and other.manifest["config"]["engine"] == {"name": "itself"}
    assert one.doc_ids == other.doc_ids
    for i in range(one.num_docs):
        a, b = one.document(i), other.document(i)
        for name in ("ids", "mask", "top1"):
            assert torch.equal(a[name], b[name])
        for name in ("taps", "final"):
            torch.testing.assert_close(a[name].float(), b[name].float(), rtol=2**-7, atol=1e-5)
        torch.testing.assert_close(a["logsumexp"], b["logsumexp"], rtol=1e-5, atol=1e-5)
    assert not list((tmp_path / "engine").glob(".eyas-tmp*"))  # its files are gone
    marked = (tmp_path / "engine" / "manifest.json").stat().st_mtime_ns
    extract(tiny_target, rows(), tmp_path / "engine", taps, shard_bytes=1 << 12, engine=Itself("few"))
    assert (tmp_path / "engine" / "manifest.json").stat().st_mtime_ns == marked  # finished: nobody was asked


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("order", "conversation c0: 8 ids were sent, states of 9 returned.*from token 2 on.*mixes up"),
        ("ids", "conversation c1: 9 ids were sent, states of 9 returned.*from token 3 on"),
        ("short", r"conversation c1: .*shape \[8, 4, 32\].*\[9, 4, 32\]"),
        ("nan", "conversation c1: its states are not finite"),
        ("zero", "conversation c1: its states are zero from token 4 on"),
        ("few", "conversation c5: the engine returned no states"),
    ],
)
def test_what_an_engine_gets_wrong_is_told(tiny_target: Path, tmp_path: Path, spoil: str, says: str):
    with pytest.raises(EyasError, match=says):
        extract(tiny_target, rows(), tmp_path / "out", TAPS, engine=Itself(spoil))
    assert not (tmp_path / "out" / "manifest.json").exists()
    extract(tiny_target, rows(), tmp_path / "out", TAPS, engine=Itself())
    assert FeatureSet.open(tmp_path / "out", verify=True).num_docs == 6


def test_the_token_that_an_engine_must_say_needs_room(tiny_target: Path, tmp_path: Path):
    """A conversation that fills the target's 256 positions fits the target, not an engine."""
    full = {"id": "full", "prompt_token_ids": [5, 6], "response_token_ids": [8] * 254}
    assert extract(tiny_target, [full], tmp_path / "hf", TAPS)["tokens"] == 256
    counts = extract(tiny_target, [full, *rows(1)], tmp_path / "engine", TAPS, engine=Itself())
    assert counts["documents"] == 1 and counts["set_aside"] == {"too_long": 1}


# ------------------------------------------------------------------------------------------------ vLLM's process

FAKE = """
import json, os, sys, torch
from safetensors.torch import save_file
told = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
argv = sys.argv[1:]
after = lambda name: argv[argv.index(name) + 1]
print("INFO [x.py:1] loading", argv)
if json.loads(after("--arguments")).get("die") == "early":
    print("(Engine) ERROR [core.py:7] RuntimeError: Model does not support EAGLE3 interface")
    sys.exit(3)
print(json.dumps({"ready": True}), file=told)
layers = [int(n) for n in after("--layers").split(",")]
for line in sys.stdin:
    for n, ids in enumerate(json.loads(line)):
        if json.loads(after("--arguments")).get("die") == "late" and n == 1:
            print(json.dumps({"error": "vLLM did not write it"}), file=told)
            continue
        if json.loads(after("--arguments")).get("die") == "dead" and n == 1:
            os._exit(9)
        file = os.path.join(after("--folder"), f"{n}.safetensors")
        states = torch.tensor(ids)[:, None, None] + torch.tensor(layers)[:, None] * torch.ones(4)
        save_file({"token_ids": torch.tensor(ids), "hidden_states": states.float()}, file)
        print(json.dumps({"file": file}), file=told)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """VllmEngine with a script in vLLM's place, opened with these arguments."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(vllm_states, "SCRIPT", tmp_path / "fake.py")

    def opened(**arguments):
        engine = VllmEngine(Path(sys.executable), arguments)
        assert pickle.loads(pickle.dumps(engine)) == engine  # it is sent to workers
        return engine.open(tmp_path, [2, 8], 7, 64, "float32", tmp_path, False)

    return opened


def test_batches_go_through_the_process_and_no_file_stays(process, tmp_path: Path):
    with process() as states:
        for batch in ([[5, 6, 7], [8, 9]], [[1]]):
            got = list(states([torch.tensor(ids, dtype=torch.int32) for ids in batch]))
            assert [ids.tolist() for ids, _ in got] == batch
            assert [list(s.shape) for _, s in got] == [[len(ids), 2, 4] for ids in batch]
            assert got[0][1][0, 1, 0] == batch[0][0] + 8
    assert not list(tmp_path.glob("*.safetensors"))


def test_why_it_ended_is_told(process):
    with (
        pytest.raises(EyasError, match=r"exit code 3.*does not support EAGLE3.*log: .*eyas-vllm"),
        process(die="early"),
    ):
        pass
    batch = [torch.tensor([1, 2]), torch.tensor([3])]
    with process(die="late") as states, pytest.raises(EyasError, match="did not write it"):
        list(states(batch))
    with pytest.raises(EyasError, match="exit code 9"), process(die="dead") as states:
        list(states(batch))


def test_a_python_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BadInput, match="--engine-python"):
        VllmEngine(tmp_path / "none").told()
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match="eyas engines setup vllm"):
        VllmEngine().told()


def test_an_error_of_the_engine_names_the_conversation(tiny_target: Path):
    from types import SimpleNamespace

    from eyas.features.conversations import encode_all
    from eyas.target.weights import load_ends

    documents = encode_all(rows(2), SimpleNamespace(), vocab_size=300).documents

    def fails(batch):
        raise EyasError("vLLM did not write it")
        yield

    with pytest.raises(EyasError, match="conversation c0: vLLM did not write it"):
        fill_from_states(fails, load_ends(tiny_target), documents, SimpleNamespace(), TAPS)
