"""Prompts of a source, whatever its file (rows.py) and layout (prompt.py); duplicates and malformed rows are counted.

prompts = load_prompts("prompts.jsonl")
pytest tests/test_prompts.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import BadInput
from eyas.prompt import EXPECTED, Malformed, Prompt, parse_row
from eyas.prompt_sets import training_prompts
from eyas.rows import read_rows
from eyas.untrusted import parse_json


@dataclass(frozen=True)
class BadRow:
    """A row that is no prompt."""

    file: str
    line: int
    expected: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.expected}"


@dataclass
class Prompts:
    """All prompts of a source, in its order, and what was left out on the way."""

    prompts: list[Prompt] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    duplicates: int = 0
    """Rows that ask exactly what an earlier row asks."""
    renamed: int = 0
    """Rows whose id an earlier, different row had: they got a suffix (`7` becomes `7~2`)."""


def load_prompts(source: str | Path, *, skip_bad: bool = False, limit: int | None = None) -> Prompts:
    """Read prompts from a file, a folder of such files, a saved dataset (`folder`, `folder@split`), a `datasets` id
    (`id`, `id:config`, `id@split`), or `builtin`.

    Raises BadInput naming file, line and what was expected at the first malformed row, unless `skip_bad`: then such
    rows are set aside in `.bad`. `limit` counts good, distinct prompts.
    """
    out = Prompts()
    seen: set[str] = set()
    ids: dict[str, int] = {}
    for prompt in read_prompts(source, skip_bad=skip_bad, on_bad=out.bad.append):
        digest = prompt.digest()
        if digest in seen:
            out.duplicates += 1
            continue
        seen.add(digest)
        name = prompt.id
        while name in ids:
            ids[prompt.id] += 1
            name = f"{prompt.id}~{ids[prompt.id]}"
        ids[name] = 1
        if name != prompt.id:
            out.renamed += 1
            prompt = Prompt(name, prompt.turns, prompt.tools, prompt.source)
        out.prompts.append(prompt)
        if limit is not None and len(out.prompts) >= limit:
            break
    if not out.prompts:
        why = f"{len(out.bad)} malformed rows" if out.bad else "it is empty"
        raise BadInput(f"{source}: no prompt can be used ({why}). {EXPECTED.capitalize()}.")
    return out


def read_prompts(
    source: str | Path, *, skip_bad: bool = False, on_bad: Callable[[BadRow], None] | None = None
) -> Iterator[Prompt]:
    """Prompts of a source one by one, duplicates included. See `load_prompts`."""
    if str(source) == "builtin":
        yield from training_prompts()
        return
    for file, line, row in read_rows(source):
        try:
            yield parse_row(_object(row), default_source=Path(file).name.split(".")[0])
        except Malformed as error:
            text = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)
            bad = BadRow(file, line, str(error), text.strip()[:2000])
            if not skip_bad:
                raise BadInput(f"{bad}. Mend the line, or set such lines aside with --skip-bad.") from None
            if on_bad:
                on_bad(bad)


def _object(row: Any) -> Mapping[str, Any]:
    if isinstance(row, str):
        try:
            row = parse_json(row)
        except ValueError as error:
            raise Malformed(f"not JSON ({error}); {EXPECTED}") from None
    if not isinstance(row, Mapping):
        raise Malformed(f"a JSON {type(row).__name__}; {EXPECTED}")
    return row
