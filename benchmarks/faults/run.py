"""Inject faults into healthy drafts, singly and in pairs, and count what `eyas doctor` says.

    python benchmarks/faults/run.py DRAFT... --target smollm2 --out table.json [--pairs 30] [--only 'd2t.*'] [--repair]
    python benchmarks/faults/run.py --show a.json b.json         # the table of two processes (--part 1/2 and 2/2)

DRAFT: healthy drafts, of several dialects. Prints the confusion table of docs/doctor.md; what is in --out is not run
again. Single: right when the top finding is about the injected convention (or an equivalence set that holds it) and no
other convention is confirmed; pair: right when both are among the errors, or in an equivalence set. Healthy: right
without any error or confirmed hypothesis.

--repair: each fault that lies in the files is then repaired in place (`eyas repair --auto`), from the broken bytes
alone, else with the healthy draft as reference; right when the replayed accept length is within 1 % of the healthy
draft's. Then it is reverted, and the SHA-256 of every file compared.
"""

from __future__ import annotations

import argparse
import hashlib
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
from eyas.repair.apply import repair
from eyas.repair.history import revert
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


def repaired(folder: Path, first: dict[str, Any], healthy: Path, target: Path, wanted: float) -> dict[str, Any]:
    """`eyas repair --auto --in-place`, and the way back. first: the diagnosis of the broken draft."""
    before = digests(folder)
    out: dict[str, Any] = {"way": "none", "tau": first["tau"]["declared"], "left": [], "steps": [], "reverted": True}
    for way, reference in (("alone", None), ("reference", healthy)):
        known = first if reference is None else None
        done = repair(folder, in_place=True, target=target, reference=reference, budget=600, first=known)
        tau = done.tau[1] if done.tau[1] is not None else float("nan")
        steps = [s.operation for s in done.plan.steps] if done.plan else []
        back = abs(tau - wanted) <= 0.01 * wanted
        out |= {"tau": tau, "left": [f"{row['finding']}: {row['why']}" for row in done.left], "steps": steps}
        if done.plan is not None:
            revert(folder)
            out["reverted"] = out["reverted"] and digests(folder) == before
        if back:
            return out | {"way": way}
    return out


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the draft's own files."""
    files = [p for p in sorted(folder.iterdir()) if p.is_file()]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


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


def in_files(faults: tuple[str, ...]) -> bool:
    """Is there anything in the draft's own files to mend?"""
    return bool(faults) and not any(f.launch or f.data or f.harmless for f in (BY_NAME[name] for name in faults))


def told(row: dict[str, Any] | None) -> str:
    """A repair in a word or two."""
    if row is None:
        return ""
    return f"| {row['way']}: {' '.join(row['steps'])}" + ("" if row["reverted"] else " NOT REVERTED")


def table(rows: list[dict[str, Any]]) -> str:
    """The confusion table in Markdown: a line a fault, a column a draft; then the wrong answers, and the counts."""
    drafts = list(dict.fromkeys(r["draft"] for r in rows))
    found = {(r["draft"], *r["faults"]): r for r in rows}
    lines = [f"| injected | {' | '.join(drafts)} |", "|---" * (1 + len(drafts)) + "|"]
    place = {(): -1} | {(fault.name,): i for i, fault in enumerate(FAULTS)}
    singles = sorted({tuple(r["faults"]) for r in rows if len(r["faults"]) < 2}, key=lambda key: place[key])
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
    mended = [r | r["repair"] for r in rows if r.get("repair")]
    if mended:
        lines.append(f"repaired: {sum(r['way'] == 'alone' for r in mended)} alone, "
                     f"{sum(r['way'] == 'reference' for r in mended)} with the reference, of {len(mended)}; "
                     f"reverted: {sum(r['reverted'] for r in mended)}")  # fmt: skip
        lines += [f"not repaired: {r['draft']}: {' + '.join(r['faults'])}: {r['left']}"
                  for r in mended if r["way"] == "none"]  # fmt: skip
    lines += [
        f"wrong: {r['draft']}: {' + '.join(r['faults']) or 'healthy'}: {r['why']}" for r in rows if not r["right"]
    ]
    return "\n".join(lines)


