"""A matrix that a quantiser stored in fewer bits, back in floating point: what embedding and head of a target may be.

    dequantised("lm_head.weight", {"weight": fp8 [V, H], "weight_scale": [V, 1]}, (V, H), torch.bfloat16, None, folder)

Quantisers mostly leave both ends alone. Where they do not, only formats are read whose rule is certain
(docs/facts/quantised-targets.md); any other raises an error that names the tensor, its format and what to supply. Rows
are converted a block at a time in float32 and rounded once, so that no float32 copy of a table is ever whole.
    Exercise it:  pytest tests/test_target_quantised.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from eyas.errors import BadInput, Mismatch

BLOCK = 2048  # rows converted at once: 60 MB of float32 at a width of 7168
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Which part of a module is its weight, in the order of preference; the others say how to read it.
WEIGHTS = ("weight", "weight_packed", "qweight")
PARTS = (
    *WEIGHTS, "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point",
    "weight_shape", "weight_g_idx", "qzeros", "scales", "g_idx",
)  # fmt: skip
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SUPPLIED = "eyas/ends.safetensors"
"""File inside a target's folder whose tensors are taken instead of the checkpoint's, by the same names."""
REMEDY = f"give it unquantised, under this name, in {SUPPLIED} of that folder, or name the unquantised target"

Parts = Mapping[str, torch.Tensor]


def parts_of(name: str, names: Iterable[str]) -> dict[str, str]:
    """Part -> tensor name of all that belongs to the matrix `name` ("lm_head.weight"); {} where nothing does."""
    module, have = name.removesuffix("weight"), set(names)
    return {part: module + part for part in PARTS if module + part in have}


def plain_names(names: Iterable[str]) -> set[str]:
    """Names as if nothing were packed: `lm_head.weight_packed` and `lm_head.qweight` count as `lm_head.weight`."""
    endings = {f".{part}": ".weight" for part in WEIGHTS[1:]}
    out = set()
    for name in names:
        ending = next((e for e in endings if name.endswith(e)), None)
        out.add(name.removesuffix(ending) + endings[ending] if ending else name)
    return out


def dequantised(
    name: str, parts: Parts, sizes: tuple[int, int], dtype: torch.dtype, block: tuple[int, int] | None, where: str
) -> torch.Tensor:
    """The matrix [V, H]: as stored where it is plain floating point, else converted to `dtype`.

    parts: as `parts_of` names them, loaded; block: rows and columns of one scale, where the config says so; where:
    folder, for errors. Raises BadInput for a format whose rule is not known here, Mismatch for impossible shapes.
    """
    weight = parts.get("weight")
    if weight is not None and weight.dtype.is_floating_point and weight.dtype.itemsize > 1:
        return weight
    rows = _reader(name, parts, sizes, block, where)
    out = torch.empty(sizes, dtype=dtype)
    for start in range(0, sizes[0], BLOCK):
        part = slice(start, min(sizes[0], start + BLOCK))
        out[part] = rows(part)
    return out


def _reader(
    name: str, parts: Parts, sizes: tuple[int, int], block: tuple[int, int] | None, where: str
) -> Callable[[slice], torch.Tensor]:
    """Rows of the matrix as float32, for a slice of them."""
    weight, packed = parts.get("weight"), parts.get("weight_packed")
    scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
    held = ", ".join(f"{part} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for part, t in parts.items())
    if "qweight" in parts:
        kind = "GPTQ or AWQ" if "qzeros" in parts else "packed"
        raise BadInput(f"{where}: {name} is stored in a {kind} format ({held}), which Eyas does not read; {REMEDY}")
    if "weight_g_idx" in parts:
        raise BadInput(f"{where}: {name} has its columns reordered by activation ({held}); {REMEDY}")
    if scale is not None and weight is not None and weight.dtype in (*FP8, torch.int8):
        _expect(weight, sizes, name, where)
        if "weight_zero_point" in parts and bool(parts["weight_zero_point"].any()):
            raise BadInput(f"{where}: {name} is stored with zero points ({held}), which Eyas does not read; {REMEDY}")
        grid = _grid(scale, sizes, block, name, where)
        return lambda rows: weight[rows].float() * grid(rows)
    four = packed if packed is not None else weight
    if scale is not None and four is not None and four.dtype is torch.uint8:
        _expect(four, (sizes[0], sizes[1] // 2), name, where)
        grid, factor = _grid(scale, sizes, None, name, where), _factor(parts, scale, name, where, held)
        table = torch.tensor(FP4)
        # Low bits first (compressed-tensors compressors/nvfp4/helpers.py, unpack_fp4_from_uint8).
        return lambda rows: (
            table[torch.stack([four[rows] & 15, four[rows] >> 4], -1).flatten(1).int()] * (grid(rows) * factor)
        )
    if scale is not None and packed is not None and packed.dtype is torch.int32:
        return _integers(packed, scale, parts, sizes, name, where)
    raise BadInput(f"{where}: {name} is stored in a format that Eyas does not read ({held}); {REMEDY}")


def _factor(parts: Parts, scale: torch.Tensor, name: str, where: str, held: str) -> torch.Tensor | float:
    """What the scales of NVFP4 are multiplied with; 1 for MXFP4, whose scales are powers of two alone."""
    if "weight_scale_2" in parts:  # Model Optimizer (vLLM 0.32 modelopt.py:2062)
        return parts["weight_scale_2"].float().max()
    if "weight_global_scale" in parts:  # compressed-tensors: quantization/lifecycle/forward.py divides
        return 1.0 / parts["weight_global_scale"].float().max()
    if scale.dtype is torch.uint8:
        return 1.0
    raise BadInput(f"{where}: {name} is NVFP4 without its global scale ({held}); {REMEDY}")


def _grid(
    scale: torch.Tensor, sizes: tuple[int, int], block: tuple[int, int] | None, name: str, where: str
) -> Callable[[slice], torch.Tensor]:
    """Scales of a slice of rows, to be multiplied with them: one in all, one a row, or one a block.

    A one-byte integer is an exponent of two, 127 meaning 1 (OCP microscaling).
    """
    wide = (scale.float() - 127).exp2() if scale.dtype is torch.uint8 else scale.float()
    if wide.numel() == 1:
        return lambda rows: wide.reshape(1, 1)
    wide = wide.reshape(-1, 1) if wide.ndim == 1 else wide
    tall = _size(sizes[0], wide.shape[0], block[0] if block else None)
    broad = _size(sizes[1], wide.shape[1], block[1] if block else None)
    if wide.ndim != 2 or tall is None or broad is None:
        raise Mismatch(f"{where}: {name} is {list(sizes)}, but its scales are {list(scale.shape)}; download it again")

    def of(rows: slice) -> torch.Tensor:
        picked = wide[torch.arange(rows.start, rows.stop) // tall]
        return picked if wide.shape[1] == 1 else picked.repeat_interleave(broad, 1)[:, : sizes[1]]

    return of


def _size(whole: int, count: int, block: int | None) -> int | None:
    """Length of a block of which `count` cover `whole`: that of the config, else the one that fits exactly."""
    if block is not None and -(-whole // block) == count:
        return block
    return whole // count if count and whole % count == 0 else None


def _integers(
    packed: torch.Tensor, scale: torch.Tensor, parts: Parts, sizes: tuple[int, int], name: str, where: str
) -> Callable[[slice], torch.Tensor]:
    """pack-quantized of compressed-tensors: 4 or 8 bits, dense in 32-bit words, offset by half the range.

    (compressors/pack_quantized/helpers.py, pack_to_int32; zero points packed along the rows.)
    """
    bits = packed.shape[1] * 32 // sizes[1] if packed.ndim == 2 else 0
    if bits not in (4, 8) or packed.shape != (sizes[0], -(-sizes[1] * bits // 32)):
        raise BadInput(
            f"{where}: {name} is packed as {list(packed.shape)} words for {list(sizes)} numbers, neither 4 nor 8 bits "
            f"each, which Eyas does not read; {REMEDY}"
        )
    grid, half = _grid(scale, sizes, None, name, where), 1 << (bits - 1)
    zero = parts.get("weight_zero_point")
    zeros = None if zero is None else _unpack(zero.T.contiguous(), bits)[:, : sizes[0]].T  # [V, groups], offset too

    def of(rows: slice) -> torch.Tensor:
        numbers = _unpack(packed[rows], bits)[:, : sizes[1]].float()
        if zeros is None:
            return (numbers - half) * grid(rows)
        own = zeros[rows].float()
        return (numbers - own.repeat_interleave(sizes[1] // own.shape[1], 1)) * grid(rows)

    return of


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, w] -> the unsigned numbers in them, uint8 [n, w * 32 / bits], lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def _expect(tensor: torch.Tensor, sizes: tuple[int, int], name: str, where: str) -> None:
    if tuple(tensor.shape) != sizes:
        raise Mismatch(
            f"{where}: {name} has shape {list(tensor.shape)}, config.json says {list(sizes)}; download the model again"
        )
