"""What an engine would run against what was trained: one `Difference` each, with the way out.

    differences(reading, profile("sglang").read(Seen(reading.folder, facts)))

Symmetries are no differences: a constant RoPE offset under the default RoPE, a copy of the target's embedding where the
engine puts the target's own.   pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..conventions import Conventions
from ..draft.dialects import Reading
from ..draft.dialects.canonical import LENGTH_FREE_ROPE
from .reading import ZEROS, EngineReading

FINE_TUNE = "choose another engine, or fine-tune under its convention (eyas train --init-from, --set change.…)"
EXPORT = "export it for this engine (eyas export --to)"
# What the trainer alone decides, or what only names the target.
NOT_READ = {"num_target_layers", "final_state", "teacher", "mask_shift", "max_position"}
WAYS = {
    "taps": EXPORT,
    "d2t": EXPORT,
    "rope_theta": EXPORT,
    "rope_type": EXPORT,
    "rope_scaling": EXPORT,
    "rms_norm_eps": EXPORT,
    "embedding": "choose another engine, or train on the target's embedding",
    "embedding_scale": "the engine alone decides about it; check the accept length that it reaches",
    "sliding_window": "choose an engine that applies it",
}
MEANING = {
    "taps": "other hidden states feed fc",
    "d2t": "draft ids become other target ids",
    "norm_before_residual": "the residual stream starts from another state",
    "norm_output": "another state is fed back",
    "norm_before_fc": "the norm before fc is put in or left out",
    "fc_norm": "the norms on the slices of fc are put in or left out",
    "head": "another head chooses",
    "embedding": "another embedding is read",
    "sliding_window": "attention reaches further or less far",
}


@dataclass(frozen=True)
class Difference:
    """One point where `engine` departs from what was declared."""

    engine: str
    what: str
    """A field of `Conventions`, a parameter, or "start"."""
    text: str
    way_out: str
    certain: bool = True
    """False where it depends on something that is not known here: the target's depth, the length that is served."""

    @property
    def sentence(self) -> str:
        """ "sglang: ...; way out" """
        return f"{self.engine}: {self.text}" + (f"; {self.way_out}" if self.way_out else "")


def differences(declared: Reading | Conventions, read: EngineReading) -> list[Difference]:
    """Everything that `read` does otherwise than `declared`; [] where the engine runs what was trained."""
    c = declared.conventions if isinstance(declared, Reading) else declared
    if read.failure is not None:
        failure = read.failure
        error = f" ({failure.error})" if failure.error else ""
        return [Difference(read.engine, "start", f"it stops at the {failure.stage}{error}: {failure.what}",
                           failure.way_out)]  # fmt: skip
    out = [_field(read.engine, name, *values) for name, values in _fields(c, read)]
    for name, p in read.unfilled().items():
        if not _meant(name, p.instead, c):
            out.append(Difference(read.engine, name, f"{name} is not filled by the file, so it is {p.instead}", EXPORT))
    out += [Difference(read.engine, "use_aux_hidden_state", text, EXPORT) for text in read.surprises]
    return out


def _fields(c: Conventions, read: EngineReading) -> list[tuple[str, tuple[Any, Any]]]:
    """Fields that differ: (name, (declared, read))."""
    standard = Conventions(taps=c.taps)
    out = []
    for name, mine in vars(c).items():
        if name == "how" or name in NOT_READ:
            continue
        theirs = read.values.get(name, getattr(standard, name))
        if mine == theirs or _same(name, mine, theirs, c):
            continue
        out.append((name, (mine, theirs)))
    if c.rope_type not in LENGTH_FREE_ROPE and read.values.get("max_position", c.max_position) != c.max_position:
        out.append(("max_position", (c.max_position, read.values["max_position"])))
    return out


def _same(name: str, mine: Any, theirs: Any, c: Conventions) -> bool:
    """Do two values of a field give the same draft?"""
    if name == "rope_offset":
        return c.rope_type == "default"
    if name == "embedding":
        return bool(mine == "target")  # a stored copy of the target's rows, or nothing stored
    if name == "sliding_window" and mine is not None and theirs is None:
        return bool(mine >= c.max_position)
    if name == "head":
        return {mine, theirs} == {"own", "target"} and c.d2t == "none" and mine == "target"
    return False


def _meant(name: str, instead: str, c: Conventions) -> bool:
    """Is it right that the file leaves a parameter to the engine?"""
    if name.endswith(".bias") and instead == ZEROS:
        return True
    if "embed_tokens" in name:
        return c.embedding == "target" and "target" in instead
    return "lm_head" in name and c.head == "target" and "target" in instead


def _field(engine: str, name: str, mine: Any, theirs: Any) -> Difference:
    way = WAYS.get(name, FINE_TUNE)
    if name == "taps" and theirs is None:
        text = f"taps are {list(mine)}; it finds none and takes its default for the target, which is not known here"
        return Difference(engine, name, text, "name the target (--target), or " + EXPORT, certain=False)
    if name == "sliding_window" and isinstance(mine, int) and theirs is None:
        text = f"attention reaches past the window of {mine} that it was trained with, in longer sequences"
        return Difference(engine, name, text, "keep served sequences within the window", certain=False)
    meaning = f": {MEANING[name]}" if name in MEANING else ""
    return Difference(engine, name, f"{name} is {_text(mine)}, it runs {_text(theirs)}{meaning}", way)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
