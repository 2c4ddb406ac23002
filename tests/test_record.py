"""States recorded while the target answers are those that extract computes; what is missing or wrong is computed.

pytest -q tests/test_record.py
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.answers import CONVERSATIONS, JOURNAL
from eyas.digests import sha256_file
from eyas.features import extract as extraction
from eyas.features import filling
from eyas.features.extract import extract
from eyas.features.layout import teacher_rows
from eyas.features.reader import FeatureSet
from eyas.features.recorded import FOLDER, Recordings, RecordingWriter, StatesMeta
from eyas.prompts import Prompt
from eyas.regenerate import regenerate
from eyas.repetition import RunningPeriods
from eyas.target.answering import run_all
from eyas.target.generate import Generator
from eyas.target.model import Target
from eyas.target.record import Recorder
from eyas.target.requests import Generated, Request
from eyas.target.source import fingerprint

TAPS = (0, 3, 8)  # the embedding, a block, and the input of the final norm
# Both sides are rounded to bf16 (8 bits: 2^-8 from one number to the next), so numbers that float noise puts on either
# side of a boundary differ by one such step; the absolute part is for numbers near zero beside large ones.
BF16 = {"rtol": 2**-7, "atol": 2e-3}


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target)


def asked() -> list[list[int]]:
    """Short prompts, which ride along, and long ones, which are read in a pass of their own; some share a beginning."""
    rng = np.random.default_rng(0)
    opening = [1, 9, 8, 7, 6, 5, 4]
    plain = [rng.integers(3, 300, size=n).tolist() for n in (1, 40, 90)]
    return plain + [opening + rng.integers(3, 300, size=n).tolist() for n in (1, 30, 80, 9)]


def answers(target: Target, prompts: list[list[int]], recorder: Recorder | None, **how) -> list[Generated]:
    how = {"slots": 5, "max_new_tokens": 12, "stop_loops": False, "prefix": [1, 9, 8, 7, 6, 5, 4], **how}
    generator = Generator(target, recorder=recorder, **how)
    out = {a.key: a for a in run_all(generator, (Request(k, ids, seed=k) for k, ids in enumerate(prompts)))}
    return [out[k] for k in range(len(prompts))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_against_states_computed_afterwards(target: Target, temperature: float):
    prompts = asked()
    got = answers(target, prompts, Recorder(target, TAPS), temperature=temperature)
    assert got == answers(target, prompts, None, temperature=temperature), "recording must not change an answer"
    for ids, answer in zip(prompts, got, strict=True):
        whole, p = torch.tensor([ids + answer.ids]), len(ids)
        taps, final = (x[0] for x in target.states(whole, taps=TAPS))
        kept = answer.recording
        assert kept is not None and len(kept) == whole.shape[1]
        torch.testing.assert_close(kept.taps[:-1], taps[:-1].bfloat16(), **BF16)
        torch.testing.assert_close(kept.final[:-1], final[:-1].bfloat16(), **BF16)
        assert not kept.taps[-1].any() and not kept.final[-1].any()
        top1, logsumexp = target.choices(final[p - 1 : -1])
        assert kept.top1.tolist() == [-1] * (p - 1) + top1.tolist() + [-1]
        torch.testing.assert_close(kept.logsumexp[p - 1 : -1], logsumexp, rtol=1e-5, atol=1e-4)
        assert not kept.logsumexp[: p - 1].any() and kept.logsumexp[-1] == 0


def test_logsumexp_is_of_the_finished_logits(target: Target):
    """With a scale and a soft-cap, and the vocabulary in several blocks."""
    import dataclasses

    import eyas.target.head as module

    class Capped:
        model, device, dir = target.model, target.device, target.dir
        facts = dataclasses.replace(target.facts, logit_scale=0.5, logit_softcap=6.0)
        recording = target.recording

    before, module.HEAD_BLOCK = module.HEAD_BLOCK, 77
    try:
        got = answers(Capped(), [[5, 6, 7]], Recorder(Capped(), TAPS))[0]
    finally:
        module.HEAD_BLOCK = before
    final = target.states(torch.tensor([[5, 6, 7, *got.ids]]))[1][0, 2:-1]
    wanted = Capped.facts.finish_logits(target.head(final)).logsumexp(-1)
    torch.testing.assert_close(got.recording.logsumexp[2:-1], wanted, rtol=1e-5, atol=1e-5)


def test_a_recording_does_not_depend_on_the_batch(target: Target):
    """Bit-equal among others and alone, so a resumed run records what an uninterrupted one does."""
    prompts = asked()
    among = answers(target, prompts, Recorder(target, TAPS), slots=40)
    alone = [answers(target, [ids], Recorder(target, TAPS))[0] for ids in prompts[-3:-1]]
    for a, b in zip(alone, among[-3:-1], strict=True):
        for name, tensor in a.recording.__dict__.items():
            assert torch.equal(tensor, getattr(b.recording, name)), name


def test_a_loop_is_not_recorded(target: Target, monkeypatch):
    monkeypatch.setattr(RunningPeriods, "push", lambda self, rows, tokens: tokens % 8 == 0)
    got = answers(target, asked(), Recorder(target, TAPS), stop_loops=True)
    assert {a.finish for a in got} >= {"loop", "length"}
    assert all((a.recording is None) == (a.finish == "loop") for a in got)


def test_the_choices_of_an_earlier_turn_are_kept(target: Target):
    """A second turn reads the first one as its prompt; what was chosen there is known from before."""
    first = answers(target, [[5, 6, 7]], Recorder(target, TAPS))[0]
    prompt = [5, 6, 7, *first.ids, 8, 9]
    second = answers(target, [prompt], Recorder(target, TAPS))[0]
    assert first.recording is not None and second.recording is not None
    both = second.recording.after(first.recording)
    whole = torch.tensor([[*prompt, *second.ids]])
    mask = torch.zeros(whole.shape[1], dtype=torch.uint8)
    mask[3 : 3 + len(first.ids)] = mask[len(prompt) :] = 1
    read = teacher_rows(mask)
    top1, logsumexp = target.choices(target.states(whole, taps=TAPS)[1][0, read])
    assert both.top1[read].tolist() == top1.tolist()
    assert both.top1[~read].tolist() == [-1] * int((~read).sum())
    torch.testing.assert_close(both.logsumexp[read], logsumexp, rtol=1e-5, atol=1e-4)
    assert torch.equal(both.taps, second.recording.taps)


# ------------------------------------------------------------------------------------------------ through the stages


def prompts() -> list[Prompt]:
    words = ["hawk", "glove", "field", "draft", "target", "token", "state", "tap", "norm", "head"]
    texts = [f"{a} {b}" for a in words for b in words][:18]
    follow = [[{"role": "user", "content": "and then?"}]]
    return [
        Prompt(f"p{i}", [[{"role": "user", "content": t}], *(follow if i % 6 == 0 else [])])
        for i, t in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def answered(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answered")
    regenerate(prompts(), tiny_target, out, max_new_tokens=10, slots=16, record_states=True)
    return out


@pytest.fixture(scope="module")
def computed(answered: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("computed")
    extract(tiny_target, answered / CONVERSATIONS, out, shard_bytes=1 << 16)
    return out


def same_features(one: Path, other: Path) -> None:
    a, b = FeatureSet.open(one), FeatureSet.open(other)
    assert a.doc_ids == b.doc_ids and a.num_docs > 10
    for i in range(a.num_docs):
        x, y = a.document(i), b.document(i)
        for name in ("ids", "mask", "top1"):
            assert torch.equal(x[name], y[name]), name
        torch.testing.assert_close(x["logsumexp"], y["logsumexp"], rtol=1e-5, atol=1e-4)
        for name in ("taps", "final"):
            torch.testing.assert_close(x[name][:-1], y[name][:-1], **BF16)


def test_extract_copies_what_was_recorded(
    answered: Path, computed: Path, tiny_target: Path, tmp_path: Path, monkeypatch
):
    passes = []
    real = filling.fill_shard
    monkeypatch.setattr(filling, "fill_shard", lambda *a: (passes.append(len(a[6])), real(*a)))
    counts = extract(tiny_target, answered / CONVERSATIONS, tmp_path, shard_bytes=1 << 16, recorded=answered / FOLDER)
    assert counts["recorded"] == counts["documents"] > 10 and counts["computed"] == 0
    assert passes == [2], "only the audit runs the target"
    same_features(tmp_path, computed)
    again = FeatureSet.open(computed).manifest["counts"]
    assert again["recorded"] == 0 and again["computed"] == again["documents"]


def test_what_is_missing_or_damaged_is_computed(
    answered: Path, computed: Path, tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    found = Recordings(answered / FOLDER, states_meta(tiny_target))
    documents = extraction.encode_all(
        answered / CONVERSATIONS, Target.load(tiny_target).tokenizer, vocab_size=300, eos_ids=(2,)
    ).documents
    # Four chunks of the same recordings: whole, whole but one flipped bit in the states, cut off, and garbage.
    states = tmp_path / "states"
    with RecordingWriter(states, found.meta, chunk_bytes=1 << 30, seconds=1e9) as writer:
        from eyas.target.record import Recording

        for number, document in enumerate(documents):
            rows = found.find(document)
            assert rows is not None
            recording = Recording(*(rows[n].clone() for n in ("taps", "final", "top1", "logsumexp")))
            writer.add(document.ids.tolist(), recording, lambda: None)
            if number % 6 == 5:
                writer.flush()
    chunks = sorted(states.glob("*.safetensors"))
    assert len(chunks) >= 3
    flipped = bytearray(chunks[0].read_bytes())
    flipped[-3] ^= 1
    chunks[0].write_bytes(flipped)
    chunks[1].write_bytes(chunks[1].read_bytes()[:-5])
    (states / "00099.safetensors").write_bytes(b"no safetensors")
    with caplog.at_level(logging.WARNING):
        counts = extract(tiny_target, answered / CONVERSATIONS, tmp_path / "out", shard_bytes=1 << 16, recorded=states)
    assert counts["computed"] == 7 and counts["recorded"] == len(documents) - 7
    assert all(word in caplog.text for word in ("damaged", "00001.safetensors", "00099.safetensors"))
    same_features(tmp_path / "out", computed)


def states_meta(folder: Path, **other) -> StatesMeta:
    return StatesMeta(
        **{"target": fingerprint(folder), "taps": (2, 4, 5), "hidden_size": 32, "dtype": "float32", **other}
    )


@pytest.mark.parametrize("other", [{"taps": [1, 4, 5]}, {"dtype": "bfloat16"}], ids=["taps", "dtype"])
def test_recordings_of_another_kind_are_not_used(answered: Path, tiny_target: Path, other: dict, caplog):
    with caplog.at_level(logging.WARNING):
        assert not len(Recordings(answered / FOLDER, states_meta(tiny_target, **other)))
    assert f"of another {next(iter(other))}" in caplog.text


def test_the_audit_refuses_wrong_states(answered: Path, computed: Path, tiny_target: Path, tmp_path: Path, caplog):
    """Recordings that are whole and say the right thing, but are those of taps 1, 4, 5: nothing of them is used."""
    lying = tmp_path / "lying"
    regenerate(prompts(), tiny_target, lying, max_new_tokens=10, slots=16, record_states=True, taps=(1, 4, 5))
    for chunk in (lying / FOLDER).glob("*"):
        data = chunk.read_bytes()
        assert data.count(b"[1, 4, 5]") + data.count(b"[1,4,5]") == 1
        chunk.write_bytes(data.replace(b"[1, 4, 5]", b"[2, 4, 5]"))
    with caplog.at_level(logging.WARNING):
        counts = extract(
            tiny_target, answered / CONVERSATIONS, tmp_path / "out", shard_bytes=1 << 16, recorded=lying / FOLDER
        )
    assert counts["recorded"] == 0 and "a tap differs by" in caplog.text
    for name in (s.name for s in FeatureSet.open(computed).shards):
        assert sha256_file(tmp_path / "out" / name) == sha256_file(computed / name)


def test_a_killed_run_ends_with_the_same_recordings(answered: Path, tiny_target: Path, tmp_path: Path, monkeypatch):
    """Killed after its second chunk: answers are in the journal with their states or not at all; then it goes on."""

    class Killed(Exception):
        pass

    real, written = RecordingWriter._write, []

    def dying(self, pending):
        if len(written) == 2:
            raise Killed  # nothing of this chunk is written, as under SIGKILL
        written.append(real(self, pending))

    monkeypatch.setattr(RecordingWriter, "_write", dying)
    monkeypatch.setattr(RecordingWriter.__init__, "__defaults__", (1 << 14, 1e9))
    with pytest.raises(Killed):
        regenerate(prompts(), tiny_target, tmp_path, max_new_tokens=10, slots=16, record_states=True)
    monkeypatch.undo()
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()[1:]]
    assert lines and len(lines) < 18
    regenerate(prompts(), tiny_target, tmp_path, max_new_tokens=10, slots=16, record_states=True)
    assert (tmp_path / CONVERSATIONS).read_bytes() == (answered / CONVERSATIONS).read_bytes()

    a, b = tmp_path / "a", tmp_path / "b"
    for out, states in ((a, answered / FOLDER), (b, tmp_path / FOLDER)):
        counts = extract(tiny_target, answered / CONVERSATIONS, out, shard_bytes=1 << 16, recorded=states)
        assert counts["computed"] == 0
    assert [sha256_file(p) for p in FeatureSet.open(a).shards] == [sha256_file(p) for p in FeatureSet.open(b).shards]


def test_a_full_disk_stops_the_recording_not_the_answers(
    answered: Path, tiny_target: Path, tmp_path: Path, monkeypatch, caplog
):
    from eyas.errors import EyasError

    def full(self, pending):
        raise EyasError("00000.safetensors cannot be written (No space left on device).")

    monkeypatch.setattr(RecordingWriter, "_write", full)
    with caplog.at_level(logging.WARNING):
        regenerate(prompts(), tiny_target, tmp_path, max_new_tokens=10, slots=16, record_states=True)
    assert (tmp_path / CONVERSATIONS).read_bytes() == (answered / CONVERSATIONS).read_bytes()
    assert "no more states are recorded" in caplog.text
    shutil.rmtree(tmp_path)
