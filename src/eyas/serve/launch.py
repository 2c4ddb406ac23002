"""Launch: what is to be served, by which engine and how.   pytest tests/test_serve_command.py"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..engines.setup import ENGINES
from ..errors import BadInput

DTYPES = ("float32", "bfloat16", "auto")
TREES = ("sglang",)  # engines here that draft more than a chain


@dataclass(frozen=True)
class Launch:
    """One server, for `running`. Raises BadInput, naming the option, for values that no engine takes.

    It says nothing about whether draft and engine go together: `check` does.
    """

    engine: str
    target: Path
    """A Hugging Face folder; for llama.cpp also a .gguf file, for OpenVINO also a converted folder."""
    draft: Path | None
    """None serves the target alone."""
    k: int = 4
    """Tokens drafted one after the other in a round."""
    topk: int = 1
    """Branches at each step; 1 is a chain."""
    dtype: str = "float32"
    """Of the weights and of all arithmetic; `auto` is what the target's config says."""
    context: int = 1024
    """Longest sequence, prompt and answer, in tokens."""
    host: str = "127.0.0.1"
    port: int | None = None
    """None takes a free one."""
    log: Path | None = None
    """Where the server's output goes; None names a file in the cache."""
    requests: int = 8
    """Most at once."""
    extra: tuple[str, ...] = ()
    """More options of the engine's own; they win over those that Eyas sets."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise BadInput(f"--engine {self.engine}: no such engine; choose one of {', '.join(ENGINES)}")
        if self.dtype not in DTYPES:
            raise BadInput(f"--dtype {self.dtype}: choose one of {', '.join(DTYPES)}")
        for name, value in (("--k", self.k), ("--topk", self.topk), ("--context-length", self.context),
                            ("--requests", self.requests)):  # fmt: skip
            if value < 1:
                raise BadInput(f"{name} {value}: it must be at least 1")
        if self.port is not None and not 0 < self.port < 65536:
            raise BadInput(f"--port {self.port}: a port lies between 1 and 65535; choose such a one")
        if self.topk > 1 and self.engine not in TREES:
            raise BadInput(
                f"--topk {self.topk}: {self.engine} drafts chains only; leave --topk out, or choose --engine sglang, "
                f"which drafts trees"
            )

    @property
    def model(self) -> str:
        """The name by which requests ask for it."""
        return self.target.stem if self.target.suffix == ".gguf" else self.target.name
