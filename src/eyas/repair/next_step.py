"""What to type after a diagnosis: one command.

next_step(diagnose("draft", target=folder), target="TARGET")        the last lines of `eyas doctor`
pytest tests/test_doctor_diagnosis.py tests/test_doctor_cli.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .remedies import known

AS_READ = "EY-AS-READ"


def next_step(diagnosis: Mapping[str, Any], target: str | Path | None = None) -> str:
    """The command that goes on from what `diagnose` returned. target: as the user named it, None where it was not."""
    draft, findings = diagnosis["draft"], diagnosis["findings"]
    if findings and findings[0]["id"] == "EY-D2T-OTHER":
        return f"eyas doctor {draft} --target {target or 'TARGET'} --reference D2T_OF_THE_TRAINING_RUN"
    for f in findings:
        if f["severity"] == "error" and f["id"] != AS_READ and known(f):
            with_ = f" --target {target}" if target else ""
            return f"eyas repair {draft}{with_} --finding {f['id']} --out {draft}-mended"
    for f in findings:
        if f["id"] == AS_READ and "eyas export" in f["remedy"]:
            return f"eyas export {draft} --to {f['evidence'].split()[0]} {draft}-export"
        if f["id"] == AS_READ:
            return f"eyas inspect {draft} --target {target or 'TARGET'}    # which engines run it as it was trained"
    if "ledger" in diagnosis:
        return f"eyas prove {draft} --target {target or 'TARGET'}"
    only_files = "engines" not in diagnosis
    again = "    # the same without --static" if only_files else ""
    return f"eyas doctor {draft} --target {target or 'TARGET'}{again}"
