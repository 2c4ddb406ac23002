"""`eyas extract`: record the target's states on conversations, or bring in the feature files of other trainers.

eyas extract conversations.jsonl --target smollm2 --out runs/demo/features
eyas extract conversations.jsonl --target smollm2 --show 3          # pytest tests/test_features_extract.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from eyas.cli.workers import engine_names, ray_options, spread, template_options
from eyas.errors import Mismatch
from eyas.terminal import echo

HELP = """Run the target over CONVERSATIONS and write feature shards.

CONVERSATIONS is a JSONL, Parquet or Arrow file, a folder of them, a dataset saved to disk (DIR, DIR@split) or its id
(id, id:config, id@split). Each row holds `messages`, or `prompt_token_ids` and `response_token_ids`. The chat template
is rendered once; the loss mask lies on the assistant's tokens, end-of-turn token included. Look at it first with
--show. A killed extraction goes on where it stopped; finished and unchanged features are kept.

\b
Examples:
  eyas extract conversations.jsonl --show 2
  eyas extract conversations.jsonl --target Qwen/Qwen3-1.7B --taps 2,14,25 --out features
  eyas extract answers/conversations.jsonl --recorded answers/states --out features
  eyas extract answers/conversations.jsonl --supervise all --out features      # learn from the prompts, too
  eyas extract conversations.jsonl --target T --engine vllm --audit 1% --out features
  eyas extract conversations.jsonl --target T --engine ray --ray-address auto --workers 8 --worker-gpus 1 \\
      --device cuda --out /shared/features
  eyas extract --target T --audit 20 --out features      # what is there already
  eyas extract --from-specforge cache/hidden_states --target smollm2 --out features
  eyas extract --from-speculators data --target smollm2 --taps 2,15,27 --out features

