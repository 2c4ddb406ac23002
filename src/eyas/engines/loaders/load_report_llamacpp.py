"""What llama.cpp's converter and its loader make of EAGLE-3 drafts.   load_report_llamacpp.py DRAFT ... --target TARGET

Runs under the Python of llama.cpp's environment. The converter reads files itself, so each draft is copied with its
tensors numbered; the numbers are found again in the GGUF file. That file is then given to llama-speculative-simple,
with the converted target, for two tokens: whether it loads is the loader's own word.
"""

# ruff: noqa: E402  the converter's folder has to be on the path before what lies in it is imported

from __future__ import annotations

import logging
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(sys.prefix).parent  # of the environment: venv/ lies in it
SOURCE = ROOT / "source"
CONVERTER = SOURCE / "convert_hf_to_gguf.py"
DRIVER = ROOT / "bin" / "llama-speculative-simple"
sys.path.insert(0, str(SOURCE))

import gguf
import numpy as np
import transformers  # noqa: F401  imported once, before the forks, as the converter would in each of them
from conversion import base
from reporting import MAPS, Report, main

VERSION = f"b{ROOT.name.removeprefix('llamacpp-').split('.')[0]}"
METADATA = ("general.architecture", "eagle3.")


def load(report: Report, draft: Path, target: Path) -> None:
    report.stage = "convert"
    with tempfile.TemporaryDirectory() as scratch:
        copy, file = Path(scratch) / draft.name, Path(scratch) / "draft.gguf"
        report.numbered_copy(draft, copy)
        convert(copy, file, target)
        read(report, file)
        report.stage = "weights"
        run(file, converted_target(target))


def convert(folder: Path, file: Path, target: Path | None = None) -> None:
    """Run the converter in this process, which is a fork of its own.

    A tokenizer that it does not know stops it before it has looked at a draft's tensors; the tests' tiny one is made
    up, so an unknown one passes as GPT-2's here. What it is matters for text only.
    """
    known = base.TextModel.get_vocab_base_pre

    def or_gpt2(self: Any, tokenizer: Any) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    base.TextModel.get_vocab_base_pre = or_gpt2
    complaints: list[str] = []
    listener = logging.Handler(logging.ERROR)
    listener.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(listener)
    draft_of = ["--target-model-dir", str(target)] if target else []
    sys.argv = [str(CONVERTER), str(folder), *draft_of, "--outtype", "f32", "--outfile", str(file)]
    try:
        runpy.run_path(str(CONVERTER), run_name="__main__")
    except SystemExit as left:
        if left.code:
            said = " / ".join(complaints[-2:])
            raise RuntimeError(f"the converter left with exit code {left.code}: {said}") from left


def read(report: Report, file: Path) -> None:
    """Tensors and metadata of the GGUF file; a number that is found tells which stored tensor it is."""
    reader = gguf.GGUFReader(file)
    seen = set()
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.I64:
            keys = [key for key in report.keys if key.endswith(MAPS[0])]
            report.fields["d2t"] = tensor.data.flatten()[:8].tolist()
        else:
            keys = report.named(np.unique(tensor.data).tolist())
        seen.update(keys)
        report.fields["parameters"][tensor.name] = {
            "shape": [int(size) for size in reversed(tensor.shape)],
            "keys": keys,
            "filled": "whole",
            "created": "other",
        }
    report.fields["ignored"] = [key for key in report.keys if key not in seen]
    found = {name: _value(field) for name, field in reader.fields.items() if name.startswith(METADATA)}
    report.fields["metadata"] = found
    report.fields["architecture"] = found.get("general.architecture")
    report.fields["taps"] = report.fields["captured"] = found.get("eagle3.target_layers")
    for name in ("norm_before_residual", "norm_before_fc"):
        report.fields["flags"][name] = found.get(f"eagle3.{name}")


def _value(field: Any) -> Any:
    value = field.contents()
    return value.tolist() if isinstance(value, np.ndarray) else value


def converted_target(target: Path) -> Path:
    """The target as GGUF, converted by the first draft that needs it and kept for those that follow."""
    kept = Path(tempfile.gettempdir()) / f"eyas-loader-{os.getppid()}" / "target.gguf"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        convert(target, kept.with_suffix(".part"))
        kept.with_suffix(".part").rename(kept)
    return kept


def run(draft: Path, target: Path) -> None:
    """Raises RuntimeError, with what it complained of, where the draft does not load."""
    command = [
        DRIVER, "-m", target, "-md", draft, "--spec-type", "draft-eagle3", "--spec-draft-n-max", "2", "-p", "ab",
        "-n", "2", "--temp", "0", "-t", "1", "-td", "1", "-c", "64", "-fa", "off",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", timeout=120)
    if done.returncode != 0:
        words = (" E ", "error", "GGML_ASSERT", "terminate called", "what()")
        lines = [line for line in done.stderr.splitlines() if any(word in line for word in words)]
        raise RuntimeError(f"exit code {done.returncode}: " + " / ".join(lines[-4:]))


if __name__ == "__main__":
    try:
        main("llamacpp", VERSION, load)
    finally:
        shutil.rmtree(Path(tempfile.gettempdir()) / f"eyas-loader-{os.getpid()}", ignore_errors=True)
