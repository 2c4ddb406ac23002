"""Embedding and head as quantisers store them, against references written out, compressed-tensors and transformers.

The comparison with compressed-tensors runs where it is installed: pip install --no-deps compressed-tensors loguru

pytest -q tests/test_target_quantised.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eyas.errors import BadInput, Mismatch
from eyas.target import quantised
from eyas.target.facts import read_facts
from eyas.target.quantised import FP4, SUPPLIED, dequantised
from eyas.target.weights import load_ends

V, H = 300, 64
SIZES = (V, H)


def table(seed: int = 0) -> torch.Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(seed))


def read(parts: dict[str, torch.Tensor], block: tuple[int, int] | None = None) -> torch.Tensor:
    return dequantised("lm_head.weight", parts, SIZES, torch.float32, block, "folder")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Blocks that end inside the table and inside an FP8 block."""
    monkeypatch.setattr(quantised, "BLOCK", 77)


def test_plain_tables_are_returned_as_stored_without_a_copy():
    plain = table().bfloat16()
    assert read({"weight": plain, "weight_packed": torch.zeros(1, dtype=torch.int32)}) is plain


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (V,), (V, 1)])
def test_fp8_with_one_scale_in_all_or_a_row(name: str, shape: tuple[int, ...]):
    weight, scale = table().to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    expected = weight.float() * (scale if scale.numel() == 1 else scale.reshape(V, 1))
    assert torch.equal(read({"weight": weight, name: scale}), expected)


