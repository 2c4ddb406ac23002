"""`eyas plan`: what a draft will weigh, take and cost, before anything is run.

eyas plan --target kimi-k2.5 --tokens 600e6 --hardware h200 --devices 8
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from eyas.terminal import echo

HELP = """Plan a draft: parameters, bytes of features, memory, operations, hours and cost, each with its formula.

Only the target's config.json is read: TARGET is a folder, a config.json, a .gguf file, a hub id (config.json alone is
fetched), 'smollm2', or a shape kept here ('kimi-k2.5'); --size changes or makes up its sizes. Tokens are given, or
counted in --features or --conversations. Settings of training are those of `eyas train` (--set, --config).

--calibrate runs the target's forward and real optimizer steps here for 20 seconds and plans with what it measured.

--synthetic DIR writes a dry run instead: a target of these sizes with random embedding, norm and head, and features
with random states, on which `eyas vocab`, `train`, `export` and `doctor` run unchanged. It is part of planning because
it needs sizes only, and no command that makes real features can then make these by accident.

\b
Examples:
  eyas plan --target kimi-k2.5 --tokens 600e6 --hardware h200 --devices 8 --price-per-hour 3.5
  eyas plan --target Qwen/Qwen3-8B --tokens 50e6 --draft-vocab 16000 --set ttt_steps=7 --set batch_tokens=8192
  eyas plan --target smollm2 --features features --draft-vocab 8192 --dtype float32 --calibrate
  eyas plan --size hidden_size=4096 --size num_hidden_layers=32 --size num_attention_heads=32 \\
      --size intermediate_size=14336 --size vocab_size=128256 --tokens 100e6
  eyas plan --target kimi-k2.5 --synthetic dry --documents 24 --length 64

