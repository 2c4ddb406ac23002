"""An in-place repair of `d2t` in a draft of the size of Kimi-K2's (2.47 GB): the change alone, the revert of it, and
all of `eyas repair --finding`, diagnoses included.

    python benchmarks/repair_in_place.py [FOLDER ON THE DISK TO MEASURE]

Each runs in a process of its own. Wall and CPU include the start of Python and all imports; `written` is what that
process gave to write(2) (wchar of /proc/self/io), `to disk` what it dirtied (write_bytes). Medians of
the rounds, and the worst one: the first repair alone has to store the map that it replaces.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kimi import DRAFT, kimi_shaped

ROUNDS = 5
REPAIR = """
import numpy as np
from eyas.draft.assemble import Piece
from eyas.repair.change import Change
from eyas.repair.in_place import repair_in_place
new = np.arange({size}, dtype="<i8") * 4 + {round}
repair_in_place(Path(sys.argv[1]), Change({{"d2t": Piece("d2t", "I64", new.shape, (new,))}}), {{"operation": "bench"}})
"""
BY_FINDING = """
from eyas.repair.apply import repair
repair(sys.argv[1], finding="EY-D2T-TWICE", in_place=True)
"""
REVERT = """
from eyas.repair.history import revert
revert(sys.argv[1])
"""
MEASURED = """
import json, os, sys, time
from pathlib import Path
{body}
io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
used = os.times()
print(json.dumps({{"cpu": used.user + used.system, "written": int(io["wchar"]), "to disk": int(io["write_bytes"])}}))
"""


def measured(body: str, draft: Path) -> dict[str, float]:
    """One process: seconds, CPU-seconds, bytes."""
    started = time.perf_counter()
    code = MEASURED.format(body=body)
    done = subprocess.run([sys.executable, "-c", code, str(draft)], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr
    return {"wall": seconds, **json.loads(done.stdout)}


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else ".") as name:
        draft = Path(name)
        size = kimi_shaped(draft, holes=False)
        os.sync()  # or the first fsync waits for all of it
        rows: dict[str, list[dict[str, float]]] = {"repair": [], "revert": [], "finding": []}
        for i in range(ROUNDS):
            rows["repair"].append(measured(REPAIR.format(size=DRAFT, round=i + 1), draft))
            rows["revert"].append(measured(REVERT, draft))
        broken = REPAIR.format(size=DRAFT, round=0).replace(" * 4 + 0", " * 3")  # once too often subtracted
        for _ in range(ROUNDS):
            measured(broken, draft)
            rows["finding"].append(measured(BY_FINDING, draft))
            measured(REVERT, draft)
            measured(REVERT, draft)
        print(f"a draft of {size / 1e9:.2f} GB")
        for kind, runs in rows.items():
            for how, of in (("median", statistics.median), ("worst", max)):
                m = {key: of(run[key] for run in runs) for key in runs[0]}
                print(f"{kind:7} {how:7} {m['wall']:6.2f} s  {m['cpu']:6.2f} CPU-s  "
                      f"{m['written'] / 2**20:6.2f} MiB written  {m['to disk'] / 2**20:6.2f} MiB to disk")  # fmt: skip


if __name__ == "__main__":
    main()