def cases_of(name: str, pairs: int, singles: bool) -> list[tuple[str, ...]]:
    """The healthy draft, every fault alone, and a sample of pairs that is the draft's own."""
    out: list[tuple[str, ...]] = [(), *((f.name,) for f in FAULTS)] if singles else []
    measurable = [f for f in FAULTS if f.measured]
    possible = [(a.name, b.name) for a, b in itertools.combinations(measurable, 2)
                if not set(a.conventions) & set(b.conventions)]  # fmt: skip
    return out + random.Random(name).sample(possible, min(pairs, len(possible)))


def run_case(
    faults: tuple[str, ...], broken: Held, healthy: Path, wanted: float | None, target: Path
) -> dict[str, Any]:
    """One row of the table. wanted: the healthy draft's accept length, where repairs are to be tried."""
    began, cpu = time.monotonic(), time.process_time()
    diagnosis: dict[str, Any] = {"findings": [], "verdict": "crash", "tau": {}}
    right, why, mended = False, "", None
    with tempfile.TemporaryDirectory() as root:
        try:
            folder = broken.write(Path(root) / "draft")
            diagnosis = diagnose(folder, target=target, budget=600, **around(faults, broken, target, root))
            right, why = judge(diagnosis, faults)
            if wanted is not None and in_files(faults):
                mended = repaired(folder, diagnosis, healthy, target, wanted)
        except Exception as error:  # a crash is a wrong answer, and the table goes on
            right, why = False, repr(error)
    return {
        "draft": healthy.name, "faults": list(faults), "right": right, "why": why, "verdict": diagnosis["verdict"],
        "top": diagnosis["findings"][0]["id"] if diagnosis["findings"] else None,
        "confirmed": [f["convention"] for f in diagnosis["findings"] if f["status"] == "confirmed"],
        "tau": diagnosis["tau"], "repair": mended, "cpu_s": round(time.process_time() - cpu, 1),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("drafts", nargs="*", type=Path)
    parser.add_argument("--show", nargs="+", type=Path, help="print the table of these files, and stop")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-singles", action="store_true")
    parser.add_argument("--repair", action="store_true")
    parser.add_argument("--part", default="1/1", help="1/2 and 2/2: two processes, each with every other case")
    args = parser.parse_args()
    if args.show:
        print(table([row for file in args.show for row in json.loads(file.read_text())]))
        return
    if not args.drafts or args.out is None:
        parser.error("name healthy drafts, and --out")
    target = resolve_target(args.target)
    every = {draft.name: Held.read(draft, target) for draft in args.drafts}
    rows: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out.is_file() else []
    done = {(row["draft"], *row["faults"]) for row in rows}
    part, parts = map(int, args.part.split("/"))
    for path in args.drafts:
        name, whole = path.name, every[path.name]
        maps = [m for n, o in every.items() if n != name and (m := ids_of(o)) is not None]
        whole.other_map = next((m for m in maps if not torch.equal(m, ids_of(whole))), None)
        healthy = diagnose(path, target=target, budget=600)["tau"]["declared"] if args.repair else None
        for place, faults in enumerate(cases_of(name, args.pairs, not args.no_singles)):
            if (name, *faults) in done or place % parts != part - 1:
                continue
            broken = whole.copy()
            wanted = not args.only or re.search(args.only, " + ".join(faults) or "healthy")
            if not wanted or any(BY_NAME[f].apply(broken) is None for f in faults):
                continue
            row = run_case(faults, broken, path, healthy, target)
            rows.append(row)
            args.out.write_text(json.dumps(rows, indent=1))
            print(f"{'ok   ' if row['right'] else 'WRONG'} {name:14} {' + '.join(faults) or 'healthy':50} {row['top']} "
                  f"{row['confirmed']} {row['cpu_s']} s  {row['why']} {told(row['repair'])}", flush=True)  # fmt: skip
    print(table(rows))


if __name__ == "__main__":
    main()
