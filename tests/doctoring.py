"""A text that the draft wrote itself: on it the draft as declared is nearly unsurprised, with no training at all.

    patient = make_patient()                     # a random draft, its map, embedding, and text with states at taps 0..8
    Bench(patient.material).surprise([patient.specimen])          from doctoring import make_patient

What the target chooses after each token is the draft's own argmax at step 0, and most recorded states are made so that
`fc` of them is what the draft feeds back, so later steps are known, too: row i at step 1 is row i+1 at step 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafts import make_draft, with_embedding
from eyas.doctor.hypotheses import Context, Hypothesis, hypotheses
from eyas.doctor.material import Material
from eyas.doctor.specimen import Specimen, stored_ids
from eyas.draft.checkpoint import save_draft
from eyas.draft.model import Draft
from eyas.target.facts import read_facts
from eyas.target.weights import load_ends
from eyas.vocab import VocabMap

Tensors, Config = dict[str, torch.Tensor], dict[str, Any]

LAYERS = 8  # of the target: taps 0 .. 8 are recorded
DOCUMENTS, LENGTH, PROMPT = 24, 40, 4
CARRIED = 0.7  # share of the states that the draft can know in advance
ODD = 0.1  # share of tokens that the target chooses against the draft
SHARP = 6.0  # factor on the head: random weights are too undecided


@dataclass(frozen=True)
class Patient:
    """A healthy draft and its text."""

    draft: Draft
    vocab_map: VocabMap
    embedding: torch.Tensor  # [V, H]
    material: Material

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """As a checkpoint holds them, by canonical name."""
        owned = {name: t.detach() for name, t in self.draft.owned_state_dict().items()}
        return owned | {"d2t": self.vocab_map.d2t, "t2d": self.vocab_map.t2d}

    @property
    def specimen(self) -> Specimen:
        """As declared."""
        c = self.draft.conventions
        return Specimen(self.draft.shape, c, self.tensors, self.vocab_map.ids, self.embedding, c.taps)

    @property
    def context(self) -> Context:
        """Nothing but the recorded taps."""
        return Context(taps=frozenset(self.material.states))


def make_patient(
    seed: int = 0,
    *,
    embedding: torch.Tensor | None = None,
    sizes: dict[str, int] | None = None,
    ids: torch.Tensor | None = None,
    text: dict[str, Any] | None = None,
    **conventions: Any,
) -> Patient:
    """A sharp random draft with its text. ids: its map where that matters; text: arguments of `written_by`."""
    draft, vocab_map = make_draft(seed, sizes, **conventions)
    if ids is not None:
        vocab_map = VocabMap.from_absolute(ids, draft.shape.vocab_size)
    with torch.no_grad():
        draft.lm_head.weight *= SHARP
    table = with_embedding(draft) if embedding is None else embedding
    draft.set_embedding(table)
    draft.requires_grad_(False)
    return Patient(draft, vocab_map, table, written_by(draft, vocab_map, seed=seed + 100, **(text or {})))


@torch.inference_mode()
def written_by(
    draft: Draft,
    vocab_map: VocabMap,
    documents: int = DOCUMENTS,
    length: int = LENGTH,
    prompt: int = PROMPT,
    carried: float = CARRIED,
    odd: float = ODD,
    seed: int = 0,
) -> Material:
    """Text of a target that chooses what `draft` says (but for a share `odd` of the tokens, which are random).

    States are random; a share `carried` of them is such that the draft feeds the same itself (not under norms before
    fc, which forget a scale). The first `prompt` tokens of each document are random and not supervised.
    """
    generator = torch.Generator().manual_seed(seed)
    c, width = draft.conventions, draft.shape.target_hidden_size
    states = torch.randn(documents, length, LAYERS + 1, width, generator=generator)
    ids = torch.randint(draft.shape.vocab_size, (documents, length), generator=generator)
    choice = torch.empty_like(ids)
    choice[:, 0] = ids[:, 1]
    other = vocab_map.ids[torch.randint(vocab_map.size, (documents, length), generator=generator)]
    against = torch.rand(documents, length, generator=generator) < odd
    carry = torch.rand(documents, length, generator=generator) < carried
    plain = not (c.norm_before_fc or c.fc_norm)
    back, taps = torch.linalg.pinv(draft.fc.weight), list(c.taps)
    cache = draft.new_cache()
    for i in range(length - 1):
        g = draft.fuse(states[:, i, taps].flatten(1))  # [B, H]
        h = draft.step(draft.embed(ids[:, i + 1 : i + 2]), g[:, None], torch.tensor([i]), cache)[:, 0]
        said = vocab_map.ids[draft.logits(h).argmax(-1)]
        choice[:, i + 1] = torch.where(against[:, i + 1], other[:, i + 1], said)
        if i + 2 < length and i + 2 >= prompt:
            ids[:, i + 2] = choice[:, i + 1]
        if plain:
            own = states[:, i + 1, taps].flatten(1)
            moved = own + (draft.feedback(h) - draft.fuse(own)) @ back.T
            states[:, i + 1, taps] = torch.where(carry[:, i + 1, None], moved, own).unflatten(1, (len(taps), -1))
    mask = (torch.arange(length) >= prompt).expand(documents, length)
    return Material(
        ids=ids.flatten().clone(),
        offsets=torch.arange(0, documents * length + 1, length),
        mask=mask.flatten().clone(),
        choice=choice.flatten().clone(),
        states={tap: states[:, :, tap].flatten(0, 1).clone() for tap in range(LAYERS + 1)},
        source="written by the draft",
        final_tap=LAYERS,
    )


def all_of(base: Specimen, context: Context) -> dict[tuple[str, str], Hypothesis]:
    """Hypotheses by group and label."""
    return {(h.group, h.label): h for h in hypotheses(base, context)}


def without(specimen: Specimen, *names: str) -> Specimen:
    """The same with tensors lost."""
    return replace(specimen, tensors={name: t for name, t in specimen.tensors.items() if name not in names})


# ---------------------------------------------------------------- faults, and which hypothesis undoes each


@dataclass(frozen=True)
class Fault:
    """`inject` makes the specimen that a faulty directory gives; `group` and `label` name the hypothesis against it."""

    group: str
    label: str
    inject: Callable[[Patient], Specimen]
    patient: Mapping[str, Any] = field(default_factory=dict)
    """Conventions of the draft that it is put into."""
    context: Callable[[Patient], dict[str, Any]] = lambda patient: {}
    """What must be at hand beside the draft."""


def stored_map(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patient], Specimen]:
    """d2t changed as stored; the ids are what engines make of it."""

    def inject(patient: Patient) -> Specimen:
        tensors = patient.tensors | {"d2t": change(patient.vocab_map.d2t)}
        return replace(patient.specimen, tensors=tensors, ids=stored_ids(tensors, patient.draft.shape))

    return inject


def weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Patient], Specimen]:
    """Tensors changed, added or removed in place of a copy of the dict."""

    def inject(patient: Patient) -> Specimen:
        tensors = patient.tensors
        change(tensors)
        return replace(patient.specimen, tensors=tensors)

    return inject


def said(**fields: Any) -> Callable[[Patient], Specimen]:
    """Conventions declared otherwise."""
    return lambda patient: patient.specimen.with_(conventions=fields)


def _each(names: Sequence[str], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patient], Specimen]:
    return weights(lambda t: t.update({n: change(t[n]).contiguous() for n in names}))


def _swap(a: str, b: str) -> Callable[[Patient], Specimen]:
    return weights(lambda t: t.update({a: t[b], b: t[a]}))


def _rename(old: str, new: str, change: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> Any:
    return weights(lambda t: t.update({new: change(t.pop(old))}))


def _target_head(patient: Patient) -> torch.Tensor:
    """A head [V, H] of the target from which this draft's was cut."""
    head = torch.randn(patient.embedding.shape, generator=torch.Generator().manual_seed(5)) * 0.2 * SHARP
    head[patient.vocab_map.ids] = patient.draft.lm_head.weight
    return head


