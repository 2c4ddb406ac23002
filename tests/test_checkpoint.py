"""Draft directories: what is written is read back bit for bit, and what others write is read as they mean it.

pytest -q tests/test_checkpoint.py
"""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drafts import foreign_tensors, make_draft, with_embedding, write_flat, write_speculators
from eyas.conventions import Known
from eyas.draft.checkpoint import load_draft, read_draft, save_draft
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.export.check import check_draft
from eyas.target.facts import read_facts
from eyas.target.weights import load_ends


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


flags = st.fixed_dictionaries(
    {},
    optional={
        "norms": st.sampled_from(["norm_before_fc", "fc_norm"]),
        **{name: st.booleans() for name in (
            "norm_before_residual", "norm_output", "fc_bias", "attention_bias", "mlp_bias", "qk_norm",
            "rms_norm_offset",
        )},
        "rope_theta": st.sampled_from([1e4, 1e5, 500000.0]),
        "sliding_window": st.sampled_from([None, 64]),
        "layer_input": st.sampled_from(["embedding_state", "state_embedding"]),
        "logit_scale": st.sampled_from([1.0, 0.5]),
    },
)  # fmt: skip
sizes = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 3),
        "num_taps": st.integers(1, 4),
        "draft_vocab_size": st.sampled_from([1, 120, 299, 300]),
        "head_dim": st.sampled_from([2, 8]),
        "num_heads": st.sampled_from([2, 4]),
        "target_hidden_size": st.sampled_from([32, 24]),
    }
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flags=flags, sizes=sizes, seed=st.integers(0, 5))
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path_factory, flags, sizes, seed):
    values = dict(flags)
    if norms := values.pop("norms", None):
        values[norms] = True
    values["taps"] = tuple(range(1, sizes["num_taps"] + 1))
    if sizes["target_hidden_size"] != 32:
        values["embedding"] = "own"
    draft, vocab_map = make_draft(seed, sizes, **values)
    with_embedding(draft)
    out = tmp_path_factory.mktemp("draft") / "d"
    save_draft(draft, vocab_map, out)
    again, its_map, conventions = load_draft(out)
    assert same_tensors(draft.owned_state_dict(), again.owned_state_dict())
    assert torch.equal(vocab_map.d2t, its_map.d2t) and torch.equal(vocab_map.t2d, its_map.t2d)
    assert conventions == draft.conventions and again.shape == draft.shape
    assert not [k for k in draft.conventions.how if conventions.known(k) is not draft.conventions.known(k)]
    stored = load_file(out / "model.safetensors")
    assert ("d2t" in stored) == (sizes["draft_vocab_size"] < 300)
    for n in range(1, sizes["num_layers"]):  # SGLang reads the one, vLLM the other
        assert torch.equal(stored[f"layers.{n}.hidden_norm.weight"], stored[f"layers.{n}.input_layernorm.weight"])
    assert [p.name for p in out.rglob("*.safetensors")] == ["model.safetensors"]
    assert check_draft(out).problems == []  # config.json, read without eyas.json, says the same


