"""Files that are damaged, hostile or missing: one clear sentence, no code run, nothing outside the folder opened.

pytest -q tests/test_checkpoint_files.py
"""

import json
import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drafts import make_draft, write_flat
from eyas.draft import checkpoint
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.draft.files import open_folder
from eyas.errors import BadInput, EyasError

PLAIN = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}


@pytest.fixture
def sharded(tmp_path):
    return write_flat(tmp_path / "d", *make_draft(), container="sharded", eagle_aux_hidden_state_layer_ids=[2, 4, 5])


@pytest.fixture
def single(tmp_path):
    return write_flat(tmp_path / "d", *make_draft(), eagle_aux_hidden_state_layer_ids=[2, 4, 5])


def test_symlinked_entries_are_followed(tmp_path, sharded):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(os.path.relpath(blobs / str(i), sharded))
    assert len(load_draft(sharded)[1].ids) == 120


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "a/../../x.safetensors", ""])
def test_an_index_never_leads_out(sharded, name):
    (sharded.parent / "elsewhere.safetensors").write_bytes((sharded / "model-2.safetensors").read_bytes())
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"] = {k: name if v == "model-2.safetensors" else v for k, v in index["weight_map"].items()}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match="leads out of the folder"):
        open_folder(sharded)


def test_a_missing_shard_and_a_wrong_index_are_named(sharded):
    index_file = sharded / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index_file.write_text(json.dumps({"weight_map": {**index["weight_map"], "phantom": "model-1.safetensors"}}))
    with pytest.raises(BadInput, match=r"places phantom in model-1\.safetensors"):
        open_folder(sharded)
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(BadInput, match=r"model-1\.safetensors are missing"):
        open_folder(sharded)
    index_file.write_text('{"weight_map": []}')
    with pytest.raises(BadInput, match="weight_map"):
        open_folder(sharded)


@pytest.mark.parametrize("damage", ["truncated", "huge header", "empty", "text", "overlap"])
def test_damaged_safetensors_are_named(single, damage):
    file = single / "model.safetensors"
    whole = file.read_bytes()
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                         "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}).encode()  # fmt: skip
    file.write_bytes({
        "truncated": whole[: len(whole) // 2], "huge header": (1 << 62).to_bytes(8, "little") + whole[8:], "empty": b"",
        "text": b"<html>404 Not Found</html>\n",
        "overlap": len(header).to_bytes(8, "little") + header + bytes(12),
    }[damage])  # fmt: skip
    with pytest.raises(BadInput, match=r"model\.safetensors is not a readable safetensors file"):
        load_draft(single)


def test_a_pointer_in_the_place_of_a_file_is_called_that(single):
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n")
    with pytest.raises(BadInput, match=r"is a Git LFS pointer.*git lfs pull"):
        load_draft(single)


class Evil:
    def __reduce__(self):
        return os.system, ("touch " + os.environ["EYAS_TEST_EVIL"],)


def test_code_in_a_pickle_is_never_run(single, monkeypatch):
    (single / "model.safetensors").unlink()
    monkeypatch.setenv("EYAS_TEST_EVIL", str(single / "ran"))
    torch.save({"fc.weight": torch.zeros(2), "x": Evil()}, single / "pytorch_model.bin")
    with pytest.raises(BadInput, match="nothing in it was executed"):
        load_draft(single)
    (single / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Evil()}))
    with pytest.raises(BadInput, match="nothing in it was executed"):
        load_draft(single)
    assert not (single / "ran").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size = '32', expected a whole number"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"rms_norm_eps": float("nan")}, "expected a finite number"),
        ({"norm_output": "yes"}, "norm_output = 'yes', expected true or false"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "names 2 taps, but fc.weight is 3 taps wide"),
        ({"eagle_aux_hidden_state_layer_ids": [2, "4", 5]}, "expected a list of whole numbers"),
        ({"target_hidden_size": 50}, "no multiple of target_hidden_size = 50"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "spiral"}}, "spiral"),
        ({"draft_vocab_size": 121}, r"lm_head.weight in model.safetensors is \[120, 32\], expected \[121, 32\]"),
        # Sizes that would need terabytes, or a million modules, are compared with the file before anything is made.
        ({"intermediate_size": 1 << 36}, r"expected \[68719476736, 32\]"),
        ({"num_hidden_layers": 1 << 36}, "num_hidden_layers = 68719476736; at most 256 is believed"),
        ({"num_hidden_layers": 40}, "asks for 40 layers, the tensors make 1"),
        ({"vocab_size": 1 << 34}, "vocab_size = 17179869184; at most 16,777,216 is believed"),
        ({"rope_theta": 10**400}, "rope_theta = inf, expected a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor of RoPE = inf, expected a finite"),
        ({"num_attention_heads": 1 << 20}, r"expected \[8388608, 64\]"),
    ],
)
def test_impossible_config_values_are_named(single, changes, words):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(BadInput, match=words) as caught:
        load_draft(single)
    assert str(single) in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_theta", "factor", "x"]), inner),
    max_leaves=4,
)
KEYS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
    "draft_vocab_size", "num_hidden_layers", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling",
    "hidden_act", "max_position_embeddings", "eagle_aux_hidden_state_layer_ids", "eagle_config", "target_hidden_size",
    "norm_output", "fc_norm", "norm_before_fc", "sliding_window", "layer_types", "logit_scale",
    "partial_rotary_factor", "num_aux_hidden_states", "transformer_layer_config", "speculators_model_type",
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), json_values, min_size=1, max_size=2))
def test_any_config_is_read_or_refused_in_words(tmp_path_factory, changes):
    folder = write_flat(tmp_path_factory.mktemp("fuzz") / "d", *make_draft(), **PLAIN)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    try:
        load_draft(folder)
    except EyasError as error:
        assert str(folder) in str(error)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100000])
