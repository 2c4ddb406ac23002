"""Render what the benchmarks wrote into the tables of docs/performance.md, beside the goals.

    python benchmarks/performance.py --train runs/performance/train_step.json --stages runs/performance/data_stages.json

Everything between the two marker comments is replaced; nothing there is written by hand. Several files may follow
--train: a row of a later one replaces the same work, tool, setting and threads of an earlier one, so that what needs an
idle machine can be measured apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from step.works import WORKS

from eyas.writes import atomic_write

Row = dict[str, Any]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PEERS = {"specforge": "SpecForge", "speculators": "speculators"}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"

BESIDE_PEERS = {
    "full mask, L = 512": {"specforge": 0.60, "speculators": 0.40},
    "full mask, L = 1,024": {"specforge": 0.35},
    "full mask, L = 2,048": {"specforge": 0.20},
    "conversations packed to 1,024": {"specforge": 0.28, "speculators": 0.25},
}
"""At most so many times the CPU seconds of a peer's better setting."""
LIMIT = {"full mask, L = 512": (0.60, 0.75)}
"""At least that share of what the products allow, and later that."""
SHORT = "full mask, L = 512"
LONG = {"one document, L = 4,096": 1.8, "8 documents of 512, packed": 1.1}
"""At most so many times the CPU seconds of a supervised token at L = 512."""
MEMORY = ("full mask, L = 2,048", 0.5)
THREADS = 1.7


@dataclass(frozen=True)
class Line:
    """A line of the table; `ratios` is what the goal speaks of."""

    work: str
    goal: str
    ours: str
    specforge: str
    speculators: str
    ratios: str
    limit: str = ""

    def __str__(self) -> str:
        cells = (self.work, self.goal, self.ours, self.specforge, self.speculators, self.ratios, self.limit)
        return f"| {' | '.join(cell or '–' for cell in cells)} |"


def best(rows: Sequence[Row], work: str, tool: str, key: str = "cpu_s", threads: int = 1) -> Row | None:
    """The row of the setting in which a tool needs least of `key`; None where it was not measured."""
    found = [r for r in rows if (r["work"], r["tool"], r["threads"]) == (work, tool, threads)]
    return min(found, key=lambda r: r[key]) if found else None


def judged(value: float, met: bool) -> str:
    """A figure, and whether it misses the goal."""
    return f"{value:.2f}" if met else f"{value:.2f} (missed)"


def per_token(row: Row) -> float:
    """CPU milliseconds of a supervised token."""
    return 1e3 * row["cpu_s"] / row["supervised_rows"]


# ---------------------------------------------------------------- the lines of each goal


def beside_peers(rows: Sequence[Row]) -> list[Line]:
    """CPU seconds of a step of each tool in its better setting."""
    out = []
    for work, goals in BESIDE_PEERS.items():
        ours = best(rows, work, "eyas")
        if ours is None:
            continue
        theirs = {peer: best(rows, work, peer) for peer in PEERS}
        ratios = []
        for peer, row in theirs.items():
            ratio = ours["cpu_s"] / row["cpu_s"] if row else None
            ratios.append("–" if ratio is None else judged(ratio, ratio <= goals.get(peer, ratio)))
        goal = ", ".join(f"≤ {share:.2f} × {PEERS[peer]}" for peer, share in goals.items())
        limit = "" if ours["limit_ratio"] is None else f"{ours['limit_ratio']:.2f}"
        if work in LIMIT:
            first, later = LIMIT[work]
            goal += f"; limit ≥ {first:.2f}, later {later:.2f}"
            limit = judged(ours["limit_ratio"], ours["limit_ratio"] >= first) if limit else ""
        cells = (seconds(theirs["specforge"]), seconds(theirs["speculators"]))
        out.append(Line(work, goal, seconds(ours), *cells, ", ".join(ratios), limit))
    return out


def seconds(row: Row | None) -> str:
    """CPU seconds and the precision in which they were reached."""
    return "" if row is None else f"{row['cpu_s']:.2f} s ({row['dtype']})"


def long_documents(rows: Sequence[Row]) -> list[Line]:
    """What a supervised token costs in long documents, against short ones in the same precision."""
    out = []
    for work, goal in LONG.items():
        ours = best(rows, work, "eyas")
        short = best([r for r in rows if ours and r["dtype"] == ours["dtype"]], SHORT, "eyas")
        if ours and short:
            ratio = per_token(ours) / per_token(short)
            cell = f"{per_token(ours):.2f} ms against {per_token(short):.2f} ms"
            limit = "" if ours["limit_ratio"] is None else f"{ours['limit_ratio']:.2f}"
            what = f"≤ {goal:.1f} × a supervised token at L = 512"
            out.append(Line(work, what, cell, "", "", judged(ratio, ratio <= goal), limit))
    return out


def memory(rows: Sequence[Row]) -> list[Line]:
    """Ours in its faster setting against the peer that needs least in any of its own."""
    work, goal = MEMORY
    ours = best(rows, work, "eyas")
    theirs = {peer: best(rows, work, peer, "peak_mib") for peer in PEERS}
    if ours is None or not any(theirs.values()):
        return []
    ratios = [ours["peak_mib"] / row["peak_mib"] if row else None for row in theirs.values()]
    worst = max(r for r in ratios if r is not None)
    told = ["–" if r is None else judged(r, r != worst or r <= goal) for r in ratios]
    mine, sf, sp = (f"{row['peak_mib']:,.0f} MiB ({row['dtype']})" if row else "" for row in (ours, *theirs.values()))
    return [Line(f"memory above the start, {work}", f"≤ {goal:.1f} × the better peer", mine, sf, sp, ", ".join(told))]


