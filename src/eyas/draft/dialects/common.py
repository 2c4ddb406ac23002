"""What the Llama-like dialects share: sizes, norms, RoPE and window out of config fields and tensor shapes.

A dialect says where its fields lie and what its silences mean (`Defaults`); everything else is the same reading. Where
config and tensors contradict each other the tensors say what was trained.   pytest tests/test_checkpoint.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...conventions import Conventions, Known, default_taps
from ...errors import BadInput
from ..files import DraftFolder
from ..shape import DraftShape
from .fields import Fields, Found
from .keys import Canonical, canonicalise


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


@dataclass(frozen=True)
class Silence:
    """What an absent flag means in a dialect, and how surely."""

    norm_before_residual: Found = field(default_factory=lambda: Found(False, Known.DEFAULT))
    norm_output_how: Known = Known.DECLARED
    """How a *present* norm_output is known."""


def read_llama_like(
    dialect: str,
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
    head_dim = model.whole("head_dim", max(1, hidden // heads)).value
    rows = {"self_attn.qkv_proj": [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], "mlp.gate_up_proj": []}
    canonical = canonicalise(folder.tensors, lambda kind, total: rows[kind] or [total // 2, total - total // 2])

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
    take("norm_output", Found(output.value, silence.norm_output_how, output.where) if output.value else output)
    values["fc_bias"] = canonical.any(r"^fc\.bias$")
    values["attention_bias"] = canonical.any(r"self_attn\.[qkvo]_proj\.bias$")
    values["mlp_bias"] = canonical.any(r"mlp\..*\.bias$")
    values["qk_norm"] = canonical.any(r"self_attn\.[qk]_norm\.")
    how.update(dict.fromkeys(("fc_bias", "attention_bias", "mlp_bias", "qk_norm"), Known.INFERRED))
    take("d2t", Found("none" if draft_vocab == vocab and d2t is None else "offset", Known.INFERRED))
    take("hidden_act", model.text("hidden_act", "silu"))
    take("rms_norm_eps", model.number("rms_norm_eps", 1e-6))
    take("max_position", model.whole("max_position_embeddings", 2048))
    take("logit_scale", draft.number("logit_scale", 1.0))
    take("sliding_window", _window(model))
    _rope(model, take, notes)
    notes += [f"{name} is not used: {why}" for name, why in canonical.ignored.items()]
    try:
        shape = DraftShape(
            hidden, target_hidden, intermediate, heads, kv_heads, head_dim, vocab, draft_vocab, num_taps, layers
        )
        return Reading(dialect, folder, shape, Conventions(**values, how=how), canonical, tuple(notes))
    except ValueError as error:
        raise BadInput(f"{folder.config_file}: {error}") from error


def _pair(found: Found) -> tuple[bool, Known]:
    return found.value, found.how


def _num_taps(folder: DraftFolder, canonical: Canonical, width: int, draft: Fields, taps: Found) -> int:
    fc = canonical.shape("fc.weight")
    if fc is None or len(fc) != 2:
        return len(taps.value) if taps.value else draft.whole("num_aux_hidden_states", 3).value
    if fc[1] % width:
        raise BadInput(f"{folder.path}: fc.weight reads {fc[1]} features, no multiple of target_hidden_size = {width}")
    return fc[1] // width


def _taps(folder: DraftFolder, taps: Found, num_taps: int, target_layers: int | None) -> Found:
    """The taps that the config names, or the default ones of a known target."""
    if taps.value is not None:
        if len(taps.value) != num_taps:
            raise BadInput(
                f"{folder.config_file}: {taps.where} names {len(taps.value)} taps, but fc.weight is "
                f"{num_taps} taps wide"
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


def _window(model: Fields) -> Found:
    """The attention window, where the first layer uses one."""
    size = model.get("sliding_window", (int,), "a whole number")
    kinds = model.get("layer_types", (list,), "a list of strings")
    switched = model.flag("use_sliding_window")
    if size.value is None:
        return Found(None, Known.DEFAULT)
    uses = "sliding_attention" in kinds.value if kinds.value is not None else switched.value
    return Found(size.value, Known.DECLARED, size.where) if uses else Found(None, Known.DECLARED)


def _rope(model: Fields, take: Any, notes: list[str]) -> None:
    """rope_parameters (transformers >= 5), else rope_theta and rope_scaling (before)."""
    new, old = model.table("rope_parameters"), model.table("rope_scaling")
    table = dict(old.value) | dict(new.value)
    inner = Fields(model.file, [("rope_parameters.", table), *model.places])
    theta = inner.number("rope_theta", 10000.0)
    outer = model.number("rope_theta", theta.value)
    if outer.value != theta.value:
        notes.append(
            f"rope_theta is {theta.value:g} in rope_parameters and {outer.value:g} beside it; the first was taken"
        )
    if theta.how is Known.DEFAULT:
        notes.append("no rope_theta: 10000, as every reader assumes, whatever the target's is")
    kind = table.get("rope_type") or table.get("type") or "default"
    if not isinstance(kind, str):
        raise BadInput(f"{model.file}: rope_type = {kind!r}, expected a string")
    named = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    take("rope_theta", theta)
    take("rope_type", Found(kind, Known.DECLARED if table else Known.DEFAULT))
    rest = {k: v for k, v in table.items() if k not in named and v is not None}
    take("rope_scaling", Found(rest if kind != "default" else {}, Known.DECLARED if rest else Known.DEFAULT))
    take("partial_rotary_factor", inner.number("partial_rotary_factor", 1.0))