def test_an_unreadable_config_is_named(single, text):
    (single / "config.json").write_text(text)
    with pytest.raises(BadInput, match=r"config\.json"):
        load_draft(single)


def test_missing_files_are_named(tmp_path, single):
    with pytest.raises(BadInput, match="does not exist"):
        load_draft(tmp_path / "nowhere")
    (single / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(BadInput, match=r"has no config\.json"):
        load_draft(single)
    (single / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="holds no weights"):
        load_draft(single)


def test_integer_weights_are_refused(single):
    tensors = load_file(single / "model.safetensors")
    save_file({**tensors, "fc.weight": tensors["fc.weight"].to(torch.int8)}, single / "model.safetensors")
    with pytest.raises(BadInput, match=r"fc\.weight is stored as torch\.int8"):
        load_draft(single)


def test_a_directory_is_replaced_only_if_eyas_wrote_all_of_it(tmp_path):
    draft, vocab_map = make_draft()
    out = tmp_path / "out"
    out.mkdir()
    save_draft(draft, vocab_map, out)  # an empty one is free
    other, its_map = make_draft(1)
    save_draft(other, its_map, out)
    assert torch.equal(load_draft(out)[0].fc.weight, other.fc.weight)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"did not write \(notes\.txt\)"):
        save_draft(draft, vocab_map, out)
    (out / "notes.txt").unlink()
    (out / "eyas.json").unlink()
    with pytest.raises(BadInput, match="did not write"):
        save_draft(draft, vocab_map, out)
    assert torch.equal(load_file(out / "model.safetensors")["fc.weight"], other.fc.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_write_leaves_the_old_directory_and_nothing_else(tmp_path, monkeypatch):
    draft, vocab_map = make_draft()
    out = save_draft(draft, vocab_map, tmp_path / "out")
    other, its_map = make_draft(1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "atomic_write_json", full)
    with pytest.raises(EyasError, match="disk is full"):
        save_draft(other, its_map, out)
    assert torch.equal(load_draft(out)[0].fc.weight, draft.fc.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_writer_left_is_cleared(tmp_path, monkeypatch):
    draft, vocab_map = make_draft()
    dead = 2**22 + 1  # beyond the largest process id
    out = save_draft(draft, vocab_map, tmp_path / "out")
    out.rename(tmp_path / f".eyas-tmp-{dead}-ab12-out-old")  # killed between the two renames
    (tmp_path / f".eyas-tmp-{dead}-ab12-out").mkdir()
    other, its_map = make_draft(1)

    def stop(*_: object, **__: object) -> None:
        raise RuntimeError("stop")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(checkpoint, "atomic_save_safetensors", stop)
        save_draft(other, its_map, out)
    assert torch.equal(load_draft(out)[0].fc.weight, draft.fc.weight)  # put back
    save_draft(other, its_map, out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
