"""A draft beside a target that it was not trained for: allowed where it is measured, never without a word.

eyas prove BASE_DRAFT --target TUNED        # docs/guides/fine-tuned-target.md       pytest tests/test_messages.py
"""

from __future__ import annotations

from pathlib import Path

from eyas.terminal import echo


def note_other_target(draft: Path, target: Path) -> None:
    """Say on standard error that eyas.json in `draft` names another target than the one in `target`, where it does."""
    from eyas.draft.files import EYAS_JSON, read_json
    from eyas.target.source import other_target

    told = draft / EYAS_JSON
    if not told.is_file():
        return
    declared = read_json(told).get("target") or {}
    other = other_target(declared.get("target") or "", declared.get("ends") or "", target)
    if other is not None:
        echo(
            f"note: {draft} was trained for target {other[0][:16]}, {target} is {other[1][:16]}: a low accept length "
            "then says how far apart they are, not that the draft is broken",
            err=True,
        )
