"""Record what trials need from a target: greedy answers to a few prompts, with states at every tap that may matter.

    record("path/to/target", taps=(1, 2, 3, 14, 15, 16, 26, 27, 28))  -> Material

Kept by content below the user's cache, so that a second look at the same target costs nothing.
    pytest tests/test_doctor_record.py
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..cache import cache_dir
from ..digests import sha256_json
from ..errors import BadInput, EyasError
from ..features.reader import map_safetensors
from ..machine import choose_precision
from ..target import source
from ..target.facts import TargetFacts, read_facts
from ..writes import atomic_save_safetensors
from .material import Material
from .prompts import PROMPTS

POSITIONS = 4096
TOKENS = 80
"""Of an answer at most."""
MOST_BYTES = 1 << 30
"""Of states in memory: where all taps would take more, only those that are asked for are recorded."""
FORMAT = 5


def useful_taps(facts: TargetFacts, asked: Sequence[int], positions: int = POSITIONS) -> tuple[int, ...]:
    """All taps where that is affordable, else those in `asked`; ascending, within the target."""
    everything = range(facts.num_layers + 1)
    if 2 * positions * facts.hidden_size * 2 * len(everything) <= MOST_BYTES:
        return tuple(everything)
    return tuple(sorted({t for t in asked if 0 <= t <= facts.num_layers}))


def record(
    folder: str | Path,
    taps: Sequence[int],
    prompts: Sequence[str] = PROMPTS,
    *,
    kinds: Mapping[str, str] | None = None,
    positions: int = POSITIONS,
    device: str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    cache: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Material:
    """At least `positions` tokens of greedy answers where the prompts give so many, states at `taps`.

    kinds: prompt -> its kind, for `Material.kinds`.
    Raises BadInput where no prompt gets an answer, EyasError where the target cannot be loaded.
    """
    folder = Path(folder)
    dtype = choose_precision(dtype, device)
    key = {"target": source.fingerprint(folder), "template": source.template_fingerprint(folder),
           "taps": list(taps), "prompts": list(prompts), "positions": positions, "dtype": dtype,
           "format": FORMAT}  # fmt: skip
    file = cache_dir(cache) / "recorded" / f"{sha256_json(key)[:32]}.safetensors"
    if file.is_file():
        with contextlib.suppress(EyasError, KeyError):  # a damaged file is recorded again
            return _named(_read(file, taps, read_facts(folder).num_layers), prompts, kinds)
    tell(f"recording the target's answers to {len(prompts)} prompts")
    tensors = _generate(folder, taps, prompts, positions, TOKENS, True, device, dtype, trust_remote_code)
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(EyasError, OSError):  # a full disk only costs the next look
        atomic_save_safetensors(tensors, file, {"format": "pt"})
        _forget_old(file.parent)
    return _named(_material(tensors, taps, read_facts(folder).num_layers), prompts, kinds)


def answers(
    folder: str | Path,
    prompts: Sequence[str | Sequence[int]],
    taps: Sequence[int],
    *,
    positions: int | None = None,
    tokens: int = TOKENS,
    ends: bool = True,
    device: str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Material:
    """Greedy answers, recorded now. prompts: requests, or token ids as they are; positions: how many tokens are enough
    (None: answer all); ends: an answer may end before `tokens`."""
    tensors = _generate(Path(folder), taps, prompts, positions, tokens, ends, device, choose_precision(dtype, device),
                        trust_remote_code)  # fmt: skip
    return _material(tensors, taps, read_facts(folder).num_layers)[0]


def _generate(
    folder: Path, taps: Sequence[int], prompts: Sequence[str | Sequence[int]], positions: int | None, tokens: int,
    ends: bool, device: str, dtype: str, trust: bool,
) -> dict[str, torch.Tensor]:  # fmt: skip
    from ..chat import render
    from ..target.answering import make_generator
    from ..target.model import Target
    from ..target.record import Recorder
    from ..target.requests import Request

    target = Target.load(folder, device=device, dtype=getattr(torch, dtype), trust_remote_code=trust)
    texts = [
        render(target.tokenizer, [{"role": "user", "content": text}], add_generation_prompt=True)
        if isinstance(text, str)
        else list(text)
        for text in prompts
    ]
    room = target.facts.max_position or (1 << 30)
    requests = [Request(i, ids) for i, ids in enumerate(texts) if 0 < len(ids) <= room - tokens]
    if not requests:
        raise BadInput(
            f"{folder}: none of the prompts leaves room for {tokens} tokens in {room} positions; give shorter "
            "prompts (--prompts)"
        )
    generator = make_generator(
        target,
        slots=len(requests) if positions is None else min(len(requests), positions // tokens + 13),  # some end early
        max_new_tokens=tokens,
        eos_ids=None if ends else (),
        stop_loops=False,
        recorder=Recorder(target, taps=taps),
    )
    documents: dict[int, dict[str, torch.Tensor]] = {}
    for answer in _until(generator, requests, positions):
        recording = answer.recording
        if recording is None or len(answer.ids) < 3:
            continue
        prompt = texts[answer.key]
        ids = torch.tensor([*prompt, *answer.ids])
        mask = torch.arange(len(ids)) >= len(prompt)
        documents[answer.key] = {
            "ids": ids, "mask": mask, "choice": recording.top1.long(), "states": recording.taps
        }  # fmt: skip
    if not documents:
        raise BadInput(
            f"{folder}: the target answered none of the prompts with three tokens or more; give others (--prompts)"
        )
    chosen = [documents[key] for key in sorted(documents)]
    tensors = {name: torch.cat([d[name] for d in chosen]) for name in ("ids", "mask", "choice", "states")}
    offsets = torch.tensor([0, *(len(d["ids"]) for d in chosen)]).cumsum(0)
    return tensors | {"offsets": offsets, "prompt": torch.tensor(sorted(documents))}  # prompt: which one of the list


def _until(generator: Any, requests: Sequence[Any], positions: int | None) -> Iterator[Any]:
    """Answers in the order in which they finish. Once they will be enough no further one is begun."""
    from ..target.answering import run_all

    found = 0
    for answer in run_all(generator, requests):
        yield answer
        found += len(answer.ids)
        if positions is not None and found >= positions:
            generator.waiting.clear()


def _read(file: Path, taps: Sequence[int], layers: int) -> tuple[Material, list[int]]:
    os.utime(file)
    return _material(map_safetensors(file)[0], taps, layers)


def _material(tensors: dict[str, torch.Tensor], taps: Sequence[int], layers: int) -> tuple[Material, list[int]]:
    """With the number of each document's prompt."""
    width = tensors["states"].shape[1] // len(taps)
    states = {t: tensors["states"][:, i * width : (i + 1) * width] for i, t in enumerate(taps)}
    offsets, mask = tensors["offsets"].long(), tensors["mask"].bool()
    said = f"{int(mask.sum()):,} tokens of {len(offsets) - 1} greedy answers of the target"
    material = Material(
        tensors["ids"].long(), offsets, mask, tensors["choice"].long(), states, said, final_tap=layers
    )  # fmt: skip
    return material, tensors["prompt"].tolist()


def _named(made: tuple[Material, list[int]], prompts: Sequence[str], kinds: Mapping[str, str] | None) -> Material:
    material, numbers = made
    return replace(material, kinds=tuple(kinds.get(prompts[n], "") for n in numbers)) if kinds else material


def _forget_old(folder: Path, most: int = 2 << 30) -> None:
    """The newest recordings, up to `most` bytes; older ones are removed."""
    files = sorted(folder.glob("*.safetensors"), key=lambda p: p.stat().st_mtime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > most:
            file.unlink(missing_ok=True)
