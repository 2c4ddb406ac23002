"""What is measured: the works, the settings of each tool, and the documents that a work's batches hold.

    python benchmarks/train_step.py --list

Sizes are SmolLM2's and the comparison's: what the peers' scripts have as their defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

TTT_STEPS, DRAFT_VOCAB = 7, 8192
TOOLS = ("eyas", "specforge", "speculators")
CONVERSATIONS = "conversations packed to 1,024"


@dataclass(frozen=True)
class Work:
    """One training step: `documents` of `length` tokens each, all supervised, or packed conversations of together
    `length` tokens under their own mask. `alone`: nobody else is asked, since it is compared with ours."""

    name: str
    length: int
    documents: int = 1
    conversations: bool = False
    alone: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.length * self.documents

    def tools(self, chosen: list[str]) -> list[str]:
        """Who of the chosen is asked."""
        return [tool for tool in chosen if tool == "eyas" or not self.alone]


WORKS = (
    Work("full mask, L = 512", 512),
    Work("full mask, L = 1,024", 1024),
    Work("full mask, L = 2,048", 2048),
    Work(CONVERSATIONS, 1024, conversations=True),
    Work("one document, L = 4,096", 4096, alone=True),
    Work("8 documents of 512, packed", 512, documents=8, alone=True),
)


@dataclass(frozen=True)
class Setting:
    """One way to run a tool: precision, and the arguments that its script takes for it."""

    tool: str
    dtype: str
    name: str
    arguments: tuple[str, ...] = ()


def settings(tool: str, dtypes: list[str], plain: bool = False) -> list[Setting]:
    """All ways in which a tool is run. plain: SpecForge also without --compact, which is its default."""
    out = []
    for dtype in dtypes:
        if tool == "eyas":
            out.append(Setting(tool, dtype, f"adamw, {dtype}"))
        elif tool == "specforge":
            out.append(Setting(tool, dtype, f"{dtype}, compact teacher", ("--dtype", dtype, "--compact")))
            if plain:
                out.append(Setting(tool, dtype, f"{dtype}, default teacher", ("--dtype", dtype)))
        else:
            given = ("--autocast", dtype, "--no-freeze-lm-head", "--attn", "sdpa", "--optimizer", "adamw")
            out.append(Setting(tool, dtype, f"{dtype}, sdpa", given))
    return out
