"""Tensors against what the config makes of them: missing, unknown, misshapen, never trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...draft.expected import Inventory
from ..case import Case
from ..finding import Finding, Severity

ONE = {"BF16": 0x3F80}  # bits of 1.0 where numpy has no such type
SHOWN = 4


def check(case: Case) -> Iterator[Finding]:
    """All findings about which tensors there are."""
    yield from _inventory(case)
    yield from _transposed(case)
    yield from _head(case)
    yield from _norms_never_trained(case)
    yield from _embedding(case)
    yield from _files(case)


def _inventory(case: Case) -> Iterator[Finding]:
    """Engines neither miss nor refuse what they do not know: both are silent in most of them."""
    if case.reading is None:
        return
    found = Inventory.of(case.reading)
    missing = [f"{name} {list(shape)}" for name, shape in found.missing.items() if name != "lm_head.weight"]
    if missing:
        yield Finding(
            "EY-TENSOR-MISSING",
            Severity.ERROR,
            f"missing: {_some(missing)}",
            "SGLang and vLLM leave such parameters as they were allocated, without a word; llama.cpp refuses the file",
            "Export the draft again from where it was trained",
            ("SGLang 0.5.23 llama_eagle3.py:325", "sgl-project/sglang#27908"),
        )
    if found.unknown:
        foreign = [case.reading.canonical.sources[name].ref.name for name in found.unknown]
        yield Finding(
            "EY-TENSOR-UNKNOWN",
            Severity.WARNING,
            f"no draft of this kind reads: {_some(foreign)}",
            "SGLang drops them in silence, vLLM stops with a KeyError: if one of them was trained, its work is lost",
            "Rename what was misspelled, or drop what is not needed",
        )
    wrong = [f"{name} {list(held)}, expected {list(wanted)}" for name, (held, wanted) in found.misshapen.items()]
    if wrong:
        yield Finding(
            "EY-TENSOR-SHAPE",
            Severity.ERROR,
            f"config and tensors disagree: {_some(wrong)}",
            "Engines stop while loading, or read the wrong rows",
            "Correct the config where the tensors are right, which is the usual case",
        )


def _transposed(case: Case) -> Iterator[Finding]:
    if not fc_transposed(case):
        return
    fc = case.tensors["fc.weight"]
    yield Finding(
        "EY-FC-TRANSPOSED",
        Severity.ERROR,
        f"fc.weight is {list(fc.shape)}: stored the other way round, [in, out] instead of [out, in]",
        "Engines stop while loading, or take the draft for one of a single tap",
        f"Transpose it: {list(fc.shape[::-1])}",
        convention="transposed",
    )


def fc_transposed(case: Case) -> bool:
    """Is fc's output where its input belongs?"""
    fc, size = case.tensors.get("fc.weight"), case.number("hidden_size")
    wide = case.number("target_hidden_size") or size
    if fc is None or len(fc.shape) != 2 or size is None or wide is None:
        return False
    rows, columns = fc.shape
    return columns == size and rows > columns and rows % wide == 0


def _head(case: Case) -> Iterator[Finding]:
    size, vocab = case.draft_vocab, case.vocab
    if "lm_head.weight" in case.tensors or size is None or vocab is None:
        return
    if size < vocab:
        yield Finding(
            "EY-HEAD-MISSING",
            Severity.ERROR,
            f"there is no lm_head.weight, and the draft vocabulary ({size:,}) is smaller than the target's ({vocab:,})",
            "SGLang drafts from an uninitialised head; vLLM takes the target's FIRST rows, whatever d2t says",
            "Restore the head from training, or from the target's rows of the ids in d2t",
            ("sgl-project/sglang#27908",),
        )
    else:
        yield Finding(
            "EY-HEAD-SHARED",
            Severity.WARNING,
            "there is no lm_head.weight; the draft vocabulary is the target's, so its head may be meant",
            "vLLM and llama.cpp take the target's head; SGLang does so only where draft_vocab_size is null or absent",
            "Write the head into the file, or leave draft_vocab_size out for SGLang",
            ("sgl-project/sglang#27908",),
        )


def _norms_never_trained(case: Case) -> Iterator[Finding]:
    """RMSNorm weights begin as ones and training moves them: where all are ones, nobody trained, or they were lost."""
    import numpy as np

    norms = [name for name in case.tensors if name.endswith("norm.weight") or "layernorm" in name]
    ones = []
    for name in norms:
        values = case.array(name)
        if values is None or not values.size:
            continue
        one: Any = ONE.get(case.tensors[name].dtype, 1)
        if bool(np.all(values == one)):
            ones.append(name)
    if ones and len(ones) == len(norms):
        yield Finding(
            "EY-NORM-UNTRAINED",
            Severity.ERROR,
            f"all {len(norms)} norm weights are exactly 1",
            "The file holds a freshly initialised model: acceptance will be near zero",
            "Export the weights of the finished training run",
            ("lightseekorg/TorchSpec#38",),
        )
    elif ones:
        yield Finding(
            "EY-NORM-ONES",
            Severity.INFO,
            f"exactly 1 everywhere: {_some(ones)}; the other norms are not",
            "Those tensors were never trained, or were made anew on the way",
            "Compare with the training run's own checkpoint",
        )


def _embedding(case: Case) -> Iterator[Finding]:
    ref, size = case.tensors.get("embed_tokens.weight"), case.number("hidden_size")
    if ref is None or len(ref.shape) != 2:
        return
    if size is not None and ref.shape[1] != size:
        yield Finding(
            "EY-EMBED-SHAPE",
            Severity.ERROR,
            f"embed_tokens.weight is {list(ref.shape)}, the draft is {size} wide",
            "Engines stop while loading",
            "Drop it where the target's embedding is meant",
            ("vllm-project/vllm#18906",),
        )
        return
    if case.vocab is not None and ref.shape[0] < case.vocab:
        yield Finding(
            "EY-EMBED-SHAPE",
            Severity.ERROR,
            f"embed_tokens.weight has rows for {ref.shape[0]:,} ids, the target has {case.vocab:,}",
            "Engines stop while loading, or read past its end at the first token that it lacks",
            "Drop it where the target's embedding is meant",
            ("vllm-project/vllm#18906",),
        )
        return
    yield Finding(
        "EY-EMBED-STORED",
        Severity.INFO,
        f"the draft brings an embedding of its own, {list(ref.shape)}",
        "vLLM and llama.cpp use it, SGLang replaces it with the target's: where the two differ, so do the engines",
        "Leave it out where it is a copy of the target's",
        ("vllm-project/vllm#28549", "lightseekorg/TorchSpec#38"),
    )


def _files(case: Case) -> Iterator[Finding]:
    read = {file.name for file in case.folder.files}
    others = sorted(p.name for p in case.folder.path.glob("*.safetensors") if p.name not in read)
    if others:
        yield Finding(
            "EY-FILES-BESIDE",
            Severity.WARNING,
            f"beside {_some(sorted(read))} lie {_some(others)}",
            "Engines load every *.safetensors of the directory: whichever comes last wins",
            "Move them elsewhere",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
