"""`eyas measure`: what does a real server accept, how fast is it, and where does it fall short?

eyas measure DRAFT --target T --engine vllm                  # pytest tests/test_measure_cli.py
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from eyas.cli.sets import SETS, read_sets
from eyas.terminal import console, echo

HELP = """Ask a real server the same prompts with the draft and without, and say what it accepted.

--engine starts an engine of `eyas engines setup` here, measures and stops it; repeat it for one table of several. --url
asks a server that runs already (with --baseline-url for one without the draft, and with --engine where the server does
not say what it is); --log reads a server's log alone.

Acceptance is given in the engine's own words and as τ = 1 + accepted / rounds, counted request by request where the
server says so; what other people asked meanwhile is told and not mixed in. With DRAFT the same prompts are replayed as
it is declared, as the engine reads it, and decoded by the reference: the first row that falls is the place, and
`eyas doctor DRAFT --measured FILE` goes on from there.

\b
Examples:
  eyas measure my-draft --target T --engine vllm --out measured.json
  eyas measure my-draft --target T --engine vllm --engine sglang --limit 2 --max-new-tokens 48
  eyas measure my-draft --target T --url http://gpu:8000 --baseline-url http://gpu:8001 --concurrency 1,8,32
  eyas measure my-draft --target T --engine vllm --capture      # which states does it feed the draft?
  eyas measure --log server.log
  eyas doctor my-draft --target T --measured measured.json

