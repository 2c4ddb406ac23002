"""Remedies for what the files show by themselves: one function for each kind of finding, by its id.

A step is `sure` where the bytes prove it; the others are guesses that only a measurement may keep.
    pytest tests/test_repair_remedies.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from ..draft.dialects.canonical import ARCHITECTURE, QK_NORMED
from ..draft.dialects.keys import has_latent_attention
from . import places
from . import remedies_of_tensors as of_tensors
from .maps import marks
from .situation import Situation
from .step import Step
from .taps import IDS, NESTED, slices

Remedy = Callable[[Situation], list[Step]]
MLA = "Eagle3DeepseekV2ForCausalLM"
SPECULATORS = "Eagle3DraftModel"
FEW = 6
"""Sets of taps that are worth a trial."""


def steps(s: Situation) -> list[Step]:
    """Candidates for a finding by its id; [] where there are none."""
    remedy = REMEDIES.get(str(s.finding.get("id", "")))
    return remedy(s) if remedy is not None else []


# ---------------------------------------------------------------- the map


def _plain(operation: str, sure: bool = True) -> Remedy:
    return lambda s: [s.step(operation, sure)]


def _rebuild(s: Situation) -> list[Step]:
    return [s.step("d2t-from-t2d"), *s.map_from_reference()]


def _map_dtype(s: Situation) -> list[Step]:
    return [s.step("map-dtype"), *_rebuild(s)]


def _unsorted(s: Situation) -> list[Step]:
    return [*s.map_from_reference(), s.step("d2t-from-t2d", sure=False)]


def _two_maps(s: Situation) -> list[Step]:
    """d2t and t2d are of different maps: engines read d2t alone, and which one was trained the files do not say."""
    return [*s.map_from_reference(), s.step("t2d-from-d2t", sure=False), s.step("d2t-from-t2d", sure=False)]


def _ambiguous(s: Situation) -> list[Step]:
    return [*s.map_from_reference(), s.step("set-map-form", sure=False, form="absolute")]


def _reference_map(s: Situation) -> list[Step]:
    return s.map_from_reference()


# ---------------------------------------------------------------- the taps


def _spell_taps(s: Situation) -> list[Step]:
    """The taps are known, and some reader does not find them."""
    reading = s.overlay.reading
    if reading is None:
        return []
    known = reading.conventions.known("taps")
    return [s.step("write-taps", sure=known in ("declared", "inferred"), taps=list(reading.conventions.taps))]


def _guess_taps(s: Situation) -> list[Step]:
    """What is named cannot be: the other place's list, the default, those named ones that can be."""
    count, layers = slices(s.overlay), s.facts.num_layers if s.facts else None
    if count is None:
        return []
    nested = s.overlay.config.get(NESTED)
    inner = nested.get(IDS) if isinstance(nested, Mapping) else None
    top = s.overlay.config.get(IDS)
    found: list[list[int]] = []
    for ids, shift in ((top, 0), (inner, 1), (inner, 0)):
        if isinstance(ids, list) and all(type(i) is int for i in ids):
            real = sorted({i + shift for i in ids if i + shift >= 0 and (layers is None or i + shift <= layers)})
            usual = s.facts.default_taps if s.facts and s.facts.num_layers >= 7 else ()
            some = [list(part) for part in itertools.combinations(real, count)][: FEW // 2]
            # One id too few: what is named and what the default adds.
            more = sorted({*real, *usual})
            some += [list(part) for part in itertools.combinations(more, count) if set(real) <= set(part)][: FEW // 2]
            found += some
    if s.facts is not None and s.facts.num_layers >= 7 and count == 3:
        found.insert(0, list(s.facts.default_taps))
    unique = [list(part) for part in dict.fromkeys(map(tuple, found))]
    return [s.step("write-taps", sure=False, taps=part) for part in unique[: 2 * FEW]]


def _default_taps(s: Situation) -> list[Step]:
    if s.facts is None or s.facts.num_layers < 7:
        return []
    return [s.step("write-taps", sure=False, taps=list(s.facts.default_taps))]


# ---------------------------------------------------------------- sizes and flags


def _target_vocab(s: Situation) -> list[Step]:
    """Where no tensor is counted by the target's ids it may be another draft's target, which only a replay tells."""
    if s.facts is None:
        return []
    counted = [ref.shape[:1] for n in ("t2d", "embed_tokens.weight") if (ref := s.overlay.raw.tensors.get(n))]
    vocab = s.facts.vocab_size
    return [s.step("set-vocab-size", (vocab,) in counted, vocab_size=vocab)]


def _set(name: str, value: Any, sure: bool = True) -> Remedy:
    return lambda s: [s.step("set-flag", sure, name=name, value=value)]


def _unflagged(s: Situation) -> list[Step]:
    flags = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm."}
    there = [f for f, begin in flags.items() if any(n.startswith(begin) for n in s.overlay.raw.tensors)]
    return [s.step("set-flag", name=f, value=True) for f in there if not s.overlay.raw.said(f)]


def _norm_missing(s: Situation) -> list[Step]:
    """The flag is set and the tensors are not there: restored, or never trained."""
    out: list[Step] = []
    for flag, begin in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        if s.overlay.raw.said(flag) and not any(n.startswith(begin) for n in s.overlay.raw.tensors):
            names = [name for name in s.wanted if name.startswith(begin)]
            out += s.from_reference(*names)
            out.append(s.step("set-flag", sure=False, name=flag, value=False))
            if flag == "norm_before_fc":
                out.append(s.step("norm-of-ones", sure=False, name="input_norm.weight"))
    return out


def _base(s: Situation) -> list[Step]:
    thetas = [10000.0, *([float(s.facts.rope_theta)] if s.facts else [])]
    return [s.step("set-rope", sure=False, theta=theta) for theta in dict.fromkeys(thetas)]


def _targets_base(s: Situation) -> list[Step]:
    """Another base than the target's, where nothing else speaks for it."""
    if s.facts is None or s.convention not in ("", "rope_theta"):
        return []
    return [s.step("set-rope", sure=False, theta=float(s.facts.rope_theta))]


def _moving(s: Situation) -> list[Step]:
    """Positions that stand still are declared: perhaps wrongly, since hardly anybody trains so."""
    return [s.step("declare", sure=False, name="rope_step", value=1)]


def _positions(s: Situation) -> list[Step]:
    return [s.step("set-positions", longest=s.facts.max_position)] if s.facts and s.facts.max_position else []


def _nulls(s: Situation) -> list[Step]:
    """A null is taken out, which every reader takes for absent; the draft's vocabulary is counted."""
    from ..doctor.checks.config import TYPED

    config, gone = s.overlay.config, []
    for place in ((), ("transformer_layer_config",)):
        inside: Any = config if not place else config.get(place[0])
        for name in TYPED if isinstance(inside, Mapping) else ():
            if name in inside and inside[name] is None:
                gone.append("/".join(("", *place, name)))
    if "speculators_model_type" in config and "/target_hidden_size" in gone:
        gone.remove("/target_hidden_size")
    head = s.overlay.raw.tensors.get("lm_head.weight")
    vocab = s.overlay.raw.vocab
    pruned = head is not None and head.shape and vocab is not None and head.shape[0] < vocab
    values = {"/draft_vocab_size": head.shape[0]} if "/draft_vocab_size" in gone and head and pruned else {}
    gone = [pointer for pointer in gone if pointer not in values]
    if not gone and not values:
        return []
    return [s.step("write-fields", values={"config.json": values}, removed={"config.json": gone})]


def _architecture(s: Situation) -> list[Step]:
    overlay = s.overlay
    normed = any(".q_norm." in name for name in overlay.raw.tensors)
    name = MLA if has_latent_attention(overlay.tensors) else QK_NORMED if normed else ARCHITECTURE
    name = SPECULATORS if overlay.spelling == "speculators" else name
    return [s.step("write-fields", values={"config.json": {"/architectures": [name]}})]


# ---------------------------------------------------------------- what an engine reads otherwise


def _as_engine(s: Situation) -> list[Step]:
    """One field that an engine reads otherwise than was declared: written wherever somebody looks for it."""
    reading = s.overlay.reading
    name = s.convention or str(s.finding.get("evidence", "")).partition(": ")[2].split(" ")[0]
    if reading is None:
        return []
    c = reading.conventions
    if name == "taps":
        return [s.step("write-taps", sure=False, taps=list(c.taps))]
    if name == "rope_theta":
        return [s.step("set-rope", sure=False, theta=c.rope_theta)]
    if name in ("rope_type", "rope_scaling"):
        return [s.step("set-rope", sure=False, theta=c.rope_theta, kind=c.rope_type, scaling=dict(c.rope_scaling))]
    if name in ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "hidden_act", "rms_norm_eps"):
        return [s.step("set-flag", sure=False, name=name, value=getattr(c, name))]
    if name == "d2t" and s.overlay.raw.said("draft_vocab_size") is None:
        return [s.step("name-draft-vocabulary")]
    if name == "head":
        return [s.step("set-flag", sure=False, name="tie_word_embeddings", value=False)]
    if name in ("rms_norm_offset", "layer_input", "logit_scale", "embedding_scale"):
        return [s.step("fold", sure=False, convention=name)]
    return [s.step("drop-embedding", sure=False)] if name == "embedding" and c.embedding == "target" else []


def _marks(s: Situation) -> list[Step]:
    """t2d has another size; where d2t has none either, the reference. Where the draft names another vocabulary than the
    target's, that is to be mended first."""
    agreed = s.facts is None or s.overlay.raw.number("vocab_size") in (None, s.facts.vocab_size)
    return [s.step("t2d-from-d2t", agreed), *s.map_from_reference()] if marks(s.overlay) is None else []


def _unreadable(s: Situation) -> list[Step]:
    """Sizes that contradict the tensors stop every reader."""
    named = [s.step("name-draft-vocabulary")] if places.standing(s.overlay.config, "draft_vocab_size") else []
    return [*of_tensors.sizes(s), *named]


REMEDIES: dict[str, Remedy] = {
    "EY-D2T-ABSOLUTE": _plain("absolute-to-offset"),
    "EY-D2T-TWICE": _plain("add-arange"),
    **dict.fromkeys(("EY-D2T-ARANGE", "EY-D2T-ZEROS", "EY-D2T-MISSING", "EY-D2T-RANGE", "EY-D2T-DUPLICATE",
                     "EY-D2T-SIZE"), _rebuild),
    "EY-D2T-DTYPE": _map_dtype,
    "EY-D2T-UNSORTED": _unsorted,
    "EY-D2T-T2D": _two_maps,
    "EY-D2T-AMBIGUOUS": _ambiguous,
    "EY-D2T-FULL": _plain("drop-maps"),
    "EY-D2T-OTHER": _reference_map,
    "EY-T2D-SIZE": _marks,
    **dict.fromkeys(("EY-TAPS-TOP-ONLY", "EY-TAPS-NESTED-ONLY", "EY-TAPS-SAME-TWICE"), _spell_taps),
    **dict.fromkeys(("EY-TAPS-KIND", "EY-TAPS-DOUBLED", "EY-TAPS-RANGE", "EY-TAPS-COUNT"), _guess_taps),
    "EY-TAPS-UNNAMED": _default_taps,
    "EY-TAPS-WIDTH": of_tensors.fc_turned,
    "EY-VOCAB-TARGET": _target_vocab,
    "EY-VOCAB-SIZE": _plain("name-draft-vocabulary"),
    "EY-VOCAB-UNNAMED": _plain("name-draft-vocabulary"),
    "EY-TIED-PRUNED": _set("tie_word_embeddings", False),
    "EY-NORM-UNFLAGGED": _unflagged,
    "EY-NORM-MISSING": _norm_missing,
    "EY-NORM-OUTPUT-MEANING": _set("norm_output", False, sure=False),
    "EY-NORM-UNTRAINED": of_tensors.norms,
    "EY-ROPE-UNNAMED": _base,
    "EY-ROPE-OTHER": _targets_base,
    "EY-ROPE-STEP": _moving,
    "EY-POSITION-SHORT": _positions,
    "EY-ACTIVATION": _set("hidden_act", "silu", sure=False),
    "EY-CONFIG-NULL": _nulls,
    "EY-ARCHITECTURE": _architecture,
    "EY-READ": _unreadable,
    "EY-TENSOR-MISSING": of_tensors.missing,
    "EY-TENSOR-UNKNOWN": of_tensors.unknown,
    "EY-TENSOR-SHAPE": of_tensors.shapes,
    "EY-FC-TRANSPOSED": of_tensors.fc_turned,
    **dict.fromkeys(("EY-TENSOR-NAN", "EY-TENSOR-ZERO", "EY-TENSOR-DTYPE", "EY-TENSOR-FRESH"), of_tensors.broken),
    **dict.fromkeys(("EY-EMBED-FRESH", "EY-EMBED-SHAPE"), _plain("drop-embedding")),
    **dict.fromkeys(("EY-HEAD-MISSING", "EY-HEAD-SHARED"), of_tensors.head),
    **dict.fromkeys(("EY-ENGINE", "EY-AS-READ"), _as_engine),
}  # fmt: skip
