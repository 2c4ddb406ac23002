"""`eyas doctor`: what is wrong with this draft?   eyas doctor path/to/draft --target path/to/target"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.terminal import console, echo

if TYPE_CHECKING:
    from eyas.engines.served import Served

HELP = """Find out why a draft is not accepted. Nothing is ever changed.

Every convention has alternatives that occur in the field. The doctor tries them all on the real weights: it replays the
draft over text of the target, as it is declared, as each engine reads it, and with one convention after the other
replaced; what fits better is confirmed, what fits worse is ruled out, and what cannot be told apart is said.

With --target it records that text itself, once for each target. --features takes recorded features instead; without
both, the probe inside a draft that Eyas exported is used. --static looks at the files alone.

\b
Examples:
  eyas doctor path/to/draft --target path/to/target
  eyas doctor path/to/draft --target path/to/target --engine vllm --served-accept-length 1.03
  eyas doctor path/to/draft --target path/to/target --measured measured.json    # of `eyas measure`
  eyas doctor path/to/draft --target path/to/target --log server.log --html report.html
  eyas doctor path/to/draft --target path/to/target --reference path/to/copy/d2t.pt
  eyas doctor owner/draft --target owner/target           # both from the hub
  eyas doctor path/to/draft --static --format github --fail-on warning     # in CI