LAYER, ATTENTION = "midlayer.", "midlayer.self_attn."
QKV = [f"{ATTENTION}{x}_proj.weight" for x in "qkv"]
NORM_WEIGHTS = [f"{LAYER}{x}.weight" for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
NORM_WEIGHTS.append("norm.weight")
HEAD_DIM, D, V = 8, 120, 300


def _noise(t: torch.Tensor) -> torch.Tensor:
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(6)) * 0.2


def _places(t: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(t))


def _other_map(patient: Patient) -> Specimen:
    """The map of a run over other text, marks and all."""
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(8))[: len(patient.vocab_map.ids)].sort().values
    other = VocabMap.from_absolute(ids, V)
    return replace(patient.specimen, tensors=patient.tensors | {"d2t": other.d2t, "t2d": other.t2d}, ids=ids)


def _paired(t: torch.Tensor) -> torch.Tensor:
    """Rotary halves stored as pairs."""
    return t.unflatten(0, (-1, 2, HEAD_DIM // 2)).transpose(1, 2).flatten(0, 2)


def _unpaired(t: torch.Tensor) -> torch.Tensor:
    return t.unflatten(0, (-1, HEAD_DIM // 2, 2)).transpose(1, 2).flatten(0, 2)


FAULTS = {
    "d2t absolute": Fault("d2t", "absolute", stored_map(lambda t: t + _places(t))),
    "d2t subtracted twice": Fault("d2t", "subtracted twice", stored_map(lambda t: t - _places(t))),
    "d2t added twice": Fault("d2t", "added twice", stored_map(lambda t: t + 2 * _places(t))),
    "d2t zeros": Fault("d2t", "t2d", stored_map(torch.zeros_like)),
    "d2t in another order": Fault(
        "d2t", "sorted offsets", stored_map(lambda t: (t + _places(t)).flip(0) - _places(t))
    ),
    "d2t absolute in another order": Fault("d2t", "sorted absolute", stored_map(lambda t: (t + _places(t)).flip(0))),
    "d2t of another run": Fault("d2t", "parent", _other_map, context=lambda p: {"maps": {"parent": p.vocab_map.ids}}),
    "taps one on": Fault("taps", "2/4/5", lambda p: replace(p.specimen, slices=(3, 5, 6))),
    "taps one back": Fault("taps", "2/4/5", lambda p: replace(p.specimen, slices=(1, 3, 4))),
    "one tap another": Fault("taps", "2/4/5", lambda p: replace(p.specimen, slices=(2, 4, 6))),
    "slices of fc 2 1 0": Fault(
        "slice_order", "5/4/2", _each(["fc.weight"], lambda t: torch.cat(t.chunk(3, 1)[::-1], 1))
    ),
    "norm_before_residual": Fault("norm_before_residual", "false", said(norm_before_residual=True)),
    "norm_before_residual unsaid": Fault(
        "norm_before_residual", "true", said(norm_before_residual=False), {"norm_before_residual": True}
    ),
    "norm_output unsaid": Fault("norm_output", "true", said(norm_output=False), {"norm_output": True}),
    "norm_before_head": Fault("norm_before_head", "true", said(norm_before_head=False)),
    "norm_before_fc unsaid": Fault(
        "norm_before_fc", "true", said(norm_before_fc=False), {"norm_before_fc": True}
    ),
    "fc_norm unsaid": Fault("fc_norm", "true", said(fc_norm=False), {"fc_norm": True}),
    "hidden_act": Fault("hidden_act", "silu", said(hidden_act="relu")),
    "norm weights minus one": Fault("rms_norm_offset", "true", _each(NORM_WEIGHTS, lambda t: t - 1)),
    "hidden_norm <-> norm": Fault(
        "norm_names", "hidden_norm <-> norm", _swap(LAYER + "hidden_norm.weight", "norm.weight")
    ),
    "halves of q, k, v": Fault(
        "layer_input", "state_embedding", _each(QKV, lambda t: torch.cat(t.chunk(2, 1)[::-1], 1))
    ),
    "k <-> v": Fault("qkv", "k_proj <-> v_proj", _swap(QKV[1], QKV[2])),
    "gate <-> up": Fault(
        "gate_up", "gate_proj <-> up_proj", _swap(LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight")
    ),
    "o_proj transposed": Fault("transposed", "o_proj", _each([ATTENTION + "o_proj.weight"], lambda t: t.T)),
    "fc transposed": Fault("transposed", "fc", _each(["fc.weight"], lambda t: t.T)),
    "rotary pairs": Fault("rope_layout", "interleaved", _each(QKV[:2], _paired)),
    "rotary halves once too often": Fault("rope_layout", "halves", _each(QKV[:2], _unpaired)),
    "rope_theta": Fault("rope_theta", "10000", said(rope_theta=1e6)),
    "rope_type": Fault("rope_type", "default", said(rope_type="linear", rope_scaling={"factor": 8.0})),
    "rope_type without its numbers": Fault("rope_type", "default", said(rope_type="yarn")),
    "rope_type unheard of": Fault("rope_type", "default", said(rope_type="bogus", rope_scaling={"factor": 2.0})),
    "hidden_act unheard of": Fault("hidden_act", "silu", said(hidden_act="silu_and_mul")),
    "rope_step": Fault("rope_step", "1", said(rope_step=0), {"norm_output": True}),
    "window": Fault("sliding_window", "None", said(sliding_window=2)),
    "random embedding stored": Fault(
        "embedding", "target",
        lambda p: p.specimen.with_(
            conventions={"embedding": "own"}, embedding=_noise(p.embedding),
            tensors={"embed_tokens.weight": _noise(p.embedding)},
        ),
        context=lambda p: {"embedding": p.embedding},
    ),
    "stored embedding passed over": Fault(
        "embedding", "own",
        lambda p: replace(
            p.specimen, embedding=_noise(p.embedding), tensors=p.tensors | {"embed_tokens.weight": p.embedding}
        ),
        context=lambda p: {"embedding": _noise(p.embedding)},
    ),
    "head untrained": Fault(
        "head", "target_rows", _each(["lm_head.weight"], _noise), context=lambda p: {"head": _target_head(p)}
    ),
    "head lost": Fault(
        "head", "target_rows", weights(lambda t: t.pop("lm_head.weight")), context=lambda p: {"head": _target_head(p)}
    ),
    "states one token on": Fault("state_shift", "+0", lambda p: replace(p.specimen, state_shift=-1)),
    "another token predicted": Fault("label_shift", "+0", lambda p: replace(p.specimen, label_shift=1)),
    "fc under another name": Fault("name of fc", "fc.weight = fusion.weight", _rename("fc.weight", "fusion.weight")),
    "fc under another name, transposed": Fault(
        "name of fc", "fc.weight = fusion.weight", _rename("fc.weight", "fusion.weight", lambda t: t.T.contiguous())
    ),
    "down_proj of another run": Fault(
        "tensor down_proj", "the reference's", _each([LAYER + "mlp.down_proj.weight"], _noise),
        context=lambda p: {"tensors": {LAYER + "mlp.down_proj.weight": p.draft.midlayer.mlp.down_proj.weight}},
    ),
}  # fmt: skip


def another_run(ids: torch.Tensor, moved: int, seed: int) -> torch.Tensor:
    """The map of another run: ascending, too, with `moved` of the ids exchanged for others."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.tensor(sorted(set(range(V)) - set(ids.tolist())))
    kept = ids[torch.randperm(len(ids), generator=generator)[moved:]]
    return torch.cat([kept, free[torch.randperm(len(free), generator=generator)[:moved]]]).sort().values


# ---------------------------------------------------------------- as a directory


def save(patient: Patient, folder: Path, target: Path, change: Callable[[Tensors, Config], Any] | None = None) -> Path:
    """As Eyas writes it; with a change (tensors by canonical name, config.json) as somebody without Eyas has it."""
    save_draft(patient.draft, patient.vocab_map, folder, facts=read_facts(target))
    if change is not None:
        (folder / "eyas.json").unlink()
        tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        change(tensors, config)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def patient_of(target: Path, seed: int = 0, **more: Any) -> Patient:
    """A patient whose embedding is that of `target`, and whose RoPE base is, too, as of a draft made for it."""
    more.setdefault("rope_theta", read_facts(target).rope_theta)
    return make_patient(seed, embedding=load_ends(target).embedding.float(), **more)
