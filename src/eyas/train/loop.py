"""Training a draft: features and a vocabulary map in, a canonical draft directory out.

    eyas train runs/demo/extract --vocab runs/demo/vocab --target smollm2 --held-out runs/demo/heldout --out RUN

The same command goes on where a killed one stopped, and ends in the same weights. Under torchrun all processes call
`train` alike: rank 0 writes, and every step's documents are shared out (ranks.py).
    Exercise it:  pytest tests/test_train_loop.py tests/test_train_ranks.py
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..artifacts import is_current, read_manifest, write_manifest
from ..digests import sha256_json
from ..draft.checkpoint import save_draft
from ..draft.model import Draft
from ..errors import EyasError
from ..features.reader import FeatureSet
from ..locks import inside
from ..machine import check_device, choose_precision, no_denormals, reuse_large_allocations, row_multiple
from ..memory import spending
from ..vocab import VocabMap
from . import checkpoints
from .batches import make_batch, plan_steps, share_step, steps_in, supervised_rows
from .evaluate import predict_accept_length
from .inputs import DRAFT, STAGE, Inputs, check_run, non_finite, prepare
from .muon import Muon
from .objective import Objective, StepSums
from .ranks import ALONE, Ranks, connected, gathered, joining, sharded, spread, whole
from .record import METRICS, Recorder
from .settings import TrainSettings
from .trackers import check_trackers

REMEDY = (
    "give --set recompute=true, with which the same run goes on and keeps less; or begin anew in another --out, with a "
    "smaller --set micro_tokens=… or features of a smaller --max-length"
)


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
    map is that draft's and `vocab_map` must be None or equal. A finished, unchanged run is left as it is.
    Raises Mismatch for features, a map or checkpoints that do not belong together, BadInput for what cannot be trained,
    EyasError for a gradient that is not finite, for a full disk, and where processes see different folders.
    """
    settings, out = settings or TrainSettings(), Path(out_dir)
    check_trackers(settings.track)
    with connected(device) as ranks, contextlib.ExitStack() as held:
        where = check_device(ranks.device(device))
        settings = settings.model_copy(update={"dtype": choose_precision(settings.dtype, where.type)})
        if ranks.first:
            check_run(out)
            held.enter_context(inside(out))
        held.enter_context(no_denormals())
        return _train(features, out, Path(target_dir), vocab_map, held_out, settings, seed, where, progress, ranks)


def _train(
    features: FeatureSet, out: Path, target_dir: Path, vocab_map: VocabMap | None, held_out: FeatureSet | None,
    settings: TrainSettings, seed: int, device: torch.device, progress: bool, ranks: Ranks,
) -> dict[str, Any]:  # fmt: skip
    started = time.monotonic()
    given = prepare(features, target_dir, vocab_map, held_out, settings, seed)
    measured = sha256_json(held_out.manifest["files"]) if held_out is not None else ""
    inputs = {**given.digests, "held_out": measured}
    config = {**given.identity["settings"], "seed": seed}
    done = ranks.agree(read_manifest(out)["counts"] if ranks.first and is_current(out, STAGE, inputs, config) else None)
    if done is not None:
        return done
    held = _latest(out / checkpoints.FOLDER, given.identity, ranks)
    if held is None and ranks.first:
        given.initialise()
    reuse_large_allocations()
    run = Run(given, settings, seed, device, ranks, held)
    counts = run.go(out, progress, held.damaged if held else [])
    draft = run.trained()
    if not ranks.first:
        return counts
    meta = features.meta
    save_draft(
        draft, given.vocab_map, out / DRAFT, facts=given.facts,
        fingerprints={"target": meta.target, "tokenizer": meta.tokenizer, "template": meta.template, "ends": meta.ends},
        predicted=counts.get("predicted"),
        # Where the first weights lay is nobody's business; their digest is among the inputs.
        provenance={"inputs": inputs, "settings": settings.model_dump(exclude={"track", "init_from"}), "seed": seed,
                    "steps": run.step, "tokens_seen": run.tokens, "supervised_rows_seen": run.rows,
                    "data": _data(features, given.vocab_map)},
    )  # fmt: skip
    files = [METRICS] + [f"{DRAFT}/{p.name}" for p in sorted((out / DRAFT).iterdir()) if p.is_file()]
    write_manifest(
        out, STAGE, inputs=inputs, config=config, conventions=draft.conventions.to_dict(), counts=counts,
        duration_s=time.monotonic() - started, files=files, seed=seed,
    )  # fmt: skip
    return counts


def _latest(folder: Path, identity: dict[str, Any], ranks: Ranks) -> checkpoints.Checkpoint | None:
    """The newest checkpoint; rank 0 looks first, because it clears what killed writers left."""
    held = checkpoints.latest(folder, identity) if ranks.first else None
    ranks.agree(None)
    if not ranks.first:
        held = checkpoints.latest(folder, identity)
    if not ranks.all_same(held.step if held else -1):
        raise EyasError(
            f"{folder}: process {ranks.rank} finds {f'step {held.step}' if held else 'no checkpoint'} there, others "
            f"something else. Put --out on a file system that all machines see."
        )
    return held


