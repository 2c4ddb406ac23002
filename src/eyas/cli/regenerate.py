"""`eyas regenerate`: prompts to conversations.   eyas regenerate builtin --limit 100 --out runs/answers"""

from __future__ import annotations

from pathlib import Path

import click

from eyas.cli.workers import engine_names, ray_options, spread, template_options
from eyas.terminal import echo

HELP = """Let the target answer PROMPTS: its own answers are what a draft must learn.

PROMPTS is a JSONL, Parquet or Arrow file (or a folder of them), a dataset saved to disk (DIR, DIR@split) or the id of
one (id, id:config, id@split; package `datasets`), or `builtin`:
natural requests from the packages in requirements-data.txt. A row has `prompt`, `messages` (OpenAI), `conversations`
(ShareGPT) or `turns`. Answers that the file already has are replaced, turn by turn.

The target answers on this machine, or behind --base-url on any OpenAI-compatible server (its key is read from the
environment variable that --api-key-env names). --out gets conversations.jsonl, set_aside.jsonl with the reason for each
(repetition, empty, too_long, error), and manifest.json. Killed at any moment, the same command goes on and ends in the
same files.

\b
Examples:
  eyas regenerate builtin --limit 200 --out runs/answers
  eyas regenerate prompts.jsonl --target Qwen/Qwen3-1.7B --temperature 0.7 --seed 1 --out runs/answers
  eyas regenerate prompts.jsonl --target T --engine ray --ray-address auto --workers 8 --worker-gpus 1 --device cuda \\
      --out /shared/answers
  eyas regenerate prompts.jsonl --target Qwen/Qwen3-1.7B --template-arg enable_thinking=false --out runs/answers
  eyas regenerate prompts.parquet --base-url http://localhost:8000/v1 --concurrency 256 --out runs/answers
"""


@click.command("regenerate", help=HELP)
@click.argument("prompts")
@click.option(
    "--target", default=None, help="Folder, .gguf file, hub id, or `smollm2` [default: smollm2, or the server]."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the answers.")
@click.option("--limit", type=click.IntRange(min=1), help="Only so many prompts.")
@click.option("--max-supervised-tokens", type=click.IntRange(min=1), help="Stop once so many answer tokens are kept.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=192, show_default=True, help="Of one answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of sampling, and of the order of `builtin`.")
@click.option(
    "--slots", type=click.IntRange(min=1), default=96, show_default=True, help="Answers generated at once, here."
)
@click.option("--device", default="cpu", show_default=True, help="Where the target runs: cpu, cuda, cuda:1, auto.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="`auto`: the faster of the first two here.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run modelling code that comes with the target.")
@template_options()
@click.option(
    "--record-states", is_flag=True, help="Keep the target's states in OUT/states, for `eyas extract --recorded`."
)
@click.option("--taps", metavar="A,B,C", help="Residual streams to keep with --record-states [default: 2, n//2, n-3].")
@click.option(
    "--engine",
    default="hf",
    show_default=True,
    metavar="hf|ray",
    help="The target answers in this process, or in workers on Ray.",
)
@ray_options
@click.option("--base-url", help="An OpenAI-compatible server that answers instead, such as http://localhost:8000/v1.")
@click.option("--model", help="The model's name on that server [default: the only one it lists].")
@click.option(
    "--api-key-env", default="OPENAI_API_KEY", show_default=True, help="Variable that holds the server's key."
)
@click.option("--concurrency", type=click.IntRange(min=1), default=64, show_default=True, help="Requests at once.")
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=600.0, show_default=True, help="Seconds for a request."
)
@click.option("--skip-bad", is_flag=True, help="Set malformed rows aside and count them instead of stopping.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as one JSON object on stdout.")
def command(
    prompts: str,
    target: str | None,
    out: Path,
    limit: int | None,
    max_supervised_tokens: int | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    slots: int,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    template_args: tuple[str, ...],
    record_states: bool,
    taps: str | None,
    engine: str,
    ray_address: str | None,
    workers: int | None,
    worker_cpus: float | None,
    worker_gpus: float | None,
    base_url: str | None,
    model: str | None,
    api_key_env: str,
    concurrency: int,
    timeout: float,
    skip_bad: bool,
    as_json: bool,
) -> None:
    import json
    from collections.abc import Mapping

    from eyas.answers import CONVERSATIONS, SET_ASIDE
    from eyas.console import bar
    from eyas.features.conversations import parse_template_kwargs
    from eyas.machine import choose_precision
    from eyas.prompts import Prompts, load_prompts
    from eyas.regenerate import regenerate
    from eyas.target.server import ServerOptions

    _, on_ray = engine_names(engine, ("hf",))
    spreading = spread(on_ray, ray_address, workers, worker_cpus, worker_gpus)
    if on_ray and (base_url or record_states):
        raise click.UsageError(
            "--engine ray answers with the target itself, without --base-url and --record-states; leave them out."
        )
    if prompts == "builtin":
        from eyas.prompt_sets import training_prompts

        loaded = Prompts(training_prompts(seed, limit))
    else:
        loaded = load_prompts(prompts, skip_bad=skip_bad, limit=limit)
    try:
        chosen = None if taps is None else [int(part) for part in taps.split(",")]
    except ValueError:
        raise click.UsageError(f"--taps {taps!r}: expected numbers separated by commas, like 2,15,27") from None
    server = None
    folder = None
    if base_url:
        if record_states:
            raise click.UsageError(
                "--record-states keeps the states of a local target; a server shows none; leave it out."
            )
        server = ServerOptions(base_url, model, api_key_env, concurrency, timeout)
    else:
        from eyas.target.source import resolve_target

        folder = resolve_target(target)

    with bar(total=len(loaded.prompts), desc="regenerate", unit="prompt") as shown:

        def show(counts: Mapping[str, int]) -> None:
            shown.set_postfix(kept=counts["kept"], tokens=counts["tokens"], underway=counts["underway"], refresh=False)
            shown.update(counts["finished"] - shown.n)

        counts = regenerate(
            loaded,
            folder,
            out,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            slots=slots,
            max_supervised_tokens=max_supervised_tokens,
            server=server,
            device=device,
            dtype=choose_precision(dtype, device),
            trust_remote_code=trust_remote_code,
            template_kwargs=parse_template_kwargs(template_args),
            record_states=record_states,
            taps=chosen,
            spread=spreading,
            progress=show,
        )
    if as_json:
        echo(json.dumps(counts))
        return
    aside = ", ".join(f"{n} {reason}" for reason, n in counts["set_aside"].items()) or "none"
    echo(
        f"{counts['kept']:,} of {counts['prompts']:,} answers kept ({counts['supervised_tokens']:,} tokens) in "
        f"{out / CONVERSATIONS}; set aside: {aside}, in {out / SET_ASIDE}"
    )
    if counts["malformed"] or counts["duplicates"]:
        echo(f"{counts['malformed']} malformed rows set aside, {counts['duplicates']} duplicates left out")
