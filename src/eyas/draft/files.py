"""The files of a draft directory: its config and its tensors by name, shape and dtype, read only when asked for.

    folder = open_folder("path/to/draft"); folder.tensors["fc.weight"].load()

Safetensors (single, sharded with an index, or several files side by side), `.bin` and `.pt`; pickles only with
weights_only. Spelling is not interpreted here: that is what dialects/ are for.   pytest tests/test_checkpoint_files.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from .headers import read_array, read_header

if TYPE_CHECKING:
    import numpy as np
    import torch

EYAS_JSON = "eyas.json"
CONFIG = "config.json"
# Where a training state keeps the draft's tensors: SpecForge (export/checkpoint_io.py) and what others call it.
NESTED_STATES = ("draft_state_dict", "draft_model", "model_state_dict", "state_dict", "model", "module")
READABLE = ("F64", "F32", "F16", "BF16", "BOOL", "I64", "I32", "I16", "I8", "U8")
"""Codes of dtypes, as safetensors spells them, in which a draft's tensors may be stored."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor that has not been read yet."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Code as in safetensors: F32, BF16, I64."""
    file: Path
    load: Callable[[], torch.Tensor]
    array: Callable[[], np.ndarray[Any, Any]]
    """Its numbers, mapped where the file is safetensors, without torch; bfloat16 as bits (uint16)."""


@dataclass(frozen=True)
class DraftFolder:
    """What lies in a draft directory, uninterpreted."""

    path: Path
    config: Mapping[str, Any]
    eyas: Mapping[str, Any] | None
    """The content of eyas.json where Eyas wrote the directory."""
    tensors: Mapping[str, TensorRef]
    files: tuple[Path, ...]
    """The weight files that were read."""

    @property
    def config_file(self) -> Path:
        """For messages."""
        return self.path / CONFIG


def open_folder(path: str | Path) -> DraftFolder:
    """Open a draft directory, or a single weight file that lies beside its config.json.

    Raises BadInput naming the file for anything that is missing, damaged, or leads out of the folder.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise BadInput(f"{path} does not exist; give a directory with config.json and the draft's weights")
    files, placed = ([path], None) if path.is_file() else weight_files(folder)
    tensors: dict[str, TensorRef] = {}
    for file in files:
        for ref in _refs(file):
            if ref.name in tensors:
                raise BadInput(f"{ref.name} is both in {tensors[ref.name].file} and in {file}; remove one of the files")
            tensors[ref.name] = ref
    for name, file in (placed or {}).items():
        if name not in tensors or tensors[name].file != file:
            raise BadInput(f"the index of {folder} places {name} in {file.name}, which does not hold it")
    if not (folder / CONFIG).is_file():
        raise BadInput(f"{folder} has no {CONFIG}; put the draft's model config there under that name")
    eyas = read_json(folder / EYAS_JSON) if (folder / EYAS_JSON).is_file() else None
    return DraftFolder(folder, read_json(folder / CONFIG), eyas, tensors, tuple(files))


def weight_files(folder: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The weight files of a folder, in the order of preference that transformers and the engines have.

    Returns them with {tensor: file} where an index says so. Raises BadInput where there is none.
    """
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return [folder / single], None
        if index.is_file():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not listed or not all(isinstance(v, str) for v in listed.values()):
                raise BadInput(f"{index}: `weight_map` must be a non-empty object {{tensor name: file name}}")
            inside = {name: _inside(folder, name, index) for name in sorted(set(listed.values()))}
            missing = [name for name, file in inside.items() if not file.is_file()]
            if missing:
                raise BadInput(f"{folder}: the shards {', '.join(missing)} are missing, though {index.name} names them")
            return list(inside.values()), {tensor: inside[name] for tensor, name in listed.items()}
    for pattern in ("*.safetensors", "*.bin", "training_state.pt", "*.pt"):
        found = sorted(file for file in folder.glob(pattern) if file.is_file())
        if found and (len(found) == 1 or pattern == "*.safetensors"):
            return found, None
        if found:
            raise BadInput(f"{folder} holds {', '.join(f.name for f in found)}; name the file that is the draft")
    raise BadInput(f"{folder} holds no weights (model.safetensors, its index, pytorch_model.bin, *.pt)")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises BadInput naming the file when it is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not readable JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def load_pickle(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a `.bin` or `.pt`: only data, never code. A training state is searched for the draft's part."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen kinds; all are about this file
        raise BadInput(
            f"{path} cannot be read as plain tensors ({_first_line(error)}); nothing in it was executed. "
            f"Convert it to safetensors where it was made"
        ) from error
    for key in NESTED_STATES:
        if isinstance(state, dict) and isinstance(state.get(key), dict) and _is_tensors(state[key]):
            state = state[key]
            break
    if not isinstance(state, dict) or not _is_tensors(state):
        held = sorted(map(str, state))[:8] if isinstance(state, dict) else type(state).__name__
        raise BadInput(f"{path} holds no tensors by name (found {held}); expected a state dict, or one under "
                       f"{', '.join(NESTED_STATES)}")  # fmt: skip
    return state


def _is_tensors(value: Mapping[Any, Any]) -> bool:
    import torch

    return bool(value) and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())


def _refs(file: Path) -> Iterable[TensorRef]:
    if file.suffix != ".safetensors":
        state = load_pickle(file)
        return [
            TensorRef(k, tuple(v.shape), _code(v.dtype), file, partial(_same, v), partial(_numbers, v))
            for k, v in state.items()
        ]

    def load(name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            return handle.get_tensor(name)

    refs = []
    for name, entry in read_header(file).entries.items():
        if entry.dtype not in READABLE:
            raise BadInput(
                f"{file}: {name} is stored as {entry.dtype}; Eyas reads unquantised drafts ({', '.join(READABLE)})"
            )
        array = partial(read_array, file, entry)
        refs.append(TensorRef(name, entry.shape, entry.dtype, file, partial(load, name), array))
    return refs


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _numbers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    import torch

    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _code(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> BF16"""
    name = str(dtype).removeprefix("torch.")
    known = {"bool": "BOOL", "bfloat16": "BF16", "uint8": "U8"}
    return known.get(name) or name.replace("float", "F").replace("int", "I")


def _inside(folder: Path, name: str, index: Path) -> Path:
    """The file that an index names. The entry itself may be a symlink (hub caches); its name may not lead out."""
    pure = PurePosixPath(name)
    outside = not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or "\0" in name
    if outside or not (folder / pure).parent.resolve().is_relative_to(folder.resolve()):
        raise BadInput(f"{index} names the file {name!r}, which leads out of the folder; refusing to follow it")
    return folder / pure


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