def test_eyas_json_holds_what_a_reader_needs(tmp_path, tiny_target):
    draft, vocab_map = make_draft()
    save_draft(
        draft, vocab_map, tmp_path / "d", facts=read_facts(tiny_target), provenance={"steps": 7},
        fingerprints={"target": "abc"}, predicted={"tau": 1.5},
    )  # fmt: skip
    eyas = json.loads((tmp_path / "d/eyas.json").read_text())
    assert eyas["target"]["target"] == "abc" and eyas["target"]["facts"]["vocab_size"] == 300
    assert eyas["predicted"] == {"tau": 1.5} and eyas["provenance"] == {"steps": 7}
    assert eyas["vocab_map"] == vocab_map.digest()
    assert eyas["conventions"]["how"]["taps"] == "declared"
    import hashlib

    fc = draft.fc.weight.detach().numpy().tobytes()
    assert eyas["tensors"]["fc.weight"] == {
        "sha256": hashlib.sha256(fc).hexdigest(), "dtype": "float32", "shape": [32, 96]
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["midlayer", "layers0", "prefixed", "prefixed_midlayer", "fused", "legacy_norms"])
@pytest.mark.parametrize("container", ["safetensors", "sharded", "bin", "training_state"])
def test_flat_look_alikes(tmp_path, tiny_target, scheme, container):
    fc_norm = scheme == "legacy_norms"
    draft, vocab_map = make_draft(3, fc_norm=fc_norm)
    folder = write_flat(tmp_path / "d", draft, vocab_map, scheme, container, fc_norm=fc_norm)
    again, its_map, conventions = load_draft(folder, tiny_target)
    assert same_tensors(draft.owned_state_dict(), again.owned_state_dict())
    assert torch.equal(its_map.ids, vocab_map.ids)
    assert conventions.differences(draft.conventions) == {}
    assert conventions.known("taps") is Known.DEFAULT and conventions.taps == (2, 4, 5)
    assert conventions.known("norm_before_residual") is Known.DEFAULT
    assert torch.equal(again.embed_tokens.weight, load_ends(tiny_target).embedding)
    assert again.embed_tokens.weight.requires_grad is False and again.fc.weight.requires_grad is True


def test_speculators_look_alike(tmp_path, tiny_target):
    draft, vocab_map = make_draft(
        4, norm_before_fc=True, norm_before_residual=True, norm_output=True, sliding_window=64
    )
    folder = write_speculators(tmp_path / "d", draft, vocab_map)
    again, _, conventions = load_draft(folder)
    assert read_draft(folder).dialect == "speculators"
    assert same_tensors(draft.owned_state_dict(), again.owned_state_dict())
    assert conventions.differences(draft.conventions) == {"num_target_layers": (None, 8)}
    assert conventions.known("norm_output") is Known.DECLARED
    # Left out, it is a guess, and the engine's: the library's class and vLLM disagree.
    config = json.loads((folder / "config.json").read_text())
    del config["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(config))
    silent = read_draft(folder, tiny_target).conventions
    assert silent.norm_before_residual is True and silent.known("norm_before_residual") is Known.GUESSED


@pytest.mark.parametrize(
    "config, taps, known",
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, (1, 4, 8), Known.DECLARED),
        ({"eagle_aux_hidden_state_layer_ids": [8, 1, 4]}, (1, 4, 8), Known.DECLARED),  # engines sort
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5), Known.INFERRED),  # SGLang's
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (2, 4, 5), Known.INFERRED),  # vLLM's
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, (1, 4, 7), Known.GUESSED),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5],
          "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
         (2, 4, 5), Known.DECLARED),
        ({}, (2, 4, 5), Known.DEFAULT),
    ],
)  # fmt: skip
def test_taps_are_read_from_every_place(tmp_path, tiny_target, config, taps, known):
    draft, vocab_map = make_draft()
    conventions = read_draft(write_flat(tmp_path / "d", draft, vocab_map, **config), tiny_target).conventions
    assert (conventions.taps, conventions.known("taps")) == (taps, known)


def test_unnamed_taps_need_the_target(tmp_path):
    folder = write_flat(tmp_path / "d", *make_draft())
    with pytest.raises(BadInput, match="does not name the taps"):
        load_draft(folder)


