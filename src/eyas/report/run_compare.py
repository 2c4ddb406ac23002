"""Two runs beside each other: which settings and inputs differ, what came out, and whether the proofs can be compared.

pytest tests/test_report_run.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """settings: [{name, a, b}] that differ; inputs: [{stage, name, a, b}] of other content; proofs: see `_proofs`."""
    names = sorted(a["settings"].keys() | b["settings"].keys())
    settings = [
        {"name": name, "a": a["settings"].get(name), "b": b["settings"].get(name)}
        for name in names
        if a["settings"].get(name) != b["settings"].get(name)
    ]
    inputs = []
    for stage in [*a["inputs"], *(s for s in b["inputs"] if s not in a["inputs"])]:
        left, right = a["inputs"].get(stage, {}), b["inputs"].get(stage, {})
        for name in [*left, *(n for n in right if n not in left)]:
            if left.get(name) != right.get(name):
                inputs.append({"stage": stage, "name": name, "a": left.get(name), "b": right.get(name)})
    return {"settings": settings, "inputs": inputs, "proofs": _proofs(a, b)}


def _proofs(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """comparable: were both measured with one target, on one set of prompts, in one way? Else `because` says what
    differs; None where one of them was not proved."""
    if not a["proof"] or not b["proof"]:
        return {"comparable": None, "because": []}
    left, right = a["inputs"].get("prove", {}), b["inputs"].get("prove", {})
    because = [
        f"{name}: its content differs"
        for name in sorted((left.keys() | right.keys()) - {"draft"})
        if left.get(name) != right.get(name)
    ]
    ways = a["proof"].get("settings", {}), b["proof"].get("settings", {})
    for name in sorted((ways[0].keys() | ways[1].keys()) - {"batch", "threads", "seed"}):
        if ways[0].get(name) != ways[1].get(name):
            because.append(f"{name}: {ways[0].get(name)} and {ways[1].get(name)}")
    return {"comparable": not because, "because": because}
