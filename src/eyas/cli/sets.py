"""Prompt sets as options name them: --sets for held-out ones, --prompts for files.   pytest tests/test_prove.py"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

SETS = "mt_bench,humaneval,gsm8k"


def read_sets(files: Sequence[str], names: str | None, limit: int) -> dict[str, Any]:
    """Prompts by set; a file's set is called like the file without its ending."""
    from eyas.prompt_sets import heldout_prompts
    from eyas.prompts import load_prompts

    if names is None:
        names = "" if files else SETS
    sets: dict[str, Any] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        sets[name] = heldout_prompts(name, limit)
    for file in files:
        name = Path(file).name.split(".")[0]
        if name in sets:
            raise click.UsageError(f"two prompt sets are called '{name}'; rename a file, so that their numbers differ")
        sets[name] = load_prompts(file, limit=limit).prompts
    if not sets:
        raise click.UsageError("no prompts: give --prompts FILE or --sets NAME")
    return sets
