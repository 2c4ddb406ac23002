"""Single tensors of a target, read without loading the model: training needs embedding, head and final norm only.

    load_ends("path/to/target").head.shape

Reads model.safetensors, its sharded form with an index, and pytorch_model.bin (weights_only) likewise. Only the shards
that hold an asked-for tensor are opened, so the others need not be there (`missing_files`).
    Exercise it:  pytest tests/test_target_weights.py
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.errors import BadInput, EyasError, Mismatch
from eyas.target.facts import TargetFacts, read_facts, read_json
from eyas.target.quantised import SUPPLIED, dequantised, parts_of, plain_names
from eyas.untrusted import LONGEST_HEADER, inside, load_tensors, parse_json, regular

SINGLE = ("model.safetensors", "pytorch_model.bin")

# A language model sits at one of these places inside a checkpoint; multimodal wrappers nest it.
PREFIXES = (
    "model.", "language_model.model.", "model.language_model.", "language_model.", "model.language_model.model.",
    "thinker.model.", "transformer.", "gpt_neox.", "model.decoder.", "backbone.", "model.text_model.", "",
)  # fmt: skip
EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
NORM = ("norm.weight", "ln_f.weight", "final_layer_norm.weight", "final_layernorm.weight", "norm_f.weight")
HEAD_PREFIXES = ("", "language_model.", "model.language_model.", "thinker.", "model.", "text_model.")
HEAD = ("lm_head.weight", "embed_out.weight", "output.weight")
HEAD_ROWS = 16384  # of the head in float32 at once
FLOAT_HEAD = 2 << 30  # bytes that a whole copy of the head in float32 may take


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """Which file holds each tensor: {tensor name: file}. Files are not opened where an index names them.

    Raises BadInput when `folder` has no checkpoint, or when its index names a file outside the folder.
    """
    folder = Path(folder)
    for name in SINGLE:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return dict.fromkeys(_names_in(folder / name), folder / name)
        if index.is_file():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise BadInput(f"{index}: `weight_map` is missing or empty, expected {{tensor name: file name}}")
            files = {file: inside(folder, file, index) for file in set(map(str, listed.values()))}
            return {str(tensor): files[str(file)] for tensor, file in listed.items()}
    if (folder / "adapter_config.json").is_file():
        raise BadInput(f"{folder} holds an adapter, not a model; merge it into its base model and name that folder")
    raise BadInput(f"{folder} holds none of {', '.join(SINGLE)} nor their index; name a Hugging Face model folder")


def missing_files(folder: str | Path) -> list[str]:
    """Names of the files that the index lists and that are not there, sorted: some downloaded the ends alone."""
    folder = Path(folder)
    return sorted({path.relative_to(folder).as_posix() for path in tensor_files(folder).values() if not path.is_file()})


def read_tensors(folder: str | Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The named tensors, as stored (dtype kept), on the CPU, memory-mapped where the format allows it.

    Raises BadInput naming a tensor that the checkpoint does not have, EyasError naming a file that cannot be read.
    """
    files = tensor_files(folder)
    wanted: dict[Path, list[str]] = {}
    for name in names:
        if name not in files:
            raise BadInput(
                f"{folder}: the checkpoint has no tensor {name!r}; it has {len(files)} others; download the model again"
            )
        wanted.setdefault(files[name], []).append(name)
    out: dict[str, torch.Tensor] = {}
    for file, here in wanted.items():
        out.update(_read(file, here))
    return out


@dataclass(frozen=True)
class Ends:
    """Both ends of a target, as stored. What a draft borrows, and what turns a final state into logits."""

    embedding: torch.Tensor  # [V, H]
    head: torch.Tensor  # [V, H]; the embedding itself where tied
    final_norm: torch.Tensor | None  # [H]; None where the norm has no weight (OLMo)
    facts: TargetFacts
    head_bias: torch.Tensor | None = None  # [V] (Phi)
    norm_bias: torch.Tensor | None = None  # [H] (a LayerNorm)

    def computing(self, device: str | torch.device = "cpu") -> Ends:
        """The same on `device`, for many calls; the head in float32 once and for all, unless it is too large."""
        parts: dict[str, Any] = {name: x.to(device) for name, x in self.__dict__.items() if torch.is_tensor(x)}
        if 4 * self.head.numel() <= FLOAT_HEAD:
            parts["head"] = parts["head"].float()
        return dataclasses.replace(self, **parts)

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """Target logits from final states: [..., H] -> float32 [..., V], scale and soft-cap applied."""
        final = final.float()
        # A part of the head at a time: a float32 copy of it all is 5 GB for 160,000 ids of width 7168.
        parts = [torch.nn.functional.linear(final, rows.float()) for rows in self.head.split(HEAD_ROWS)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return self.facts.finish_logits(logits if self.head_bias is None else logits + self.head_bias.float())

    def normed(self, stream: torch.Tensor) -> torch.Tensor:
        """The final norm on a residual stream: [..., H] -> float32 [..., H]."""
        x = stream.float()
        weight = x.new_ones(x.shape[-1]) if self.final_norm is None else self.final_norm.float()
        if self.facts.layer_norm or self.norm_bias is not None or self.final_norm is None:
            x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=self.facts.rms_norm_eps)
            return x * weight + (0 if self.norm_bias is None else self.norm_bias.float())
        x = x * (x.pow(2).mean(-1, keepdim=True) + self.facts.rms_norm_eps).rsqrt()
        return x * (weight + 1.0 if self.facts.norm_offset else weight)


