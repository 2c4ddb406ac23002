"""A specimen shares its tensors and changes nothing: what it holds, what it lacks, what of it decides a forward.

pytest -q tests/test_doctor_specimen.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from doctoring import Patient, make_patient, without
from drafts import make_draft, write_flat, write_speculators
from eyas.doctor.specimen import EMBEDDING, HEAD, NOWHERE, Cast, declared, fitted, marks, stored_ids
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.draft.directory import read_draft
from eyas.errors import BadInput

D, V = 120, 300


@pytest.fixture(scope="module")
def patient() -> Patient:
    return make_patient(text={"documents": 2, "length": 8})


# ---------------------------------------------------------------- substitutions


def test_a_substitution_is_a_copy_and_is_noted(patient: Patient):
    base = patient.specimen
    before = (dict(base.tensors), base.conventions, base.ids.clone(), dict(base.changed), base.slices)
    new = base.with_("norm_output", "true", conventions={"norm_output": True}, tensors={"x": torch.ones(2)})
    newer = new.with_("taps", "1/3/4", slices=(1, 3, 4), state_shift=-1)
    assert (dict(base.tensors), base.conventions, dict(base.changed), base.slices) == (*before[:2], *before[3:])
    assert torch.equal(base.ids, before[2])
    assert new.conventions.norm_output and not base.conventions.norm_output
    assert set(new.tensors) - set(base.tensors) == {"x"}
    assert all(new.tensors[name] is tensor for name, tensor in base.tensors.items())
    assert newer.changed == {"norm_output": "true", "taps": "1/3/4"}
    assert (newer.slices, newer.state_shift, newer.conventions) == ((1, 3, 4), -1, new.conventions)
    assert newer.with_(slices=(0, 1, 2)).changed == newer.changed, "without a group nothing is noted"


def test_what_is_lacking_is_named(patient: Patient):
    base = patient.specimen
    assert base.lacking == ()

    assert without(base, "fc.weight").lacking == ("fc.weight [32, 96]",)
    turned = base.with_(tensors={"fc.weight": torch.zeros(96, 32)})
    assert turned.lacking == ("fc.weight [32, 96] (it is [96, 32])",)
    whole = base.with_(tensors={"norm.weight": torch.zeros(32, dtype=torch.int8)})
    assert whole.lacking == ("norm.weight as floating point (it is torch.int8)",)
    assert base.with_(embedding=None).lacking == ("the target's embedding",)
    assert base.with_(embedding=torch.zeros(V, 48)).lacking == ("an embedding 32 wide (it is 48)",)
    assert base.with_(conventions={"norm_before_fc": True}).lacking == ("input_norm.weight [96]",)
    assert base.with_(conventions={"rope_type": "linear", "rope_scaling": {"factor": 2.0}}).lacking == ()
    for scaling in ({"rope_type": "linear"}, {"rope_type": "bogus"}):
        (why,) = base.with_(conventions=scaling).lacking
        assert why.startswith("whole parameters of RoPE (") and ("factor" in why or "bogus" in why)
    (why,) = base.with_(conventions={"hidden_act": "swish2"}).lacking
    assert why == "an activation that Eyas knows (gelu, gelu_pytorch_tanh, relu, silu)"
    with pytest.raises(BadInput, match=r"cannot be run without input_norm\.weight \[96\]"):
        base.with_(conventions={"norm_before_fc": True}).module(Cast(torch.float32))


@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True, "norm_output": True}, {"qk_norm": True}])
def test_the_module_is_the_draft(flags):
    patient = make_patient(1, text={"documents": 2, "length": 8}, **flags)
    draft = patient.specimen.module(Cast(torch.float32))
    assert draft.conventions == patient.draft.conventions
    generator = torch.Generator().manual_seed(0)
    aux, ids = torch.randn(1, 6, 96, generator=generator), torch.arange(6)[None]
    out = [d.step(d.embed(ids), d.fuse(aux), torch.arange(6), d.new_cache()) for d in (draft, patient.draft)]
    assert torch.equal(*out)
    assert not any(p.requires_grad for p in draft.parameters())
    rough = patient.specimen.module(Cast(torch.bfloat16))
    assert rough.lm_head.weight.dtype == torch.bfloat16
    assert patient.draft.lm_head.weight.dtype == torch.float32


def test_rope_of_a_substituted_convention_reaches_the_module(patient: Patient):
    cast, base = Cast(torch.float32), patient.specimen
    assert torch.equal(base.module(cast)._inv_freq, patient.draft._inv_freq)
    assert not torch.equal(base.with_(conventions={"rope_theta": 1e6}).module(cast)._inv_freq, patient.draft._inv_freq)


def test_a_cast_converts_each_tensor_once():
    cast = Cast(torch.bfloat16)
    a, b = torch.ones(3), torch.ones(3)
    assert cast(a) is cast(a) and cast(a).dtype == torch.bfloat16
    assert cast(a) is not cast(b)
    narrow = torch.ones(3, dtype=torch.bfloat16)
    assert cast(narrow) is narrow
    made = [cast(torch.full((2,), float(i))) for i in range(50)]  # originals that are gone must not lend their id
    assert [float(m[0]) for m in made] == list(map(float, range(50)))


# ---------------------------------------------------------------- the map


def test_the_map_is_taken_as_engines_take_it(patient: Patient):
    shape, right = patient.draft.shape, patient.vocab_map
    d2t, t2d = right.d2t, right.t2d
    assert torch.equal(stored_ids({"d2t": d2t, "t2d": t2d}, shape), right.ids)
    assert torch.equal(stored_ids({"d2t": d2t.float()}, shape), right.ids)
    assert torch.equal(stored_ids({"d2t": d2t.int()}, shape), right.ids)
    assert torch.equal(stored_ids({"t2d": t2d}, shape), right.ids), "marks alone give the map, too"
    assert torch.equal(stored_ids({"t2d": t2d.to(torch.uint8)}, shape), right.ids)
    assert torch.equal(stored_ids({}, shape), torch.arange(D))
    assert torch.equal(stored_ids({"d2t": t2d}, shape), torch.arange(D)), "bool is no offset"
    assert torch.equal(stored_ids({"d2t": d2t[None]}, shape), torch.arange(D))
    short = stored_ids({"d2t": d2t[:100]}, shape)
    assert torch.equal(short[:100], right.ids[:100]) and set(short[100:].tolist()) == {NOWHERE}
    assert torch.equal(stored_ids({"d2t": torch.cat([d2t, d2t])}, shape), right.ids)
    far = stored_ids({"d2t": d2t + 250}, shape)
    assert torch.equal(far == NOWHERE, right.ids + 250 >= V)
    assert set(stored_ids({"d2t": d2t - 1000}, shape).tolist()) == {NOWHERE}
    assert marks({"t2d": t2d[:-1]}, shape) is None and marks({}, shape) is None


def test_ids_are_fitted_to_the_head():
    assert fitted(torch.tensor([3, 9, -1, 4]), 6, 9).tolist() == [3, -1, -1, 4, -1, -1]
    assert fitted(torch.tensor([3, 2, 1]), 2, 9).tolist() == [3, 2]


# ---------------------------------------------------------------- from a directory


@pytest.mark.parametrize("scheme", ["midlayer", "prefixed", "fused"])
def test_a_directory_as_declared(tmp_path: Path, patient: Patient, scheme: str):
    folder = write_flat(tmp_path / "d", patient.draft, patient.vocab_map, scheme)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}))
    reading = read_draft(folder)
    specimen = declared(reading, patient.embedding)
    assert specimen.lacking == () and specimen.slices == reading.conventions.taps
    assert torch.equal(specimen.ids, patient.vocab_map.ids) and specimen.changed == {}
    for name, tensor in patient.draft.owned_state_dict().items():
        assert torch.equal(specimen.tensors[name], tensor), name
    assert specimen.embedding is patient.embedding
    assert declared(reading).lacking == ("the target's embedding",)


def test_an_own_embedding_is_own_where_it_differs(tmp_path: Path):
    draft, vocab_map = make_draft()
    table = torch.randn(V, 32, generator=torch.Generator().manual_seed(1))
    folder = write_speculators(tmp_path / "d", draft, vocab_map)
    tensors = load_file(folder / "model.safetensors")

    def store(embedding: torch.Tensor):
        save_file({**tensors, EMBEDDING: embedding}, folder / "model.safetensors")
        return read_draft(folder)

    same = declared(store(table.bfloat16()), table)
    assert same.embedding is table and same.conventions.embedding == "target"
    other = declared(store(table + 1), table)
    assert other.conventions.embedding == "own"
    assert other.embedding is not None and torch.equal(other.embedding, table + 1)
    alone = declared(read_draft(folder))
    assert alone.conventions.embedding == "own" and alone.lacking == ()
    short = declared(store(table[:-5].clone()), table)
    assert short.embedding is table and short.conventions.embedding == "target"


def test_a_head_is_lent_to_a_full_vocabulary_only(tmp_path: Path):
    head = torch.randn(V, 32)
    for size, lent in ((V, True), (D, False)):
        draft, vocab_map = make_draft(sizes={"draft_vocab_size": size})
        folder = save_draft(draft, vocab_map, tmp_path / str(size))
        (folder / "eyas.json").unlink()
        tensors = load_file(folder / "model.safetensors")
        del tensors[HEAD]
        save_file(tensors, folder / "model.safetensors")
        specimen = declared(read_draft(folder), torch.zeros(V, 32), head)
        assert (specimen.tensors.get(HEAD) is head) is lent
        assert (specimen.conventions.head == "target") is lent
        assert (specimen.lacking == ()) is lent


def test_what_is_missing_stays_missing(tmp_path: Path):
    draft, vocab_map = make_draft()
    folder = save_draft(draft, vocab_map, tmp_path / "d")
    (folder / "eyas.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    del tensors["norm.weight"]
    tensors["odd.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors")
    specimen = declared(read_draft(folder), torch.zeros(V, 32))
    assert specimen.lacking == ("norm.weight [32]",)
    assert "odd.weight" in specimen.tensors


def test_a_specimen_runs_what_the_loader_loads(tmp_path: Path, tiny_target: Path):
    draft, vocab_map = make_draft(3)
    folder = save_draft(draft, vocab_map, tmp_path / "d")
    loaded, _, _ = load_draft(folder, tiny_target)
    assert loaded.embed_tokens is not None
    specimen = declared(read_draft(folder, tiny_target), loaded.embed_tokens.weight.detach())
    module = specimen.module(Cast(torch.float32))
    mine, theirs = module.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
