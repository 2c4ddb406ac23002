"""The frame of a page that needs nothing else, and the two things that make it safe: escaping and tables.

pytest tests/test_report_diagnosis.py

No font, no picture, nothing from elsewhere; the policy in the head forbids a browser to load any, and to run any script
but those that are named there by their digest (a diagnosis has none).
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

from eyas.report.diagnosis_text import words

ISSUE = re.compile(r"([A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9_.-]+)#([0-9]{1,9})", re.ASCII)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
# Tones: blue, green, vermilion, then purple, brown and grey for engines; told apart with any kind of colour vision.
CSS = """
:root{color-scheme:light dark;--ink:#1b1f24;--quiet:#59636e;--paper:#fff;--card:#f5f6f8;--line:#d5d9df;--bad:#b3261e;
--warn:#855300;--good:#1a6b3c;--blue:#0067a8;--green:#00785a;--red:#bf4a00;--e0:#9c3d82;--e1:#7a5c00;--e2:#5c6670}
@media (prefers-color-scheme:dark){:root{--ink:#e7eaee;--quiet:#a3adb8;--paper:#14171b;--card:#1e2227;--line:#3a414a;
--bad:#ff8a80;--warn:#f2bd56;--good:#6fd39b;--blue:#6cbcf0;--green:#4fd1ad;--red:#ff9a5c;--e0:#e69ad0;--e1:#e3cb62;
--e2:#b4bec8}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:66rem;background:var(--paper);color:var(--ink);overflow-wrap:anywhere;
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1rem;font-weight:500;color:var(--quiet);margin:0}
h2{font-size:1.25rem;line-height:1.3;margin:2.5rem 0 .5rem;padding-top:.75rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:0 0 .25rem}p{margin:.4rem 0;max-width:46rem}ul{margin:.3rem 0;padding-left:1.2rem}
.quiet{color:var(--quiet)}p.quiet,caption{font-size:.875rem}a{color:var(--blue)}
code,pre{font:.875em/1.45 ui-monospace,"SF Mono",Menlo,Consolas,monospace}
pre{background:var(--card);border:1px solid var(--line);border-radius:.4rem;padding:.6rem .75rem;margin:.4rem 0;
white-space:pre-wrap}
.verdict{font-size:1.75rem;line-height:1.2;font-weight:700;margin:.25rem 0}.summary{font-size:1.125rem}
.healthy,.v-refuted,.s-ok{color:var(--good)}.faulty,.v-confirmed,.s-error{color:var(--bad)}
.undecided,.v-inconclusive,.s-warning{color:var(--warn)}.v-not_evaluated,.s-info{color:var(--quiet)}
.word{font-weight:650;white-space:nowrap}
.tiles{display:grid;gap:.75rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,9rem),1fr));margin:.75rem 0}
.pair{display:grid;gap:1.5rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));align-items:start}
.pair>*,.tiles>*{min-width:0}.card{background:var(--card);border-radius:.5rem;padding:.75rem;margin:.75rem 0}
.tiles .card{margin:0}.card.finding{border-left:.3rem solid;border-radius:0 .5rem .5rem 0}.card .body{color:var(--ink)}
.tile data{display:block;font-size:1.75rem;line-height:1.2;font-weight:650;font-variant-numeric:tabular-nums}
.tile .quiet{font-size:.875rem;line-height:1.35;display:block}
.box{overflow-x:auto;margin:.5rem 0;max-width:100%}.box:focus-visible{outline:2px solid var(--blue)}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
.stack{width:100%}caption{text-align:left;color:var(--quiet);padding-bottom:.3rem}
th,td{text-align:left;vertical-align:top;padding:.3rem .75rem .3rem 0;border-bottom:1px solid var(--line)}
thead th{font-weight:500;color:var(--quiet);white-space:nowrap}tbody th{font-weight:500}
td.n,th.n{text-align:right;white-space:nowrap}td.long{min-width:13rem;overflow-wrap:anywhere}
summary{cursor:pointer;padding:.3rem 0}footer{margin-top:2.5rem;border-top:1px solid var(--line)}
svg{display:block;color:var(--ink)}svg.plot{width:100%;max-width:32rem;height:auto}
svg.interval{width:150px;height:18px}svg.small{width:60px;height:8px;display:inline-block;margin-right:.5rem}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}
svg text.quiet{fill:var(--quiet)}svg .grid{stroke:var(--line);fill:none}svg .axis{stroke:var(--quiet);fill:none}
svg .line{fill:none;stroke:currentColor;stroke-linejoin:round}svg .leader{stroke:currentColor;opacity:.45;fill:none}
svg .mark{fill:currentColor;stroke:currentColor}svg .dots{stroke:currentColor;stroke-linecap:round;fill:none}
svg .whisker{stroke:currentColor;stroke-width:1.5;fill:none}svg .bar{fill:var(--blue)}
svg .diagonal{stroke:var(--quiet);stroke-dasharray:4 4;fill:none}
svg .limit{stroke:var(--bad);stroke-dasharray:8 3;fill:none}
svg .v-confirmed,svg.v-confirmed{color:var(--bad)}svg.v-refuted{color:var(--good)}svg.v-inconclusive{color:var(--warn)}
.t-declared{color:var(--blue)}.t-best{color:var(--green)}.t-served{color:var(--red)}.t-engine0{color:var(--e0)}
.t-engine1{color:var(--e1)}.t-engine2{color:var(--e2)}.t-engine0 .line{stroke-dasharray:7 3}
.t-engine1 .line{stroke-dasharray:2 3}.t-engine2 .line{stroke-dasharray:8 3 2 3}.t-served .line{stroke-dasharray:12 4}
@media (min-width:60rem){.plotted{grid-template-columns:minmax(0,25rem) minmax(0,1fr)}}
@media (max-width:40rem){body{padding:.75rem}h2{margin-top:2rem}
.stack thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.stack,.stack tbody,.stack caption,.stack tr{display:block}.stack{overflow-wrap:anywhere}
.stack tr{padding:.5rem 0;border-bottom:1px solid var(--line)}
.stack tr>*{display:grid;grid-template-columns:5.5rem minmax(0,1fr);gap:.5rem;padding:.1rem 0;border:0;text-align:left}
.stack tr>*::before{content:attr(data-label);color:var(--quiet);font-weight:400;white-space:normal}
.stack tr>:has(>span:empty){display:none}}
@media print{body{max-width:none}.box{overflow:visible}}
"""


def page(title: str, head: str, body: str, foot: str, css: str = "", scripts: Sequence[str] = ()) -> str:
    """A whole page. title: text; head, body, foot: markup. Only `scripts` may run: the policy holds their digests."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = "; script-src ".join(
        [POLICY, *([" ".join(f"'sha256-{digest}'" for digest in digests)] if digests else [])]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><meta name="referrer" content="no-referrer">'
        f"<title>{e(title)}</title><style>{CSS}{css}</style></head>\n<body><header>{head}</header><main>{body}</main>"
        f'<footer><p class="quiet">{foot}</p></footer>'
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def section(name: str, title: str, content: str, empty: str) -> str:
    """A section with its heading; `empty` says what there is to say where there is no content."""
    content = content or f'<p class="quiet">{empty}</p>'
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>{content}</section>'


