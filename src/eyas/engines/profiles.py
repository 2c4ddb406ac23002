"""The engine profiles by name and version.

    profile("sglang").read(Seen(open_folder("draft"), facts))          profile("sglang@0.5.23")

A profile is a module with ENGINE, VERSION and `read`; another version of an engine is another module (or the same one
given other tables) in PROFILES.   pytest tests/test_engines_profiles.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import BadInput
from . import llamacpp, openvino, sglang, vllm
from .reading import EngineReading, Seen


@dataclass(frozen=True)
class Profile:
    """How one version of an engine reads a draft directory."""

    engine: str
    version: str
    read: Callable[[Seen], EngineReading]

    @property
    def name(self) -> str:
        """ "sglang 0.5.23" """
        return f"{self.engine} {self.version}"


PROFILES = tuple(Profile(m.ENGINE, m.VERSION, m.read) for m in (sglang, vllm, llamacpp, openvino))
ENGINES = tuple(dict.fromkeys(p.engine for p in PROFILES))


def profile(name: str) -> Profile:
    """ "sglang" (the newest version known) or "sglang@0.5.23". Raises BadInput naming what is known."""
    engine, _, version = name.strip().partition("@")
    known = [p for p in PROFILES if p.engine == engine]
    if not known:
        raise BadInput(f"unknown engine {engine!r}; known are {', '.join(ENGINES)}")
    for p in reversed(known):
        if not version or p.version == version:
            return p
    raise BadInput(
        f"{engine} {version} is not known; Eyas knows {', '.join(p.version for p in known)}; choose one of these"
    )
