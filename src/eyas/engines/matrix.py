"""One row of `engine x what it would do` for a draft directory as it stands.   pytest tests/test_engines_profiles.py"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..draft.dialects import Reading
from ..target.facts import TargetFacts
from .compare import differences
from .profiles import Profile
from .reading import Seen


def engine_row(
    profile: Profile, reading: Reading, facts: TargetFacts | None, launch: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Plain JSON values.

    runs: "as trained", "otherwise" (it serves another model), "depends" (on the target's depth or the length served) or
    "not" (it does not start). differences: what and way_out. dropped: stored names that change nothing, with the
    reason. unfilled: parameters that keep something else. needs: flags and limits of the launch.
    """
    read = profile.read(Seen(reading.folder, facts, launch or {}))
    found = differences(reading, read)
    certain = [d for d in found if d.certain]
    runs = "not" if not read.starts else "otherwise" if certain else "depends" if found else "as trained"
    return {
        "version": read.version,
        "architecture": read.architecture,
        "runs": runs,
        "differences": [{"field": d.what, "what": d.text, "way_out": d.way_out} for d in found],
        "dropped": {name: why for name, why in read.dropped.items() if "t2d" not in name},
        "unfilled": {name: p.instead for name, p in read.unfilled().items()},
        "needs": list(read.needs),
    }
