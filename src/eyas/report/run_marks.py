"""Text with marks: the loss mask of conversations, and the rounds of answers with what was drafted and accepted.

pytest tests/test_report_run.py

What is marked is marked for everybody: by colour and line for those who see, by words for those who listen.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.report.diagnosis_text import whole, words
from eyas.report.page import Raw, e, table

CSS = """
nav ul{display:flex;flex-wrap:wrap;gap:.15rem 1rem;list-style:none;padding:0;margin:1rem 0 0;font-size:.875rem}
.gaps{font-size:.875rem}.marked{font:.875rem/1.65 ui-monospace,"SF Mono",Menlo,Consolas,monospace;white-space:pre-wrap;
max-width:none;margin:.4rem 0;color:var(--quiet)}
mark{background:color-mix(in srgb,var(--green) 20%,transparent);color:var(--ink);border-radius:.15rem;
box-decoration-break:clone;-webkit-box-decoration-break:clone;padding:.08em 0}
.out{color:var(--ink);text-decoration:underline 2px var(--red);text-underline-offset:.25em}
.answer{color:var(--ink)}.key{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;font-size:.875rem;margin:.4rem 0}
.tok{background:var(--card);border:1px solid var(--line);border-radius:.25rem;padding:0 .25rem;margin-right:.25rem;
white-space:pre-wrap;display:inline-block;max-width:100%}
.tok.yes{background:color-mix(in srgb,var(--green) 20%,transparent);border-color:var(--green)}
.tok.no{color:var(--quiet);text-decoration:line-through}
.card h3{margin-top:0}.cards{display:grid;gap:.75rem;align-items:start;
grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr))}.cards>*{min-width:0;margin:0}
@media (min-width:60rem){.pair.uneven{grid-template-columns:minmax(0,9fr) minmax(0,7fr)}}
.tight :is(th,td){padding-right:.5rem}
.pair table{min-width:min(100%,20rem)}@media (forced-colors:active){mark,.tok.yes{outline:1px solid}}
"""
ROUNDS = 40
"""Rounds of an answer in its table; the text shows all."""


def visible(text: Any) -> str:
    """Text as escaped markup with what does not print made visible: a conversation must not move anything."""
    said = "".join(
        "↵\n" if c == "\n" else c if c == "\t" or c.isprintable() else c.encode("unicode_escape", "replace").decode()
        for c in str(text)
    )
    return html.escape(said)


def _hidden(text: str) -> str:
    return f'<span class="hidden">{e(text)}</span>'


def conversations(documents: Sequence[Mapping[str, Any]], run: str = "") -> str:
    """Each conversation with its supervised tokens marked, and those of them that the draft cannot say."""
    key = (
        '<p class="key"><span><mark>supervised</mark> loss mask 1</span><span class="quiet">not supervised, loss mask 0'
        '</span><span><mark class="out">supervised, not in the draft vocabulary</mark></span></p>'
    )
    cards = []
    for document in documents:
        parts = []
        for part in document["parts"]:
            text = visible(part["text"])
            if not part["supervised"]:
                parts.append(text)
            elif part["known"]:
                parts.append(f"<mark>{_hidden('supervised: ')}{text}{_hidden(' end. ')}</mark>")
            else:
                parts.append(
                    f'<mark class="out">{_hidden("not in the draft vocabulary: ")}{text}{_hidden(" end. ")}</mark>'
                )
        cut = document["tokens"] - document["shown"]
        more = f'<p class="quiet">… and {whole(cut)} further tokens</p>' if cut else ""
        count = f"{whole(document['tokens'])} tokens, {whole(document['supervised'])} of them supervised"
        cards.append(
            f'<article class="card"><h3>{e(run + words(document["id"]))}</h3><p class="quiet">{count}</p>'
            f'<p class="marked" dir="auto">{"".join(parts)}</p>{more}</article>'
        )
    return f'{key}<div class="cards">{"".join(cards)}</div>'


def samples(answers: Sequence[Mapping[str, Any]], run: str = "") -> str:
    """Each answer as text with its accepted drafts marked, and a table of its rounds. run: `A: ` of two runs, of which
    only the first answer of each set is shown."""
    shown = [answer for answer in answers if not run or answer["index"] == 0]
    key = (
        '<p class="key"><span><mark>drafted and accepted</mark></span><span>the target\'s own token, one a round</span>'
        '<span class="out">its own, which the draft vocabulary does not have</span></p>'
    )
    return f'{key}<div class="cards">{"".join(_answer(answer, run) for answer in shown)}</div>'


def _answer(answer: Mapping[str, Any], run: str) -> str:
    rounds = answer["rounds"]
    text = [visible(answer["first"])]
    for one in rounds:
        drafted, own = map(visible, one["said"])
        if drafted:
            text.append(f"<mark>{_hidden('drafted: ')}{drafted}{_hidden(' end. ')}</mark>")
        text.append(f'<span class="out">{own}</span>' if one["known"] is False and own else own)
    accepted = sum(len(one["accepted"]) for one in rounds)
    title = f"{run}{words(answer['set'])}, prompt {answer['index'] + 1}"
    emitted = sum(len(one["accepted"]) + (one["own"] is not None) for one in rounds)
    count = f"{whole(len(rounds))} rounds gave {whole(emitted)} tokens, {whole(accepted)} of them drafted"
    return (
        f'<article class="card"><h3>{e(title)}</h3><p class="quiet">{e(count)}</p>'
        f'<details><summary>Prompt<span class="hidden"> of {e(title)}</span></summary>'
        f'<p class="marked" dir="auto">{visible(answer["prompt"])}</p></details>'
        f'<p class="marked answer" dir="auto">{"".join(text)}</p>'
        f'<details><summary>Round by round<span class="hidden">: {e(title)}</span></summary>{_rounds(rounds, title)}'
        "</details></article>"
    )


def _rounds(rounds: Sequence[Mapping[str, Any]], title: str) -> str:
    rows = []
    for number, one in enumerate(rounds[:ROUNDS], 1):
        rejected = _rejected(one)
        own = "–" if one["own"] is None else Raw(_token(one["own"], ""))
        note = "the answer ended within it" if one["own"] is None else ""
        note = "not in the draft vocabulary" if one["known"] is False else note
        lost = (
            "a tree's other nodes" if rejected is None else Raw("".join(_token(t, " no") for t in rejected) or "none")
        )
        rows.append([str(number), Raw("".join(_token(t, " yes") for t in one["accepted"]) or "none"), lost, own, note])
    caption = f"Rounds of {title}" + (f": the first {ROUNDS} of {len(rounds)}" if len(rounds) > ROUNDS else "")
    heads = ["round", "accepted", "rejected", "target's own", "note"]
    return table(heads, rows, caption, stack=True)


def _rejected(one: Mapping[str, Any]) -> list[str] | None:
    """Drafts behind the accepted ones; of an answer that ended within its round those that were cut off count, too."""
    return None if one["drafted"] is None else list(one["drafted"][len(one["accepted"]) :])


def _token(text: str, kind: str) -> str:
    return f'<code class="tok{kind}">{visible(text).replace(chr(10), "") or "·"}</code>'
