"""The data of a run's page: one run or two, with what differs between them.

eyas report runs/demo --json          pytest tests/test_report_run.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.report.run_compare import compare
from eyas.report.run_read import read_run, target_of
from eyas.report.run_text import open_tokenizer

SCHEMA = "eyas-run-report/1"


def read_report(folders: Sequence[Path], target: str | None = None) -> dict[str, Any]:
    """{schema, runs: [one or two, see `read_run`], differences: see `compare`, None of one run}: plain JSON values.

    target: whose tokenizer shows the masks; without it the one that each run names, where that is at hand. Raises
    BadInput for a folder that is no run, Mismatch for the tokenizer of another target.
    """
    runs = [read_run(folder, open_tokenizer(target or target_of(folder), target is not None)) for folder in folders]
    if len({run["name"] for run in runs}) < len(runs):  # two runs of one recipe: their folders tell them apart
        runs = [
            {**run, "name": f"{run['name']} ({folder.resolve().name})"}
            for run, folder in zip(runs, folders, strict=True)
        ]
    return {"schema": SCHEMA, "runs": runs, "differences": compare(*runs) if len(runs) > 1 else None}
