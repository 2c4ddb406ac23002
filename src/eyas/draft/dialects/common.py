"""What the dialects of one decoder layer share: sizes, norms, RoPE and window out of config fields and tensor shapes.

A dialect says where its fields lie and what its silences mean (`Silence`); everything else is the same reading, for
Llama-like drafts and for those with latent attention (MLA). Where config and tensors contradict each other the tensors
say what was trained.   pytest tests/test_checkpoint.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...conventions import Conventions, Known, default_taps
from ...errors import BadInput
from ..files import DraftFolder
from ..shape import DraftShape, MlaShape
from .fields import Fields, Found
from .keys import MAPS, Canonical, canonicalise, fused_rows, has_latent_attention

Take = Callable[[str, Found], None]


@dataclass(frozen=True)
class Reading:
    """A draft directory, interpreted."""

    dialect: str
    folder: DraftFolder
    shape: DraftShape
    conventions: Conventions
    canonical: Canonical
    notes: tuple[str, ...] = ()
    """What a user should know: contradictions, guesses, tensors that nothing reads."""
    producer: str = ""
    """Who wrote it, as far as the directory says."""


@dataclass(frozen=True)
class Silence:
    """What an absent field means to whoever wrote the draft, and how surely a present one means what engines read."""

    norm_before_residual: Found = field(default_factory=lambda: Found(False, Known.DEFAULT))
    norm_output_how: Known = Known.DECLARED
    """How a *present* norm_output is known."""
    rope_theta: float | None = None
    """The base in its training code, which reads none from the config; None: the config's was used."""
    one_layer: bool = False
    """Its class has one layer, whatever num_hidden_layers says."""


