"""The states that vLLM really feeds a draft, compared with the target's own, slice by slice.

    compare(captured, target, taps)["slices"]           eyas measure DRAFT --target T --engine vllm --capture

An accept length hardly sees a tap that is one off, a cosine does not see a scale: so each slice is told by the tap
whose states are nearest (distance relative to their norm), the ratio of the norms and the cosine.
    pytest tests/test_measure_capture.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..doctor.features_audit import SAME
from ..engines.environment import SCRIPTS, required
from ..features.likeness import relative

PROMPTS = 4
SKIPPED = 2  # first rows, whose states hold a huge number of their own
ALIKE = 0.99  # cosine


def captured(
    target: Path, draft: Path, prompts: Sequence[Sequence[int]], command: Sequence[str] = ()
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids int64 [L], states float32 [L, T*H]) of each prompt, as vLLM feeds them to the draft at prefill.

    command: of the server; its --speculative-config is used again. Raises BadInput where vLLM is not set up here,
    EyasError where it fails.
    """
    from safetensors.torch import load_file

    given = speculative(command)
    with TemporaryDirectory(prefix="eyas-") as scratch:
        file, out = Path(scratch) / "prompts.json", Path(scratch) / "states.safetensors"
        file.write_text(json.dumps([list(p) for p in prompts]))
        more: list[str | Path] = ["--out", out, "--speculative", json.dumps(given)]
        required("vllm").run(SCRIPTS / "capture_vllm.py", [target, draft, file, *more], timeout=1800)
        tensors = load_file(out)
    return [(tensors[f"ids.{n}"], tensors[f"states.{n}"]) for n in range(len(prompts))]


def speculative(command: Sequence[str]) -> dict[str, Any]:
    """What a server's command says with --speculative-config, without the draft's path; {} where nothing."""
    import shlex

    from ..engines.launch import options

    said = options(shlex.join(command)).get("speculative-config")
    return {k: v for k, v in said.items() if k != "model"} if isinstance(said, dict) else {}


def compare(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], target_dir: Path, taps: Sequence[int], device: str = "cpu"
) -> dict[str, Any]:
    """Each slice of the captured states against all taps of the target, asked again in float32.

    pairs: as `captured`; taps: the declared ones, in the order of the slices. Plain JSON values: {"tokens", "right",
    "slices": [{declared, nearest, shift, distance, norm_ratio, cosine, right}], "says"}. norm_ratio and cosine are to
    the declared tap's states, medians over tokens. right: None where too little was captured to tell.
    """
    from ..target.model import Target

    target = Target.load(target_dir, device=device, dtype=torch.float32)
    layers, hidden = target.facts.num_layers, target.facts.hidden_size
    pairs = [(ids, states) for ids, states in pairs if len(ids) > SKIPPED + 1]
    if not pairs:
        return {"tokens": 0, "right": None, "slices": [],
                "says": f"No prompt is longer than the {SKIPPED + 1} tokens that are not compared"}  # fmt: skip
    if not all(states.isfinite().all() for _, states in pairs):
        why = "The draft is fed states that are not finite: the target runs in a precision too low for it"
        return {"tokens": 0, "right": False, "slices": [], "says": why}
    width = pairs[0][1].shape[1]
    if width != hidden * len(taps):
        return {"tokens": 0, "right": False, "slices": [],
                "says": f"The draft is fed states {width} wide instead of {len(taps)} of {hidden}: the method of the "
                        f"launch is not EAGLE-3's, or the engine takes the target's last state"}  # fmt: skip
    own = []
    for ids, _ in pairs:
        states, _ = target.states(ids[None].to(device), taps=range(layers + 1))
        own.append(states[0].unflatten(-1, (layers + 1, hidden)).transpose(0, 1).float().cpu())  # [n+1, L, H]
    slices = [
        _slice([states[:, i * hidden : (i + 1) * hidden] for _, states in pairs], own, tap)
        for i, tap in enumerate(taps)
    ]
    wrong = [s for s in slices if not s["right"]]
    says = "What the engine feeds the draft are the target's states at the declared taps" if not wrong else "; ".join(
        _sentence(s) for s in wrong)  # fmt: skip
    return {"tokens": sum(len(ids) for ids, _ in pairs), "right": not wrong, "slices": slices, "says": says}


def _slice(fed: Sequence[torch.Tensor], own: Sequence[torch.Tensor], tap: int) -> dict[str, Any]:
    """One slice: which tap and which shift of tokens is nearest, and how it stands to the declared one."""
    best: tuple[float, int, int] | None = None
    for shift in (0, -1, 1):
        far = torch.stack([_distances(f, o, shift) for f, o in zip(fed, own, strict=True)]).mean(0)  # [n+1]
        nearest = int(far.argmin())
        if best is None or float(far[nearest]) < best[0] - 1e-6:
            best = (float(far[nearest]), nearest, shift)
    assert best is not None
    x = torch.cat([f[SKIPPED:] for f in fed])
    y = torch.cat([o[tap, SKIPPED:] for o in own])
    ratio = float((x.norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-9)).median())
    cosine = float(torch.cosine_similarity(x, y, dim=-1).median())
    away = float(relative(x, y).median())
    return {"declared": tap, "nearest": best[1], "shift": best[2], "distance": round(away, 5),
            "nearest_distance": round(best[0], 5), "norm_ratio": round(ratio, 5), "cosine": round(cosine, 5),
            "right": best[1] == tap and best[2] == 0 and away <= SAME}  # fmt: skip


def _distances(fed: torch.Tensor, own: torch.Tensor, shift: int) -> torch.Tensor:
    """Median relative distance of fed rows [L, H] to the states [n+1, L, H] `shift` tokens on. [n+1]"""
    rows = torch.arange(SKIPPED, len(fed) - 1)
    return relative(fed[rows], own[:, rows + shift]).median(-1).values


def _sentence(s: Mapping[str, Any]) -> str:
    if s["nearest_distance"] <= SAME:
        other = f"those of tap {s['nearest']}" if s["nearest"] != s["declared"] else "its own"
        late = {0: "", -1: ", one token late", 1: ", one token early"}[s["shift"]]
        return f"the states fed as those of tap {s['declared']} are {other}{late}"
    if s["cosine"] > ALIKE:
        return f"the states fed as those of tap {s['declared']} are {s['norm_ratio']:.3g} times as large"
    away = f"nearest: {s['nearest']}, {s['nearest_distance']:.0%} of its norm away"
    return f"the states fed as those of tap {s['declared']} are no tap's ({away}): another target, or lower precision"
