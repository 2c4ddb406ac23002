"""Run the static checks on a draft: `examine("path/to/draft")` -> findings, worst first.

eyas doctor DRAFT --static          pytest tests/test_doctor_static.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..draft.files import DraftFolder
from ..target.facts import TargetFacts
from .case import Case
from .checks import FAMILIES
from .finding import ORDER, Finding, Severity

UNNAMED = "does not name the taps"  # a refusal that EY-TAPS-UNNAMED explains better


def examine(
    path: str | Path | DraftFolder,
    facts: TargetFacts | None = None,
    engines: tuple[str, ...] = (),
    launch: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """All findings about one directory, worst first and in the order of the families.

    launch: flags of the command that serves it (`engines.launch.options`), None where nobody said. Raises BadInput
    where not even its files can be read.
    """
    case = Case.open(path, facts, engines, launch)
    findings = [finding for family in FAMILIES for finding in family.check(case)]
    if case.refusal and UNNAMED not in case.refusal:
        findings.append(
            Finding(
                "EY-READ",
                Severity.ERROR,
                case.refusal,
                "What a convention means here is not known, so most checks could not be made",
                "Start with this one",
            )
        )
    return sorted(findings, key=lambda finding: ORDER[finding.severity])
