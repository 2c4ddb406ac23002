"""Do features hold what the target computes? A random sample is computed again, each conversation alone.

    eyas extract conversations.jsonl --target T --engine vllm --out features --audit 1%

Engines batch requests, and have returned the states of other requests without a word. So the sample is computed by
transformers, one conversation at a time, in the precision that the features were made in, and compared row by row
within the tolerances of recorded.py. Where states differ, it is told whose they are: another conversation's, those of
the token before or after, another tap's, the right ones times a number, or nobody's.
pytest tests/test_features_audit.py
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.errors import BadInput
from eyas.features.layout import NOT_READ, teacher_rows
from eyas.features.likeness import relative
from eyas.features.reader import FeatureSet
from eyas.features.recorded import LOOSE, TOLERANCE
from eyas.target.model import Target
from eyas.writes import atomic_write_json

REPORT = "audit.json"
LEAST = 2  # documents: two that were exchanged are both wrong
OTHERS = 2000  # documents among which the owner of wrong states is sought, nearest first
FEW, FAR = 0.02, 3.0  # share of rows that may be beyond what is allowed, and how many times it
NEARER = 4.0  # times nearer than the right ones: no chance, neighbouring taps and tokens are a third and more apart
ALIKE = 0.99  # cosine from which states differ in scale alone


def how_many(text: str, documents: int) -> int:
    """`1%` of the documents, rounded up, two at least; or `20` of them. Raises BadInput for anything else."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = 0.0
    share = text.endswith("%")
    if not math.isfinite(number) or number <= 0 or (number > 100 if share else number % 1):
        raise BadInput(f"--audit {text!r}: expected a share such as 1%, or a number of conversations such as 20")
    count = max(LEAST, math.ceil(number / 100 * documents)) if share else int(number)
    return min(count, documents)


def audit(
    folder: str | Path,
    target_dir: str | Path,
    sample: str = "1%",
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
    seed: int | None = None,
) -> dict[str, Any]:
    """Compute `sample` of the features in `folder` again; the report, which is written to folder/audit.json, too.

    {"documents", "of", "tokens", "seconds", "dtype", "allowed": {states, logsumexp, choices}, "worst": {tap or "final":
    distance in parts of the norm, "logsumexp": in parts of itself}, "choices": {same, of}, "wrong": [{document, number,
    what: [sentences]}], "checked": [ids]}. seed: None draws another sample each time.
    Raises Mismatch where the features are of another target, and what opening them and the target raises.
    """
    began = time.monotonic()
    features = FeatureSet.open(folder)
    features.check(target=Path(target_dir))
    dtype = (features.manifest["config"] or {}).get("dtype") or "float32"
    allowed = TOLERANCE.get(dtype, LOOSE) if "dtype" in features.manifest["config"] else LOOSE
    chosen = sorted(random.Random(seed).sample(range(features.num_docs), how_many(sample, features.num_docs)))
    target = Target.load(target_dir, device, getattr(torch, dtype), trust_remote_code)
    checked = [check_document(features, i, target, allowed) for i in chosen]
    report = {
        "documents": len(checked),
        "of": features.num_docs,
        "tokens": sum(int(features.doc_lengths[i]) for i in chosen),
        "seconds": round(time.monotonic() - began, 1),
        "dtype": dtype,
        "allowed": dict(zip(("states", "logsumexp", "choices"), allowed, strict=True)),
        "worst": {name: max(one.worst[name] for one in checked) for name in checked[0].worst},
        "choices": {"same": sum(one.same for one in checked), "of": sum(one.read for one in checked)},
        "wrong": [
            {"document": features.doc_id(i), "number": i, "what": one.wrong}
            for i, one in zip(chosen, checked, strict=True)
            if one.wrong
        ],
        "checked": [features.doc_id(i) for i in chosen],
    }
    atomic_write_json(Path(folder) / REPORT, report)
    return report


@dataclass(frozen=True)
class Checked:
    """One document against the target."""

    worst: dict[str, float]
    same: int
    """Choices that are the target's, of `read`."""
    read: int
    wrong: list[str]


@torch.inference_mode()
def check_document(features: FeatureSet, i: int, target: Target, allowed: tuple[float, float, float]) -> Checked:
    """Compute document i alone and compare every row of it. allowed: as recorded.TOLERANCE."""
    states, sums, tied = allowed
    row, taps = features.document(i), features.meta.taps
    every = range(target.facts.num_layers + 1)
    streams, final = target.states(row["ids"][None].long(), taps=every)
    own = streams[0].unflatten(-1, (len(every), -1)).transpose(0, 1).float().cpu()  # [n+1, L, H]
    stored = row["taps"].float().unflatten(-1, (len(taps), -1)).transpose(0, 1)  # [T, L, H]
    slices = torch.cat([stored, row["final"][None].float()])  # [T+1, L, H], the final state last
    wanted = torch.cat([own[list(taps)], final.float().cpu()])
    far = relative(slices, wanted)  # [T+1, L]
    if features.manifest["counts"].get("recorded"):
        far[:, -1] = 0  # no state of the last token was ever recorded (target/record.py)
    read = teacher_rows(row["mask"])
    top1, logsumexp = target.choices(final[0][read.to(final.device)])
    apart = (row["logsumexp"][read] - logsumexp).abs() / logsumexp.abs().clamp_min(1.0)
    same = int((row["top1"][read] == top1).sum())
    worst = dict(zip([*map(str, taps), "final"], far.amax(-1).tolist(), strict=True))
    worst["logsumexp"] = float(apart.nan_to_num(torch.inf).amax()) if len(apart) else 0.0
    wrong = []
    bad = beyond(far, states)
    if bool(bad.any()):
        wrong = _whose(features, i, slices, wanted, own, bad)
    if bool(beyond(apart.nan_to_num(torch.inf)[None], sums).any()):
        wrong.append(f"a logsumexp is {worst['logsumexp']:.2g} of itself away from the target's")
    if same < (1 - tied) * len(top1) - 1:
        wrong.append(_choices(row["top1"], read, top1, same))
    return Checked(worst, same, len(top1), wrong)


