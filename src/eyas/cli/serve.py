"""`eyas serve`: a real engine that serves target and draft, here on the CPU, or the command that does so elsewhere.

eyas serve runs/demo/export --engine vllm          # pytest tests/test_serve_command.py tests/test_serve_process.py
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.terminal import echo

if TYPE_CHECKING:
    from eyas.serve import Launch, Server

HELP = """Serve TARGET with DRAFT by a real engine, until Ctrl-C; or, with --print, show the command for your machine.

Here it runs on the CPU, in float32, in the environment that `eyas engines setup ENGINE` built: to check a draft, not
for speed. Every response says what was accepted. Before anything starts, the draft is read as that engine reads it:
what could not start, or would be another model than was trained, is refused with the way out. llama.cpp and OpenVINO
need both models converted, which is done once and kept.

Options of the engine's own come after `--`; they win over those that Eyas sets.

\b
Examples:
  eyas serve runs/demo/export --engine vllm
  eyas serve my-draft --target path/to/target --engine sglang --topk 4 --k 3 --port 30000
  eyas serve my-draft --target Qwen/Qwen3-8B --engine sglang --print -- --tp 2
  eyas serve --no-draft --target smollm2 --engine llamacpp --json

\b
Exit codes: 0 stopped by Ctrl-C or SIGTERM once it answered; 1 the server failed (the end of its log is shown); 2 bad
usage, unreadable input, the engine is not set up, the port is taken; 3 the draft does not belong to this target, or
this engine cannot serve it as it was trained; 130 interrupted before it answered.
"""
CONTEXT = 1024  # tokens, here, where nothing else is said


@click.command("serve", help=HELP,
               options_metavar="[OPTIONS]")  # fmt: skip
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="DRAFT [-- ENGINE'S OPTIONS]")
@click.option("--target", default="smollm2", show_default=True, help="Folder, .gguf file, hub id or 'smollm2'.")
@click.option("--engine", required=True, metavar="NAME", help="vllm, sglang, llamacpp or openvino.")
@click.option("--k", type=click.IntRange(1), default=4, show_default=True, help="Tokens drafted a round.")
@click.option("--topk", type=click.IntRange(1), default=1, show_default=True,
              help="Branches at each step, a tree where more than 1; SGLang only.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "auto"]),
              help="Of weights and arithmetic.  [default: float32 here, auto with --print]")  # fmt: skip
@click.option("--context-length", type=click.IntRange(2), help="Longest sequence, in tokens.  "
              "[default: 1024 here, with --print all that both models know]")  # fmt: skip
@click.option("--requests", type=click.IntRange(1), help="Requests at once.  [default: 8 here; llama.cpp: 1]")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to listen on.  [default: a free one]")
@click.option("--log", type=click.Path(path_type=Path), help="The server's output.  [default: a file in the cache]")
@click.option("--wait", type=click.FloatRange(min=1), default=900.0, show_default=True,
              help="Seconds until it must answer.")  # fmt: skip
@click.option("--no-draft", is_flag=True, help="Serve the target alone.")
@click.option("--force", is_flag=True, help="Serve even what would be another model than was trained.")
@click.option("--print", "only_print", is_flag=True, help="Show the command for a machine with GPUs; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line when it answers; progress goes to stderr.")
def command(
    words: tuple[str, ...], target: str, engine: str, dtype: str | None, context_length: int | None,
    requests: int | None, host: str | None, no_draft: bool, force: bool, only_print: bool, as_json: bool, wait: float,
    **rest: Any,
) -> None:  # fmt: skip
    from eyas.serve import Launch

    draft, extra = _split(words, no_draft)
    launch = Launch(
        engine=engine, target=Path(target), draft=None if draft is None else Path(draft), host=host or "127.0.0.1",
        dtype=dtype or ("auto" if only_print else "float32"), requests=requests or 8, extra=extra, **rest,
    )  # fmt: skip
    launch = dataclasses.replace(launch, target=_target(target, engine, only_print), draft=_draft(launch))
    launch = dataclasses.replace(launch, context=_context(launch, context_length, only_print))
    if only_print:
        _print(launch, target, draft, force, requests, bool(host or launch.port), as_json)
    else:
        _serve(launch, force, wait, as_json)


def _split(words: tuple[str, ...], no_draft: bool) -> tuple[str | None, tuple[str, ...]]:
    """(DRAFT, the engine's options)."""
    draft = None if no_draft else next(iter(words), None)
    extra = words if no_draft else words[1:]
    if not no_draft and (draft is None or draft.startswith("-")):
        raise click.UsageError("name the DRAFT to serve, or give --no-draft to serve the target alone")
    if extra and not extra[0].startswith("-"):
        what = "--no-draft serves no draft" if no_draft else "one DRAFT is served"
        raise click.UsageError(
            f"{extra[0]!r} is too much: {what}; options of the engine's own follow after `--`; put `--` before them"
        )
    return draft, extra


def _target(said: str, engine: str, only_print: bool) -> Path:
    """The target as the engine takes it. To print, its config.json is enough: nothing else is downloaded."""
    from eyas.errors import BadInput, EyasError
    from eyas.serve.prepare import as_it_is
    from eyas.target.source import resolve_target

    path = Path(said).expanduser()
    if path.exists() and as_it_is(engine, path):
        return path
    if not only_print or path.exists() or said == "smollm2":
        return resolve_target(said)
    from huggingface_hub import hf_hub_download

    name, _, revision = said.partition("@")
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision or None)).parent
    except Exception as error:  # offline, gated, no such name: the hub's own words say which
        kind = BadInput if "/" not in said or isinstance(error, ValueError) else EyasError
        raise kind(
            f"--target {said}: its config.json is neither here nor to be had from the hub ({error}); name a folder "
            f"that has it"
        ) from error