class Raw(str):
    """Markup made here, not to be escaped again."""


def e(value: Any) -> str:
    """Any value as escaped text."""
    return html.escape(value if isinstance(value, str) and value.isprintable() else words(value, 4000))


def source_link(source: Any) -> str:
    """An issue of a public repository as a link, anything else as text."""
    found = ISSUE.fullmatch(source) if isinstance(source, str) else None
    if found is None:
        return e(source)
    return f'<a href="https://github.com/{found[1]}/issues/{found[2]}" rel="noreferrer">{e(source)}</a>'


def table(
    heads: Sequence[str],
    body: Iterable[Sequence[Any]],
    caption: str,
    right: Iterable[int] = (),
    long: Iterable[int] = (),
    stack: bool = False,
) -> str:
    """A table that scrolls in its own box; its first column names the row.

    right, long: columns of numbers, and of texts that wrap. stack: on a narrow page each row becomes a block of lines,
    each with its heading; the roles are written out because a changed display takes them away.
    """
    css = {**dict.fromkeys(long, ' class="long"'), **dict.fromkeys(right, ' class="n"')}
    role = (lambda name: f' role="{name}"') if stack else (lambda name: "")

    def cell(place: int, value: Any) -> str:
        inner = value if isinstance(value, Raw) else e(value)
        tag, scope, name = ("td", "", "cell") if place else ("th", ' scope="row"', "rowheader")
        label = f' data-label="{e(heads[place])}"' if stack else ""
        inner = f"<span>{inner}</span>" if stack else inner
        return f"<{tag}{scope}{role(name)}{css.get(place, '')}{label}>{inner}</{tag}>"

    head = "".join(f'<th scope="col"{role("columnheader")}{css.get(i, "")}>{e(h)}</th>' for i, h in enumerate(heads))
    row = role("row")
    lines = "".join(f"<tr{row}>{''.join(cell(i, value) for i, value in enumerate(values))}</tr>" for values in body)
    kind = ' class="stack" role="table"' if stack else ""
    return (
        f'<div class="box" role="region" tabindex="0" aria-label="{e(caption)}">'
        f"<table{kind}><caption>{e(caption)}</caption><thead{role('rowgroup')}><tr{row}>{head}</tr></thead>"
        f"<tbody{role('rowgroup')}>{lines}</tbody></table></div>"
    )