def read_decoder(
    dialect: str,
    producer: str,
    folder: DraftFolder,
    model: Fields,
    draft: Fields,
    taps: Found,
    silence: Silence,
    target_layers: int | None,
) -> Reading:
    """Read sizes from `model` fields, draft flags from `draft` fields; `taps.value` is a tuple, or None if not named.

    Raises BadInput, naming file and field or tensor, for whatever cannot be a draft.
    """
    notes: list[str] = []
    hidden = model.whole("hidden_size").value
    heads = model.whole("num_attention_heads").value
    kv_heads = model.whole("num_key_value_heads", heads).value
    intermediate = model.whole("intermediate_size").value
    mla = _mla(folder, model)
    head_dim = mla.qk_head_dim if mla else model.whole("head_dim", max(1, hidden // heads)).value
    canonical = canonicalise(folder.tensors, fused_rows(heads * head_dim, kv_heads * head_dim, mla))

    target_hidden = draft.whole("target_hidden_size", hidden).value
    num_taps = _num_taps(folder, canonical, target_hidden, draft, taps)
    vocab = model.whole("vocab_size").value
    head = canonical.shape("lm_head.weight")
    d2t = canonical.shape("d2t")
    draft_vocab = draft.whole("draft_vocab_size", d2t[0] if d2t else head[0] if head else vocab).value
    layers = model.whole("num_hidden_layers", canonical.num_layers()).value
    if layers < canonical.num_layers():
        notes.append(
            f"config.json says num_hidden_layers = {layers}, the tensors make {canonical.num_layers()}; they win"
        )
        layers = canonical.num_layers()
    elif layers > canonical.num_layers() and silence.one_layer:
        notes.append(
            f"config.json says num_hidden_layers = {layers}, but the class of {producer} has one layer whatever it "
            f"says; engines would make {layers}, so write 1"
        )
        layers = canonical.num_layers()

    how: dict[str, Known] = {}
    values: dict[str, Any] = {}

    def take(name: str, found: Found) -> None:
        values[name], how[name] = found.value, found.how

    def by_tensor(name: str, flag: Found, pattern: str) -> None:
        """A flag whose tensors are there is on, whatever the config says: engines drop such tensors in silence."""
        present = canonical.any(pattern)
        if present and not flag.value:
            said = f"{flag.where} = false" if flag.where else f"nothing about {name}"
            notes.append(
                f"config.json says {said}, yet the tensors {pattern.strip('^')}* are there; engines will drop them"
            )
        take(name, Found(True, Known.INFERRED if not flag.value else flag.how) if present else flag)

    take("taps", _taps(folder, taps, num_taps, target_layers))
    values["num_target_layers"] = target_layers
    by_tensor("norm_before_fc", draft.flag("norm_before_fc"), r"^input_norm\.")
    by_tensor("fc_norm", draft.flag("fc_norm"), r"^fc_norm\.")
    take("norm_before_residual", draft.flag("norm_before_residual", *_pair(silence.norm_before_residual)))
    output = draft.flag("norm_output")
    take("norm_output", Found(output.value, silence.norm_output_how, output.where) if output.where else output)
    values["fc_bias"] = canonical.any(r"^fc\.bias$")
    values["attention_bias"] = canonical.any(r"self_attn\.\w+_proj(_with_mqa)?\.bias$")
    values["mlp_bias"] = canonical.any(r"mlp\..*\.bias$")
    values["qk_norm"] = canonical.any(r"self_attn\.[qk]_norm\.")
    values["attention"] = "mla" if mla else "gqa"
    how.update(dict.fromkeys(("fc_bias", "attention_bias", "mlp_bias", "qk_norm", "attention"), Known.INFERRED))
    take("d2t", Found("none" if draft_vocab == vocab and d2t is None else "offset", Known.INFERRED))
    take("hidden_act", model.text("hidden_act", model.text("hidden_activation", "silu").value))
    take("rms_norm_eps", model.number("rms_norm_eps", 1e-6))
    take("max_position", model.whole("max_position_embeddings", 2048))
    take("logit_scale", draft.number("logit_scale", 1.0))
    take("sliding_window", _window(model))
    _rope(model, silence, producer, take, notes)
    notes += [f"{name} is not used: {why}" for name, why in canonical.ignored.items()]
    notes += _not_floating(canonical)
    try:
        shape = DraftShape(
            hidden, target_hidden, intermediate, heads, kv_heads, head_dim, vocab, draft_vocab, num_taps, layers, mla
        )
        conventions = Conventions(**values, how=how)
    except ValueError as error:
        raise BadInput(f"{folder.config_file}: {error}") from error
    return Reading(dialect, folder, shape, conventions, canonical, tuple(notes), producer)


def _pair(found: Found) -> tuple[bool, Known]:
    return found.value, found.how


def _mla(folder: DraftFolder, model: Fields) -> MlaShape | None:
    """Sizes of latent attention, where the tensors have it."""
    if not has_latent_attention(folder.tensors):
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: model.whole(name).value for name in names}
    rank = model.get("q_lora_rank", (int,), "a whole number, or null").value
    interleaved = model.flag("rope_interleave", True).value
    gated = any(name.endswith("self_attn.g_proj.weight") for name in folder.tensors)
    try:
        return MlaShape(rank, **sizes, output_gate=gated, rope_interleave=interleaved)
    except ValueError as error:
        raise BadInput(f"{folder.config_file}: {error}") from error


def _num_taps(folder: DraftFolder, canonical: Canonical, width: int, draft: Fields, taps: Found) -> int:
    fc = canonical.shape("fc.weight")
    if fc is None or len(fc) != 2:
        return len(taps.value) if taps.value else draft.whole("num_aux_hidden_states", 3).value
    if fc[1] % width or not fc[1]:
        raise BadInput(
            f"{folder.path}: fc.weight reads {fc[1]} features, no multiple of target_hidden_size = {width}; correct "
            "target_hidden_size in the config"
        )
    return fc[1] // width


def _taps(folder: DraftFolder, taps: Found, num_taps: int, target_layers: int | None) -> Found:
    """The taps that the config names, or the default ones of a known target."""
    if taps.value is not None:
        if len(taps.value) != num_taps:
            raise BadInput(
                f"{folder.config_file}: {taps.where} names {len(taps.value)} taps, but fc.weight is {num_taps} taps "
                "wide; correct the list (eyas doctor tells which layers fit)"
            )
        return taps
    if num_taps != 3 or target_layers is None:
        raise BadInput(
            f"{folder.config_file} does not name the taps ({num_taps} feed fc). Where three are left out they are "
            f"by custom (2, n//2, n-3): give the target, so that n is known, or add eagle_aux_hidden_state_layer_ids"
        )
    try:
        return Found(default_taps(target_layers), Known.DEFAULT)
    except ValueError as error:
        raise BadInput(f"{folder.config_file}: {error}") from error


def ascending(found: Found, shift: int = 0) -> Found:
    """A list of layer ids as taps: shifted, sorted and each once, as engines capture them."""
    if found.value is None:
        return found
    return Found(tuple(sorted({int(i) + shift for i in found.value})), found.how, found.where)


def _not_floating(canonical: Canonical) -> list[str]:
    """Weights that nobody can compute with as they are."""
    stored = {name: source.dtype for name, source in canonical.sources.items() if name not in MAPS}
    return [
        f"{name} is stored as {dtype}, no floating point: the draft is quantised or damaged, and cannot be loaded"
        for name, dtype in stored.items()
        if not dtype.startswith(("F", "BF"))
    ]


def _window(model: Fields) -> Found:
    """The attention window, where the first layer uses one."""
    size = model.get("sliding_window", (int,), "a whole number")
    kinds = model.get("layer_types", (list,), "a list of strings")
    switched = model.flag("use_sliding_window")
    if size.value is None:
        return Found(None, Known.DEFAULT)
    uses = "sliding_attention" in kinds.value if kinds.value is not None else switched.value
    return Found(size.value, Known.DECLARED, size.where) if uses else Found(None, Known.DECLARED)


def _rope(model: Fields, silence: Silence, producer: str, take: Take, notes: list[str]) -> None:
    """rope_parameters (transformers >= 5), else rope_theta and rope_scaling (before)."""
    table = {**_first_kind(model, "rope_scaling"), **_first_kind(model, "rope_parameters")}
    inner = Fields(model.file, [("rope_parameters.", table), *model.places])
    theta = inner.number("rope_theta", 10000.0)
    outer = model.number("rope_theta", theta.value)
    if outer.value != theta.value:
        notes.append(
            f"rope_theta is {theta.value:g} in rope_parameters and {outer.value:g} beside it; the first was taken"
        )
    kind = table.get("rope_type") or table.get("type") or "default"
    if not isinstance(kind, str):
        raise BadInput(f"{model.file}: rope_type = {kind!r}, expected a string")
    sections = kind == "mrope" or "mrope_section" in table
    if sections:
        kind = "default" if kind == "mrope" else kind
        notes.append("multimodal RoPE (mrope) is read as what it is on text, plain RoPE; an export would lose it")
    if theta.how is Known.DEFAULT:
        notes.append("no rope_theta: 10000, as every reader assumes, whatever the target's is")
    elif silence.rope_theta not in (None, theta.value) and not sections:
        notes.append(
            f"rope_theta is {theta.value:g}, but the training code of {producer} uses {silence.rope_theta:g} whatever "
            f"the config says; that was taken, while engines take the config's"
        )
        theta = Found(silence.rope_theta, Known.GUESSED, theta.where)
    how = Known.DECLARED if table else Known.DEFAULT
    if model.flag("mla_use_nope").value:
        kind, how = "none", Known.DECLARED  # Kimi K3: keys and queries are not rotated at all
    named = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    rest = (
        {k: v for k, v in table.items() if k not in named and v is not None} if kind not in ("default", "none") else {}
    )
    broken = [k for k, v in rest.items() if isinstance(v, float) and not math.isfinite(v)]
    if broken:
        raise BadInput(f"{model.file}: {broken[0]} of RoPE = {rest[broken[0]]}, expected a finite number")
    take("rope_theta", theta)
    take("rope_type", Found(kind, how))
    take("rope_scaling", Found(rest, Known.DECLARED if rest else Known.DEFAULT))
    take("partial_rotary_factor", inner.number("partial_rotary_factor", 1.0))


def _first_kind(model: Fields, name: str) -> Mapping[str, Any]:
    """A RoPE table; of one for each kind of attention (Gemma) that of the first layer, the only one a draft has."""
    table: Mapping[str, Any] = model.table(name).value
    if not table or not all(key.endswith("_attention") and isinstance(table[key], Mapping) for key in table):
        return table
    kinds = model.get("layer_types", (list,), "a list of strings").value or []
    first = kinds[0] if kinds and isinstance(kinds[0], str) and kinds[0] in table else next(iter(table))
    return dict(table[first])
