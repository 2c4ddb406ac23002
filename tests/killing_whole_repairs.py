"""Kills the whole of a repair in place, from its diagnosis on, at one call of the system after the other.

    python tests/killing_whole_repairs.py EMPTY_DIR EVERY

The same command run again must end as if nothing had been: the draft mended, and all of it to be reverted. A process of
its own, since it forks (killing_repairs.py). Prints one JSON line; test_repair.py reads it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from changing import leftovers, state
from eyas.repair.apply import repair
from eyas.repair.history import history, revert
from killing_repairs import child, unwatch
from mending import D, change, healthy


def broken(folder: Path) -> Path:
    """A map, a flag, and the digests in eyas.json are to change."""
    return change(
        healthy(folder), lambda t, c: (t.update(d2t=t["d2t"] - torch.arange(D)), c.update(tie_word_embeddings=True))
    )


def main(root: Path, every: int) -> dict[str, Any]:
    unwatch()
    pristine, draft = broken(root / "pristine"), root / "draft"
    old = state(pristine)

    def reset() -> None:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(pristine, draft)

    def work() -> None:
        repair(draft, in_place=True)

    reset()
    work()
    new, wrong, ends = state(draft), [], {"old": 0, "half": 0, "new": 0}
    reset()
    calls = child(work)
    assert calls is not None and state(draft) == new != old
    for nth in range(1, len(calls) + 1, every):
        reset()
        if child(work, nth) is not None:
            wrong.append(f"call {nth} was not reached")
        found = state(draft)
        ends["old" if found == old else "new" if found == new else "half"] += 1
        pending = (draft / ".eyas" / "pending.json").exists()
        if found not in (old, new) and not pending:
            wrong.append(f"call {nth}: neither old nor new, and nothing says so")
        done = repair(draft, in_place=True)
        if done.left or state(draft) != new or len(history(draft)) != 1:
            wrong.append(f"call {nth}: the same command again did not mend it")
        revert(draft)
        if state(draft) != old or leftovers(draft):
            wrong.append(f"call {nth}: the old state did not come back")
    return {"calls": len(calls), "ends": ends, "wrong": wrong[:10]}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))), flush=True)
