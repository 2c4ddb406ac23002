"""Training a draft: features and a vocabulary map in, a canonical draft directory out.

    eyas train runs/demo/features --vocab runs/demo/vocab --target smollm2 --held-out runs/demo/heldout --out runs/demo/train

The same command goes on where a killed one stopped, and ends in the same weights.
    Exercise it:  pytest tests/test_train_loop.py
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..artifacts import atomic_write, canonical_json, sha256_json, write_manifest
from ..decode.acceptance import Acceptance
from ..decode.replay import accepted_per_row, walk_rounds
from ..draft.checkpoint import load_draft, save_draft
from ..draft.model import Draft
from ..errors import BadInput, EyasError, Mismatch
from ..features.reader import FeatureSet
from ..machine import reuse_large_allocations
from ..target.facts import read_facts
from ..target.weights import Ends, load_ends
from ..vocab import VocabMap
from . import checkpoints
from .batches import make_batch, plan_epoch, plan_steps, steps_in
from .muon import Muon
from .objective import Batch, StepSums, ttt_loss
from .settings import TrainSettings
from .start import initialise, new_draft

STAGE = "train"
METRICS = "metrics.jsonl"


def train(
    features: FeatureSet,
    out_dir: str | Path,
    *,
    target_dir: str | Path,
    vocab_map: VocabMap | None,
    held_out: FeatureSet | None = None,
    settings: TrainSettings | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: bool = True,
) -> dict[str, Any]:
    """Train, or go on training, in `out_dir`; returns counts and the last predicted accept length.

    Writes `draft/` (canonical directory, float32), `metrics.jsonl`, `tensorboard/`, `checkpoints/` and, last,
    `manifest.json`. Needs only embedding, head and final norm of the target. With `settings.init_from` the vocabulary
    map is that draft's and `vocab_map` must be None or equal. Raises Mismatch for features or maps of another target.
    """
    settings, out, target_dir = settings or TrainSettings(), Path(out_dir), Path(target_dir)
    started = time.monotonic()
    reuse_large_allocations()
    features.check(target=target_dir)
    facts = read_facts(target_dir)
    ends = load_ends(target_dir, facts)
    draft, vocab_map = _make_draft(features, target_dir, ends, vocab_map, settings, seed)
    if held_out is not None:
        held_out.check(target=target_dir, taps=draft.conventions.taps)
    features.check(taps=draft.conventions.taps)
    draft.to(device)
    inputs = {
        "features": features.manifest["config_digest"] + sha256_json(features.manifest["files"]),
        "vocab_map": vocab_map.digest(),
        "target": features.meta.target,
        "init_from": _digest_of(draft) if settings.init_from else "",
    }
    # What only decides how often to save does not make it another run.
    decisive = settings.model_dump(exclude={"save_every", "keep"})
    key = sha256_json({"inputs": inputs, "settings": decisive, "seed": seed})
    run = _Run(draft, vocab_map, ends, features, held_out, settings, seed, device)
    held = checkpoints.latest(out / checkpoints.FOLDER, key)
    if held is not None:
        run.resume(held)
    _cut_metrics(out / METRICS, run.step)
    counts = run.go(out, key, progress)
    save_draft(
        draft.cpu(), vocab_map, out / "draft", facts=facts,
        fingerprints={"target": features.meta.target, "tokenizer": features.meta.tokenizer,
                      "template": features.meta.template},
        predicted=counts.get("predicted"),
        provenance={"inputs": inputs, "settings": settings.model_dump(), "seed": seed, "steps": run.step,
                    "tokens_seen": run.tokens, "supervised_rows_seen": run.rows},
    )  # fmt: skip
    files = [METRICS] + [f"draft/{p.name}" for p in sorted((out / "draft").iterdir()) if p.is_file()]
    write_manifest(
        out, STAGE, inputs=inputs, config=settings.model_dump(), conventions=draft.conventions.to_dict(), counts=counts,
        duration_s=time.monotonic() - started, files=files, seed=seed,
    )  # fmt: skip
    return counts


def _make_draft(
    features: FeatureSet, target_dir: Path, ends: Ends, vocab_map: VocabMap | None, settings: TrainSettings, seed: int
) -> tuple[Draft, VocabMap]:
    if settings.init_from:
        draft, own_map, _ = load_draft(settings.init_from, target_dir, dtype=torch.float32)
        if vocab_map is not None and vocab_map.digest() != own_map.digest():
            raise Mismatch(
                f"{settings.init_from} was trained with another vocabulary map than the one given: rows of its head "
                f"would come to mean other tokens. Leave --vocab out; a fine-tune keeps its draft's map."
            )
        return draft, own_map
    if vocab_map is None:
        raise BadInput("training a new draft needs a vocabulary map: give --vocab (see `eyas vocab`), or --init-from")
    if vocab_map.target_size != ends.facts.vocab_size:
        raise Mismatch(
            f"the vocabulary map is for {vocab_map.target_size} target ids, {target_dir} has {ends.facts.vocab_size}; "
            f"cut a map from features of this target"
        )
    draft = new_draft(settings, ends.facts, features, vocab_map)
    draft.set_embedding(ends.embedding)
    initialise(draft, settings, ends, features, vocab_map, seed)
    return draft, vocab_map


class _Run:
    """The state of a run in memory: what a checkpoint holds, and what can be made again from the inputs."""

    def __init__(
        self,
        draft: Draft,
        vocab_map: VocabMap,
        ends: Ends,
        features: FeatureSet,
        held_out: FeatureSet | None,
        settings: TrainSettings,
        seed: int,
        device: str,
    ) -> None:
        self.draft, self.features, self.held_out = draft, features, held_out
        self.settings, self.seed, self.device = settings, seed, device
        self.compute = torch.float32 if settings.dtype == "float32" else torch.bfloat16
        self.lengths = features.doc_lengths.numpy()
        self.target_ids = vocab_map.ids.to(device)
        self.draft_of = vocab_map.to_draft(torch.arange(vocab_map.target_size)).to(device)
        self.head_rows = ends.head[vocab_map.ids].to(device=device, dtype=self.compute)
        facts = ends.facts
        plain = facts.logit_scale == 1 and facts.logit_softcap is None
        self.logits_of = None if plain else facts.finish_logits
        draft.lm_head.weight.requires_grad_(settings.train_head)
        self.optimizers = _optimizers(draft, settings)
        self.peak = [[group["lr"] for group in opt.param_groups] for opt in self.optimizers]
        s = settings
        self.total = s.steps or steps_in(self.lengths, s.batch_tokens, s.micro_tokens, seed, s.epochs)
        self.step = self.tokens = self.rows = 0
        torch.manual_seed(seed)

    def resume(self, held: checkpoints.Checkpoint) -> None:
        """Go on from a checkpoint."""
        self.draft.load_state_dict(held.weights)
        checkpoints.restore(self.optimizers, held.optimizer)
        torch.set_rng_state(torch.tensor(held.state["rng"], dtype=torch.uint8))
        self.step, self.tokens, self.rows = held.step, held.state["tokens"], held.state["rows"]

    def go(self, out: Path, key: str, progress: bool) -> dict[str, Any]:
        """All remaining steps."""
        s = self.settings
        plan = plan_steps(self.lengths, s.batch_tokens, s.micro_tokens, self.seed)
        for _ in range(self.step):  # the plan costs nothing: it touches lengths only
            next(plan)
        predicted = self.evaluate() if self.step >= self.total else None
        out.mkdir(parents=True, exist_ok=True)
        board = _tensorboard(out / "tensorboard", self.step)
        bar = tqdm(total=self.total, initial=self.step, desc="train", unit="step", disable=None if progress else True)
        with bar, (out / METRICS).open("a", encoding="utf-8") as log:
            while self.step < self.total:
                began = time.monotonic()
                sums, norm = self.optimize(next(plan))
                record = self._record(sums, norm, time.monotonic() - began)
                done = self.step >= self.total
                if self.held_out is not None and (self.step % s.eval_every == 0 or done):
                    predicted = self.evaluate()
                    record["predicted"] = predicted
                log.write(canonical_json(record) + "\n")
                _report(board, bar, record, predicted)
                if self.step % s.save_every == 0 or done:
                    log.flush()
                    state = {"key": key, "tokens": self.tokens, "rows": self.rows}
                    weights = {k: v.cpu() for k, v in self.draft.owned_state_dict().items()}
                    checkpoints.save(out / checkpoints.FOLDER, self.step, weights, self.optimizers, state, s.keep)
        if board is not None:
            board.close()
        counts = {"steps": self.step, "tokens_seen": self.tokens, "supervised_rows_seen": self.rows}
        return counts | ({"predicted": predicted} if predicted else {})

    def optimize(self, step: list[list[int]]) -> tuple[StepSums, float]:
        """One optimizer step over its micro-batches; returns sums and the gradient norm before clipping."""
        s = self.settings
        share = self._learning_rate_share()
        for optimizer, peaks in zip(self.optimizers, self.peak, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share
        batches = [make_batch(self.features, docs, self.device) for docs in step]
        denominators = torch.stack([b.weights(s.ttt_steps).cpu() for b in batches]).sum(0).clamp(min=1)
        sums: StepSums | None = None
        for batch in batches:
            if not len(batch.rows(0)):
                continue
            loss, part = self._loss(batch, denominators)
            loss.backward()
            sums = part if sums is None else sums + part
            self.rows += int(part.rows[0])
        self.tokens += sum(len(b.ids) for b in batches)
        self.step += 1
        if sums is None:  # a step of documents without a supervised row changes nothing
            zero = torch.zeros(s.ttt_steps, dtype=torch.float64)
            return StepSums(zero, zero, zero, zero), 0.0
        trained = [p for p in self.draft.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, s.clip))
        if not math.isfinite(norm):
            raise EyasError(
                f"the gradient is not finite at step {self.step}: lower train.lr (now {s.lr:g}); the last checkpoint is "
                f"from before this step"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return sums, norm

    def _loss(self, batch: Batch, denominators: torch.Tensor) -> tuple[torch.Tensor, StepSums]:
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.compute is torch.bfloat16):
            return ttt_loss(
                self.draft, batch, self.head_rows, self.draft_of, steps=self.settings.ttt_steps,
                decay=self.settings.decay, denominators=denominators, logits_of=self.logits_of,
                chunk=self.settings.head_chunk, compute=self.compute,
            )  # fmt: skip

    def _learning_rate_share(self) -> float:
        """Linear warm-up, then a cosine to `final_lr`."""
        s, warm = self.settings, self.settings.warmup * self.total
        if self.step < warm:
            return (self.step + 1) / (warm + 1)
        done = (self.step - warm) / max(1.0, self.total - warm)
        return s.final_lr + (1 - s.final_lr) * 0.5 * (1 + math.cos(math.pi * done))

    def _record(self, sums: StepSums, norm: float, seconds: float) -> dict[str, Any]:
        rows = sums.rows.clamp(min=1)
        return {
            "step": self.step,
            "loss": _rounded(sums.loss / rows),
            "accuracy": _rounded(sums.right / rows),  # teacher-forced, out-of-vocabulary choices count as wrong
            "chain_accuracy": _rounded(sums.chain / rows),  # right at this step and all before it
            "gradient_norm": round(norm, 4),
            "tokens": self.tokens,
            "rows": self.rows,
            "seconds": round(seconds, 3),
        }

    def evaluate(self) -> dict[str, Any] | None:
        """Predicted accept length on the held-out features, by chain drafting (decode/replay.py)."""
        if self.held_out is None:
            return None
        k = self.settings.eval_draft_tokens
        histogram = torch.zeros(k + 1, dtype=torch.int64)
        lengths = self.held_out.doc_lengths.numpy()
        for docs in plan_epoch(lengths, self.settings.micro_tokens, seed=0, epoch=0):
            b = make_batch(self.held_out, docs, self.device)
            accepted = accepted_per_row(self.draft, b.ids, b.aux, b.run, b.packing, self.target_ids, k)
            histogram += walk_rounds(accepted, b.run, k)
        if not int(histogram.sum()):
            return None
        found = Acceptance(tuple(histogram.tolist()))
        return {
            "accept_length": round(found.tau, 4),
            "per_position": _rounded(torch.tensor(found.unconditional)),
            "rounds": found.rounds,
            "draft_tokens": k,
            "definition": "1 + accepted/rounds; chain drafting on the draft's own tokens over held-out answers",
        }


def _optimizers(draft: Draft, s: TrainSettings) -> list[torch.optim.Optimizer]:
    named = [(n, p) for n, p in draft.named_parameters() if p.requires_grad and not n.startswith("embed_tokens")]
    matrices = [p for n, p in named if p.ndim == 2 and n != "lm_head.weight"]
    rest = [p for n, p in named if p.ndim != 2 or n == "lm_head.weight"]
    adam: dict[str, Any] = {"betas": s.betas, "weight_decay": s.weight_decay, "fused": True}
    if s.optimizer == "muon":
        return [Muon(matrices, lr=s.lr, weight_decay=s.weight_decay), torch.optim.AdamW(rest, lr=s.head_lr, **adam)]
    groups = [{"params": matrices, "lr": s.lr}, {"params": rest, "lr": s.head_lr}]
    return [torch.optim.AdamW(groups, **adam)]


def _digest_of(draft: Draft) -> str:
    """Content digest of the weights a fine-tune starts from."""
    import hashlib

    digest = hashlib.sha256()
    for name, tensor in sorted(draft.owned_state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(float(v), 4) for v in values]


def _cut_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps that will be done again, and a torn last line."""
    if not path.is_file():
        return
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    atomic_write(path, "".join(line + "\n" for line in kept))


def _tensorboard(folder: Path, step: int) -> Any:
    """A SummaryWriter, or None where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def _report(board: Any, bar: Any, record: dict[str, Any], predicted: dict[str, Any] | None) -> None:
    step = record["step"]
    shown = {"loss": record["loss"][0], "acc": record["accuracy"][0]}
    if predicted:
        shown["tau"] = predicted["accept_length"]
    bar.set_postfix(shown, refresh=False)
    bar.update()
    if board is None:
        return
    scalars: Iterable[tuple[str, float]] = [
        (f"{name}/{k}", v) for name in ("loss", "accuracy", "chain_accuracy") for k, v in enumerate(record[name])
    ]
    for name, value in scalars:
        board.add_scalar(name, value, step)
    if record.get("predicted"):
        board.add_scalar("accept_length/predicted", record["predicted"]["accept_length"], step)
