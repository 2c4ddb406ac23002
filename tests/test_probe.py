"""The probe: recorded with the draft, it accepts every faithful copy and refuses every broken one.

pytest -q tests/test_probe.py
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafts import foreign_tensors, make_draft, with_embedding
from eyas.draft.checkpoint import save_draft
from eyas.draft.directory import PROBE
from eyas.draft.probe import STEPS, answer, collect, compare, read_probe, verify_probe, write_probe
from eyas.errors import BadInput


class Features:
    """Three documents of random ids and states, in the interface of FeatureSet."""

    dir = "features"
    lengths = (30, 5, 21)

    def __init__(self, taps: int = 3) -> None:
        self.doc_lengths = torch.tensor(self.lengths)
        generator = torch.Generator().manual_seed(2)
        self.documents = [
            {
                "ids": torch.randint(0, 300, (n,), generator=generator, dtype=torch.int32),
                "taps": torch.randn(n, taps * 32, generator=generator).bfloat16(),
            }
            for n in self.lengths
        ]

    def document(self, i: int) -> dict[str, torch.Tensor]:
        return self.documents[i]


def write(folder: Path, **conventions):
    """A draft directory with a probe in it."""
    draft, vocab_map = make_draft(1, **conventions)
    inputs = collect(Features(), with_embedding(draft), tokens=24)
    answers = answer(draft, vocab_map, inputs)
    save_draft(draft, vocab_map, folder)
    write_probe(folder, inputs, answers)
    return draft, vocab_map, inputs, answers


@pytest.mark.parametrize("flags", [{}, {"norm_output": True, "norm_before_residual": True}, {"sliding_window": 4}])
def test_answers_are_those_of_plain_decoding_fed_the_recorded_tokens(tmp_path, flags):
    draft, vocab_map, inputs, answers = write(tmp_path / "d", **flags)
    assert inputs.offsets.tolist() == [0, 24, 45]  # the document of 5 tokens is too short
    assert len(answers.rows) == 45 - 2 * STEPS and answers.choices.shape == (STEPS, len(answers.rows))
    for column, row in list(enumerate(answers.rows.tolist()))[::7]:
        start = int(inputs.offsets[inputs.offsets <= row].max())
        i = row - start
        ids, taps = inputs.ids[start:], inputs.taps[start:].float()
        cache = draft.new_cache()
        with torch.no_grad():
            rows = torch.arange(i + 1)
            h = draft.step(draft.embed(ids[None, 1 : i + 2]), draft.fuse(taps[None, : i + 1]), rows, cache)[:, -1:]
            for k in range(STEPS):
                logits = draft.logits(h)[0, 0]
                best = logits.topk(2)
                assert int(vocab_map.to_target(best.indices[:1])) == int(answers.choices[k, column])
                assert abs(float(best.values[0] - best.values[1]) - float(answers.margins[k, column])) < 1e-4
                token, position = ids[None, i + 2 + k : i + 3 + k], torch.tensor([i + 1 + k])
                if k + 1 < STEPS:
                    h = draft.step(draft.embed(token), draft.feedback(h), position, cache)


def test_a_probe_reads_back_and_verifies(tmp_path):
    *_, inputs, answers = write(tmp_path / "d")
    again, recorded = read_probe(tmp_path / "d")
    assert all(torch.equal(getattr(again, n), getattr(inputs, n)) for n in inputs.__dataclass_fields__)
    assert all(torch.equal(getattr(recorded, n), getattr(answers, n)) for n in answers.__dataclass_fields__)
    report = verify_probe(tmp_path / "d")
    assert report.ok and report.changed == 0 and report.choices == STEPS * len(answers.rows)


@pytest.mark.parametrize("scheme", ["prefixed", "fused"])
def test_a_renamed_copy_verifies(tmp_path, scheme):
    draft, vocab_map, *_ = write(tmp_path / "d")
    save_file(foreign_tensors(draft, vocab_map, scheme), tmp_path / "d/model.safetensors")
    assert verify_probe(tmp_path / "d").ok


def test_a_copy_with_a_nan_is_refused_by_the_name_of_its_tensor(tmp_path):
    write(tmp_path / "d")
    tensors = load_file(tmp_path / "d/model.safetensors")
    tensors["midlayer.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "d/model.safetensors")
    with pytest.raises(BadInput, match=r"NaN or infinite values in midlayer\.mlp\.down_proj\.weight \(1\)"):
        verify_probe(tmp_path / "d")


@pytest.mark.parametrize(
    "change", ["rolled map", "swapped q k", "no hidden norm", "rope", "norm_before_residual", "norm_output"]
)
def test_a_broken_copy_does_not_verify(tmp_path, change):
    write(tmp_path / "d")
    file = tmp_path / "d/model.safetensors"
    t = load_file(file)
    declared = json.loads((tmp_path / "d/eyas.json").read_text())
    if change == "rolled map":
        ids = torch.arange(120) + t["d2t"]
        ids = torch.where(ids + 1 < 300, ids + 1, ids)
        if int(ids[-1]) == int(ids[-2]):  # keep it a valid map
            ids[-1] = 299
        t["d2t"] = ids - torch.arange(120)
        del t["t2d"]
    elif change == "swapped q k":
        t["midlayer.self_attn.k_proj.weight"], t["midlayer.self_attn.v_proj.weight"] = (
            t["midlayer.self_attn.v_proj.weight"], t["midlayer.self_attn.k_proj.weight"],
        )  # fmt: skip
    elif change == "no hidden norm":
        t["midlayer.hidden_norm.weight"] = torch.ones(32)
    elif change == "rope":
        declared["conventions"]["rope_theta"] = 100.0
    else:
        declared["conventions"][change] = True
    save_file({k: v.contiguous() for k, v in t.items()}, file)
    (tmp_path / "d/eyas.json").write_text(json.dumps(declared))
    report = verify_probe(tmp_path / "d")
    assert not report.ok
    assert report.changed > 0 or not report.largest_margin_difference <= report.tolerance


def test_a_near_tie_is_not_held_against_the_draft(tmp_path):
    *_, answers = write(tmp_path / "d")
    choices, margins = answers.choices.clone(), answers.margins.clone()
    choices[0, 0] += 1
    margins[0, 0] = 5e-4
    now = type(answers)(answers.rows, choices, margins)
    tied = type(answers)(answers.rows, answers.choices, margins)
    report = compare(tied, now, "d")
    assert report.ok and report.near_ties == 1 and report.first_changed is None
    report = compare(answers, now, "d")
    assert not report.ok and report.changed == 1 and report.first_changed["step"] == 0


def test_probes_that_do_not_fit_are_named(tmp_path):
    write(tmp_path / "d")
    other, its_map = make_draft(sizes={"num_taps": 2}, taps=(2, 4))
    save_draft(other, its_map, tmp_path / "e")
    (tmp_path / "e/eyas").mkdir()
    (tmp_path / "e" / PROBE).write_bytes((tmp_path / "d" / PROBE).read_bytes())
    with pytest.raises(BadInput, match="belongs to another draft: its states are 96 wide"):
        verify_probe(tmp_path / "e")
    (tmp_path / "e" / PROBE).write_bytes((tmp_path / "d" / PROBE).read_bytes()[:500])
    with pytest.raises(BadInput, match=r"probe\.safetensors cannot be read"):
        verify_probe(tmp_path / "e")
    (tmp_path / "e" / PROBE).unlink()
    with pytest.raises(BadInput, match="carries no probe"):
        verify_probe(tmp_path / "e")


def test_features_without_a_usable_document_make_no_probe():
    features = Features()
    features.doc_lengths = torch.tensor([3, 4])
    with pytest.raises(BadInput, match="no probe can be made"):
        collect(features, torch.zeros(300, 32))