def test_rope_is_found_wherever_it_is_written(tmp_path, tiny_target):
    draft, vocab_map = make_draft()

    def read(name, **changes):
        reading = read_draft(write_flat(tmp_path / name, draft, vocab_map, **changes), tiny_target)
        return reading.conventions, reading.notes

    new, _ = read("new", rope_theta=..., rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert (new.rope_theta, new.known("rope_theta")) == (5e5, Known.DECLARED)
    none, notes = read("none", rope_theta=...)
    assert (none.rope_theta, none.known("rope_theta")) == (1e4, Known.DEFAULT) and "no rope_theta" in " ".join(notes)
    both, notes = read("both", rope_theta=1e4, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert both.rope_theta == 5e5 and "beside it" in " ".join(notes)
    old, _ = read("old", rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2.0})
    assert (old.rope_theta, old.rope_type, old.rope_scaling) == (1e6, "linear", {"factor": 2.0})


def test_norm_tensors_without_their_flag_are_believed_and_named(tmp_path, tiny_target):
    draft, vocab_map = make_draft(5, norm_before_fc=True)
    reading = read_draft(write_flat(tmp_path / "d", draft, vocab_map), tiny_target)
    assert reading.conventions.norm_before_fc and reading.conventions.known("norm_before_fc") is Known.INFERRED
    assert any("engines will drop them" in note for note in reading.notes)


def test_every_missing_unknown_and_misshapen_tensor_is_named(tmp_path, tiny_target):
    draft, vocab_map = make_draft()
    folder = write_flat(tmp_path / "d", draft, vocab_map)
    tensors = load_file(folder / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"], tensors["norm.weight"]
    tensors["midlayer.mlp.extra.weight"] = torch.zeros(3)
    tensors["midlayer.self_attn.o_proj.weight"] = torch.zeros(32, 31)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BadInput) as caught:
        load_draft(folder, tiny_target)
    for words in (
        "midlayer.hidden_norm.weight [32] is missing", "norm.weight [32] is missing", "midlayer.mlp.extra.weight [3]",
        "midlayer.self_attn.o_proj.weight in model.safetensors is [32, 31], expected [32, 32]",
    ):  # fmt: skip
        assert words in str(caught.value)


def test_absolute_ids_in_d2t_are_refused_in_words(tmp_path, tiny_target):
    draft, vocab_map = make_draft()
    folder = write_flat(tmp_path / "d", draft, vocab_map)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "d2t": vocab_map.ids.clone()}, folder / "model.safetensors")
    with pytest.raises(BadInput, match="absolute"):
        load_draft(folder, tiny_target)


@pytest.mark.parametrize("kept", ["d2t", "t2d"])
def test_one_of_d2t_and_t2d_is_enough_and_a_contradiction_is_named(tmp_path, tiny_target, kept):
    draft, vocab_map = make_draft()
    folder = write_flat(tmp_path / "d", draft, vocab_map)
    tensors = load_file(folder / "model.safetensors")
    gone = "t2d" if kept == "d2t" else "d2t"
    lone = {k: v for k, v in tensors.items() if k != gone}
    save_file(lone, folder / "model.safetensors")
    assert torch.equal(load_draft(folder, tiny_target)[1].ids, vocab_map.ids)
    first = int(vocab_map.ids[0])
    wrong = vocab_map.t2d.clone()
    wrong[first] = False
    save_file({**tensors, "t2d": wrong}, folder / "model.safetensors")
    with pytest.raises(BadInput, match=f"disagree, first at target id {first}"):
        load_draft(folder, tiny_target)
    save_file({k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}, folder / "model.safetensors")
    with pytest.raises(BadInput, match="d2t is missing"):
        load_draft(folder, tiny_target)


def test_a_copy_of_the_targets_embedding_is_the_targets_and_another_is_the_drafts_own(tmp_path, tiny_target):
    draft, vocab_map = make_draft()
    table = load_ends(tiny_target).embedding
    folder = write_flat(tmp_path / "d", draft, vocab_map)
    tensors = load_file(folder / "model.safetensors")
    for stored, expected in ((table.bfloat16(), "target"), (table + 1, "own")):
        save_file({**tensors, "embed_tokens.weight": stored.contiguous()}, folder / "model.safetensors")
        again, _, conventions = load_draft(folder, tiny_target)
        assert conventions.embedding == expected
        assert torch.equal(again.embed_tokens.weight, table if expected == "target" else stored)