@dataclass(frozen=True)
class EndNames:
    """What the ends are called in a checkpoint; `head` is `embedding` where tied."""

    embedding: str
    head: str
    norm: str | None
    tensors: tuple[str, ...]
    """All that is stored for them: weights, biases, scales of quantised weights."""


def end_names(folder: str | Path, facts: TargetFacts, names: Collection[str]) -> EndNames:
    """Find embedding, head and final norm among the tensor `names`. Raises BadInput where one is not there."""
    plain = plain_names(names)
    embedding = find_name(plain, PREFIXES, EMBEDDING)
    if embedding is None:
        raise BadInput(
            f"{folder}: no embedding among {len(names)} tensors (looked for *.{', *.'.join(EMBEDDING)}); name the "
            "folder of the whole language model"
        )
    beside = next(embedding.removesuffix(ending) for ending in EMBEDDING if embedding.endswith(ending))
    norm = find_name(plain, (beside, *PREFIXES), NORM)
    head = embedding if facts.tied else find_name(plain, HEAD_PREFIXES, HEAD)
    if head is None:
        raise BadInput(
            f"{folder}: no head among the tensors (looked for {', '.join(HEAD)}) though config.json says that "
            f"embedding and head are not tied; set tie_word_embeddings to true if they are"
        )
    stored = [part for name in (embedding, head) for part in parts_of(name, names).values()]
    rest = [name for name in (norm, _bias(head), _bias(norm)) if name in names]
    return EndNames(embedding, head, norm, tuple(dict.fromkeys([*stored, *filter(None, rest)])))


def load_ends(folder: str | Path, facts: TargetFacts | None = None) -> Ends:
    """Embedding, head and final norm of the target in `folder`, and nothing else.

    Tables that a quantiser stored are converted to the dtype that config.json names (quantised.py); those of
    `eyas/ends.safetensors` in the folder are taken instead of the checkpoint's. Raises BadInput when one of them cannot
    be found or is stored in a format that Eyas does not read, Mismatch when a shape contradicts config.json.
    """
    folder = Path(folder)
    facts = facts or read_facts(folder)
    files = tensor_files(folder)
    names = end_names(folder, facts, files)
    supplied = _supplied(folder)
    tensors = read_tensors(folder, [name for name in names.tensors if name not in supplied])
    sizes, block = (facts.vocab_size, facts.hidden_size), facts.scale_block
    dtype = getattr(torch, facts.dtype, torch.float32)
    dtype = dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
    tables = {}
    for name in dict.fromkeys([names.embedding, names.head]):
        given = {"weight": supplied[name]} if name in supplied else None
        parts = given or {part: tensors[stored] for part, stored in parts_of(name, files).items()}
        tables[name] = dequantised(name, parts, sizes, dtype, block, str(folder))
        if tuple(tables[name].shape) != sizes:
            raise Mismatch(
                f"{folder}: {name} has shape {list(tables[name].shape)}, config.json says {list(sizes)}; download "
                "the model again"
            )
    return Ends(
        embedding=tables[names.embedding],
        head=tables[names.head],
        final_norm=tensors[names.norm] if names.norm else None,
        facts=facts,
        head_bias=tensors.get(_bias(names.head)),
        norm_bias=tensors.get(_bias(names.norm)),
    )


def _supplied(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors that a user gives beside a checkpoint whose own cannot be read."""
    file = folder / SUPPLIED
    return _read(file, _names_in(file)) if file.is_file() else {}


def find_name(names: Iterable[str], prefixes: Iterable[str], suffixes: Iterable[str]) -> str | None:
    """The first `prefix + suffix` that is there, prefixes in order; None if there is none."""
    have = set(names)
    suffixes = tuple(suffixes)
    return next((p + s for p in prefixes for s in suffixes if p + s in have), None)


def _bias(name: str | None) -> str:
    return name.removesuffix("weight") + "bias" if name else ""


def read_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Header of a safetensors file: ({name: {dtype, shape, data_offsets}}, byte where the data begins)."""
    try:
        size = file.stat().st_size
        with regular(file).open("rb") as handle:
            length = struct.unpack("<Q", handle.read(8))[0]
            if not 2 <= length <= min(size - 8, LONGEST_HEADER):
                raise ValueError(f"a header of {length} bytes does not fit into {size}")
            header = parse_json(handle.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((spec["data_offsets"][1] for spec in header.values()), default=0)
        if end > size:
            raise ValueError(f"the header promises {end} bytes, the file has {size}")
    except (OSError, ValueError, struct.error, TypeError, KeyError, AttributeError, IndexError) as error:
        raise EyasError(f"{file}: not a readable safetensors file ({error}); download or convert it again") from error
    return header, 8 + length


def _names_in(file: Path) -> list[str]:
    return list(read_header(file)[0]) if file.suffix == ".safetensors" else list(_load_bin(file))


def _read(file: Path, names: list[str]) -> dict[str, torch.Tensor]:
    try:
        if file.suffix != ".safetensors":
            state = _load_bin(file)
            return {name: state[name] for name in names}
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in names}
    except KeyError as error:
        raise BadInput(
            f"{file}: the index places {error} here, but the file does not have it; download the model again"
        ) from error
    except FileNotFoundError as error:
        raise BadInput(f"{file} is missing, though the index names it; download the model again") from error
    except EyasError:
        raise
    except Exception as error:  # safetensors raises its own type, torch a dozen
        raise EyasError(f"{file} cannot be read ({error}); download or convert it again") from error


def _load_bin(file: Path) -> dict[str, torch.Tensor]:
    """A .bin checkpoint, mapped where its format allows; only tensors, never code."""
    try:
        state = load_tensors(file)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise EyasError(f"{file} cannot be read with weights_only ({error}); convert it to safetensors") from error
    return state
