"""A GGUF file becomes the very model it was made from, once, and whole or not at all.

    pytest -q tests/test_target_gguf.py

The GGUF is made here with the `gguf` package from the tiny target, q and k permuted as llama.cpp's converter does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import BadInput, EyasError
from eyas.target import gguf as module
from eyas.target.facts import read_facts
from eyas.target.gguf import NOTE, convert_gguf
from eyas.target.model import Target
from eyas.target.source import resolve_target

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp keeps the two halves of a rotary pair side by side: convert_hf_to_gguf.py, LlamaModel.permute."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def tiny_gguf(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf"
    facts, state = read_facts(tiny_target), load_file(tiny_target / "model.safetensors")
    tokenizer = json.loads((tiny_target / "tokenizer.json").read_text())
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(facts.num_layers)
    writer.add_context_length(facts.max_position)
    writer.add_embedding_length(facts.hidden_size)
    writer.add_feed_forward_length(facts.intermediate_size)
    writer.add_head_count(facts.num_heads)
    writer.add_head_count_kv(facts.num_kv_heads)
    writer.add_layer_norm_rms_eps(facts.rms_norm_eps)
    writer.add_rope_freq_base(facts.rope_theta)
    writer.add_rope_dimension_count(facts.head_dim)
    writer.add_vocab_size(facts.vocab_size)
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in vocab])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_eot_token_id(5)
    writer.add_chat_template((tiny_target / "chat_template.jinja").read_text())
    for name, weight in state.items():
        if name == "model.embed_tokens.weight":
            to = "token_embd.weight"
        elif name == "model.norm.weight":
            to = "output_norm.weight"
        else:
            layer, inner = name.removeprefix("model.layers.").split(".", 1)
            to = f"blk.{layer}.{NAMES[inner.removesuffix('.weight')]}.weight"
        if "q_proj" in name or "k_proj" in name:
            weight = _permuted(weight, facts.num_heads if "q_proj" in name else facts.num_kv_heads)
        writer.add_tensor(to, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_target(tiny_gguf, tmp_path_factory.mktemp("cache"))


def test_weights_facts_and_template_survive(converted: Path, tiny_target: Path):
    here, there = load_file(converted / "model.safetensors"), load_file(tiny_target / "model.safetensors")
    here.pop("lm_head.weight", None)
    assert set(here) == set(there)
    for name, weight in there.items():
        assert torch.equal(here[name], weight), name
    mine, original = read_facts(converted), read_facts(tiny_target)
    assert mine.eos_ids == (2, 5), "the end of a turn that the GGUF names apart"
    told = {k: v for k, v in original.to_dict().items() if k != "eos_ids"}
    assert {k: v for k, v in mine.to_dict().items() if k != "eos_ids"} == told
    assert (converted / "chat_template.jinja").read_text() == (tiny_target / "chat_template.jinja").read_text()
    for file in converted.glob("*.json"):
        assert str(converted.parents[2]) not in file.read_text(), f"{file.name} names a place on this machine"


def test_states_are_those_of_the_original(converted: Path, tiny_target: Path):
    ids = torch.tensor([[5, 60, 7, 100, 2]])
    taps, final = Target.load(converted).states(ids)
    expected_taps, expected_final = Target.load(tiny_target).states(ids)
    assert torch.equal(taps, expected_taps)
    assert torch.equal(final, expected_final)


def test_the_tokenizer_splits_digits_as_its_kind_does(converted: Path, tiny_target: Path):
    tokenizer = Target.load(converted).tokenizer
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hawk 12"}], tokenize=False)
    original = Target.load(tiny_target).tokenizer
    assert (
        tokenizer(chat, add_special_tokens=False)["input_ids"] == original(chat, add_special_tokens=False)["input_ids"]
    )
    text = "x\n  7"  # "smollm" splits the digit off first, so the three blanks before it stay together
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == ["x", "ĊĠĠ", "7"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 2


def test_it_is_converted_once_and_says_nothing(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    folder = convert_gguf(tiny_gguf, tmp_path)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(module, "_write", lambda *a: pytest.fail("converted again"))
    assert convert_gguf(tiny_gguf, tmp_path) == folder
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_a_conversion_that_breaks_off_leaves_nothing(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def breaks(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device", str(folder / "model.safetensors"))

    monkeypatch.setattr(module, "_write", breaks)
    with pytest.raises(EyasError, match="disk is full"):
        convert_gguf(tiny_gguf, tmp_path)
    assert list(tmp_path.iterdir()) == []
    dead = tmp_path / f".eyas-tmp-{2**22 + 1}-aa-tiny"  # left by a killed process; no pid is that large
    dead.mkdir()
    monkeypatch.setattr(module, "_write", lambda gguf, folder: (folder / "config.json").write_text("{}"))
    folder = convert_gguf(tiny_gguf, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]
    assert json.loads((folder / NOTE).read_text())["gguf"] == tiny_gguf.name


def test_another_content_is_another_conversion(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_write", lambda gguf, folder: None)
    first = convert_gguf(tiny_gguf, tmp_path)
    copy = tmp_path / tiny_gguf.name
    data = bytearray(tiny_gguf.read_bytes())
    data[-5] ^= 1
    copy.write_bytes(data)
    os.utime(copy, ns=(tiny_gguf.stat().st_atime_ns, tiny_gguf.stat().st_mtime_ns))
    assert convert_gguf(copy, tmp_path) != first


def test_a_pre_tokenizer_that_nobody_knows_is_said_aloud(
    tiny_gguf: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for file in converted.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    plain = json.loads((tmp_path / "tokenizer.json").read_text())
    plain["pre_tokenizer"] = plain["pre_tokenizer"]["pretokenizers"][1]
    for kind, told in [("gpt-2", False), ("from-the-future", True)]:
        (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
        monkeypatch.setattr(module, "_fields", lambda gguf, kind=kind: {"tokenizer.ggml.pre": kind})
        module._mend(tiny_gguf, tmp_path)
        assert json.loads((tmp_path / "tokenizer.json").read_text()) == plain
        assert ("from-the-future" in caplog.text) is told


def test_what_is_no_gguf_is_refused(tmp_path: Path, tiny_gguf: Path):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(BadInput, match="does not start with the letters GGUF"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "cache")
    (tmp_path / "cut.gguf").write_bytes(tiny_gguf.read_bytes()[:5000])
    with pytest.raises(BadInput, match=r"cut\.gguf is not a readable GGUF file.*Download or convert it again"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "cache")
    with pytest.raises(BadInput, match="cannot be read"):
        convert_gguf(tmp_path / "missing.gguf", tmp_path / "cache")
