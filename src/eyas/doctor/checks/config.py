"""config.json against the tensors, against itself, and against the places where engines look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...draft.dialects.numbering import SGLANG_AS_GIVEN
from ..case import Case
from ..finding import Finding, Severity
from .tensors import fc_transposed

IDS = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "Eagle3Speculator",
    "Eagle3DraftModel", "Eagle3DeepseekV2ForCausalLM", "Eagle3MistralLarge3ForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
)  # fmt: skip
TYPED = ("use_cache", "target_hidden_size", "draft_vocab_size", "vocab_size", "hidden_size", "num_hidden_layers",
         "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps",
         "max_position_embeddings", "tie_word_embeddings", "num_aux_hidden_states", IDS)  # fmt: skip


def check(case: Case) -> Iterator[Finding]:
    """All findings about config.json."""
    for family in (_taps, _sizes, _norm_flags, _head_flags, _positions, _activation, _nulls, _architecture):
        yield from family(case)


def _taps(case: Case) -> Iterator[Finding]:
    nested = case.config.get("eagle_config")
    top, inner = case.config.get(IDS), nested.get(IDS) if isinstance(nested, Mapping) else None
    places = {"the top level": top, "eagle_config": inner}
    said = {where: ids for where, ids in places.items() if ids is not None}
    layers = case.facts.num_layers if case.facts else None
    for where, ids in said.items():
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            yield _taps_error("KIND", f"{where} of config.json has {IDS} = {ids!r}, expected a list of whole numbers")
            return
        if len(set(ids)) < len(ids):
            yield _taps_error("DOUBLED", f"{where} names a layer twice: {ids}")
        if min(ids) < -1 or (layers is not None and max(ids) > layers):
            has = f"the target has {layers} layers" if layers else "there is no layer before the first"
            yield _taps_error("RANGE", f"{where} names {ids}; {has}")
    fc = None if fc_transposed(case) else case.tensors.get("fc.weight")
    wide = case.number("target_hidden_size") or case.number("hidden_size")
    taps = fc.shape[1] // wide if fc and len(fc.shape) == 2 and wide and fc.shape[1] % wide == 0 else None
    if fc and wide and taps is None:
        said_wide = f"fc.weight is {list(fc.shape)}: what it reads is no multiple of the target's width {wide:,}"
        yield _taps_error("WIDTH", said_wide)
    other = next(((where, ids) for where, ids in said.items() if taps is not None and len(ids) != taps), None)
    if other is not None:
        counted = f"{other[0]} names {len(other[1])} layers ({other[1]}), but fc.weight is {taps} taps wide"
        yield _taps_error("COUNT", counted, ("vllm-project/speculators#1065",))
    if not said:
        yield Finding(
            "EY-TAPS-UNNAMED",
            Severity.WARNING,
            f"config.json does not name the layers whose states feed the draft ({IDS})",
            "Engines then take (2, n//2, n-3), OpenVINO one more of each; trained on others, acceptance is near zero",
            "Write them down where engines look: eyas export does, for every engine",
            ("vllm-project/vllm#50170",),
        )
    if top is not None and inner is None and "speculators_model_type" not in case.config:
        yield Finding(
            "EY-TAPS-TOP-ONLY",
            Severity.WARNING,
            f"the layer ids {top} stand at the top level alone",
            "SGLang reads eagle_config only and takes its default; with another number of taps than 3, vLLM crashes",
            "Write eagle_config, too, one less each for Llama-like targets (eyas export)",
            ("SGLang 0.5.23 spec_aux_hidden_state.py:185",),
        )
    if inner is not None and top is None:
        yield Finding(
            "EY-TAPS-NESTED-ONLY",
            Severity.WARNING,
            f"the layer ids {inner} stand in eagle_config alone",
            "SGLang counts them as outputs of layers (one more), vLLM takes them as they are, llama.cpp does not look "
            "there: three engines, three sets of states",
            "Write both places (eyas export)",
            ("vLLM 0.32 gpu_model_runner.py:5251", "sgl-project/sglang#25454"),
        )
    family = case.facts.model_type if case.facts else None
    if top is not None and top == inner and family not in SGLANG_AS_GIVEN:
        yield Finding(
            "EY-TAPS-SAME-TWICE",
            Severity.WARNING,
            f"both places name {top}, but in eagle_config SGLang counts outputs of layers: one more than vLLM",
            "One of the two engines reads states of the next layer: acceptance falls a little, or a lot",
            "One less in eagle_config for Llama-like targets (eyas export)",
        )


def _taps_error(kind: str, evidence: str, sources: tuple[str, ...] = ()) -> Finding:
    return Finding(
        f"EY-TAPS-{kind}",
        Severity.ERROR,
        evidence,
        "Engines stop, or feed the draft states that it was not trained on",
        "Write the layers that it was trained on",
        sources,
    )


def _sizes(case: Case) -> Iterator[Finding]:
    size, vocab, head = case.number("draft_vocab_size"), case.number("vocab_size"), case.tensors.get("lm_head.weight")
    if case.facts and vocab is not None and vocab != case.facts.vocab_size:
        yield Finding(
            "EY-VOCAB-TARGET",
            Severity.ERROR,
            f"vocab_size is {vocab:,}, the target's {case.facts.vocab_size:,}",
            "The map leads to other tokens, or the engine stops",
            "Name the draft's own target; where vocab_size holds the draft's size, write the target's",
        )
    if size is not None and vocab is not None and not 0 < size <= vocab:
        yield Finding("EY-VOCAB-SIZE", Severity.ERROR, f"draft_vocab_size = {size:,} with vocab_size = {vocab:,}",
                      "Engines stop or allocate nonsense", "Write the rows of the head",
                      ("NVIDIA-NeMo/Automodel#2260",))  # fmt: skip
    if size is None and head and vocab is not None and head.shape and head.shape[0] < vocab:
        yield Finding(
            "EY-VOCAB-UNNAMED",
            Severity.ERROR,
            f"draft_vocab_size is absent, but the head has {head.shape[0]:,} rows of {vocab:,}",
            "vLLM allocates a head of the target's size; SGLang takes the target's head instead of this one",
            f"Write draft_vocab_size = {head.shape[0]}",
        )
    wide, target = case.number("target_hidden_size") or case.number("hidden_size"), case.facts
    if target and wide is not None and wide != target.hidden_size:
        yield Finding(
            "EY-WIDTH-TARGET",
            Severity.ERROR,
            f"the draft reads states {wide:,} wide, the target's are {target.hidden_size:,}",
            "Engines stop while loading or at the first request",
            "Name the draft's own target",
        )


def _norm_flags(case: Case) -> Iterator[Finding]:
    for flag, prefix in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        there, said = any(name.startswith(prefix) for name in case.tensors), case.said(flag)
        if there and not said:
            yield Finding(
                "EY-NORM-UNFLAGGED",
                Severity.ERROR,
                f"the tensors {prefix}* are there, but {flag} is {'false' if said is False else 'absent'}",
                "vLLM and SGLang drop them in silence, so fc reads states that were never normed",
                f"Set {flag} to true",
            )
        elif said and not there:
            yield Finding(
                "EY-NORM-MISSING",
                Severity.ERROR,
                f"{flag} is true, but there are no tensors {prefix}*",
                "Engines norm with weights that nobody trained",
                f"Restore the tensors, or clear {flag} where the draft was trained without",
            )
    if case.reading is not None and case.reading.dialect == "flat" and case.said("norm_output") is True:
        yield Finding(
            "EY-NORM-OUTPUT-MEANING",
            Severity.WARNING,
            "norm_output is true: SpecForge means by it a norm before the head, engines feed the normed state back",
            "If SpecForge wrote it, engines run another model from the second drafted token on: a cliff there",
            "Clear it for a SpecForge draft; replaying both readings tells them apart",
        )


def _head_flags(case: Case) -> Iterator[Finding]:
    size, vocab = case.draft_vocab, case.vocab
    if case.said("tie_word_embeddings") is True and size is not None and vocab is not None and size < vocab:
        yield Finding(
            "EY-TIED-PRUNED",
            Severity.ERROR,
            f"tie_word_embeddings is true with a draft vocabulary of {size:,} of {vocab:,}",
            "SGLang drops the file's head; transformers replaces it by the whole embedding",
            "Set it to false",
            ("sgl-project/SpecForge#139",),
        )


def _positions(case: Case) -> Iterator[Finding]:
    rope = case.said("rope_parameters")
    theta = case.said("rope_theta")
    theta = rope.get("rope_theta", theta) if isinstance(rope, Mapping) else theta
    target = case.facts
    if theta is None:
        yield Finding(
            "EY-ROPE-UNNAMED",
            Severity.WARNING if target is None or target.rope_theta != 10000.0 else Severity.INFO,
            "rope_theta is absent" + (f"; the target's is {target.rope_theta:g}" if target else ""),
            "Every engine takes 10000: wrong angles unless the draft was trained so",
            "Write the value of training",
        )
    elif target is not None and isinstance(theta, int | float) and float(theta) != float(target.rope_theta):
        yield Finding(
            "EY-ROPE-OTHER",
            Severity.INFO,
            f"rope_theta is {theta:g}, the target's {target.rope_theta:g}",
            "Right if the draft was trained so; a draft's RoPE need not be the target's",
            "Check the training run's config",
            ("wejoncy/sfllm#32",),
        )
    if target is not None and (kind := _scaling(rope) or _scaling(case.said("rope_scaling"))):
        theirs = str(target.rope_parameters.get("rope_type", "default"))
        if kind != theirs:
            yield Finding(
                "EY-ROPE-OTHER",
                Severity.INFO,
                f"RoPE is scaled ({kind}), the target's is {theirs}",
                "Right if the draft was trained so; a draft's RoPE need not be the target's",
                "Check the training run's config",
                ("wejoncy/sfllm#32",),
                convention="rope_type",
            )
    if case.reading is not None and case.reading.conventions.rope_step != 1:
        yield Finding(
            "EY-ROPE-STEP",
            Severity.WARNING,
            f"declared: positions advance by {case.reading.conventions.rope_step} with each drafted token",
            "Every engine advances them by one: from the second drafted token on the angles are others than trained",
            "Right only if the draft was trained so; then train it further with positions that advance",
            convention="rope_step",
        )
    longest = case.number("max_position_embeddings")
    if longest is not None and target is not None and target.max_position and longest < target.max_position:
        yield Finding(
            "EY-POSITION-SHORT",
            Severity.WARNING,
            f"max_position_embeddings is {longest:,}, the target's {target.max_position:,}",
            "SGLang refuses to start; vLLM stops drafting past it, counting zeros as drafts",
            "Write the target's, where RoPE does not depend on it (eyas export does)",
        )


def _activation(case: Case) -> Iterator[Finding]:
    act = case.said("hidden_act")
    if isinstance(act, str) and act != "silu":
        yield Finding(
            "EY-ACTIVATION",
            Severity.ERROR,
            f"hidden_act is {act!r}",
            "SGLang and vLLM run silu only in a draft, and stop at any other",
            "Write silu where it was trained so, which is what every known trainer does",
            ("SGLang 0.5.23 llama.py:116", "vLLM 0.32 llama.py:112"),
        )


def _nulls(case: Case) -> Iterator[Finding]:
    layer: Any = case.config.get("transformer_layer_config")
    places = {"": case.config, "transformer_layer_config.": layer if isinstance(layer, Mapping) else {}}
    nulls = [f"{prefix}{name}" for prefix, place in places.items() for name in TYPED if place.get(name, 0) is None]
    speculators = "speculators_model_type" in case.config
    nulls = [name for name in nulls if not (speculators and name == "target_hidden_size")]
    if nulls:
        yield Finding(
            "EY-CONFIG-NULL",
            Severity.WARNING,
            f"null where a value belongs: {', '.join(nulls)}",
            "SGLang multiplies target_hidden_size, and takes the target's head for a null draft_vocab_size; strict "
            "config classes refuse null",
            "Write the values, or leave the keys out",
            ("NVIDIA/Model-Optimizer#1417",),
        )


def _architecture(case: Case) -> Iterator[Finding]:
    named = case.config.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in ARCHITECTURES:
        yield Finding(
            "EY-ARCHITECTURE",
            Severity.WARNING,
            f"architectures is {named!r}",
            "Engines choose the draft's class by it: they refuse it, or load it as something else",
            f'Write ["{ARCHITECTURES[0]}"] for a Llama-like draft',
        )


def _scaling(rope: object) -> str:
    """The kind of RoPE that a table of parameters names, "" for none or the default one."""
    kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
    return "" if kind in (None, "default") else str(kind)