def test_full_vocabulary_without_a_head_takes_the_targets(tmp_path, tiny_target):
    draft, vocab_map = make_draft(sizes={"draft_vocab_size": 300})
    folder = write_flat(tmp_path / "d", draft, vocab_map, draft_vocab_size=None)
    tensors = {
        k: v for k, v in load_file(folder / "model.safetensors").items() if k not in ("lm_head.weight", "d2t", "t2d")
    }
    save_file(tensors, folder / "model.safetensors")
    again, its_map, conventions = load_draft(folder, tiny_target)
    assert conventions.head == "target" and conventions.d2t == "none" and its_map.size == 300
    assert torch.equal(again.lm_head.weight, load_ends(tiny_target).head.float())
    with pytest.raises(BadInput, match=re.escape("lm_head.weight [300, 32] is missing")):
        load_draft(write_named(folder, [2, 4, 5]))


def write_named(folder: Path, ids: list[int]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": ids}))
    return folder


def test_another_target_is_refused_naming_both(tmp_path, make_tiny_target):
    other = make_tiny_target(tmp_path / "t", vocab=310)
    folder = write_flat(tmp_path / "d", *make_draft())
    with pytest.raises(Mismatch, match=r"vocab_size 300, but .* has 310"):
        load_draft(folder, other)


def test_layers_after_the_first_have_one_stream_norm_under_two_names(tmp_path, tiny_target):
    draft, vocab_map = make_draft(sizes={"num_layers": 2})
    folder = write_flat(tmp_path / "d", draft, vocab_map)
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("layers.1.hidden_norm.weight")
    save_file({**tensors, "layers.1.input_layernorm.weight": norm}, folder / "model.safetensors")
    assert torch.equal(load_draft(folder, tiny_target)[0].layers["1"].hidden_norm.weight, norm)
    both = {**tensors, "layers.1.input_layernorm.weight": norm, "layers.1.hidden_norm.weight": norm + 1}
    save_file(both, folder / "model.safetensors")
    with pytest.raises(BadInput, match="vLLM reads the first and SGLang the second"):
        load_draft(folder, tiny_target)


def test_other_kinds_of_drafts_are_named(tmp_path, tiny_target):
    draft, vocab_map = make_draft()
    tensors = foreign_tensors(draft, vocab_map)
    folder = write_flat(tmp_path / "d", draft, vocab_map)
    one = {k: v for k, v in tensors.items() if "norm" not in k} | {"fc.weight": torch.zeros(32, 64)}
    cases = {
        "EAGLE-1/2": one,
        "not an EAGLE-3 draft": {"model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)},
        "quantised": tensors | {"fc.weight_scale": torch.ones(1)},
    }
    for words, held in cases.items():
        save_file({k: v.contiguous() for k, v in held.items()}, folder / "model.safetensors")
        with pytest.raises(BadInput, match=words):
            load_draft(folder, tiny_target)


def test_a_foreign_or_contradictory_map_is_not_saved(tmp_path):
    draft, _ = make_draft()
    _, other = make_draft(sizes={"draft_vocab_size": 60})
    with pytest.raises(BadInput, match="vocabulary map"):
        save_draft(draft, other, tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_float16_overflow_names_the_way_out(tmp_path):
    draft, vocab_map = make_draft()
    with torch.no_grad():
        draft.fc.weight[0, 0] = 1e6
    with pytest.raises(EyasError, match=r"fc\.weight: .*choose bfloat16"):
        save_draft(draft, vocab_map, tmp_path / "d", dtype=torch.float16)
    save_draft(draft, vocab_map, tmp_path / "d", dtype=torch.bfloat16)


def test_nan_is_never_saved(tmp_path):
    draft, vocab_map = make_draft()
    with torch.no_grad():
        draft.midlayer.mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(EyasError, match=r"midlayer.mlp.up_proj.weight: NaN"):
        save_draft(draft, vocab_map, tmp_path / "d")
    assert list(tmp_path.iterdir()) == []
