"""A draft with changes laid over its files: it reads like a folder, and nothing has been written.

    overlay = Overlay.of("path/to/draft", facts)
    interpret(overlay.folder); overlay.case(); overlay.change()

Operations speak canonical names; `stored` and `spelled` say what a tensor is called in this draft. An overlay is valid
as long as the files below it stay as they are.   pytest tests/test_repair_operations.py
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..digests import sha256_json
from ..doctor.case import Case
from ..draft.dialects import Reading, interpret, speculators
from ..draft.dialects.keys import FUSED, PREFIXES, canonical_name
from ..draft.files import DraftFolder, TensorRef, open_folder
from ..errors import BadInput
from ..target.facts import TargetFacts
from .change import Change
from .refs import CODES, digest, named, piece

DTYPES = {code: name for name, code in CODES.items()}
APART = ("lm_head.weight", "d2t", "t2d")
"""What stands outside the model in a wrapped state dict, so without `model.` before it."""


@dataclass(frozen=True)
class Overlay:
    """A draft as it would be. Every change makes a new overlay; `base` is what lies on the disk."""

    base: DraftFolder
    config: Mapping[str, Any]
    eyas: Mapping[str, Any] | None
    tensors: Mapping[str, TensorRef]
    """By stored name."""
    facts: TargetFacts | None = None
    """Of its target, where that is known."""
    told: tuple[str, ...] = ()
    """What operations found and what they write, as a careful engineer would say it."""

    @classmethod
    def of(cls, path: str | Path, facts: TargetFacts | None = None) -> Overlay:
        """The draft as it lies there. Raises BadInput where its files cannot be read."""
        return cls.over(open_folder(path), facts)

    @classmethod
    def over(cls, folder: DraftFolder, facts: TargetFacts | None = None) -> Overlay:
        """A folder that is open already."""
        return cls(folder, folder.config, folder.eyas, folder.tensors, facts)

    # ---------------------------------------------------------------- reading it

    @cached_property
    def folder(self) -> DraftFolder:
        """As files would be read."""
        return replace(self.base, config=self.config, eyas=self.eyas, tensors=self.tensors)

    @cached_property
    def _read(self) -> tuple[Reading | None, str]:
        try:
            return interpret(self.folder, self.facts.num_layers if self.facts else None), ""
        except BadInput as error:
            return None, str(error)

    @property
    def reading(self) -> Reading | None:
        """As declared; None where it cannot be interpreted (`refusal` says why)."""
        return self._read[0]

    @property
    def refusal(self) -> str:
        """ "" where it can be interpreted."""
        return self._read[1]

    @cached_property
    def raw(self) -> Case:
        """Its small tensors and config fields, whether or not it can be interpreted."""
        return Case(self.folder, self.facts)

    def case(self, engines: tuple[str, ...] = (), launch: Mapping[str, Any] | None = None) -> Case:
        """What static checks look at."""
        return Case(self.folder, self.facts, engines, self.reading, self.refusal, launch or {})

    @property
    def path(self) -> Path:
        """For messages."""
        return self.base.path

    @property
    def spelling(self) -> str:
        """How config.json is laid out: "speculators" or "flat"; eyas.json beside it does not matter."""
        return speculators.NAME if speculators.matches(replace(self.folder, eyas=None)) else "flat"

    # ---------------------------------------------------------------- names

    def stored(self, name: str) -> str | None:
        """Under which name a canonical tensor lies there; None where it is absent, or part of a fused one."""
        if name in self.tensors and canonical_name(name) == name:
            return name
        return next((held for held in self.tensors if canonical_name(held) == name), None)

    def fused(self, name: str) -> str | None:
        """The stored name of the fused tensor that a canonical one is part of."""
        for kind, parts in FUSED.items():
            part = next((p for p in parts if f".{p}." in name), None)
            if part is not None and (held := self.stored(name.replace(part, kind))) is not None:
                return held
        return None

    def ref(self, name: str) -> TensorRef:
        """A canonical tensor. Raises BadInput where it is absent or fused."""
        held = self.stored(name)
        if held is None:
            into = f"; it is part of {fused}" if (fused := self.fused(name)) else ""
            raise BadInput(f"{self.path}: there is no tensor {name}{into}; name one that `eyas inspect` shows")
        return self.tensors[held]

    def spelled(self, name: str) -> str:
        """How this draft would call a canonical tensor: with its prefix, and `layers.0.` where it writes that."""
        if (held := self.stored(name)) is not None:
            return held
        outer = next((p for p in PREFIXES if p != "model." and all(n.startswith(p) for n in self.tensors)), "")
        inner = [n.removeprefix(outer) for n in self.tensors if canonical_name(n) not in APART]
        wrapped = bool(inner) and 2 * sum(n.startswith("model.") for n in inner) > len(inner)
        numbered = any(n.removeprefix("model.").startswith("layers.0.") for n in inner)
        if name in APART:
            beside = next((h for h in map(self.stored, APART[1:]) if h is not None), None)  # d2t and t2d lie together
            return outer + name if beside is None or name not in APART[1:] else beside[:-3] + name
        if numbered and name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        return outer + ("model." if wrapped else "") + name

    # ---------------------------------------------------------------- changing it

    def with_tensors(self, tensors: Mapping[str, TensorRef | None]) -> Overlay:
        """By stored name; None takes one out. New ones come last."""
        out = {name: ref for name, ref in self.tensors.items() if tensors.get(name, ref) is not None}
        return replace(self, tensors=out | {n: named(ref, n) for n, ref in tensors.items() if ref is not None})

    def with_config(self, config: Mapping[str, Any]) -> Overlay:
        """The whole config.json."""
        return replace(self, config=config)

    def with_eyas(self, eyas: Mapping[str, Any] | None) -> Overlay:
        """The whole eyas.json."""
        return replace(self, eyas=eyas)

    def declare(self, **conventions: Any) -> Overlay:
        """The same said in eyas.json, where there is one, since that is what Eyas believes."""
        held = (self.eyas or {}).get("conventions") or {}
        conventions = {name: value for name, value in conventions.items() if held.get(name) != value}
        if self.eyas is None or not conventions:
            return self
        eyas = copy.deepcopy(dict(self.eyas))
        how = {**held.get("how", {}), **dict.fromkeys(conventions, "declared")}
        eyas["conventions"] = {**held, **conventions, "how": how}
        return replace(self, eyas=eyas)

    def declare_sizes(self, **sizes: Any) -> Overlay:
        """Fields of `DraftShape` in eyas.json, where there is one."""
        if self.eyas is None or not sizes:
            return self
        eyas = copy.deepcopy(dict(self.eyas))
        eyas["shape"] = {**eyas.get("shape", {}), **sizes}
        return replace(self, eyas=eyas)

    def tell(self, *texts: str) -> Overlay:
        """With sentences about what was done."""
        return replace(self, told=self.told + texts)

    # ---------------------------------------------------------------- what is other than on the disk

    @property
    def changed(self) -> dict[str, TensorRef | None]:
        """Stored names whose bytes are not those on the disk; None: taken out."""
        return differing(self.base.tensors, self.tensors)

    def change(self) -> Change:
        """What the files must become. Digests in eyas.json are left to whoever writes it (draft/digests.py)."""
        config = None if self.config == self.base.config else dict(self.config)
        eyas = None if self.eyas == self.base.eyas or self.eyas is None else dict(self.eyas)
        return Change({n: None if ref is None else piece(ref) for n, ref in self.changed.items()}, config, eyas)


def differing(before: Mapping[str, TensorRef], after: Mapping[str, TensorRef]) -> dict[str, TensorRef | None]:
    """Stored names of `before` that are gone from `after` (None), and those that are new or another tensor there."""
    gone: dict[str, TensorRef | None] = {name: None for name in before if name not in after}
    return gone | {name: ref for name, ref in after.items() if before.get(name) is not ref}


def digests(overlay: Overlay, names: Sequence[str]) -> dict[str, str | None]:
    """SHA-256 of the bytes of stored tensors, None for one that is not there."""
    return {name: digest(overlay.tensors[name]) if name in overlay.tensors else None for name in names}


def config_digest(value: Mapping[str, Any] | None) -> str | None:
    """SHA-256 of a config's canonical JSON: independent of spaces and of the order of its fields."""
    return None if value is None else sha256_json(value)
