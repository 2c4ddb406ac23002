"""The directory as each engine would read it, next to what was declared: engines/ has the profiles."""

from __future__ import annotations

from collections.abc import Iterator

from ...engines.compare import differences
from ...engines.profiles import ENGINES, profile
from ...engines.reading import Seen
from ..case import Case
from ..finding import Finding, Severity


def check(case: Case) -> Iterator[Finding]:
    """Of an engine that the user named: an error for each difference. Of the others: one line, worth knowing."""
    if case.reading is None:
        return
    for engine in case.engines or ENGINES:
        read = profile(engine).read(Seen(case.folder, case.facts, case.launch))
        found = differences(case.reading, read)
        served = f"{read.name} would run another model than was trained" if read.starts else f"{read.name} would stop"
        if not case.engines:
            found = found[:1] if any(d.certain for d in found) else []
        for difference in found:
            severity = Severity.INFO if not case.engines else Severity.ERROR if difference.certain else Severity.WARNING
            remedy = difference.way_out[:1].upper() + difference.way_out[1:] or "Choose another engine"
            yield Finding("EY-ENGINE", severity, f"{engine}: {difference.text}", served, remedy)