class Run:
    """The state of a run in memory: what a checkpoint holds, and what can be made again from the inputs.

    `held` is the checkpoint to go on from; without one the draft begins with rank 0's weights.
    """

    def __init__(
        self, given: Inputs, settings: TrainSettings, seed: int, device: torch.device,
        ranks: Ranks = ALONE, held: checkpoints.Checkpoint | None = None,
    ) -> None:  # fmt: skip
        self.given, self.settings, self.seed, self.device, self.ranks = given, settings, seed, device, ranks
        self.draft = given.draft.to(device)
        if held is not None:
            self.draft.load_owned(held.weights)
        else:
            ranks.same(self.draft.owned_state_dict().values())
        self.compute = torch.float32 if settings.dtype == "float32" else torch.bfloat16
        self.lengths = given.features.doc_lengths.numpy()
        ids, size = given.vocab_map.ids, given.vocab_map.target_size
        self.draft_of = given.vocab_map.to_draft(torch.arange(size)).to(device)
        self.head_rows = given.ends.head[ids].to(device=device, dtype=torch.float32)
        self.logits_of = self._logits_of(ids)
        self.draft.lm_head.weight.requires_grad_(settings.train_head)
        if not settings.train_head and torch.equal(self.head_rows, self.draft.lm_head.weight):
            self.head_rows = self.draft.lm_head.weight.detach()  # the same rows: 0.9 GB for 32,000 ids 7,168 wide
        self.objective = spread(Objective(self.draft), settings.parallel, ranks, device)
        self.optimizers = self._optimizers()
        self.peak = [[group["lr"] for group in opt.param_groups] for opt in self.optimizers]
        s = settings
        self.total = s.steps or steps_in(self.lengths, s.batch_tokens, s.micro_tokens, seed, s.epochs)
        self.step = self.tokens = self.rows = 0
        torch.manual_seed(seed)
        if held is not None:
            checkpoints.restore(self.optimizers, held.optimizer)
            checkpoints.restore_rng(held.optimizer)
            self.step, self.tokens, self.rows = held.step, held.state["tokens"], held.state["rows"]

    def _logits_of(self, ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """From the plain product with the head's rows to the target's logits (bias, scale, soft-cap); None if equal."""
        facts, bias = self.given.facts, self.given.ends.head_bias
        if bias is None and facts.logit_scale == 1 and facts.logit_softcap is None:
            return None
        rows = 0.0 if bias is None else bias[ids].float().to(self.device)
        return lambda z: facts.finish_logits(z + rows)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        s = self.settings
        named = dict(self.draft.named_parameters())
        trained = {n: p for n, p in named.items() if p.requires_grad and not n.startswith("embed_tokens.")}
        matrices = [p for n, p in trained.items() if p.ndim == 2 and n != "lm_head.weight"]
        rest = [p for n, p in trained.items() if p.ndim != 2 or n == "lm_head.weight"]
        adam: dict[str, Any] = {"betas": s.betas, "weight_decay": s.weight_decay}
        adam["fused"] = self.device.type in ("cpu", "cuda")
        if s.optimizer == "muon":
            muon = Muon(matrices, lr=s.lr, weight_decay=s.weight_decay, dtype=self.compute)
            return [muon, torch.optim.AdamW(rest, lr=s.head_lr, **adam)]
        groups = [{"params": matrices, "lr": s.lr}, {"params": rest, "lr": s.head_lr}]
        return [torch.optim.AdamW(groups, **adam)]

    def go(self, out: Path, progress: bool, damaged: list[str]) -> dict[str, Any]:
        """All remaining steps; returns the counts."""
        s = self.settings
        plan = plan_steps(self.lengths, s.batch_tokens, s.micro_tokens, self.seed)
        for _ in range(self.step):  # the plan costs nothing: it touches lengths only
            next(plan)
        predicted = self._evaluate() if self.step >= self.total else None
        told = {**s.model_dump(mode="json", exclude={"track"}), "seed": self.seed, "total_steps": self.total}
        with Recorder(
            out if self.ranks.first else None, self.step, self.total, progress and self.ranks.first, s.track, told
        ) as recorder:
            if self.step:
                recorder.say(f"going on from step {self.step}")
            for text in damaged:
                recorder.say(f"checkpoint left aside: {text}")
            while self.step < self.total:
                began, tokens = time.monotonic(), self.tokens
                sums, norm = self.optimize(next(plan))
                record = self._record(sums, norm, time.monotonic() - began)
                done = self.step >= self.total
                if self.given.held_out is not None and (self.step % s.eval_every == 0 or done):
                    recorder.evaluating()
                    predicted = self._evaluate()
                    record |= {"predicted": predicted} if predicted else {}
                recorder.step(record, self.tokens - tokens)
                if self.step % s.save_every == 0 or done:
                    recorder.flush()
                    self._save(out / checkpoints.FOLDER)
        counts = {"steps": self.step, "tokens_seen": self.tokens, "supervised_rows_seen": self.rows}
        return counts | ({"predicted": predicted} if predicted else {})

    def _save(self, folder: Path) -> None:
        weights, optimizer = self._weights(), checkpoints.flatten(self.optimizers)
        if self.ranks.first:
            state = {"identity": self.given.identity, "tokens": self.tokens, "rows": self.rows}
            checkpoints.save(folder, self.step, weights, optimizer, state, self.settings.keep)

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(tensor).cpu() for name, tensor in self.draft.owned_state_dict().items()}

    def trained(self) -> Draft:
        """The draft on the CPU, with all its shards."""
        if not sharded(self.objective):
            return self.draft.cpu()
        draft = Draft(self.draft.shape, self.draft.conventions)
        if self.draft.embed_tokens is not None:
            draft.set_embedding(self.draft.embed_tokens.weight.detach().cpu())
        draft.load_owned(self._weights())
        return draft

    def optimize(self, step: list[list[int]]) -> tuple[StepSums, float]:
        """One optimizer step over its micro-batches; returns sums and the gradient norm before clipping."""
        s = self.settings
        share = self._learning_rate_share()
        for optimizer, peaks in zip(self.optimizers, self.peak, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share
        features, docs = self.given.features, [doc for batch in step for doc in batch]
        weights = supervised_rows(features, docs, s.ttt_steps)
        self.tokens += int(self.lengths[docs].sum())
        self.rows += int(weights[0])
        self.step += 1
        sums = StepSums.zeros(s.ttt_steps)
        if not weights[0]:  # nothing is supervised in this step, and nothing changes
            return sums, 0.0
        mine = share_step(step, self.lengths, s.micro_tokens, self.ranks.rank, self.ranks.world)
        for number, batch in enumerate(mine, 1):
            with joining(self.objective, number == len(mine)), spending(self._doing(batch), REMEDY):
                loss, part = self._loss(batch, weights.clamp(min=1))
                (loss * self.ranks.world).backward()  # gradients are averaged over processes; we want their sum
            sums += part
        sums = StepSums(*self.ranks.sum(torch.stack([sums.loss, sums.rows, sums.right, sums.chain])))
        trained = [p for p in self.draft.parameters() if p.grad is not None]
        norm = float(whole(torch.nn.utils.clip_grad_norm_(trained, s.clip)))
        if not math.isfinite(norm):
            raise EyasError(self._not_finite(docs))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return sums, norm

    def _loss(self, docs: list[int], denominators: torch.Tensor) -> tuple[torch.Tensor, StepSums]:
        multiple = row_multiple(self.settings.dtype, self.device.type)
        batch = make_batch(self.given.features, docs, self.device, multiple) if docs else None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute is torch.bfloat16):
            return self.objective(
                batch, head_rows=self.head_rows, draft_of=self.draft_of, steps=self.settings.ttt_steps,
                decay=self.settings.decay, denominators=denominators, logits_of=self.logits_of,
                chunk=self.settings.head_chunk, compute=self.compute, recompute=self.settings.recompute,
            )  # fmt: skip

    def _doing(self, docs: list[int]) -> str:
        """A micro-batch in words, for whoever runs out of memory in it."""
        lengths, s = self.lengths[docs], self.settings
        if not docs:
            return f"training step {self.step}"
        return (
            f"training step {self.step}, on {int(lengths.sum()):,} tokens at once (micro_tokens = {s.micro_tokens:,}, "
            f"the longest document has {int(lengths.max()):,}), unrolled {s.ttt_steps} times on {self.device}"
        )

    def _not_finite(self, docs: list[int]) -> str:
        told = non_finite(self.given.features, docs)
        if told:
            return f"the gradient is not finite at step {self.step}: {told}. Extract again without it."
        s = self.settings
        return (
            f"the gradient is not finite at step {self.step}. Lower train.lr (now {s.lr:g}) and train.head_lr (now "
            f"{s.head_lr:g}) and train into another --out; the checkpoints here are from before this step."
        )

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

    def _evaluate(self) -> dict[str, Any] | None:
        given, s = self.given, self.settings
        if given.held_out is None:
            return None
        doing = f"predicting the accept length on held-out text, {s.micro_tokens:,} tokens at once (micro_tokens)"
        with gathered(self.objective), spending(doing, REMEDY):
            return predict_accept_length(
                self.draft, given.held_out, given.vocab_map, s.eval_draft_tokens, batch_tokens=s.micro_tokens,
                ranks=self.ranks,
            )  # fmt: skip


def _data(features: FeatureSet, vocab_map: VocabMap) -> dict[str, Any]:
    """What there was to learn from, and how much of what the map was counted on it can say; None where not known."""
    counts = vocab_map.counts
    return {
        "documents": features.num_docs, "tokens": features.num_tokens,
        "supervised_tokens": features.supervised_tokens,
        "coverage": None if counts is None or not int(counts.sum()) else vocab_map.coverage(counts),
    }  # fmt: skip


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(float(v), 4) for v in values]