def beyond(far: torch.Tensor, allowed: float) -> torch.Tensor:
    """Which rows are wrong: far [n, L], a distance a row of each slice -> bool [n, L].

    Low precision throws a row far off now and then (bf16 in vLLM against transformers: 99.9 % of the rows within 0.07,
    one of 1,756 at 0.151), so few rows may be a little beyond what is allowed. What belongs to somebody else is far
    away, or everywhere.
    """
    off = far > allowed
    wrong = (off.float().mean(-1) > FEW) | (far > FAR * allowed).any(-1)  # [n]
    return off & wrong[:, None]


# ------------------------------------------------------------------------------------------------ whose they are


def _whose(
    features: FeatureSet, i: int, slices: torch.Tensor, wanted: torch.Tensor, own: torch.Tensor, bad: torch.Tensor
) -> list[str]:
    """Sentences on the wrong rows: slices, wanted [T+1, L, H], own [n+1, L, H], bad bool [T+1, L]."""
    rows = bad.any(0).nonzero().flatten()
    where = f"{len(rows)} of {bad.shape[1]} rows ({_span(rows)})"
    other = _other_document(features, i, slices[-1], wanted[-1], bad[-1].nonzero().flatten())
    if other is not None:
        return [f"{where}: {other}"]
    names = [f"tap {t}" for t in features.meta.taps] + ["the final state"]
    said: dict[str, list[str]] = {}
    for name, stored, right, off in zip(names, slices, wanted, bad, strict=True):
        if bool(off.any()):
            at = off.nonzero().flatten()
            said.setdefault(f"{_what(stored, right, own, at)} ({_span(at)})", []).append(name)
    return [f"{', '.join(names)}: {what}" for what, names in said.items()]


def _other_document(
    features: FeatureSet, i: int, stored: torch.Tensor, right: torch.Tensor, rows: torch.Tensor
) -> str | None:
    """Whose final states lie in the wrong `rows` of document i, or where its own lie. stored, right [L, H]."""
    if not len(rows):
        return None
    for j in sorted(set(range(features.num_docs)) - {i}, key=lambda j: abs(j - i))[:OTHERS]:
        theirs = features.document(j)["final"]
        shared = rows[rows < len(theirs)]
        if 2 * len(shared) < len(rows):
            continue
        near = float(relative(stored[shared], right[shared]).median()) / NEARER
        if float(relative(theirs[shared], stored[shared]).median()) < near:
            return f"the states of another conversation, {features.doc_id(j)}"
        if float(relative(theirs[shared], right[shared]).median()) < near:
            return f"another conversation's states, and its own are recorded as those of {features.doc_id(j)}"
    return None


def _what(stored: torch.Tensor, right: torch.Tensor, own: torch.Tensor, rows: torch.Tensor) -> str:
    """What the wrong `rows` of one slice are. stored, right [L, H]; own [n+1, L, H]."""
    far = float(relative(stored[rows], right[rows]).median())
    near = far / NEARER
    for shift, word in ((-1, "before"), (1, "after")):
        inside = rows[(rows + shift >= 0) & (rows + shift < len(right))]
        if len(inside) and float(relative(stored[inside], right[inside + shift]).median()) < near:
            return f"the states of the token {word}"
    taps = relative(stored[rows], own[:, rows]).median(-1).values  # [n+1]
    if float(taps.min()) < near:
        return f"the states of tap {int(taps.argmin())}"
    cosine = torch.cosine_similarity(stored[rows], right[rows], dim=-1).median()
    if float(cosine) > ALIKE and far > 0.05:
        ratio = float((stored[rows].norm(dim=-1) / right[rows].norm(dim=-1)).median())
        return f"{ratio:.3g} times the states of the target"
    return f"{far:.2g} of their norm away from the target's, and nobody's"


def _choices(stored: torch.Tensor, read: torch.Tensor, top1: torch.Tensor, same: int) -> str:
    """stored int [L] as recorded, read bool [L], top1 int [R] the target's."""
    place = torch.full_like(stored, NOT_READ).masked_scatter(read, top1.to(stored.dtype))
    for shift, word in ((-1, "before"), (1, "after")):
        moved = place.roll(-shift)
        asked = read & (moved != NOT_READ)
        if bool(asked.any()) and float((stored[asked] == moved[asked]).float().mean()) > 0.9:
            return f"the choices are those of the row {word}"
    return f"only {same} of {len(top1)} choices are the target's"


def _span(rows: torch.Tensor) -> str:
    first, last = int(rows[0]), int(rows[-1])
    return f"row {first}" if first == last else f"rows {first} to {last}"


def summary(report: dict[str, Any]) -> Sequence[str]:
    """Lines for a person."""
    worst = report["worst"]
    taps = ", ".join(f"{name} {far:.2g}" for name, far in worst.items() if name != "logsumexp")
    lines = [
        f"audit: {report['documents']} of {report['of']} conversations ({report['tokens']:,} tokens) computed again, "
        f"each alone, in {report['seconds']:.0f} s",
        f"  farthest row, in parts of its norm: {taps} (allowed: {report['allowed']['states']:g}); logsumexp "
        f"{worst['logsumexp']:.2g} ({report['allowed']['logsumexp']:g}); {report['choices']['same']:,} of "
        f"{report['choices']['of']:,} choices equal",
    ]
    return lines + [f"  {one['document']}: {what}" for one in report["wrong"] for what in one["what"]]
