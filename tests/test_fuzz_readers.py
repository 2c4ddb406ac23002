"""Whatever lies in a draft's directory, its readers answer or refuse in a sentence: no other exception, ever.

What once came out as something else is kept in CORPUS.   pytest -q tests/test_fuzz_readers.py
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drafts import MLA, make_draft, write_flat, write_latent, write_speculators
from eyas.cli.inspect import command as inspect_command
from eyas.describe import inspect_draft
from eyas.doctor.examine import examine
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.draft.files import open_folder
from eyas.errors import EyasError

IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
    "draft_vocab_size", "num_hidden_layers", "max_position_embeddings", "target_hidden_size", "num_aux_hidden_states",
    "sliding_window", *MLA,
)  # fmt: skip
OTHERS = (
    "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "hidden_act", "hidden_activation", IDS,
    "eagle_config", "text_config", "norm_output", "fc_norm", "norm_before_fc", "norm_before_residual", "layer_types",
    "use_sliding_window", "logit_scale", "partial_rotary_factor", "transformer_layer_config", "speculators_model_type",
    "speculators_version", "architectures", "model_type", "parallel_drafting", "mla_use_nope", "tie_word_embeddings",
    "target_model_type", "_torchspec_version", "bias",
)  # fmt: skip
INNER = (IDS, "rope_theta", "rope_type", "type", "factor", "hidden_size", "vocab_size", "full_attention",
         "sliding_attention", "mrope_section", "next_layer_regular", "x")  # fmt: skip
whole = st.integers() | st.sampled_from([-1, 0, 1, 2, 3, 8, 32, 120, 300, 1 << 31, 1 << 40, 1 << 63, 10**400])
texts = st.text(max_size=5) | st.sampled_from(
    ["silu", "default", "yarn", "llama3", "dynamic", "longrope", "mrope", "eagle3", "\ud800", "LlamaForCausalLMEagle3",
     "Eagle3DeepseekV2ForCausalLM", "sliding_attention"]
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | whole | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=3),
    max_leaves=5,
)
changes = st.dictionaries(st.sampled_from(SIZES), whole | st.none(), max_size=1).flatmap(
    lambda sizes: st.dictionaries(st.sampled_from(SIZES + OTHERS), json_values, max_size=3).map(lambda c: c | sizes)
)


def answers_or_refuses(folder: Path) -> None:
    """Every reader, on one directory. A refusal names something in it, in one line."""
    for reader in READERS:
        try:
            reader(folder)
        except EyasError as error:
            assert folder.name in str(error)
            assert "\n" not in str(error).strip()


READERS: tuple[Callable[[Path], Any], ...] = (
    lambda folder: CliRunner().invoke(inspect_command, [str(folder), "--all"], catch_exceptions=False),
    lambda folder: json.dumps(inspect_draft(folder)),
    lambda folder: json.dumps([finding.to_dict() for finding in examine(folder)]),
    load_draft,
)


def make_flat(folder: Path) -> Path:
    return write_flat(folder, *make_draft(), **{IDS: [2, 4, 5]})


def make_speculators(folder: Path) -> Path:
    return write_speculators(folder, *make_draft())


def make_latent(folder: Path) -> Path:
    return write_latent(folder, **{IDS: [2, 4, 5]})


def make_own(folder: Path) -> Path:
    return save_draft(*make_draft(), folder)


MAKERS = {"flat": make_flat, "speculators": make_speculators, "latent": make_latent, "own": make_own}


def change_json(file: Path, changes: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("made", MAKERS)
@settings(max_examples=40, deadline=None)
@given(changes=changes, inside=st.booleans())
def test_any_config(tmp_path_factory, made: str, changes: dict[str, Any], inside: bool):
    folder = MAKERS[made](tmp_path_factory.mktemp("fuzz") / "draft")
    config = json.loads((folder / "config.json").read_text())
    if inside and isinstance(config.get("transformer_layer_config"), dict):
        changes = {"transformer_layer_config": config["transformer_layer_config"] | changes}
    change_json(folder / "config.json", changes)
    answers_or_refuses(folder)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), value=json_values)
def test_any_eyas_json(tmp_path_factory, data, value):
    folder = make_own(tmp_path_factory.mktemp("fuzz") / "draft")
    eyas = json.loads((folder / "eyas.json").read_text())
    place = data.draw(st.sampled_from(["", "shape", "conventions"]))
    table = eyas[place] if place else eyas
    table[data.draw(st.sampled_from(sorted(table)))] = value
    (folder / "eyas.json").write_text(json.dumps(eyas))
    answers_or_refuses(folder)


names = st.sampled_from(
    ["fc.weight", "d2t", "t2d", "lm_head.weight", "norm.weight", "embed_tokens.weight", "fc_norm.0.weight",
     "fc_norm.7.weight", "input_norm.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.qkv_proj.weight",
     "midlayer.self_attn.kv_b_proj.weight", "midlayer.self_attn.fused_qkv_a_proj_with_mqa.weight",
     "midlayer.mlp.gate_up_proj.weight", "layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight",
     "layers.999999999.hidden_norm.weight", "layers.0.hidden_norm.weight", "model.fc.weight", "fc.bias", "mask_hidden",
     "midlayer.self_attn.o_proj.bias", "x\n"]
)  # fmt: skip
shapes = st.lists(st.sampled_from([0, 1, 2, 32, 64, 96, 120, 300]), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool,
                          torch.float8_e4m3fn, torch.complex64, torch.uint16])  # fmt: skip


@pytest.mark.filterwarnings("ignore:Casting complex values")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tensors(tmp_path_factory, data):
    """Tensors left out, added, misshapen, of other types, full of NaN; in safetensors or a pickle."""
    folder = make_flat(tmp_path_factory.mktemp("fuzz") / "draft")
    tensors = load_file(folder / "model.safetensors")
    for name in data.draw(st.lists(names, max_size=3)):
        kind = data.draw(st.sampled_from(["gone", "new", "cast", "nan"]))
        held = tensors.pop(name, torch.zeros(32))
        if kind == "cast":
            tensors[name] = held.to(data.draw(dtypes))
        elif kind == "nan":
            tensors[name] = torch.full(held.shape, float("nan"))
        elif kind == "new":
            tensors[name] = torch.zeros(data.draw(shapes), dtype=data.draw(dtypes))
    if data.draw(st.booleans()):
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    else:
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    answers_or_refuses(folder)


known_names = [
    "model-1.safetensors", "model-2.safetensors", ".", "..", "config.json", "a/../model-1.safetensors", "x" * 300,
    "\ud800", "a\nb", "sub", "sub/x.safetensors", "model.safetensors.index.json", "/", "\0",
]  # fmt: skip
file_names = st.sampled_from(known_names) | st.text(max_size=8)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_index(tmp_path_factory, data):
    folder = write_flat(
        tmp_path_factory.mktemp("fuzz") / "draft", *make_draft(), container="sharded", **{IDS: [2, 4, 5]}
    )
    (folder / "sub").mkdir()
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    kind = data.draw(st.sampled_from(["names", "map", "whole"]))
    if kind == "names":
        for name in data.draw(st.lists(st.sampled_from(sorted(listed)), min_size=1, max_size=3)):
            listed[name] = data.draw(file_names)
        index.write_text(json.dumps({"weight_map": listed}))
    elif kind == "map":
        index.write_text(json.dumps({"weight_map": data.draw(json_values)}))
    else:
        index.write_text(json.dumps(data.draw(json_values)))
    try:
        held = open_folder(folder)
    except EyasError as error:
        assert folder.name in str(error)
        return
    assert all(file.resolve().is_relative_to(folder.resolve()) for file in held.files)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_to_a_pickle(tmp_path_factory, data):
    """One byte changed, or the end cut off: zip directory, pickle or numbers."""
    folder = write_flat(tmp_path_factory.mktemp("fuzz") / "draft", *make_draft(), container="bin", **{IDS: [2, 4, 5]})
    file = folder / "pytorch_model.bin"
    raw = bytearray(file.read_bytes())
    start = data.draw(st.sampled_from([0, max(0, len(raw) - 4000)]))
    place = min(len(raw) - 1, start + data.draw(st.integers(0, 4000)))
    if data.draw(st.booleans()):
        raw[place] = data.draw(st.integers(0, 255))
    else:
        raw = raw[:place]
    file.write_bytes(raw)
    answers_or_refuses(folder)


# ---------------------------------------------------------------- what once came out as something else

CORPUS: dict[str, tuple[Callable[[Path], Any], str]] = {}


def kept(words: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """Keep a case: `make(folder)`, and words of the sentence with which it is refused ("" where it is answered)."""

    def keep(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
        CORPUS[make.__name__] = (make, words)
        return make

    return keep


@kept("num_hidden_layers = 2147483648; at most 256 is believed")
def layers_beside_eyas_json(folder: Path) -> None:
    """The models of the engines made a list of them, gigabytes long."""
    change_json(make_own(folder) / "config.json", {"num_hidden_layers": 1 << 31})


@kept("num_layers = 1.0 must be a whole number")
def a_number_of_layers_with_a_point(folder: Path) -> None:
    change_json(make_own(folder) / "eyas.json", {"shape": {**make_draft()[0].shape.to_dict(), "num_layers": 1.0}})


@kept("'list' object has no attribute")
def conventions_that_are_a_list(folder: Path) -> None:
    change_json(make_own(folder) / "eyas.json", {"conventions": []})


@kept("target = [1], expected an object")
def a_target_that_is_a_list(folder: Path) -> None:
    change_json(make_own(folder) / "eyas.json", {"target": [1]})


@kept("rope_theta = inf, expected a finite number")
def a_number_of_400_digits(folder: Path) -> None:
    change_json(make_flat(folder) / "config.json", {"rope_theta": 10**400})


@kept("surrogates not allowed")
def half_a_character(folder: Path) -> None:
    """Nothing that a terminal shows can hold it."""
    change_json(make_flat(folder) / "config.json", {"architectures": ["\ud800"]})


def replaced(folder: Path, **changes: torch.Tensor | None) -> None:
    file = make_flat(folder) / "model.safetensors"
    tensors = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@kept("fc.weight in model.safetensors is []")
def a_scalar_fc(folder: Path) -> None:
    replaced(folder, fc__weight=torch.tensor(1.0))


@kept("d2t is [0], expected [120]")
def an_empty_map(folder: Path) -> None:
    replaced(folder, d2t=torch.zeros(0, dtype=torch.int64))


@kept("NaN or infinite values in norm.weight (2)")
def weights_that_are_no_numbers(folder: Path) -> None:
    replaced(folder, norm__weight=torch.tensor([float("nan"), float("inf")] + [1.0] * 30))


@kept("fc.weight is stored as F8_E4M3")
def weights_of_eight_bits(folder: Path) -> None:
    replaced(folder, fc__weight=torch.zeros(32, 96).to(torch.float8_e4m3fn))


@kept("is no name of a tensor")
def a_name_over_two_lines(folder: Path) -> None:
    file = make_flat(folder) / "model.safetensors"
    save_file({**load_file(file), "x\ny": torch.zeros(1)}, file)


@kept("'t9999' is given twice")
def ten_thousand_names_one_of_them_twice(folder: Path) -> None:
    """Finding the second took the square of their number."""
    entries = [f'"t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in (*range(10_000), 9_999)]
    raw = ("{" + ",".join(entries) + "}").encode()
    (make_flat(folder) / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)


@kept("its header is not JSON")
def a_header_in_another_encoding(folder: Path) -> None:
    """Python's json takes UTF-16, the format does not."""
    raw = json.dumps({"x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode("utf-16")
    (make_flat(folder) / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)


def sharded_as(folder: Path, name: str) -> None:
    write_flat(folder, *make_draft(), container="sharded", **{IDS: [2, 4, 5]})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))