def _draft(launch: Launch) -> Path | None:
    """The draft's folder, where a run was named."""
    from eyas.draft.source import resolve_draft
    from eyas.export import find_draft
    from eyas.serve.prepare import as_it_is

    if launch.draft is None or as_it_is(launch.engine, launch.draft):
        return launch.draft
    return find_draft(resolve_draft(launch.draft))


def _context(launch: Launch, said: int | None, only_print: bool) -> int:
    """What was asked for, else what both models know, here at most CONTEXT."""
    from eyas.serve.check import longest

    if said is not None:
        return said
    most = longest(launch)
    return most or CONTEXT if only_print else min(most or CONTEXT, CONTEXT)


def _print(
    launch: Launch, target: str, draft: str | None, force: bool, requests: int | None, address: bool, as_json: bool
) -> None:
    from eyas.console import say
    from eyas.serve.check import check
    from eyas.serve.printed import There, printed
    from eyas.target.source import DEFAULT

    warnings = check(launch, force=force, here=False)
    named = str(launch.target) if target == DEFAULT else target
    said = None if draft is None else str(launch.draft)
    lines = printed(launch, There(named, said, requests=requests, address=address, **_models(launch)))
    if as_json:
        echo(json.dumps({"lines": lines, "warnings": warnings}))
        return
    for line in warnings:
        say(f"note: {line}")
    for line in lines:
        echo(line)


def _models(launch: Launch) -> dict[str, Any]:
    """What a printed command depends on of target and draft."""
    from eyas.draft.directory import read_draft
    from eyas.serve.check import target_facts
    from eyas.serve.prepare import as_it_is, hugging_face

    facts = target_facts(launch)
    latent = facts is not None and bool(facts.raw.get("kv_lora_rank"))
    if launch.draft is None or as_it_is(launch.engine, launch.draft):
        return {"target_latent": latent}
    conventions = read_draft(launch.draft, hugging_face(launch.target)).conventions
    return {"taps": tuple(conventions.taps), "target_latent": latent, "draft_latent": conventions.attention == "mla"}


# ---------------------------------------------------------------- here


def _serve(launch: Launch, force: bool, wait: float, as_json: bool) -> None:
    from eyas.console import say
    from eyas.engines.environment import required
    from eyas.serve import running
    from eyas.serve.check import check

    required(launch.engine)  # first of all: without it nothing else matters
    for line in check(launch, force=force):
        say(f"note: {line}")
    enough = threading.Event()
    _on_signals(_interrupt)
    with running(launch, tell=say, wait=wait) as server:
        _on_signals(lambda *_: enough.set())
        _announce(server, launch, as_json)
        while not enough.wait(0.3):
            if not server.alive():
                _died(server)
        say("stopping ...")
    say(f"stopped; its log is kept: {server.log}")


def _on_signals(handler: Any) -> None:
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _died(server: Server) -> None:
    from eyas.errors import EyasError
    from eyas.serve.explain import explained

    raise EyasError(f"{server.engine} ended by itself. {explained(server.log)}")


def _announce(server: Server, launch: Launch, as_json: bool) -> None:
    if as_json:
        said = {"url": server.url, "pid": server.pid, "engine": server.engine, "model": server.model,
                "log": str(server.log), "command": server.command, "seconds": round(server.seconds, 1)}  # fmt: skip
        echo(json.dumps(said))
        return
    echo(f"{server.engine} answers at {server.url} after {server.seconds:.0f} s; Ctrl-C stops it. For example:")
    echo(f"  {example(server.engine, server.url, server.model, launch.draft is not None)}")
    if server.engine != "openvino":
        echo(f"What was accepted since its start: curl -s {server.url}/metrics")


def example(engine: str, url: str, model: str, drafted: bool) -> str:
    """A request that is answered with what was accepted."""
    text = "The capital of France is"
    if engine in ("llamacpp", "openvino"):
        page, body = "completion", {"prompt": text, "n_predict": 32, "temperature": 0}
    else:
        page, body = "v1/completions", {"model": model, "prompt": text, "max_tokens": 32, "temperature": 0}
        body |= {"return_spec_tokens_details": True} if engine == "sglang" and drafted else {}
    return shlex.join(["curl", "-s", f"{url}/{page}", "-H", "Content-Type: application/json", "-d", json.dumps(body)])
