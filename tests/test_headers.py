"""Safetensors headers: what the library writes is read alike; what is forged is refused by name, and never trusted.

pytest -q tests/test_headers.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from eyas.errors import BadInput
from eyas.headers import BYTES, read_array, read_header

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.int64,
    torch.int32,
    torch.uint8,
]


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=5), st.booleans())
def test_what_the_library_writes_is_read_alike(tmp_path_factory, kinds, with_metadata):
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    rng = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": (torch.rand(shape, generator=rng) * 9).to(dtype) for i, (dtype, shape) in enumerate(kinds)}
    save_file(tensors, path, {"a": "b"} if with_metadata else None)
    header = read_header(path)
    assert header.entries.keys() == tensors.keys()
    assert header.metadata == ({"a": "b"} if with_metadata else {})
    for name, tensor in tensors.items():
        entry = header.entries[name]
        assert entry.shape == tuple(tensor.shape)
        mine = np.array(read_array(path, entry))
        wanted = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        np.testing.assert_array_equal(mine, wanted.numpy())


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"\xff\xfe", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        ([1], b"", "is a list"),
        ({"w": 3}, b"", "'w' must have"),
        (one(dtype="F31"), b"\0" * 8, "dtype 'F31'"),
        (one(dtype=["F32"]), b"\0" * 8, "dtype"),
        (one(shape=[-2]), b"\0" * 8, "shape"),
        (one(shape=[True, 2]), b"\0" * 8, "shape"),
        (one(shape=[2.0]), b"\0" * 8, "shape"),
        (one(shape=[1] * 99), b"\0" * 4, "shape"),
        (one(shape=[1 << 40, 1 << 40]), b"\0" * 8, "needs"),
        (one(shape=[1 << 70]), b"\0" * 8, "shape"),
        (one(offsets=[8, 0]), b"\0" * 8, "lies at bytes"),
        (one(offsets=[0, 1 << 40]), b"\0" * 8, "the file ends at"),
        (one(offsets=[0]), b"\0" * 8, "data_offsets"),
        (one(offsets=[0, 4]), b"\0" * 4, "takes 4 bytes"),
        (one(), b"\0" * 4, "the file ends at"),
        (one(), b"\0" * 12, "its tensors end at"),
        (one(offsets=[4, 12]), b"\0" * 12, "leaves a hole"),
        (one() | {"v": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"\0" * 12, "v overlaps"),
        (one() | {"__metadata__": {"a": 1}}, b"\0" * 8, "__metadata__"),
        (b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
         b"\0", "'w' is given twice"),
    ],
)  # fmt: skip
def test_what_is_forged_is_refused_by_name(tmp_path: Path, header: object, data: bytes, words: str):
    path = write(tmp_path / "forged.safetensors", header, data)
    with pytest.raises(BadInput, match=r"forged\.safetensors is not a readable safetensors file") as caught:
        read_header(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("length", [0, 1, 1 << 40, (1 << 64) - 1])
def test_a_forged_header_length_allocates_nothing(tmp_path: Path, length: int):
    path = write(tmp_path / "x.safetensors", one(), b"\0" * 8, length)
    with pytest.raises(BadInput, match="not a readable safetensors file"):
        read_header(path)
    with pytest.raises(BadInput, match=r"gone\.safetensors cannot be read"):
        read_header(tmp_path / "gone.safetensors")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_as_the_library_reads_it_or_refused(tmp_path_factory, data):
    """Whatever single change: never another exception, and nothing is accepted that the library refuses."""
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "d2t": torch.arange(4)}, path, {"k": "v"})
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[place] = data.draw(st.integers(0, 255))
    else:
        raw = raw[:place]
    path.write_bytes(raw)
    try:
        mine = {name: entry.shape for name, entry in read_header(path).entries.items()}
    except BadInput:
        return
    with safe_open(path, framework="pt") as handle:
        theirs = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    assert mine == theirs


def test_sizes_of_dtypes_are_the_librarys():
    for code, torch_dtype in {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "BOOL": torch.bool,
    }.items():
        assert BYTES[code] == torch_dtype.itemsize


def test_reading_a_header_needs_no_torch(tmp_path: Path):
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    code = (
        "import sys; from pathlib import Path; from eyas.headers import read_header; "
        f"read_header(Path({str(tmp_path / 'x.safetensors')!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
