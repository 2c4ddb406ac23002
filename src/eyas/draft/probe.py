"""The probe: a few recorded sequences inside an exported draft, by which any later copy or conversion can be verified.

`eyas/probe.safetensors` holds ids, aux states, the embedding rows they need, and what this draft chooses on them at
each step, fed the recorded tokens (teacher-forced). Verifying needs neither the target nor the features:

    eyas export --check path/to/draft

It lies in a subfolder because engines load every *.safetensors beside the model.   pytest tests/test_probe.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import BadInput
from ..vocab import VocabMap
from ..writes import atomic_save_safetensors
from .checkpoint import load_draft
from .directory import PROBE
from .model import Draft
from .unroll import Packing, Unroll

if TYPE_CHECKING:
    from ..features.reader import FeatureSet

SCHEMA = "eyas-probe/1"
STEPS = 5
SEQUENCES, TOKENS = 4, 96
# Float32 sums in another order move a margin by about 1e-5; a wrong convention by more than this, somewhere.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class ProbeInputs:
    """What the draft is shown. N tokens of all sequences, U distinct ids among them."""

    ids: torch.Tensor  # int64 [N]
    offsets: torch.Tensor  # int64 [sequences+1]
    taps: torch.Tensor  # [N, T*Ht] as recorded (bf16 from features)
    embedding_ids: torch.Tensor  # int64 [U], ascending
    embedding_rows: torch.Tensor  # [U, H] as the draft's table holds them, unscaled


@dataclass(frozen=True)
class ProbeAnswers:
    """What the draft says: R rows, K steps."""

    rows: torch.Tensor  # int64 [R] indices into the packed sequence; row i at step k predicts x_{i+2+k}
    choices: torch.Tensor  # int32 [K, R] target ids
    margins: torch.Tensor  # float32 [K, R] logit of the choice minus that of the next best


@dataclass(frozen=True)
class ProbeReport:
    """The outcome of a replay. `ok`: all choices are the recorded ones (near-ties apart) and their margins agree."""

    path: str
    rows: int
    steps: int
    choices: int
    changed: int
    """Choices that differ although their recorded margin exceeds the tolerance."""
    near_ties: int
    """Choices that differ within the tolerance: not held against the draft."""
    largest_margin_difference: float
    tolerance: float
    ok: bool
    first_changed: dict[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def collect(
    features: FeatureSet, embedding: torch.Tensor, sequences: int = SEQUENCES, tokens: int = TOKENS
) -> ProbeInputs:
    """The beginnings (at most `tokens` tokens) of a few documents spread over the features; embedding [V, H]."""
    usable = (features.doc_lengths >= STEPS + 3).nonzero().squeeze(1)
    if not len(usable):
        raise BadInput(
            f"{features.dir}: no document has {STEPS + 3} tokens, so no probe can be made of them; give features of "
            "longer conversations, or leave --features out"
        )
    picked = usable[torch.linspace(0, len(usable) - 1, min(sequences, len(usable))).round().long()].unique()
    documents = [features.document(int(i)) for i in picked]
    lengths = torch.tensor([min(tokens, len(d["ids"])) for d in documents])
    ids = torch.cat([d["ids"][:n] for d, n in zip(documents, lengths.tolist(), strict=True)]).long()
    taps = torch.cat([d["taps"][:n] for d, n in zip(documents, lengths.tolist(), strict=True)])
    needed = ids.unique()
    rows = embedding.detach().cpu()[needed].clone()
    return ProbeInputs(ids, nn.functional.pad(lengths.cumsum(0), (1, 0)), taps.clone(), needed, rows)


@torch.inference_mode()
def answer(draft: Draft, vocab_map: VocabMap, inputs: ProbeInputs, steps: int = STEPS) -> ProbeAnswers:
    """Run the draft over the inputs, teacher-forced, in its own dtype and on its own device."""
    device, dtype = draft.fc.weight.device, draft.fc.weight.dtype
    packing = Packing(inputs.offsets.to(device))
    room = inputs.offsets.diff().to(device)[packing.document] - packing.position
    rows = (room > steps).nonzero().squeeze(1)  # x_{i+1} ... x_{i+steps} are there to be fed
    compact = torch.searchsorted(inputs.embedding_ids, inputs.ids).to(device)
    following = torch.cat([compact[1:], compact[-1:]])  # a sequence's last row is never attended to by an asked one
    choices, margins = [], []
    with _embedding(draft, inputs.embedding_rows.to(device)):
        unroll = Unroll(draft, packing, rows)
        embedded = unroll.embed(following)
        h = unroll.start(embedded, inputs.taps.to(device, dtype))
        for k in range(steps):
            best = draft.logits(h).float().topk(min(2, draft.shape.draft_vocab_size), dim=-1)
            choices.append(vocab_map.to_target(best.indices[:, 0].cpu()).int())
            margins.append((best.values[:, 0] - best.values[:, -1]).cpu())
            if k + 1 < steps:
                h = unroll.step(embedded[rows + k + 1], draft.feedback(h))
    return ProbeAnswers(rows.cpu(), torch.stack(choices), torch.stack(margins))


@contextmanager
def _embedding(draft: Draft, rows: torch.Tensor) -> Iterator[None]:
    """Let the draft look up compact ids in the probe's few rows instead of its table."""
    table = draft.embed_tokens
    draft.embed_tokens = nn.Embedding.from_pretrained(rows)
    try:
        yield
    finally:
        draft.embed_tokens = table


