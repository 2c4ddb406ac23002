"""What an engine could not run even if the files were spelled for it; see draft/obstacles.py for the rules."""

from __future__ import annotations

from collections.abc import Iterator

from ...draft.obstacles import ENGINES, obstacles
from ..case import Case
from ..finding import Finding, Severity


def check(case: Case) -> Iterator[Finding]:
    """One finding an obstacle: an error where the user named the engine, else worth knowing."""
    if case.reading is None:
        return
    for engine in case.engines or ENGINES:
        for found in obstacles(engine, case.reading.shape, case.reading.conventions, case.facts):
            yield Finding(
                "EY-ENGINE",
                Severity.ERROR if case.engines else Severity.INFO,
                f"{engine}: {found.what}",
                f"{engine} would run another model than was trained",
                found.way_out[0].upper() + found.way_out[1:],
            )
