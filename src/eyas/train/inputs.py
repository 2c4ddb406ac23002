"""What a run is made of, checked before anything is computed: draft, map, both ends of the target, identity.

Everything that can be refused is refused here, in seconds: features of another target, a map that does not fit, a draft
whose conventions the objective does not honour, a folder that holds something else.
    Exercise it:  pytest tests/test_train_inputs.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..artifacts import MANIFEST, REPORTS, check_out
from ..conventions import Known
from ..digests import canonical_json, sha256_json
from ..draft.checkpoint import load_draft
from ..draft.directory import check_replaceable
from ..draft.model import Draft
from ..draft.source import resolve_draft
from ..errors import BadInput, Mismatch
from ..features.reader import FeatureSet
from ..target.facts import TargetFacts, read_facts
from ..target.weights import Ends, load_ends
from ..vocab import VocabMap
from . import checkpoints
from .record import METRICS
from .settings import TrainSettings
from .start import embedding_for, initialise, new_draft
from .trackers import BOARD, NAMED

STAGE = "train"
DRAFT = "draft"
OURS = {DRAFT, checkpoints.FOLDER, METRICS, BOARD, NAMED, "wandb", MANIFEST, ".lock", f".{DRAFT}.lock", *REPORTS}
TEMPORARY = ".eyas-tmp-"
# What only decides how often to save, who is told, where the draft was found or how the work is laid out makes it no
# other run.
INDIFFERENT = {"save_every", "keep", "track", "init_from", "parallel", "recompute"}
# Settings that describe a new draft. A draft that is gone on from has them already.
OF_A_NEW_DRAFT = ("hidden_size", "num_layers", "intermediate_size", "qk_norm", "norm_before_fc", "fc_norm",
                  "norm_output", "norm_before_residual")  # fmt: skip
# What `train.change` may name: conventions that another draft of the same tensors may have.
CHANGEABLE = ("embedding_scale", "hidden_act", "norm_before_head", "norm_before_residual", "norm_output", "rope_step",
              "rope_theta", "sliding_window")  # fmt: skip
# The objective's reading of these, for drafts that were trained under another; decoding does not depend on them.
TRAINED_UNDER = {"mask_shift": 2, "teacher": "whole_vocabulary"}


@dataclass
class Inputs:
    """All of it. `initialise` gives a draft that has no checkpoint its first weights."""

    draft: Draft
    vocab_map: VocabMap
    ends: Ends
    features: FeatureSet
    held_out: FeatureSet | None
    digests: dict[str, str]
    identity: dict[str, Any]
    """What decides the run's result, as JSON values: {inputs, settings, seed}."""
    initialise: Callable[[], None]

    @property
    def facts(self) -> TargetFacts:
        """The target's."""
        return self.ends.facts


def prepare(
    features: FeatureSet,
    target_dir: Path,
    vocab_map: VocabMap | None,
    held_out: FeatureSet | None,
    settings: TrainSettings,
    seed: int,
) -> Inputs:
    """Check everything and build the draft. Raises Mismatch naming both sides, BadInput for what cannot be trained."""
    features.check(target=target_dir)
    if held_out is not None:
        held_out.check(target=target_dir)
        if held_out.manifest["files"] == features.manifest["files"]:
            raise BadInput(
                f"--held-out {held_out.dir} holds the very features that are trained on, so what it predicts would "
                f"mean nothing: extract other conversations for it, or leave it out"
            )
    facts = read_facts(target_dir)
    ends = load_ends(target_dir, facts)
    if settings.init_from:
        draft, vocab_map = _given_draft(settings, target_dir, vocab_map)
        digests = {"init_from": _digest(draft)}

        def first_weights() -> None:
            """The draft has them."""
    else:
        draft, vocab_map = _new_draft(features, target_dir, ends, vocab_map, settings)
        digests, chosen = {}, vocab_map

        def first_weights() -> None:
            initialise(draft, settings, ends, features, chosen, seed)

    for one in (features, held_out):
        if one is not None:
            one.check(taps=draft.conventions.taps)
            if one.conventions.final_state != "post_norm":
                raise Mismatch(
                    f"{one.dir}: its final states are stored {one.conventions.final_state}, the teacher reads them "
                    f"post_norm, as the target's head does; extract again"
                )
    digests |= {
        "features": sha256_json([features.manifest["config_digest"], features.manifest["files"]]),
        "vocab_map": vocab_map.digest(),
        "target": features.meta.target,
    }
    decisive = settings.model_dump(mode="json", exclude=INDIFFERENT)
    identity = json.loads(canonical_json({"inputs": digests, "settings": decisive, "seed": seed}))
    return Inputs(draft, vocab_map, ends, features, held_out, digests, identity, first_weights)


def check_run(out: Path) -> None:
    """Raise BadInput unless `out` is free or holds nothing but a training run."""
    check_out(out, STAGE)
    if not out.exists():
        return
    others = sorted(p.name for p in out.iterdir() if p.name not in OURS and not p.name.startswith(TEMPORARY))
    if others:
        raise BadInput(f"--out {out} holds files that no training run writes ({', '.join(others[:4])}); choose another")
    check_replaceable(out / DRAFT)


