"""A GGUF file as a Hugging Face folder in float32, converted once: weights, tokenizer, chat template, end-of-turn ids.

    convert_gguf(Path("model.Q4_1.gguf"), Path("~/.cache/eyas/targets"))

Weights stay float32, so that the numbers are the file's own.   Exercise it:  pytest tests/test_target_gguf.py
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.errors import BadInput, EyasError
from eyas.target.gguf_header import check_header
from eyas.untrusted import regular
from eyas.writes import atomic_dir, disk_errors, remove_leftovers

FORMAT = 1  # raise it when the conversion changes, so that cached conversions are made again
DIGIT_SPLITTING = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
GPT2_SPLITTING = {"default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion"}
NOTE = "eyas_source.json"
PIECE = 1 << 20


def convert_gguf(gguf: Path, cache: Path) -> Path:
    """The converted folder below `cache` for this content of `gguf`; made if it is not there yet.

    Built under a temporary name and renamed, so that a killed conversion leaves nothing under the final name. Raises
    BadInput when the file is not GGUF or of an architecture that transformers cannot read, EyasError when the disk is
    full.
    """
    key = _content_key(gguf)
    check_header(gguf)
    final = cache / f"{gguf.stem}-{key[:12]}-v{FORMAT}"
    if (final / NOTE).is_file():
        return final
    with disk_errors(final):
        cache.mkdir(parents=True, exist_ok=True)
    remove_leftovers(cache)
    with atomic_dir(final) as temporary:
        _write(gguf, temporary)
        _dump(temporary / NOTE, {"gguf": gguf.name, "content": key, "format": FORMAT})
    return final


def _write(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # the dequantiser's bar knows no switch
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
            )
        except ImportError as error:
            raise EyasError(f"{gguf}: reading GGUF needs `pip install gguf accelerate` ({error})") from error
        except Exception as error:
            raise BadInput(f"{gguf}: transformers cannot convert it ({error}); name a Hugging Face folder") from error
        needed = 4 * sum(p.numel() for p in model.parameters())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise EyasError(
                f"{folder.parent}: the converted target needs {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} are free; "
                f"make room, or name another place with EYAS_CACHE"
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _mend(gguf, folder)


def _mend(gguf: Path, folder: Path) -> None:
    """What transformers' conversion leaves imprecise."""
    fields = _fields(gguf)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, value in config.items():
        if name.endswith(("_eps", "_epsilon")):  # 9.999999747378752e-06 is float32's 1e-05
            config[name] = float(f"{value:.7g}")
    config.pop("_name_or_path", None)
    _dump(folder / "config.json", config)

    # A GGUF names the token that ends a turn apart from the one that ends a text; answers stop at either.
    generation = json.loads((folder / "generation_config.json").read_text())
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    distinct = list(dict.fromkeys(i for i in ends if i is not None))
    if len(distinct) > 1:
        generation["eos_token_id"] = distinct
        _dump(folder / "generation_config.json", generation)

    # The pre-tokenizers of this kind split every digit off first (llama.cpp's llama-vocab.cpp: "\\p{N}", then GPT-2's
    # rule); the conversion forgets that, and "  7" after a line break would become ids that the model never saw.
    kind = fields.get("tokenizer.ggml.pre", "default")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if (tokenizer.get("pre_tokenizer") or {}).get("type") == "ByteLevel":  # the conversion had no rule for this kind
        if kind in DIGIT_SPLITTING:
            digits = {"type": "Digits", "individual_digits": True}
            tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
            _dump(folder / "tokenizer.json", tokenizer)
        elif kind not in GPT2_SPLITTING:
            logging.getLogger(__name__).warning(
                "%s: nobody here knows how pre-tokenizer %r splits text, so ids may differ from the model's own; put "
                "the original tokenizer.json into the converted folder",
                gguf,
                kind,
            )

    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):
        settings.pop(name, None)
    _dump(folder / "tokenizer_config.json", settings)


def _fields(gguf: Path) -> dict[str, Any]:
    """Scalar metadata of the file."""
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(gguf))
    return {name: value for name, value in metadata.items() if not isinstance(value, list)}


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _content_key(gguf: Path) -> str:
    """SHA-256 over the size and a MiB at each of 16 places: names the content without reading 40 GB of it."""
    try:
        size = regular(gguf).stat().st_size
        with gguf.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise BadInput(f"{gguf} does not start with the letters GGUF; download it again")
            digest = hashlib.sha256(str(size).encode())
            for place in sorted({max(0, (size - PIECE) * i // 15) for i in range(16)}):
                file.seek(place)
                digest.update(file.read(PIECE))
    except OSError as error:
        raise BadInput(f"{gguf} cannot be read ({error.strerror}); check the path and its permissions") from error
    return digest.hexdigest()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings inside, and put everything back."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
