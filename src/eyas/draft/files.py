"""The files of a draft directory: its config and its tensors by name, shape and dtype, read only when asked for.

    folder = open_folder("path/to/draft"); folder.tensors["fc.weight"].load()

Safetensors (single, sharded with an index, or several files side by side), `.bin` and `.pt`; pickles only with
weights_only. Spelling is not interpreted here: that is what dialects/ are for.   pytest tests/test_checkpoint_files.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..headers import read_array, read_header
from ..untrusted import content, inside, load_tensors, parse_json

if TYPE_CHECKING:
    import numpy as np
    import torch

EYAS_JSON = "eyas.json"
CONFIG = "config.json"
HISTORY = ".eyas"  # the journal of changes made to a draft in place, and what they replaced
PENDING = f"{HISTORY}/pending.json"  # there while such a change is under way
TRAINING_STATE = "training_state.pt"
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
    try:
        return _open(path)
    except OSError as error:  # no permission, a name too long for the file system, a disk that fails
        raise BadInput(
            f"{error.filename or path} cannot be read ({error.strerror or error}); check its permissions"
        ) from error


def _open(path: Path) -> DraftFolder:
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise BadInput(f"{path} does not exist; give a directory with config.json and the draft's weights")
    if (folder / PENDING).exists():
        raise BadInput(
            f"{folder}: an in-place repair of this draft was interrupted, or is under way; run `eyas history {folder}`,"
            f" which finishes it"
        )
    files, placed = ([path], None) if path.is_file() else weight_files(folder)
    tensors: dict[str, TensorRef] = {}
    for file in files:
        for ref in _refs(file):
            if ref.name in tensors:
                raise BadInput(f"{ref.name} is both in {tensors[ref.name].file} and in {file}; remove one of the files")
            tensors[ref.name] = ref
    for name, file in (placed or {}).items():
        if name not in tensors or tensors[name].file != file:
            raise BadInput(
                f"the index of {folder} places {name} in {file.name}, which does not hold it; copy or download the "
                "files again"
            )
    if not (folder / CONFIG).is_file():
        state = any(file.name == TRAINING_STATE for file in files)
        own = " (a training state holds none: it is the one that the training run was given)"
        hint = own if state else below(folder)
        raise BadInput(f"{folder} has no {CONFIG}; put the draft's model config there under that name{hint}")
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
            shards = {name: inside(folder, name, index) for name in sorted(set(listed.values()))}
            missing = [name for name, file in shards.items() if not file.is_file()]
            if missing:
                raise BadInput(
                    f"{folder}: the shards {', '.join(missing)} are missing, though {index.name} names them; copy "
                    "or download them"
                )
            return list(shards.values()), {tensor: shards[name] for tensor, name in listed.items()}
    for pattern in ("*.safetensors", "*.bin", TRAINING_STATE, "*.pt"):
        found = sorted(file for file in folder.glob(pattern) if file.is_file())
        if found and (len(found) == 1 or pattern == "*.safetensors"):
            return found, None
        if found:
            raise BadInput(f"{folder} holds {', '.join(f.name for f in found)}; name the file that is the draft")
    states = sorted(file.parent.name for file in folder.glob(f"*/{TRAINING_STATE}"))
    hint = f"; a training run keeps them below: give {folder / states[-1]}" if states else below(folder)
    raise BadInput(
        f"{folder} holds no weights (model.safetensors, its index, pytorch_model.bin, *.pt)"
        f"{hint or '; give the directory of a draft'}"
    )


def below(folder: Path) -> str:
    """Where a run keeps its draft, as the end of a message about `folder`; "" where none lies below it."""
    places = ("draft", "export", "train/draft")
    return next((f"; a draft lies in {folder / p}: give that" for p in places if (folder / p / CONFIG).is_file()), "")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises BadInput naming the file when it is something else."""
    try:
        value = parse_json(content(path))
        json.dumps(value, ensure_ascii=False).encode()  # halves of characters, which nothing could print
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror or error}); check the path and its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not readable JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def load_pickle(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a `.bin` or `.pt`: only data, never code. A training state is searched for the draft's part."""
    import torch

    try:
        state = load_tensors(path)
    except Exception as error:  # torch raises a dozen kinds; all are about this file
        raise BadInput(
            f"{path} cannot be read as plain tensors ({_why(error)}); nothing in it was executed. "
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
    for name, tensor in state.items():
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        # A view that repeats one number may claim any size; what is written down is as large as its storage.
        if not plain or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise BadInput(
                f"{path}: {name!r} is no plain tensor (sparse, quantised, or larger than what is stored); save it "
                "dense and contiguous where it was made"
            )
    return state


def _is_tensors(value: Mapping[Any, Any]) -> bool:
    import torch

    return bool(value) and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())


def _refs(file: Path) -> Iterable[TensorRef]:
    refs = _safetensors_refs(file) if file.suffix == ".safetensors" else _pickle_refs(file)
    for ref in refs:
        if not ref.name.isprintable():
            raise BadInput(f"{file}: {ref.name!r} is no name of a tensor; export the file again")
        if ref.dtype not in READABLE:
            raise BadInput(
                f"{file}: {ref.name} is stored as {ref.dtype}; Eyas reads unquantised drafts "
                f"({', '.join(READABLE)}); convert it (`eyas repair --plan` with `cast`), or take the unquantised "
                "file"
            )
    return refs


def _pickle_refs(file: Path) -> list[TensorRef]:
    return [
        TensorRef(k, tuple(v.shape), _code(v.dtype), file, partial(_same, v), partial(_numbers, v))
        for k, v in load_pickle(file).items()
    ]


def _safetensors_refs(file: Path) -> list[TensorRef]:
    def load(name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            return handle.get_tensor(name)

    return [
        TensorRef(name, entry.shape, entry.dtype, file, partial(load, name), partial(read_array, file, entry))
        for name, entry in read_header(file).entries.items()
    ]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _numbers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    import torch

    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _code(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> BF16; a dtype that is not `READABLE` keeps its name."""
    name = str(dtype).removeprefix("torch.")
    known = {"bool": "BOOL", "bfloat16": "BF16", "uint8": "U8"}
    code = known.get(name) or name.replace("float", "F").replace("int", "I")
    return code if code in READABLE else name


def _why(error: BaseException) -> str:
    """What torch says of a pickle, without its advice to run the code in it."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    if asked:
        return f"it asks for {asked[1]}, which is code, not data"
    said = _first_line(error)
    return "it is nothing that torch.save wrote" if said.startswith("Weights only load failed") else said


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