def check_trainable(draft: Draft, name: str) -> None:
    """Raise BadInput for conventions that the objective does not honour, instead of training something else."""
    c = draft.conventions
    problems = []
    if c.attention == "mla":
        raise BadInput(
            f"{name} has latent attention (MLA): Eyas runs and diagnoses such drafts and does not train them. Train a "
            f"draft without it for the same target, which the engines run as well, or go on in TorchSpec"
        )
    if not c.norm_before_head:
        problems.append("its head reads the state before the last norm (norm_before_head = false)")
    if c.token_shift != 1:
        problems.append(f"it reads the token at a shift of {c.token_shift} beside a state (token_shift)")
    if problems:
        raise BadInput(
            f"{name} cannot be trained on: {'; '.join(problems)}. Eyas trains with the norm before the head and a "
            f"token_shift of 1, as engines run drafts; correct its conventions if they are told wrongly, or train anew"
        )


# ---------------------------------------------------------------- the draft


def _given_draft(settings: TrainSettings, target_dir: Path, vocab_map: VocabMap | None) -> tuple[Draft, VocabMap]:
    source = str(settings.init_from)
    draft, own_map, _ = load_draft(resolve_draft(source), target_dir, dtype=torch.float32)
    draft = _changed(draft, settings.change, source).train()
    check_trainable(draft, source)
    if vocab_map is not None and vocab_map.digest() != own_map.digest():
        raise Mismatch(
            f"{source} was trained with a vocabulary map of {own_map.size} ids ({own_map.digest()[:16]}), given is "
            f"another of {vocab_map.size} ({vocab_map.digest()[:16]}): rows of its head would come to mean other ids. "
            f"Leave --vocab out; a fine-tune keeps its draft's map."
        )
    has = {**draft.shape.to_dict(), **draft.conventions.to_dict()}
    asked = {name: getattr(settings, name) for name in OF_A_NEW_DRAFT if name in settings.model_fields_set}
    differs = [f"{name} = {value}, the draft has {has[name]}" for name, value in asked.items()
               if value is not None and value != has[name]]  # fmt: skip
    if differs:
        raise Mismatch(
            f"{source} keeps its shape and conventions, but the settings ask for {'; '.join(differs)}. Leave these "
            f"settings out; go over to another convention with --set change.NAME=VALUE ({', '.join(CHANGEABLE)}); or "
            f"train a new draft without --init-from."
        )
    draft.conventions = draft.conventions.with_(Known.DECLARED, **TRAINED_UNDER)
    return draft, own_map


def _changed(draft: Draft, change: Mapping[str, Any], name: str) -> Draft:
    """The same weights under other conventions. Raises BadInput for what cannot be changed so."""
    if not change:
        return draft
    for key, value in change.items():
        if key not in CHANGEABLE:
            raise BadInput(
                f"change.{key}: a draft that goes on can be trained under another {', '.join(CHANGEABLE)}; for another "
                f"{key} train a new one without --init-from"
            )
        has = getattr(draft.conventions, key)
        kinds = (int, type(None)) if key == "sliding_window" else (float, int) if type(has) is float else (type(has),)
        if type(value) not in kinds:
            raise BadInput(
                f"change.{key} = {value!r}: {name} has {has!r}, another of that kind is needed; give such a value"
            )
    other = Draft(draft.shape, draft.conventions.with_(Known.DECLARED, **change))
    if draft.embed_tokens is not None:
        other.set_embedding(draft.embed_tokens.weight.detach())
    other.load_owned(draft.owned_state_dict())
    return other


def _new_draft(
    features: FeatureSet, target_dir: Path, ends: Ends, vocab_map: VocabMap | None, settings: TrainSettings
) -> tuple[Draft, VocabMap]:
    if vocab_map is None:
        raise BadInput("training a new draft needs a vocabulary map: give --vocab (see `eyas vocab`), or --init-from")
    if vocab_map.target_size != ends.facts.vocab_size:
        raise Mismatch(
            f"the vocabulary map is for {vocab_map.target_size} target ids, {target_dir} has {ends.facts.vocab_size}; "
            f"cut a map from features of this target"
        )
    draft = new_draft(settings, ends.facts, features, vocab_map)
    draft.set_embedding(embedding_for(draft, ends))
    return draft, vocab_map


def _digest(draft: Draft) -> str:
    """Content digest of the weights and conventions that a fine-tune starts from."""
    digest = hashlib.sha256(canonical_json(draft.conventions.to_dict()).encode())
    for name, tensor in sorted(draft.owned_state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def non_finite(features: FeatureSet, docs: list[int]) -> str:
    """Which of `docs` has states that are not finite, as a sentence; "" where all are fine."""
    for doc in docs:
        part = features.document(doc)
        bad = [name for name in ("taps", "final", "logsumexp") if not bool(torch.isfinite(part[name]).all())]
        if bad:
            return f"document {features.doc_id(doc)!r} of {features.dir} has NaN or infinite {' and '.join(bad)}"
    return ""