\b
Exit codes: 0 planned (warnings or not), 2 a config, sizes or settings that cannot be.
"""


@click.command("plan", help=HELP)
@click.option("--target", help="Folder, config.json, .gguf, hub id, 'smollm2' or 'kimi-k2.5' [default: smollm2].")
@click.option("--size", "sizes", multiple=True, metavar="NAME=VALUE", help="A key of config.json; repeatable.")
@click.option("--tokens", type=float, help="Tokens of all conversations, prompts included, for example 600e6.")
@click.option("--features", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Count these instead.")
@click.option(
    "--conversations", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Count these instead, with the target's tokenizer.",
)  # fmt: skip
@click.option("--length", type=click.IntRange(min=4), help="Mean tokens of a conversation [default: 512, or counted].")
@click.option(
    "--supervised", type=click.FloatRange(0, 1, min_open=True),
    help="Share of tokens to learn from [default: 0.5, or counted].",
)  # fmt: skip
@click.option("--draft-vocab", type=click.IntRange(min=1), default=32_000, show_default=True, help="Its ids (D).")
@click.option("--taps", type=click.IntRange(min=1), default=3, show_default=True, help="How many taps.")
@click.option("--config", type=click.Path(path_type=Path), help="YAML with settings of training, as for `eyas train`.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="One setting of training; repeatable.")
@click.option("--served", type=click.IntRange(min=1), help="Tokens that the server is to draft a round (K).")
@click.option("--batch-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Of extraction.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of extraction [default: float32 on cpu]."
)
@click.option(
    "--hardware", "device_name", type=click.Choice(["cpu", "a100", "h100", "h200", "b200"]), default="cpu",
    show_default=True, help="What computes; cpu: this machine, measured.",
)  # fmt: skip
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="For extraction.")
@click.option("--flops", type=float, help="Operations a second of one device, in the data sheet's place.")
@click.option("--memory", type=float, metavar="GB", help="Memory of one device, in the data sheet's place.")
@click.option("--utilisation", type=click.FloatRange(0, 1, min_open=True), help="Share of the rate that is reached.")
@click.option("--price-per-hour", type=float, help="Of one device.")
@click.option("--calibrate", "calibrated", is_flag=True, help="Measure here for 20 seconds, and plan with that.")
@click.option("--device", default="cpu", show_default=True, help="For --calibrate: cpu, cuda.")
@click.option("--synthetic", type=click.Path(path_type=Path), metavar="DIR", help="Write a dry run here; see above.")
@click.option("--documents", type=click.IntRange(min=1), default=24, show_default=True, help="Of --synthetic.")
@click.option("--seed", default=0, show_default=True, help="Of --synthetic.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(**given: Any) -> None:
    if given["synthetic"] is not None:
        _synthetic(given)
        return
    plan = _plan(given)
    if given["as_json"]:
        echo(json.dumps(plan.to_dict()))
    else:
        from eyas.report.plan_text import plan_text

        echo(plan_text(plan))


def _plan(given: dict[str, Any]) -> Any:
    from eyas.cli.train import read_settings
    from eyas.errors import BadInput
    from eyas.plan.hardware import hardware
    from eyas.plan.target import plan_target
    from eyas.plan.whole import Job, make_plan

    settings = read_settings(given["config"], given["settings"], None)
    target = plan_target(given["target"], _sizes(given["sizes"]))
    counted = _counted(given, target)
    if counted is None and given["tokens"] is None:
        raise click.UsageError("say how much text there is: --tokens N, --features DIR or --conversations FILE")
    told: dict[str, Any] = {"tokens": int(given["tokens"] or 0), "length": 512, "supervised": 0.5}
    told |= counted or {}
    told |= {name: given[name] for name in ("length", "supervised") if given[name] is not None}
    on_cpu = given["device_name"] == "cpu"
    job = Job(
        target=target, settings=settings, taps=given["taps"], draft_vocab=given["draft_vocab"], served=given["served"],
        batch_tokens=given["batch_tokens"], dtype=given["dtype"] or ("float32" if on_cpu else "bfloat16"), **told,
    )  # fmt: skip
    memory = None if given["memory"] is None else given["memory"] * 1e9
    machine = hardware(given["device_name"], given["flops"], memory, given["devices"], given["price_per_hour"],
                       given["utilisation"])  # fmt: skip
    measured = None
    if given["calibrated"]:
        from eyas.features.reader import FeatureSet
        from eyas.plan.calibrate import calibrate

        if target.folder is None:
            raise BadInput(
                f"--calibrate runs the target, but only the config of {target.name} is at hand; plan with --hardware, "
                f"or name a folder with its weights"
            )
        features = FeatureSet.open(given["features"]) if given["features"] else None
        measured = calibrate(
            target.folder, settings, length=job.length, supervised=job.supervised, taps=None if job.taps == 3 else
            list(_spread(target.facts.num_layers, job.taps)), draft_vocab=job.draft_vocab,
            batch_tokens=job.batch_tokens, dtype=job.dtype, device=given["device"], features=features,
        )  # fmt: skip
    return make_plan(job, machine, measured)


def _counted(given: dict[str, Any], target: Any) -> dict[str, Any] | None:
    """Tokens, mean length, supervised share and distinct ids of what is there; None where nothing is named."""
    if given["features"] is not None:
        from eyas.features.count import count_supervised
        from eyas.features.reader import FeatureSet

        features = FeatureSet.open(given["features"])
        tokens, documents, supervised = features.num_tokens, features.num_docs, features.supervised_tokens
        observed = int((count_supervised(features) > 0).sum())
    elif given["conversations"] is not None:
        import torch

        from eyas.features.conversations import encode_all, load_tokenizer
        from eyas.target.source import resolve_target

        folder = target.folder or resolve_target(given["target"])
        collection = encode_all(
            given["conversations"], load_tokenizer(folder, False), skip_bad=True, vocab_size=target.facts.vocab_size,
            max_length=target.facts.max_position or None, eos_ids=target.facts.eos_ids,
        )  # fmt: skip
        counts = collection.counts()
        tokens, documents, supervised = (counts[k] for k in ("tokens", "documents", "supervised_tokens"))
        observed = len(torch.cat([d.ids[d.mask.bool()] for d in collection.documents]).unique())
    else:
        return None
    return {"tokens": tokens, "length": max(4, round(tokens / documents)), "supervised": supervised / tokens,
            "documents": documents, "observed": observed}  # fmt: skip


def _synthetic(given: dict[str, Any]) -> None:
    from eyas.plan.synthetic import synthetic_features, synthetic_target
    from eyas.plan.target import planned_config

    out = given["synthetic"]
    target = synthetic_target(out / "target", planned_config(given["target"], _sizes(given["sizes"])), given["seed"])
    taps = None
    if given["taps"] != 3:
        from eyas.target.facts import read_facts

        taps = list(_spread(read_facts(target).num_layers, given["taps"]))
    share = given["supervised"] or 0.5
    written = {}
    for name, documents, seed in (("features", given["documents"], 0), ("heldout", max(2, given["documents"] // 8), 1)):
        features = synthetic_features(
            out / name, target, documents=documents, length=given["length"] or 64, supervised=share, taps=taps,
            seed=2 * given["seed"] + seed,
        )  # fmt: skip
        written[name] = {"documents": features.num_docs, "tokens": features.num_tokens}
    size = given["draft_vocab"]
    following = [
        f"eyas vocab {out}/features --size {size} --target {out}/target --out {out}/vocab",
        f"eyas train {out}/features --vocab {out}/vocab --target {out}/target --held-out {out}/heldout --out {out}/run "
        f"--set steps=3 --set train_head=false",
        f"eyas export {out}/run {out}/draft --for vllm,sglang --target {out}/target",
        f"eyas doctor {out}/draft --target {out}/target --static",
    ]
    if given["as_json"]:
        echo(json.dumps({"target": str(target), **written, "next": following}))
        return
    echo(f"{target}: both ends of a target, random; states in {out}/features and {out}/heldout, random, too")
    echo(f"  {written['features']['documents']} documents, {written['features']['tokens']:,} tokens")
    for text in following:
        echo(f"  next: {text}")


def _sizes(assignments: tuple[str, ...]) -> dict[str, str]:
    out = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise click.UsageError(f"--size {assignment!r}: expected NAME=VALUE, for example --size hidden_size=4096")
        out[name.strip()] = text
    return out


def _spread(layers: int, count: int) -> list[int]:
    """`count` taps over a target of so many blocks, from tap 2 to tap n - 3 where there are several."""
    if count == 1:
        return [layers // 2]
    return sorted({round(2 + i * (layers - 5) / (count - 1)) for i in range(count)})