def write_probe(folder: Path, inputs: ProbeInputs, answers: ProbeAnswers) -> Path:
    """Write the probe of the draft in `folder`; returns its path."""
    tensors = {
        "ids": inputs.ids.int(), "offsets": inputs.offsets, "taps": inputs.taps,
        "embedding_ids": inputs.embedding_ids.int(), "embedding_rows": inputs.embedding_rows,
        "rows": answers.rows, "choices": answers.choices, "margins": answers.margins,
    }  # fmt: skip
    path = folder / PROBE
    atomic_save_safetensors(tensors, path, {"schema": SCHEMA, "steps": str(len(answers.choices))})
    return path


def read_probe(folder: str | Path) -> tuple[ProbeInputs, ProbeAnswers]:
    """The probe of a draft directory. Raises BadInput when it is missing, damaged or of another schema."""
    from safetensors import safe_open

    path = Path(folder) / PROBE
    if not path.is_file():
        raise BadInput(f"{path} is missing: this draft carries no probe; export it with --features")
    try:
        with safe_open(path, framework="pt") as handle:
            if (schema := (handle.metadata() or {}).get("schema")) != SCHEMA:
                raise BadInput(f"{path}: expected schema {SCHEMA!r}, found {schema!r}; export the draft again")
            t = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        inputs = ProbeInputs(t["ids"].long(), t["offsets"], t["taps"], t["embedding_ids"].long(), t["embedding_rows"])
        answers = ProbeAnswers(t["rows"], t["choices"], t["margins"])
    except BadInput:
        raise
    except Exception as error:  # safetensors raises its own type
        raise BadInput(f"{path} cannot be read ({error!r}); export the draft again") from error
    return inputs, answers


def compare(recorded: ProbeAnswers, now: ProbeAnswers, path: str, tolerance: float = TOLERANCE) -> ProbeReport:
    """Recorded answers against fresh ones for the same rows."""
    differ = recorded.choices != now.choices  # [K, R]
    tie = recorded.margins <= tolerance
    changed, ties = differ & ~tie, differ & tie
    # Where the choice is the same its margin must be; NaN, as from a broken weight, is no agreement.
    gaps = (recorded.margins - now.margins).abs().masked_fill(differ, 0.0)
    largest = float(gaps.nan_to_num(float("inf")).max()) if gaps.numel() else 0.0
    first = None
    if changed.any():
        step, row = (int(x) for x in changed.nonzero()[0])
        first = {"step": step, "row": int(recorded.rows[row]), "recorded": int(recorded.choices[step, row]),
                 "now": int(now.choices[step, row])}  # fmt: skip
    steps, rows = recorded.choices.shape
    ok = not changed.any() and largest <= tolerance
    return ProbeReport(
        path, rows, steps, steps * rows, int(changed.sum()), int(ties.sum()), largest, tolerance, bool(ok), first
    )


def verify_probe(folder: str | Path, device: torch.device | str = "cpu", tolerance: float = TOLERANCE) -> ProbeReport:
    """Replay the probe on the weights in `folder`, in float32. Raises BadInput where either cannot be read."""
    inputs, recorded = read_probe(folder)
    draft, vocab_map, _ = load_draft(folder, device=device)
    wide, expected = inputs.taps.shape[-1], draft.fc.weight.shape[1]
    if wide != expected or inputs.embedding_rows.shape[-1] != draft.shape.hidden_size:
        raise BadInput(
            f"{Path(folder) / PROBE} belongs to another draft: its states are {wide} wide and its embedding "
            f"{inputs.embedding_rows.shape[-1]}, this draft reads {expected} and {draft.shape.hidden_size}; export "
            "this draft again with --features"
        )
    return compare(recorded, answer(draft, vocab_map, inputs, len(recorded.choices)), str(folder), tolerance)
