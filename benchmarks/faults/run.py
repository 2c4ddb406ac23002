"""Inject faults into healthy drafts, singly and in pairs, and count what `eyas doctor` says.

    python benchmarks/faults/run.py DRAFT... --target smollm2 --out table.json [--pairs 30] [--only 'd2t.*']

DRAFT: healthy drafts, of several dialects. Prints the confusion table of docs/doctor.md; what is in --out is not run
again. Single: right when the top finding is about the injected convention (or an equivalence set that holds it) and no
other convention is confirmed; pair: right when both are among the errors, or in an equivalence set. Healthy: right
without any error or confirmed hypothesis.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import features
import torch
from kinds import BY_NAME, FAULTS, Held

from eyas.doctor.diagnosis import diagnose
from eyas.doctor.prompts import KINDS, PROMPTS
from eyas.doctor.record import record, useful_taps
from eyas.engines.launch import options
from eyas.target.facts import read_facts
from eyas.target.source import resolve_target


def ids_of(h: Held) -> torch.Tensor | None:
    name = h.name("d2t")
    return None if name is None else torch.arange(len(h.tensors[name])) + h.tensors[name]


def named(finding: dict[str, Any], wanted: tuple[str, ...]) -> bool:
    """Is the finding about one of the conventions, or does its equivalence set hold one?"""
    said = [finding["convention"] or "", *(str(e).partition(" = ")[0] for e in finding["equivalents"])]
    kinds = [re.sub(r"^(name of |tensor )?", "", s) for s in said]
    if finding["id"].startswith("EY-LAUNCH-"):
        kinds.append("launch")
    return any(w in said or w in kinds or w == CATEGORY.get(finding["id"]) for w in wanted)


CATEGORY = {
    "EY-TENSOR-MISSING": "tensors", "EY-TENSOR-SHAPE": "tensors", "EY-TENSOR-NAN": "tensors",
    "EY-VOCAB-TARGET": "vocab", "EY-MEASURED-NOTHING": "tensors", "EY-NORM-UNTRAINED": "norms",
    "EY-VOCAB-UNNAMED": "d2t", "EY-HEAD-MISSING": "head", "EY-TIED-PRUNED": "head", "EY-READ": "tensors",
}  # fmt: skip


def judge(diagnosis: dict[str, Any], faults: tuple[str, ...]) -> tuple[bool, str]:
    """(right, why not)"""
    found = diagnosis["findings"]
    errors = [f for f in found if f["severity"] == "error" or f["status"] == "confirmed"]
    if not faults or all(BY_NAME[name].harmless for name in faults):
        return not errors, "; ".join(f"{f['id']} {f['status']}" for f in errors)
    wanted = [BY_NAME[name].conventions for name in faults]
    if len(faults) == 1:
        top = found[0] if found else None
        if top is None or not named(top, wanted[0]):
            return False, f"top finding is {top and (top['id'], top['status'], top['convention'])}"
        confirmed = [f for f in found if f["status"] == "confirmed" and f["convention"]]
        others = [f["convention"] for f in confirmed if not named(f, wanted[0])]
        return not others, f"also confirmed: {others}" if others else ""
    undecided = [f for f in found if f["status"] == "inconclusive"]  # equivalence sets
    missed = [name for name, w in zip(faults, wanted, strict=True) if not any(named(f, w) for f in errors + undecided)]
    return not missed, f"missed {missed}; errors are {[(f['id'], f['convention']) for f in errors]}" if missed else ""


def around(faults: tuple[str, ...], draft: Held, target: Path, root: str) -> dict[str, Any]:
    """What lies around the draft where the fault is not in it: the launch, recorded features."""
    out: dict[str, Any] = {}
    for fault in (BY_NAME[name] for name in faults):
        if fault.launch:
            out["launch"] = options(fault.launch)
        if fault.data is not None:
            assert draft.reading is not None
            facts = read_facts(target)
            material = fault.data(record(target, useful_taps(facts, range(facts.num_layers + 1)), PROMPTS, kinds=KINDS))
            out["features"] = features.write(material, Path(root) / "features", draft.reading.conventions, draft.vocab)
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """The confusion table in Markdown: a line a fault, a column a draft; then the wrong answers, and the counts."""
    drafts = list(dict.fromkeys(r["draft"] for r in rows))
    found = {(r["draft"], *r["faults"]): r for r in rows}
    lines = [f"| injected | {' | '.join(drafts)} |", "|---" * (1 + len(drafts)) + "|"]
    singles = dict.fromkeys(tuple(r["faults"]) for r in rows if len(r["faults"]) < 2)
    for faults in singles:
        cells = []
        for draft in drafts:
            row = found.get((draft, *faults))
            said = "" if row is None else f"`{row['top']}`" if faults else row["verdict"]
            cells.append("" if row is None else said if row["right"] else f"**wrong**: {said}")
        lines.append(f"| {faults[0] if faults else 'nothing (healthy)'} | {' | '.join(cells)} |")
    lines.append("")
    for kind, count in (("healthy", 0), ("single", 1), ("pairs", 2)):
        mine = [r for r in rows if len(r["faults"]) == count]
        lines += [f"{kind}: {sum(r['right'] for r in mine)} of {len(mine)} right"] if mine else []
    lines += [
        f"wrong: {r['draft']}: {' + '.join(r['faults']) or 'healthy'}: {r['why']}" for r in rows if not r["right"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("drafts", nargs="+", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-singles", action="store_true")
    args = parser.parse_args()
    target = resolve_target(args.target)
    every = {draft.name: Held.read(draft, target) for draft in args.drafts}
    rows: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out.is_file() else []
    done = {(row["draft"], *row["faults"]) for row in rows}
    for name, whole in every.items():
        others = [o for n, o in every.items() if n != name]
        maps = [m for o in others if (m := ids_of(o)) is not None and not torch.equal(m, ids_of(whole))]
        whole.other_map = maps[0] if maps else None
        cases: list[tuple[str, ...]] = [] if args.no_singles else [(), *((f.name,) for f in FAULTS)]
        measurable = [f for f in FAULTS if f.measured]
        pairs = [
            (a.name, b.name)
            for a, b in itertools.combinations(measurable, 2)
            if not set(a.conventions) & set(b.conventions)
        ]
        cases += random.Random(name).sample(pairs, min(args.pairs, len(pairs)))
        for faults in cases:
            if args.only and not re.search(args.only, " + ".join(faults) or "healthy"):
                continue
            if (name, *faults) in done:
                continue
            broken = whole.copy()
            if any(BY_NAME[f].apply(broken) is None for f in faults):
                continue
            began, cpu = time.monotonic(), time.process_time()
            with tempfile.TemporaryDirectory() as root:
                try:
                    diagnosis = diagnose(
                        broken.write(Path(root) / "draft"),
                        target=target,
                        budget=600,
                        **around(faults, broken, target, root),
                    )
                    right, why = judge(diagnosis, faults)
                except Exception as error:  # a crash is a wrong answer, and the table goes on
                    diagnosis, right, why = {"findings": [], "verdict": "crash", "tau": {}}, False, repr(error)
            row = {
                "draft": name, "faults": list(faults), "right": right, "why": why, "verdict": diagnosis["verdict"],
                "top": diagnosis["findings"][0]["id"] if diagnosis["findings"] else None,
                "confirmed": [f["convention"] for f in diagnosis["findings"] if f["status"] == "confirmed"],
                "tau": diagnosis["tau"], "cpu_s": round(time.process_time() - cpu, 1),
                "seconds": round(time.monotonic() - began, 1),
            }  # fmt: skip
            rows.append(row)
            args.out.write_text(json.dumps(rows, indent=1))
            print(f"{'ok   ' if right else 'WRONG'} {name:14} {' + '.join(faults) or 'healthy':50} {row['top']} "
                  f"{row['confirmed']} {row['cpu_s']} s  {why}", flush=True)  # fmt: skip
    print(table(rows))


if __name__ == "__main__":
    main()
