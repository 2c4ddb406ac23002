"""Is a copy, an upload or a conversion of a draft intact? Proven from the directory alone, without its target.

    verify_draft("draft").ok                         eyas verify draft

The comparison itself is that of `eyas export --check`: digest of each tensor, the map, config.json as engines read it,
the probe's recorded choices. Here a draft that carries no digests is refused: of it, nothing could be proven.
pytest tests/test_verify.py
"""

from __future__ import annotations

from pathlib import Path

from ..draft.digests import declared
from ..draft.files import EYAS_JSON, open_folder
from ..errors import BadInput
from ..export.check import CheckReport, check_draft


def verify_draft(folder: str | Path) -> CheckReport:
    """Compare the draft with its eyas.json and replay its probe, where it has one.

    Raises BadInput where it cannot be checked: unreadable, no eyas.json, or one without digests.
    """
    folder = Path(folder)
    if not declared(open_folder(folder).eyas):
        where = folder / EYAS_JSON
        why = "keeps no digests (it was written with --no-verify)" if where.is_file() else "is missing"
        raise BadInput(
            f"{where} {why}, so nothing says what this draft should hold; `eyas export {folder} OUT` writes one that "
            f"can be verified from then on"
        )
    return check_draft(folder)