\b
Exit codes: 0 measured; 1 only a part was (what there is, is written), or --strict and --fail-below were not met;
2 unreadable input; 3 draft, target and engine do not go together; 130 interrupted (what there is, is written).
"""


@click.command("measure", help=HELP)
@click.argument("draft", required=False, type=click.Path(path_type=Path))
@click.option(
    "--target",
    default="smollm2",
    show_default=True,
    help="Folder, .gguf file, hub id or 'smollm2': its tokenizer, and what is replayed.",
)
@click.option(
    "--engine", "engines", multiple=True, metavar="NAME", help="vllm, sglang, llamacpp or openvino; repeatable."
)
@click.option("--url", help="A server that runs already.")
@click.option("--baseline-url", help="The same without the draft, for speed-up and losslessness.")
@click.option("--model", help="The model's name, where a server has several.")
@click.option("--log", type=click.Path(path_type=Path), help="A server's log: what it says of acceptance, no requests.")
@click.option("--prompts", "files", multiple=True, metavar="FILE", help="A prompt file, a set of its own; repeatable.")
@click.option("--sets", "names", metavar="A,B", help=f"Held-out sets by name: {SETS}.")
@click.option("--limit", type=click.IntRange(min=1), default=8, show_default=True, help="Prompts of each set.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens an answer.")
@click.option("--k", type=click.IntRange(min=1), default=4, show_default=True, help="Tokens drafted a round.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "auto"]), default="float32", show_default=True)
@click.option("--context-length", type=click.IntRange(min=8), default=1024, show_default=True, help="Of the server.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--stop-at-eos", is_flag=True, help="Let answers end by themselves; all go on to the limit otherwise.")
@click.option("--concurrency", default="1", show_default=True, metavar="N,M", help="Requests at once; each a pass.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=300.0, show_default=True,
              help="Seconds of silence after which a server hangs.")  # fmt: skip
@click.option("--wait", type=click.FloatRange(min=0, min_open=True), default=900.0, show_default=True,
              help="Seconds until a started server must answer.")  # fmt: skip
@click.option("--no-baseline", is_flag=True, help="Not without the draft: no speed-up, no losslessness.")
@click.option("--no-locate", is_flag=True, help="Nothing is replayed or decoded here.")
@click.option(
    "--capture", is_flag=True, help="Also compare the states that vLLM feeds the draft with the target's own."
)
@click.option("--launch", default="", metavar="COMMAND", help="The command line that started --url, in quotes.")
@click.option("--training", type=click.Path(path_type=Path), help="The training run, for what it predicted.")
@click.option("--force", is_flag=True, help="Serve a pair that the engine would run as another model.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write everything to this file.")
@click.option("--strict", is_flag=True, help="Exit code 1 unless lossless.")
@click.option("--fail-below", type=float, metavar="TAU", help="Exit code 1 unless every τ is at least TAU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    draft: Path | None, target: str, engines: tuple[str, ...], url: str | None, log: Path | None,
    as_json: bool, out: Path | None, strict: bool, fail_below: float | None, **given: Any,
) -> None:  # fmt: skip
    if log is not None and (engines or url is not None):
        raise click.UsageError("--log reads a file and asks nobody: leave out --engine and --url")
    if log is not None:
        _log(log, as_json)
        return
    if not engines and url is None:
        raise click.UsageError("give one of --engine (started here), --url (a server that runs) and --log (a file)")
    if url is not None and len(engines) > 1:
        raise click.UsageError("--url is one server: --engine names what runs there, once; leave the others out")
    if url is None and draft is None:
        raise click.UsageError("--engine serves a DRAFT: name its directory")
    result = _measured(draft, target, engines, url, out, given)
    if as_json:
        echo(json.dumps(result))
    else:
        from eyas.report.measured_text import show

        show(console(), result, out)
    if result["interrupted"]:
        echo("eyas: interrupted; these are the answers that had come by then", err=True)
        raise SystemExit(130)
    _judge(result, strict, fail_below)


def _measured(
    draft: Path | None, target: str, engines: Sequence[str], url: str | None, out: Path | None, given: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    from eyas.console import bar, teller
    from eyas.draft.files import open_folder
    from eyas.draft.source import resolve_draft
    from eyas.measure.asking import How
    from eyas.measure.measured import write
    from eyas.measure.questions import questions_of
    from eyas.measure.whole import Plan, measure
    from eyas.target.source import resolve_target

    levels, words = _levels(given["concurrency"]), _words(given["launch"])
    if draft is not None:
        draft = resolve_draft(draft)
        open_folder(draft)  # nobody is asked for minutes about a draft that is not there
    if out is not None:
        _writable(out)
    plan = Plan(
        draft, resolve_target(target), tuple(engines), url, given["baseline_url"], given["model"], given["k"],
        tuple(levels), given["dtype"], given["context_length"], not given["no_baseline"], not given["no_locate"],
        given["capture"], given["force"], given["wait"], tuple(words), given["training"],
    )  # fmt: skip
    how = How(given["max_new_tokens"], given["temperature"], not given["stop_at_eos"], 0, given["timeout"])
    sets = read_sets(given["files"], given["names"], given["limit"])
    questions = questions_of(plan.target, sets, plan.context - how.max_tokens - plan.k - 1)
    with bar(total=plan.passes * len(questions), desc="measure", unit="answer", leave=False) as shown:
        return measure(plan, questions, how, given=target, tell=teller(), on_answer=shown.update,
                       keep=lambda result: write(out, result) if out is not None else None)  # fmt: skip


def _writable(out: Path) -> None:
    """Raises BadInput now rather than after minutes of measuring."""
    import os

    from eyas.errors import BadInput

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        refused = "" if os.access(out.parent, os.W_OK) else "nobody may write there"
    except OSError as error:
        refused = str(error.strerror)
    if refused:
        raise BadInput(f"--out {out} cannot be written ({refused}); name a file in a folder that you may write to")


def _words(launch: str) -> list[str]:
    try:
        return shlex.split(launch)
    except ValueError as error:
        raise click.UsageError(f"--launch is no command line ({error}): {launch}; quote it as a shell would") from error


def _levels(text: str) -> list[int]:
    try:
        levels = [int(word) for word in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1 or len(set(levels)) < len(levels):
        raise click.UsageError(f"--concurrency {text!r}: expected different whole numbers such as 1,8,32")
    return levels


def _log(log: Path, as_json: bool) -> None:
    from eyas.engines.served import from_log
    from eyas.errors import BadInput

    if not log.is_file():
        raise BadInput(f"{log} is no file; --log takes the server's log; check the path")
    served = from_log(log)
    if as_json:
        echo(json.dumps(served.to_dict()))
        return
    from eyas.report.measured_text import show_log

    show_log(console(), served)


def _judge(result: Mapping[str, Any], strict: bool, fail_below: float | None) -> None:
    """Raise EyasError (exit code 1) where the caller asked for more than there is."""
    from eyas.errors import EyasError

    if not result["complete"]:
        errors = [*result["failed"].values(), *(error for part in result["engines"] for error in part["errors"])]
        raise EyasError(
            "only a part could be measured: " + "; ".join(errors) + "; mend that and run the same command again"
        )
    for part in result["engines"]:
        tau = (part["acceptance"] or {}).get("tau")
        if strict and part["lossless"]["lossless"] is not True:
            why = part["lossless"].get("why") or "answers differ from those without the draft"
            raise EyasError(
                f"{part['engine']}: not shown to be lossless ({why}); look at the differences in the report, or "
                "measure in float32"
            )
        if fail_below is not None and (tau is None or tau < fail_below):
            raise EyasError(
                f"{part['engine']}: accept length {tau} is below the --fail-below of {fail_below}; `eyas doctor "
                "DRAFT --measured FILE` looks for the reason"
            )
