"""`eyas vocab`: choose the draft vocabulary from token counts.

eyas vocab runs/demo/features --size 8192 --target smollm2 --out runs/demo/vocab
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from eyas.terminal import echo

HELP = """Choose the draft vocabulary: features or conversations to a vocabulary map.

SOURCE is a folder of features, whose supervised tokens are counted; a file of conversations, whose answers are counted
(needs --target); or a vocabulary map, which keeps its counts and is cut to another size. The most frequent ids are
taken, and always those of --always-id and --always-token, and, with --target, its special and end-of-turn tokens. Where
fewer than SIZE ids were observed, the lowest not yet in fill up.

\b
Examples:
  eyas vocab runs/demo/features --size 8192 --target smollm2 --out runs/demo/vocab
  eyas vocab runs/demo/features --size 8192 --held-out runs/demo/heldout --out runs/demo/vocab --json
  eyas vocab runs/demo/vocab --size 4096 --out smaller
  eyas vocab conversations.jsonl --size 8192 --target smollm2 --out vocab
"""


@click.command("vocab", help=HELP)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--size", required=True, type=click.IntRange(min=1), help="Ids in the draft vocabulary (D).")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option(
    "--target",
    help="Folder, .gguf file, hub id or 'smollm2': its special and end-of-turn ids are always in.",
)
@click.option("--always-id", "always_ids", multiple=True, type=int, metavar="ID", help="An id always in; repeatable.")
@click.option(
    "--always-token",
    "always_tokens",
    multiple=True,
    metavar="TEXT",
    help="A text whose ids are always in (needs --target).",
)
@click.option(
    "--held-out", type=click.Path(path_type=Path), help="Features for a second coverage, of text not counted."
)
@click.option("--skip-bad", is_flag=True, help="Set malformed conversations aside instead of stopping at them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    source: Path,
    size: int,
    out: Path,
    target: str | None,
    always_ids: tuple[int, ...],
    always_tokens: tuple[str, ...],
    held_out: Path | None,
    skip_bad: bool,
    as_json: bool,
) -> None:
    if always_tokens and target is None:
        raise click.UsageError("--always-token needs --target, whose tokenizer knows the ids of a text")
    from eyas.features.count import make_vocab

    always, folder = set(always_ids), None
    if target is not None:
        from eyas.target.source import resolve_target
        from eyas.target.tokens import special_ids, token_ids

        folder = resolve_target(target, part="ends")
        always.update(special_ids(folder))
        for text in always_tokens:
            always.update(token_ids(folder, text))
    report = make_vocab(source, out, size, always=always, held_out=held_out, target_dir=folder, skip_bad=skip_bad)
    if as_json:
        echo(json.dumps(report.to_dict()))
        return
    echo(f"{report.out}: {report.size:,} of the target's {report.target_size:,} ids{_unchanged(report.skipped)}")
    echo(
        f"  counted {report.supervised_tokens:,} supervised tokens, {report.observed:,} distinct ids; "
        f"{report.always} ids always in, {report.filled:,} in the map were not observed"
    )
    held = "" if report.held_out_coverage is None else f", {report.held_out_coverage:.2%} of the held-out ones"
    echo(f"  covers {report.coverage:.2%} of the supervised tokens counted{held}")
    for reason, number in report.set_aside.items():
        echo(f"  set aside: {number} {reason}")


def _unchanged(skipped: bool) -> str:
    return " (done before, unchanged)" if skipped else ""