Exit codes: 0 nothing of --fail-on or worse, 1 findings, 2 it could not run.
"""
ANNOTATIONS = {"error": "error", "warning": "warning", "info": "notice", "ok": "notice"}
LEVELS = ("error", "warning", "info", "ok")


@click.command("doctor", help=HELP)
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--target", help="Its target: folder, .gguf file, hub id or 'smollm2'.")
@click.option("--features", type=click.Path(path_type=Path), help="Recorded features to replay, instead of recording.")
@click.option("--engine", "engines", multiple=True, metavar="NAME[@VERSION]",
              help="sglang, vllm, llamacpp or openvino; repeatable  [default: the first two].")  # fmt: skip
@click.option("--served-accept-length", type=float, help="What the server reports, bonus token included.")
@click.option("--log", type=click.Path(path_type=Path), help="The server's log.")
@click.option(
    "--metrics", metavar="URL", help="The server's address, a saved /metrics text, or saved responses (.json)."
)
@click.option("--measured", type=click.Path(path_type=Path), help="What `eyas measure --out` wrote of the server.")
@click.option("--launch", default="", metavar="COMMAND", help="The command line that serves it, in quotes.")
@click.option("--reference", type=click.Path(path_type=Path),
              help="A copy to compare with: draft directory, d2t.pt, d2t.npy or vocab_mapping.pt.")  # fmt: skip
@click.option("--training", type=click.Path(path_type=Path), help="The training run, for what it predicted.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Requests to record on  [default: 64 of our own].")
@click.option("--draft-tokens", "k", type=click.IntRange(1, 16), default=4, show_default=True, help="Drafted a round.")
@click.option("--static", is_flag=True, help="Files only: no target, no trials.")
@click.option("--budget", default="60s", show_default=True, metavar="TIME", help="After it no round of trials begins.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--trust-remote-code", is_flag=True, help="Run code that the target's folder brings along.")
@click.option("--fail-on", type=click.Choice(["error", "warning", "info", "never"]), default="error", show_default=True,
              help="Exit with 1 from this severity on.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(["text", "json", "github"]), default="text", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report as one HTML file.")
@click.option("-v", "--verbose", is_flag=True, help="Show what is only worth knowing, and every hypothesis, too.")
def command(
    draft: Path, target: str | None, features: Path | None, engines: tuple[str, ...],
    served_accept_length: float | None, log: Path | None, metrics: str | None, launch: str, reference: Path | None,
    training: Path | None, prompts: Path | None, measured: Path | None, k: int, static: bool, budget: str, device: str,
    trust_remote_code: bool, fail_on: str, form: str, as_json: bool, html: Path | None, verbose: bool,
) -> None:  # fmt: skip
    from eyas.draft.source import resolve_draft
    from eyas.errors import BadInput, EyasError

    try:
        read = resolve_draft(draft)  # before the seconds that all other modules take
    except EyasError as error:  # whatever it is: 1 would mean findings
        raise BadInput(str(error)) from error
    from eyas.console import teller
    from eyas.doctor.diagnosis import diagnose
    from eyas.engines.launch import options
    from eyas.engines.profiles import profile
    from eyas.repair.next_step import next_step

    for name in engines:
        profile(name)
    form = "json" if as_json else form
    served, located = _served(served_accept_length, log, metrics), None
    if measured is not None:
        if served is not None:
            raise BadInput("--measured says what was served: leave out --served-accept-length, --log and --metrics")
        from eyas.measure.measured import of_file

        file = of_file(measured, engines[0] if engines else None)
        served, located, engines = file.served, file.located, engines or (file.engine,)
        launch = launch or shlex.join(file.command)
    folder = None
    if target is not None:
        from eyas.target.source import resolve_target

        folder = resolve_target(target)
    limit, requests, flags = seconds(budget), _prompts(prompts), options(launch)
    if not static:
        from eyas.machine import check_device

        check_device(device)
    try:
        diagnosis = diagnose(
            read,
            target=folder,
            features=features,
            engines=engines,
            reference=reference,
            training=training,
            served=served,
            located=located,
            launch=flags,
            prompts=requests,
            static=static,
            budget=limit,
            k=k,
            device=device,
            trust_remote_code=trust_remote_code,
            tell=teller(),
        )
    except EyasError as error:
        raise BadInput(str(error)) from error
    diagnosis["draft"] = str(draft)  # as the user said it
    diagnosis["next"] = next_step(diagnosis, target)
    if html is not None:
        from eyas.report.diagnosis_html import render
        from eyas.writes import atomic_write

        try:
            atomic_write(html, render(diagnosis))
        except OSError as error:
            raise BadInput(
                f"--html {html} cannot be written ({error.strerror}); name a file in a folder that you may write to"
            ) from error
    if form == "json":
        echo(json.dumps(diagnosis))
    elif form == "github":
        for f in diagnosis["findings"]:
            echo(_annotation(draft, f))
    else:
        from eyas.report.diagnosis_text import show

        show(console(), diagnosis, verbose=verbose)
    raise SystemExit(1 if _failed(diagnosis, fail_on) else 0)


def _failed(diagnosis: Mapping[str, Any], fail_on: str) -> bool:
    """From `fail_on` on; what is measured or served wrong fails like an error."""
    if fail_on == "never":
        return False
    bad: Sequence[str] = LEVELS[: LEVELS.index(fail_on) + 1]
    return diagnosis["verdict"] == "faulty" or any(f["severity"] in bad for f in diagnosis["findings"])


def _served(number: float | None, log: Path | None, metrics: str | None) -> Served | None:
    from eyas.errors import BadInput

    given = [x for x in (number, log, metrics) if x is not None]
    if not given:
        return None
    if len(given) > 1:
        raise BadInput("give one of --served-accept-length, --log and --metrics: they would say different things")
    from eyas.engines.served import from_log, from_metadata, from_number, from_prometheus, from_url

    if number is not None:
        return from_number(number)
    if log is not None:
        if not log.is_file():
            raise BadInput(f"{log} is no file; --log takes the server's log; check the path")
        return from_log(log)
    assert metrics is not None
    if "://" in metrics:
        return from_url(metrics)
    return from_metadata(Path(metrics)) if metrics.endswith((".json", ".jsonl")) else from_prometheus(Path(metrics))


def _prompts(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    from eyas.prompts import load_prompts

    return [prompt.text for prompt in load_prompts(path).prompts]


def seconds(text: str) -> float:
    """ "60s", "2m", "90" """
    from eyas.errors import BadInput

    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise BadInput(f"--budget {text!r}: expected a time such as 60s or 2m")
    return value


def _annotation(draft: Path, f: Mapping[str, Any]) -> str:
    text = f"{f['evidence']}. {f['remedy']}".replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{ANNOTATIONS[f['severity']]} file={draft},title={f['id']}::{text}"
