"""What extraction and training hold at most: bytes by part, on the device and, where that is the CPU, as resident set.

The parts are those of the code: features/passes.py and writer.py for extraction, train/loop.py, draft/unroll.py and
train/head_loss.py for training, in which everything but bfloat16 products is float32. What libraries take was measured
(docs/plan.md). Symbols as in counts.py; B tokens of one forward.   Exercise it:  python benchmarks/plan.py
"""

from __future__ import annotations

from ..draft.shape import DraftShape
from ..draft.unroll import JOINED
from ..features.writer import DEFAULT_SHARD_BYTES
from ..target.head import HEAD_BLOCK, HEAD_BLOCK_OF_ACCELERATORS, LOGIT_BYTES
from ..train.head_loss import rows_held
from ..train.ridge import fit_bytes
from ..train.settings import TrainSettings
from .counts import draft_parameters, matrices, pick, sizes, trained
from .formula import Section, line, total
from .target import PlannedTarget

MIB = 1 << 20
LIBRARIES_EXTRACT, LIBRARIES_TRAIN = 360 * MIB, 340 * MIB
"""Python, torch, transformers with a tokenizer; Python, torch, TensorBoard's writer: resident, torch 2.13 for CPUs."""
AROUND = 512 << 10  # bytes of a mapped file that become resident with a row of it: Linux maps 64 KiB to 2 MiB at once


def extraction_memory(
    target: PlannedTarget, taps: int, batch_tokens: int, dtype_bytes: int, feature_bytes: float, on_cpu: bool = True,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Section:  # fmt: skip
    """The target's weights, one forward of B tokens, the shard that is being filled."""
    facts = target.facts
    weights = target.stored_bytes if target.experts else target.parameters * dtype_bytes
    shard = line("a shard, filled", "B", "min(features, shard)", features=feature_bytes, shard=shard_bytes)
    lines = [
        line("weights of the target", "B", "weights", weights=weights),
        line("states and one block", "B", "b*B*(2*T*H + 8*H + 3*I_t)", b=dtype_bytes, B=batch_tokens, T=taps,
             H=facts.hidden_size, I_t=_inner(target)),
        line("logits", "B", "2*min(4*B*block, chunk)", B=batch_tokens, chunk=LOGIT_BYTES,
             block=HEAD_BLOCK if on_cpu else HEAD_BLOCK_OF_ACCELERATORS),
    ]  # fmt: skip
    if on_cpu:
        lines += [shard, line("the shard, as it is written", "B", "shard", shard=shard.result),
                  line("libraries and tokenizer", "B", "measured", measured=LIBRARIES_EXTRACT)]  # fmt: skip
    return Section("Memory of extraction", (*lines, total("at most", "B", lines)), (_where(on_cpu),))


def training_memory(
    target: PlannedTarget, shape: DraftShape, settings: TrainSettings, supervised: float, longest: float,
    feature_bytes: float, tokens: int, on_cpu: bool = True,
) -> Section:  # fmt: skip
    """Weights, gradients and optimizer state in float32, the activations of one micro-batch, what is mapped of files.

    Gradients come while activations go, so the larger of the two counts beside what is always there; where a step takes
    several micro-batches gradients are there from the second on.
    """
    p = draft_parameters(shape, settings)
    learnt, inside = trained(shape, settings), sum(m * n for m, n in matrices(shape))
    micro = max(min(settings.micro_tokens, settings.batch_tokens), longest)
    z = {**sizes(shape), "s": supervised, "K": settings.ttt_steps, "B": micro, "V": shape.vocab_size,
         "c": min(rows_held(settings.head_chunk, shape.draft_vocab_size),
                  max(1.0, supervised * micro * settings.ttt_steps)),
         "b": 2 if settings.dtype == "bfloat16" else 4}  # fmt: skip
    shared = not settings.train_head and settings.start != "random" and not settings.init_from
    if settings.optimizer == "muon":
        optimizer = line("optimizer", "B", "4*P_inside + 8*(P_trained - P_inside)", P_inside=inside, P_trained=learnt)
    else:
        optimizer = line("optimizer", "B", "8*P_trained", P_trained=learnt)
    always = [
        line("weights", "B", "4*P", P=p["parameters"].result),
        optimizer,
        line("the target's head rows", "B", "4*own*D*H", own=0 if shared else 1, **pick(z, "D H")),
    ]
    forward = [
        line("batch and step 0", "B", "B*(2*(T*H + H) + 4*(2*T*H + 4*H + q + 6*kv))", **pick(z, "B T H q kv")),
        line("K steps of the layer", "B", "4*s*B*K*N*(8*H + 3*q + 3*kv + 3*I)", **pick(z, "s B K N H q kv I")),
        line("teacher and logits", "B", "4*s*B*(D + 3*H) + b*c*D", **pick(z, "s B b c D H")),
    ]
    # The two halves of their gradient, and a joined copy of the weights where they are small (draft/unroll.py).
    copies = 2 if 2 * z["H"] * (z["q"] + 2 * z["kv"]) <= JOINED else 1
    halves = line("q, k, v: halves of gradients", "B", "4*copies*H*(q + 2*kv)*2", copies=copies, **pick(z, "H q kv"))
    gathered = line("the head's gradient, gathered", "B", "4*f*D*H", f=int(settings.train_head), **pick(z, "D H"))
    gradients = line("gradients", "B", "4*P_trained", P_trained=learnt)
    several = int(settings.batch_tokens > settings.micro_tokens)
    step = line(
        "a step beside them", "B", "gathered + max(activations + several*gradients, gradients + halves)",
        halves=halves.result, gathered=gathered.result, activations=sum(x.result for x in forward),
        several=several, gradients=gradients.result,
    )  # fmt: skip
    summed, notes = [*always, step], ["resident set of the process" if on_cpu else "memory of the one device"]
    if on_cpu:
        b = 4 if target.facts.dtype == "float32" else 2
        rows = line("embedding and head, mapped", "B", "min(b*V*H, tokens*around) + b*untied*D*H", b=b, tokens=tokens,
                    around=AROUND, untied=int(not target.facts.tied), **pick(z, "V D H"))  # fmt: skip
        summed += [line("features, mapped", "B", "features", features=feature_bytes), rows,
                   line("libraries", "B", "measured", measured=LIBRARIES_TRAIN)]  # fmt: skip
        notes.append("mapped pages of files are given back where memory is short")
    at_most = total("at most", "B", summed)
    if settings.start == "regression" and not settings.init_from:
        wide = shape.target_hidden_size
        read = min(settings.start_rows, round(tokens * supervised))
        start = fit_bytes((shape.num_taps + 1) * wide, wide, read)
        notes.append(f"the linear start, before optimizer and gradients are there, holds {start / 1e9:,.2f} GB")
    lines = (*always, *forward, halves, gathered, gradients, step, *summed[len(always) + 1 :], at_most)
    return Section("Memory of training", lines, tuple(notes))


def _inner(target: PlannedTarget) -> float:
    """Width of what a block computes between its two projections, for one token."""
    raw = target.facts.raw
    if target.experts and raw.get("moe_intermediate_size"):
        chosen = next((int(raw[n]) for n in ("num_experts_per_tok", "num_experts_per_token") if raw.get(n)), 1)
        return float(max(target.facts.intermediate_size, chosen * int(raw["moe_intermediate_size"])))
    return float(target.facts.intermediate_size)


def _where(on_cpu: bool) -> str:
    return "resident set of the process" if on_cpu else "memory of the devices together; the host's is less"