def two_threads(rows: Sequence[Row]) -> list[Line]:
    """Wall seconds of one thread over those of two, in the precision that is faster on one."""
    out = []
    for work in (w.name for w in WORKS):
        one = best(rows, work, "eyas", "wall_s")
        two = best([r for r in rows if one and r["dtype"] == one["dtype"]], work, "eyas", "wall_s", threads=2)
        if one and two:
            ratio = one["wall_s"] / two["wall_s"]
            cell = f"{two['wall_s']:.2f} s against {one['wall_s']:.2f} s of wall time"
            line = Line(f"two threads, {work}", f"≥ {THREADS} ×", cell, "", "", judged(ratio, ratio >= THREADS))
            out.append(line)
    return out


# ---------------------------------------------------------------- the page


def table(heads: Sequence[str], lines: Sequence[str]) -> str:
    """A Markdown table."""
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines])


def where(rows: Sequence[Row]) -> str:
    """Machine, threads, torch, date and commit of the rows; every one that occurs."""

    def each(of: Callable[[Row], Any]) -> str:
        return ", ".join(dict.fromkeys(str(of(r)) for r in rows))

    bf16 = "with" if rows[0]["machine"]["bf16"] else "without"
    return (
        f"{each(lambda r: r['machine']['cpu'])}, {each(lambda r: r['machine']['cores'])} cores, {bf16} bf16 "
        f"instructions; torch {each(lambda r: r['torch'])}; threads {each(lambda r: r['threads'])}; "
        f"{each(lambda r: r['date'])}; commit {each(lambda r: r['commit'])}; "
        f"medians of {each(lambda r: r['rounds'])} rounds of {each(lambda r: r['steps'])} steps. One thread multiplies "
        f"the head's shape at "
        + ", ".join(f"{rate:.0f} GFLOP/s in {dtype}" for dtype, rate in rates(rows).items())
        + "."
    )


def rates(rows: Sequence[Row]) -> dict[str, float]:
    """GFLOP/s of each precision, as measured beside our steps at L = 512 or the first work there is."""
    held = [r for r in rows if r["tool"] == "eyas" and r["threads"] == 1 and r["gemm_gflop_s"]]
    found: dict[str, float] = {}
    for row in sorted(held, key=lambda r: r["work"] != SHORT):
        found.setdefault(row["dtype"], row["gemm_gflop_s"])
    return found


def all_settings(rows: Sequence[Row]) -> str:
    """Every row, as measured."""
    lines = [
        f"| {r['work']} | {r['tool']} | {r['setting']} | {r['threads']} | {r['cpu_s']:.2f} | {r['wall_s']:.2f} | "
        f"{r['peak_mib']:,.0f} | {r['tokens_per_cpu_s']:,.0f} | "
        f"{'–' if r['limit_ratio'] is None else format(r['limit_ratio'], '.2f')} |"
        for r in rows
    ]
    heads = ("work", "tool", "setting", "threads", "CPU-s", "wall s", "MiB above", "tokens / CPU-s", "limit_ratio")
    return table(heads, lines)


def stages(rows: Sequence[Row]) -> str:
    """The rows of data_stages.py."""
    lines = [
        f"| {r['work']} | {r['tool']} | {r.get('goal') or '–'} | {r['wall_s']:.2f} | {r['cpu_s']:.2f} | "
        f"{r['rate']:,.0f} | {'–' if r.get('ratio') is None else format(r['ratio'], '.2f')} |"
        for r in rows
    ]
    return table(("work", "tool", "goal", "wall s", "CPU-s", "units / s", "ratio"), lines)


def render(train: Sequence[Row], data: Sequence[Row]) -> str:
    """What stands between the markers."""
    parts = []
    if train:
        lines = [*beside_peers(train), *long_documents(train), *memory(train), *two_threads(train)]
        heads = ("work", "goal", "ours", *PEERS.values(), "ratio to each", "limit_ratio")
        parts += ["### One training step", where(train), table(heads, [str(line) for line in lines])]
        parts += ["### Every setting that was run", all_settings(train)]
    if data:
        parts += ["### Stages before training", stages(data)]
    return "\n\n".join(parts)


def merged(files: Sequence[Path]) -> list[Row]:
    """The rows of several files; see above."""
    found: dict[tuple[Any, ...], Row] = {}
    for path in files:
        for row in json.loads(path.read_text()):
            found[tuple(row.get(k) for k in ("work", "tool", "setting", "threads"))] = row
    return list(found.values())


def replace(page: str, text: str) -> str:
    """The page with `text` between its markers. Raises ValueError where they are not there."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}, between which the tables are written")
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="*", type=Path, default=[], help="what train_step.py --json wrote")
    parser.add_argument("--stages", type=Path, help="what data_stages.py --json wrote")
    parser.add_argument("--page", type=Path, default=PAGE)
    a = parser.parse_args()
    data = json.loads(a.stages.read_text()) if a.stages and a.stages.is_file() else []
    text = render(merged([p for p in a.train if p.is_file()]), data)
    atomic_write(a.page, replace(a.page.read_text(encoding="utf-8"), text))


if __name__ == "__main__":
    main()