@kept("leads out of the folder")
def a_shard_with_a_name_that_no_file_has(folder: Path) -> None:
    sharded_as(folder, "x" * 5000)


@kept("which cannot be")
def a_shard_in_a_loop_of_links(folder: Path) -> None:
    sharded_as(folder, "loop/x.safetensors")
    (folder / "loop").symlink_to("loop")


def pickled(folder: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """A `.bin` whose parts went through `change(name, content)`."""
    file = write_flat(folder, *make_draft(), container="bin", **{IDS: [2, 4, 5]}) / "pytorch_model.bin"
    out = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(out, "w", compression) as new:
        for part in old.infolist():
            new.writestr(part.filename, change(part.filename, old.read(part.filename)))
    file.write_bytes(out.getvalue())


@kept("its parts are compressed")
def a_bomb(folder: Path) -> None:
    """64 MiB in 64 KiB."""
    pickled(folder, lambda name, raw: bytes(1 << 26) if name.endswith("/data/0") else raw, zipfile.ZIP_DEFLATED)


@kept("cannot be read as plain tensors")
def numbers_that_are_not_there(folder: Path) -> None:
    """Sizes in the pickle that its storages do not have: torch alone reads past their end."""
    pickled(folder, lambda name, raw: raw[:16] if "/data/" in name else raw)


def with_tensor(folder: Path, tensor: torch.Tensor) -> None:
    file = make_flat(folder) / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    torch.save({**tensors, "fc.weight": tensor}, folder / "pytorch_model.bin")


@kept("'fc.weight' is no plain tensor")
def one_number_said_to_be_many(folder: Path) -> None:
    with_tensor(folder, torch.zeros(1).expand(32, 1 << 40))


@kept("'fc.weight' is no plain tensor")
def a_sparse_tensor(folder: Path) -> None:
    with_tensor(folder, torch.sparse_coo_tensor([[0], [0]], [1.0], (1 << 30, 1 << 30), check_invariants=True))


@kept("'fc.weight' is no plain tensor")
def a_tensor_of_no_device(folder: Path) -> None:
    with_tensor(folder, torch.zeros(1 << 20, 1 << 20, device="meta"))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 7",)


@kept("which is code, not data")
def code_in_a_training_state(folder: Path) -> None:
    file = write_flat(folder, *make_draft(), container="training_state") / "training_state.pt"
    torch.save({"draft_state_dict": {"fc.weight": Evil()}}, file)


@pytest.mark.parametrize("name", CORPUS)
def test_what_was_found_stays_found(tmp_path: Path, name: str):
    make, words = CORPUS[name]
    make(tmp_path / "draft")
    answers_or_refuses(tmp_path / "draft")
    with pytest.raises(EyasError) as caught:
        load_draft(tmp_path / "draft")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 700