\b
Exit codes: 0 written, 1 the disk is full or the target cannot be loaded, 2 unreadable input, 3 --out holds features of
another target, tokenizer, template or taps, foreign files do not fit the target, or the audit found other states.
"""


@click.command("extract", help=HELP)
@click.argument("conversations", required=False, type=click.Path(path_type=Path))
@click.option("--target", default=None, help="Folder, .gguf file, hub id or 'smollm2' [default: smollm2].")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the features.")
@click.option("--taps", metavar="A,B,C", help="Residual streams to record [default: 2, n//2, n-3].")
@click.option("--max-length", type=click.IntRange(min=2), help="Longest one, in tokens [default: the context].")
@click.option(
    "--batch-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Of one forward pass."
)
@click.option("--shard-mib", type=click.FloatRange(min=0.001), default=64.0, show_default=True, help="Size of a shard.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many usable conversations.")
@click.option(
    "--supervise",
    type=click.Choice(["answers", "all"]),
    default="answers",
    show_default=True,
    help="Tokens to learn from: the assistant's, or all after the template's opening (for training only).",
)
@click.option("--skip-bad", is_flag=True, help="Set malformed lines aside (set-aside.jsonl) instead of stopping.")
@click.option("--replace", is_flag=True, help="Overwrite features of another target or other taps in --out.")
@click.option(
    "--engine",
    default="hf",
    show_default=True,
    metavar="hf|vllm[,ray]",
    help="What computes the states: transformers or vLLM; with `ray`, in workers (`ray` alone: hf).",
)
@ray_options
@click.option(
    "--engine-python",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Python of an environment with vLLM, say for GPUs [default: that of `eyas engines setup vllm`].",
)
@click.option(
    "--engine-arg",
    "engine_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="For vllm.LLM, for example tensor_parallel_size=4; repeatable.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1 or auto.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Precision of the target's computation (auto: the faster one here); states are stored in bfloat16.",
)
@template_options("  [default: those that the answers were made with]")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the target.")
@click.option(
    "--show",
    is_flag=False,
    flag_value="3",
    default=None,
    metavar="[N]",
    help="Print the loss mask of the first N (3) conversations and stop; the target is not run.",
)
@click.option(
    "--recorded",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="States that `eyas regenerate --record-states` kept; only what is missing there is computed.",
)
@click.option(
    "--from-speculators",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Read speculators' hs_*.safetensors instead of running the target.",
)
@click.option(
    "--from-specforge",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Read SpecForge's *.ckpt[.gz] instead of running the target.",
)
@click.option(
    "--masks",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Loss masks of --from-speculators: its dataset folder, or JSONL of input_ids and loss_mask.",
)
@click.option(
    "--audit",
    metavar="1%|N",
    help="Compute so many conversations again, each alone, and compare. Without CONVERSATIONS: of what is in --out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    conversations: Path | None, target: str | None, out: Path | None, taps: str | None, max_length: int | None,
    batch_tokens: int, shard_mib: float, limit: int | None, supervise: str, skip_bad: bool, replace: bool, device: str,
    dtype: str, template_args: tuple[str, ...], trust_remote_code: bool, show: str | None, recorded: Path | None,
    from_speculators: Path | None, from_specforge: Path | None, masks: Path | None, engine: str,
    engine_python: Path | None, engine_args: tuple[str, ...], ray_address: str | None, workers: int | None,
    worker_cpus: float | None, worker_gpus: float | None, audit: str | None, as_json: bool,
) -> None:  # fmt: skip
    sources = [s for s in (conversations, from_speculators, from_specforge) if s is not None]
    if len(sources) != 1 and (sources or audit is None):
        raise click.UsageError("name one source: CONVERSATIONS, --from-speculators DIR or --from-specforge DIR")
    if recorded is not None and conversations is None:
        raise click.UsageError(
            "--recorded goes with CONVERSATIONS; foreign feature files bring their own states; leave it out"
        )
    computing, on_ray = engine_names(engine, ("hf", "vllm"))
    if conversations is None and (engine != "hf" or engine_python is not None or engine_args):
        raise click.UsageError(
            "--engine goes with CONVERSATIONS: it computes states, others bring theirs; leave it out"
        )
    if out is None and show is None:
        raise click.UsageError("say where the features go: --out DIR (or look at the loss mask with --show)")

    from eyas.target.source import resolve_target

    chosen = _taps(taps)
    folder = resolve_target(target, part="all" if conversations is not None and show is None else "ends")
    if show is not None:
        if conversations is None:
            raise click.UsageError(
                "--show renders CONVERSATIONS; foreign feature files bring their own masks; name a file of "
                "conversations"
            )
        _show(conversations, folder, _count(show), template_args, max_length, supervise, skip_bad, trust_remote_code,
              as_json)  # fmt: skip
        return
    assert out is not None
    shared: dict[str, Any] = {"shard_bytes": int(shard_mib * 2**20), "skip_bad": skip_bad, "limit": limit,
                              "replace": replace, "max_length": max_length}  # fmt: skip
    counts: dict[str, Any] = {}
    if conversations is not None:
        from eyas.features.conversations import parse_template_kwargs
        from eyas.features.extract import extract
        from eyas.machine import choose_precision

        counts = extract(
            folder, conversations, out, chosen, batch_tokens=batch_tokens, device=device,
            dtype=choose_precision(dtype, device), trust_remote_code=trust_remote_code, recorded=recorded,
            template_kwargs=parse_template_kwargs(template_args) if template_args else None, supervise=supervise,
            engine=_engine(computing, engine_python, engine_args),
            spread=spread(on_ray, ray_address, workers, worker_cpus, worker_gpus), **shared,
        )  # fmt: skip
    elif sources:
        from eyas.features.foreign import import_foreign

        counts = import_foreign(
            "speculators" if from_speculators else "specforge", sources[0], folder, out, chosen, masks=masks, **shared
        )
    report = None
    if audit is not None:
        from eyas.features.audit import audit as compare

        report = compare(out, folder, audit, device=device, trust_remote_code=trust_remote_code)
    if as_json:
        echo(json.dumps({"out": str(out), **counts, **({"audit": report} if report else {})}))
    else:
        _print(out, counts, report)
    if report and report["wrong"]:
        names = ", ".join(one["document"] for one in report["wrong"][:5])
        raise Mismatch(
            f"{out}: {len(report['wrong'])} of {report['documents']} conversations hold something else than this "
            f"target computes ({names}); extract them again with --engine hf"
        )


def _print(out: Path, counts: dict[str, Any], report: dict[str, Any] | None) -> None:
    from eyas.features.audit import summary

    if counts:
        _print_counts(out, counts)
    for line in summary(report) if report else ():
        echo(line)


def _print_counts(out: Path, counts: dict[str, Any]) -> None:
    echo(
        f"{out}: {counts['documents']:,} conversations, {counts['tokens']:,} tokens, "
        f"{counts['supervised_tokens']:,} supervised, {counts['shards']} shards, {counts['bytes'] / 2**20:.1f} MiB"
    )
    echo(f"  {counts['agreement']:.1%} of the supervised tokens are the target's own first choice")
    for reason, number in counts["set_aside"].items():
        echo(f"  set aside: {number} {reason} (see {out / 'set-aside.jsonl'})")


def _show(
    path: Path, folder: Path, count: int, template_args: tuple[str, ...], max_length: int | None, supervise: str,
    skip_bad: bool, trust_remote_code: bool, as_json: bool,
) -> None:  # fmt: skip
    from eyas.answers import template_arguments
    from eyas.features.conversations import encode_all, load_tokenizer, parse_template_kwargs
    from eyas.features.show import legend, mask_runs, show_document
    from eyas.target.facts import read_facts
    from eyas.terminal import wants_color

    given = parse_template_kwargs(template_args) if template_args else None
    facts = read_facts(folder)
    tokenizer = load_tokenizer(folder, trust_remote_code)
    collection = encode_all(
        path, tokenizer, skip_bad=skip_bad, limit=count, vocab_size=facts.vocab_size,
        max_length=max_length or facts.max_position or None, eos_ids=facts.eos_ids,
        template_kwargs=template_arguments(path, given), supervise=supervise,
    )  # fmt: skip
    if as_json:
        shown = [{"id": d.id, "ids": d.ids.tolist(), "runs": mask_runs(d)} for d in collection.documents]
        echo(json.dumps({"conversations": shown, **collection.counts()}))
        return
    color = wants_color(sys.stdout)
    echo(legend(color), color=color, styled=True)
    for document in collection.documents:
        echo()
        echo(show_document(document, tokenizer, color), color=color, styled=True)
    for left in collection.set_aside:
        echo(f"\nset aside, line {left.line} ({left.id}): {left.reason}: {left.detail}")


def _engine(name: str, python: Path | None, arguments: tuple[str, ...]) -> Any:
    """What computes the states; None: the target, here."""
    if name == "hf":
        if python is not None or arguments:
            raise click.UsageError("--engine-python and --engine-arg go with --engine vllm; add it, or leave them out")
        return None
    from eyas.engines.vllm_states import VllmEngine
    from eyas.features.conversations import parse_key_values

    return VllmEngine(python, parse_key_values(arguments, "--engine-arg", "tensor_parallel_size=4"))


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise click.UsageError(f"--show takes a number of conversations, not {text!r}; put it after the file name")
    return int(text)


def _taps(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--taps {text!r}: expected numbers separated by commas, for example 2,15,27") from None