@pytest.mark.parametrize("block", [(128, 32), (64, 48), (7, 64)])
def test_fp8_blocks_also_where_the_last_is_cut(block: tuple[int, int]):
    rows, columns = -(-V // block[0]), -(-H // block[1])
    weight, scale = table().to(torch.float8_e4m3fn), torch.rand(rows, columns) + 0.5
    expected = torch.empty(V, H)
    for i in range(V):
        for j in range(H):
            expected[i, j] = weight[i, j].float() * scale[i // block[0], j // block[1]]
    assert torch.equal(read({"weight": weight, "weight_scale_inv": scale}, block), expected)


def test_fp8_blocks_are_those_of_transformers():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scale = table().to(torch.float8_e4m3fn), torch.rand(3, 2) + 0.5
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    assert torch.equal(read({"weight": weight, "weight_scale_inv": scale}, (100, 32)), theirs)


def _nibbles(seed: int, rows: int = V, columns: int = H) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_nvfp4_of_both_tools_and_mxfp4():
    codes = _nibbles(1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    values = torch.tensor(FP4)[codes.int()]
    scale = (torch.rand(V, H // 16) * 4 + 0.1).to(torch.float8_e4m3fn)
    each = values * scale.float().repeat_interleave(16, 1)
    two, one = torch.tensor(0.03), torch.tensor([320.0])
    torch.testing.assert_close(read({"weight": packed, "weight_scale": scale, "weight_scale_2": two}), each * two)
    torch.testing.assert_close(
        read({"weight_packed": packed, "weight_scale": scale, "weight_global_scale": one}), each / one
    )
    exponent = torch.randint(120, 134, (V, H // 32), dtype=torch.uint8)
    power = torch.tensor(2.0).pow(exponent.float() - 127).repeat_interleave(32, 1)
    assert torch.equal(read({"weight_packed": packed, "weight_scale": exponent}), values * power)
    with pytest.raises(BadInput, match="NVFP4 without its global scale"):
        read({"weight_packed": packed, "weight_scale": scale})


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers(bits: int):
    """Words written out by hand: number j of a word at its bits `bits * j`, offset by half the range."""
    numbers = torch.randint(-(1 << bits - 1), 1 << bits - 1, (V, H))
    each = 32 // bits
    words = torch.zeros(V, H // each, dtype=torch.int64)
    for j in range(each):
        words |= (numbers[:, j::each] + (1 << bits - 1)) << bits * j
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    scale = torch.rand(V, H // 16) + 0.1
    expected = numbers * scale.repeat_interleave(16, 1)
    shape = torch.tensor([V, H])
    assert torch.equal(read({"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}), expected)


def _theirs(kind: str, bits: int, symmetric: bool, group: int | None) -> Any:
    """(parts as compressed-tensors writes them, what it reads of them)"""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = {"nvfp4-pack-quantized": "tensor_group"}.get(kind, "group" if group else "channel")
    number = "float" if "float" in kind or "fp" in kind else "int"
    args = QuantizationArgs(num_bits=bits, type=number, symmetric=symmetric, strategy=strategy, group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scale = torch.rand(V, H // group if group else 1) * 0.2 + 0.1
    state = {"weight": table(), "weight_scale": scale}
    if kind.startswith("nvfp4"):
        state |= {
            "weight_scale": (scale * 400).to(torch.float8_e4m3fn).float(),
            "weight_global_scale": torch.tensor([300.0]),
        }
    if not symmetric:
        state["weight_zero_point"] = torch.randint(-8, 8, scale.shape, dtype=torch.int8)
    tool = BaseCompressor.get_value_from_registry(kind)
    parts = tool.compress(state, scheme)
    return parts, tool.decompress(parts, scheme)["weight"]


@pytest.mark.parametrize(
    ("kind", "bits", "symmetric", "group"),
    [
        ("pack-quantized", 4, True, 16), ("pack-quantized", 4, True, None), ("pack-quantized", 8, True, 32),
        ("pack-quantized", 4, False, 16), ("nvfp4-pack-quantized", 4, True, 16), ("mxfp4-pack-quantized", 4, True, 32),
        ("float-quantized", 8, True, None), ("int-quantized", 8, True, None),
    ],
)  # fmt: skip
def test_what_compressed_tensors_reads(kind: str, bits: int, symmetric: bool, group: int | None):
    parts, theirs = _theirs(kind, bits, symmetric, group)
    assert "weight" not in parts or parts["weight"].dtype.itemsize == 1
    apart = 2**-7 if theirs.dtype is torch.bfloat16 else 1e-6  # NVFP4 is multiplied out in bfloat16 there
    torch.testing.assert_close(read(parts), theirs.float(), rtol=apart, atol=0)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"qweight": torch.zeros(8, V, dtype=torch.int32), "qzeros": torch.zeros(1, 1)}, "a GPTQ or AWQ format"),
        ({"weight_packed": torch.zeros(V, 6, dtype=torch.int32), "weight_scale": torch.ones(V, 1)}, "neither 4 nor 8"),
        ({"weight": torch.zeros(V, H, dtype=torch.int8)}, r"does not read \(weight int8 \[300, 64\]\)"),
        (
            {
                "weight_packed": torch.zeros(V, 8, dtype=torch.int32),
                "weight_scale": torch.ones(V, 4),
                "weight_g_idx": torch.zeros(H),
            },
            "reordered",
        ),
    ],
)
def test_other_formats_name_tensor_format_and_remedy(parts: dict[str, torch.Tensor], words: str):
    with pytest.raises(BadInput, match=rf"folder: lm_head\.weight .*{words}.*eyas/ends\.safetensors"):
        read(parts)


def test_scales_that_do_not_fit_are_refused():
    weight = table().to(torch.float8_e4m3fn)
    with pytest.raises(Mismatch, match=r"is \[300, 64\], but its scales are \[7, 2\]"):
        read({"weight": weight, "weight_scale_inv": torch.ones(7, 2)}, (128, 32))


# ---------------------------------------------------------------- whole targets


def folder(path: Path, tensors: dict[str, torch.Tensor], **quantization: Any) -> Path:
    text = {
        "model_type": "llama", "hidden_size": H, "vocab_size": V, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**text, "quantization_config": quantization}))
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_target_whose_head_is_fp8_blocks(tmp_path: Path):
    head = table().to(torch.float8_e4m3fn)
    scale = torch.rand(-(-V // 128), 1) + 0.5
    tensors = {
        "model.embed_tokens.weight": table(1).bfloat16(), "model.norm.weight": torch.ones(H),
        "lm_head.weight": head, "lm_head.weight_scale_inv": scale,
    }  # fmt: skip
    where = folder(tmp_path, tensors, quant_method="fp8", weight_block_size=[128, 64])
    ends = load_ends(where)
    assert torch.equal(ends.embedding, tensors["model.embed_tokens.weight"])
    expected = head.float() * scale.repeat_interleave(128, 0)[:V]
    assert ends.head.dtype is torch.bfloat16
    assert torch.equal(ends.head, expected.bfloat16())
    assert read_facts(where).scale_block == (128, 64)


def test_an_excluded_head_beside_quantised_blocks_is_read_as_it_is(tmp_path: Path):
    tensors = {
        "model.embed_tokens.weight": table(1).bfloat16(), "model.norm.weight": torch.ones(H),
        "lm_head.weight": table().bfloat16(),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4, dtype=torch.uint8),
        "model.layers.0.self_attn.q_proj.weight_scale_2": torch.ones(1),
    }  # fmt: skip
    ends = load_ends(folder(tmp_path, tensors, quant_method="modelopt", exclude_modules=["lm_head"]))
    assert torch.equal(ends.head, tensors["lm_head.weight"])


def test_a_head_that_cannot_be_read_is_taken_from_what_the_user_supplies(tmp_path: Path):
    tensors = {
        "language_model.model.embed_tokens.weight": table(1).bfloat16(),
        "language_model.model.norm.weight": torch.ones(H),
        "language_model.lm_head.qweight": torch.zeros(H // 8, V, dtype=torch.int32),
        "language_model.lm_head.qzeros": torch.zeros(1, V // 8, dtype=torch.int32),
        "language_model.lm_head.scales": torch.ones(1, V),
    }  # fmt: skip
    where = folder(tmp_path, tensors, quant_method="gptq", bits=4)
    with pytest.raises(BadInput, match=r"language_model\.lm_head\.weight is stored in a GPTQ or AWQ format"):
        load_ends(where)
    (where / SUPPLIED).parent.mkdir()
    save_file({"language_model.lm_head.weight": table()}, where / SUPPLIED)
    assert torch.equal(load_ends(where).head, table())


def test_no_float32_copy_of_the_table_is_ever_whole(monkeypatch: pytest.MonkeyPatch):
    """Peak of what torch allocates beside input and output, in a table of many blocks."""
    monkeypatch.setattr(quantised, "BLOCK", 64)
    rows, width = 8192, 64
    weight = torch.zeros(rows, width, dtype=torch.float8_e4m3fn)
    largest = 0
    plain = torch.Tensor.float

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "float", watched)
    dequantised("t", {"weight": weight, "weight_scale": torch.ones(rows)}, (rows, width), torch.bfloat16, None, "f")
    assert largest <= max(rows, 64 * width)
